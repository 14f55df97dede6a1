"""Every kernel compiles for Hopper, to the instructions that it relies on; no GPU is needed."""

import os
import pkgutil

import pytest

import tests.support.kernel_cases
from tests.support.fresh_program import run_code

# A minute or two of a core that nobody else uses.
pytestmark = [pytest.mark.compile, pytest.mark.slow, pytest.mark.timeout(3600)]
MODULES = [m.name for m in pkgutil.iter_modules(tests.support.kernel_cases.__path__)]
_PARTS = {"nvlink_moe": 3, "local_moe": 2, "__main__": 0}  # of what takes longest
PARTS = [f"{m!r}, {i}, {n}" for m in MODULES for n in [_PARTS.get(m, 1)] for i in range(n)]


@pytest.mark.parametrize("part", PARTS)
def test_kernels_compile_for_sm_90_to_the_instructions_they_rely_on(part: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"from tests.support.kernel_cases.__main__ import main; main({part})"
    done = run_code(code, environment=environment, timeout_s=3000)
    assert done.returncode == 0, done.stderr[-4000:]
