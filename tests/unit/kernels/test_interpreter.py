"""The interpreter as the tests have it (tests/support/interpreter.py): it checks what Triton's
does, and leaves triton.language as it was."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.support.interpreter import quicken
from tests.support.machine import NEEDS_INTERPRETER

pytestmark = NEEDS_INTERPRETER


@triton.jit
def _plus(x, y):
    return x + y


@triton.jit
def _sums_kernel(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    rows = tl.load(x + at)[:, None] + tl.zeros((SIZE, SIZE), tl.int32)
    tl.store(out + at, _plus(tl.sum(rows, 0), tl.load(y + at)) - 3)


def test_the_interpreter_is_the_quick_one() -> None:
    assert quicken(), "Triton's interpreter is built otherwise: tests/support/interpreter.py"


@pytest.mark.parametrize(("value", "fails"), [(2**31 - 1 - 28, False), (2**31 - 28, True)])
def test_an_integer_that_leaves_its_type_is_an_error(value: int, fails: bool) -> None:
    x, out = torch.arange(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    y = torch.full((8,), value, dtype=torch.int32)
    if fails:
        with pytest.raises(InterpreterError, match="int32 overflow detected for operation add"):
            _sums_kernel[(1,)](x, y, out, 8)
        return
    _sums_kernel[(1,)](x, y, out, 8)
    assert out.eq(2**31 - 1 - 3).all()
