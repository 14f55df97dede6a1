"""Kernels compiled for sm_90 on a machine without a GPU: one module a family, each with its list
CASES. `python -m tests.support.kernel_cases local_moe`, without TRITON_INTERPRET, compiles one. A
case is noted down from a call on tensors of a CPU whose launches are not started, so its types and
constants are those that a GPU would get.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Argument, Launch

# Rows move by 16 bytes a lane, and not by two bytes, or by four in halves.
WIDE = ("ld.global.v4.b32", "st.global.v4.b32")
NARROW = ("ld.global.b16", "st.global.b16", "ld.global.v2.b16", "st.global.v2.b16")

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv", torch.int8: "*i8", torch.int32: "*i32", torch.uint32: "*u32",
    torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True)
class KernelCase:
    """A kernel and, for one of its uses, Triton's types of its arguments but constexprs: "*bf16",
    "i32", with ":16" what is divisible by 16, "1" an integer 1, which Triton makes a constant."""

    name: str
    kernel: Any
    arguments: tuple[str, ...]
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    maxnreg: int | None = None  # registers that a thread may take
    wanted: tuple[str, ...] = ()  # must be in the PTX: a vector width, an acquire or release
    unwanted: tuple[str, ...] = ()  # must not be in it
    spills: int = 0  # bytes of local memory per thread that it may use
    libraries: Mapping[str, str] = field(default_factory=dict)  # device code that it calls into

    @property
    def kernel_name(self) -> str:
        name: str = self.kernel.__name__
        return name


def recorded(label: str, calls: Callable[[], object]) -> list[KernelCase]:
    """A case for each launch of `calls`, in order; none is started."""
    found: list[KernelCase] = []

    def note(
        launch: Launch, grid: tuple[int, int], arguments: Sequence[Argument | None],
        integers: Sequence[int], stream: object = None,
    ) -> None:  # fmt: skip
        found.append(_case(label, launch, (*arguments, *launch._fixed, *integers)))

    with mock.patch.object(Launch, "_by_triton", note):
        calls()
    return found


def cases_of(calls: Mapping[str, Callable[[], object]]) -> list[KernelCase]:
    """The cases of calls by their label, without those that would be compiled to the same."""
    kept: dict[str, KernelCase] = {}
    for label, call in calls.items():
        for case in recorded(label, call):
            parts = case.kernel_name, case.arguments, sorted(case.constants.items())
            kept.setdefault(str((parts, case.num_warps, case.maxnreg)), case)
    return list(kept.values())


def _case(label: str, launch: Launch, values: Sequence[Argument | None]) -> KernelCase:
    kernel = getattr(launch._kernel, "jit_func", launch._kernel)
    names = [name for name in kernel.arg_names if name not in launch._constants]
    varying = {n if isinstance(n, str) else kernel.arg_names[n] for n in kernel.do_not_specialize}
    given = dict(zip(names, values, strict=True))
    absent = {name: None for name, value in given.items() if value is None}
    types = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            kind = "*i32" if name in launch._words else _TYPES[value.dtype]
            aligned = name not in launch._unaligned and value.data_ptr() % 16 == 0
            types.append(kind + (":16" if aligned else ""))
        elif value is not None:
            types.append(_integer(value, name in varying))
    return KernelCase(
        f"{label}: {kernel.__name__}",
        *(kernel, tuple(types), {**launch._constants, **absent}, launch._num_warps),
        maxnreg=launch._options.get("maxnreg"),
    )


def _integer(value: int, varies: bool) -> str:
    """What Triton makes of an integer in a first launch."""
    if value == 1 and not varies:
        return "1"
    kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return kind + (":16" if value % 16 == 0 and not varies else "")
