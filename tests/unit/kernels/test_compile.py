"""Every kernel compiles for Hopper, to the instructions that it relies on; no GPU is needed."""

import os
import pkgutil

import pytest

import tests.support.kernel_cases
from tests.support.fresh_program import run_code

pytestmark = [pytest.mark.compile, pytest.mark.slow]

MODULES = [
    m.name
    for m in pkgutil.iter_modules(tests.support.kernel_cases.__path__)
    if m.name != "__main__"
]


@pytest.mark.parametrize("family", MODULES)
def test_kernels_compile_for_sm_90_to_the_instructions_they_rely_on(family: str) -> None:
    module = f"tests.support.kernel_cases.{family}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"from tests.support.kernel_cases.__main__ import main; main({module!r})"
    done = run_code(code, environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
