"""Importing this makes Triton's interpreter leave out what it repeats: patching triton.language at
each call of a device function, looking for overflow at each integer sum, writing a block's type's
name at each operation. Results and errors are the same, in about a third of the time. A Triton
whose interpreter is built otherwise is left as it is."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_NEEDED = (
    (interpreter, ("_patch_lang", "_LangPatchScope", "InterpreterBuilder", "_get_np_dtype")),
    (TritonSemantic, ("binary_op_sanitize_overflow_impl", "binary_op_type_checking_impl")),
    (core, ("block_type", "tensor", "constexpr", "tuple")),
)
_MOST_CONSTANTS = 4096


def _patching_once(real: Any) -> Any:
    """While a kernel runs, the functions that it calls find its patches in place."""
    patched: set[int] = set()
    scopes: list[Any] = []  # of the kernel that runs
    seen: dict[int, tuple[Any, frozenset[int]]] = {}  # by globals, which are kept

    def languages_of(names: dict[str, Any]) -> frozenset[int]:
        if id(names) not in seen:
            found = (id(value) for value in list(names.values()) if value is tl or value is core)
            seen[id(names)] = names, frozenset(found)
        return seen[id(names)][1]

    def patch(fn: Any) -> Any:
        languages = languages_of(fn.__globals__)
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
    limits: dict[str, tuple[int, int]] = {}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        operation = _OPERATIONS.get(binary_op.__name__)
        if operation is None or not isinstance(self.builder, interpreter.InterpreterBuilder):
            real(self, lhs, rhs, binary_op)
            return
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
            return
        assert kind.name == rhs.type.scalar.name and kind.is_int()
        if kind.name not in limits:
            limits[kind.name] = kind.get_int_min_value(), kind.get_int_max_value()
        least, most = limits[kind.name]
        result = operation(lhs.handle.data, rhs.handle.data, dtype=np.int64, casting="unsafe")
        if result.size == 1:
            fits = least <= result.item() <= most
        else:
            fits = least <= result.min() and result.max() <= most
        if not fits:
            raise AssertionError(
                f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
            )

    return check


def _operands(real: Any) -> Any:
    """Two tensors of one type are taken as they are, and numbers become a tensor once for each type
    of the other operand."""
    constants: dict[Any, Any] = {}

    def prepare(self: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        if not isinstance(self.builder, interpreter.InterpreterBuilder) or named:
            return real(self, lhs, rhs, *flags, **named)
        kinds = type(lhs), type(rhs)
        if kinds == (core.tensor, core.tensor):
            same = lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr()
            # The fourth flag is of a division, which widens.
            return (lhs, rhs) if same and not any(flags[3:]) else real(self, lhs, rhs, *flags)
        turned = kinds[1] is core.tensor
        given, number = (rhs, lhs) if turned else (lhs, rhs)
        if type(given) is not core.tensor or type(number) not in (int, float):
            return real(self, lhs, rhs, *flags)
        key = (turned, repr(number), given.type.name, *flags)  # repr: 0.0 equals -0.0, and 1 1.0
        if (constant := constants.get(key)) is None:
            found = real(self, lhs, rhs, *flags)
            if found[turned] is not given:
                return found  # it was cast
            if len(constants) < _MOST_CONSTANTS:
                constants[key] = found[0] if turned else found[1]
            return found
        return (constant, given) if turned else (given, constant)

    return prepare


def _numpy_types(real: Any) -> Any:
    """The type of numpy by the name of Triton's."""
    known: dict[str, Any] = {}

    def find(kind: Any) -> Any:
        if (found := known.get(kind.name)) is None:
            found = known[kind.name] = real(kind)
        return found

    return find


def _block_types(real: Any) -> Any:
    """Types of one element and shape share what is made of them."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = getattr(shape, "values", shape)
        for size in sizes:
            if type(size) is not int:
                real(self, element_ty, shape)
                return
        key = (
            type(element_ty), element_ty.name, getattr(element_ty, "address_space", None), *sizes,
        )  # fmt: skip
        if (found := known.get(key)) is None:
            real(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    return init


def _tensors(real: Any) -> Any:
    """Tensors of one type share their shape, which nobody writes to."""
    known: dict[str, tuple[Any, Any]] = {}
    scalar = core.constexpr(1), core.tuple([])

    def init(self: Any, handle: Any, type: Any) -> None:
        if not type.is_block():
            numel, shape = scalar
        elif type.name in known:
            numel, shape = known[type.name]
        else:
            real(self, handle, type)
            known[type.name] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = numel, shape

    return init


if all(hasattr(owner, name) for owner, names in _NEEDED for name in names):
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_types(interpreter._get_np_dtype)
    TritonSemantic.binary_op_sanitize_overflow_impl = _overflow_by_numpy(
        TritonSemantic.binary_op_sanitize_overflow_impl
    )
    TritonSemantic.binary_op_type_checking_impl = _operands(
        TritonSemantic.binary_op_type_checking_impl
    )
    core.block_type.__init__ = _block_types(core.block_type.__init__)
    core.tensor.__init__ = _tensors(core.tensor.__init__)
