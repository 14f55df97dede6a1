"""Importing this makes Triton's interpreter leave out what it does over and over: the same results
and errors in about a third of the time.

At every call of a device function it patches triton.language once more; at every integer sum it
takes six operations of its own to find an overflow; at every operation it writes the name of a
block's type. A Triton whose interpreter is built otherwise is left as it is.
"""

import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_NEEDED = (
    (interpreter, ("_patch_lang", "_LangPatchScope", "InterpreterBuilder")),
    (TritonSemantic, ("binary_op_sanitize_overflow_impl",)),
    (core, ("block_type", "tensor", "constexpr", "tuple")),
)


def _patching_once(real: Any) -> Any:
    """While a kernel runs, the functions that it calls find its patches in place."""
    patched: set[int] = set()
    scopes: list[Any] = []  # of the kernel that runs

    def patch(fn: Any) -> Any:
        languages = {id(value) for value in fn.__globals__.values() if value in (tl, core)}
        if scopes and languages and languages <= patched:
            return interpreter._LangPatchScope()
        scope = real(fn)
        patched.update(languages)
        if scopes:  # more than the kernel itself knows: restored with the rest
            scopes[0]._changes += scope._changes
            return interpreter._LangPatchScope()
        scopes.append(scope)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            scopes.clear()
            restore()

        scope.restore = restored
        return scope

    return patch


def _overflow_by_numpy(real: Any) -> Any:
    """The check that an integer sum, difference or product fits its type."""

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        operation = _OPERATIONS.get(binary_op.__name__)
        if operation is None or not isinstance(self.builder, interpreter.InterpreterBuilder):
            real(self, lhs, rhs, binary_op)
            return
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert kind == rhs.type.scalar and kind.is_int()
        result = operation(lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
        least, most = kind.get_int_min_value(), kind.get_int_max_value()
        if not ((result >= least) & (result <= most)).all():
            raise AssertionError(
                f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
            )

    return check


def _block_types(real: Any) -> Any:
    """Types of one element and shape share what is made of them."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = getattr(shape, "values", shape)
        if not all(type(size) is int for size in sizes):
            real(self, element_ty, shape)
            return
        key = (
            type(element_ty),
            element_ty.name,
            getattr(element_ty, "address_space", None),
            *sizes,
        )
        if key not in known:
            real(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known[key])

    return init


def _tensors(real: Any) -> Any:
    """Tensors of one type share their shape, which nobody writes to."""
    known: dict[Any, tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()
        if not all(isinstance(size, int) for size in sizes):
            real(self, handle, type)
            return
        if sizes not in known:
            known[sizes] = (
                core.constexpr(math.prod(sizes)),
                core.tuple([core.constexpr(size) for size in sizes]),
            )
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[sizes]

    return init


if all(hasattr(owner, name) for owner, names in _NEEDED for name in names):
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    TritonSemantic.binary_op_sanitize_overflow_impl = _overflow_by_numpy(
        TritonSemantic.binary_op_sanitize_overflow_impl
    )
    core.block_type.__init__ = _block_types(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
