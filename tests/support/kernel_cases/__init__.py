"""Kernels compiled for sm_90 on a machine without a GPU: one module a family, each with its list
CASES.

The interpreter tells whether a kernel's arithmetic is right, not whether it compiles, nor what it
compiles to. These cases do. They run in a process without TRITON_INTERPRET:

    python -m tests.support.kernel_cases tests.support.kernel_cases.local_moe
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KernelCase"]


@dataclass(frozen=True)
class KernelCase:
    """A kernel with the arguments of one of its uses.

    `arguments` are Triton's type names in the kernel's order, constexprs left out: "*bf16", "*i64",
    "i32"; with ":16" behind it an argument is divisible by 16, as tensors from torch are; "1" is an
    integer that is 1, which Triton makes a constant. `wanted` are texts that the PTX must hold (a
    vector width, an acquire or release), `unwanted` those that it must not. `spills` are bytes of
    local memory per thread that the kernel may use, `libraries` are files of device code that it
    calls into, `maxnreg` the registers that a thread may take.
    """

    name: str
    kernel: Any
    arguments: tuple[str, ...]
    constants: Mapping[str, object] = field(default_factory=dict)
    num_warps: int = 4
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    spills: int = 0
    libraries: Mapping[str, str] = field(default_factory=dict)
    maxnreg: int | None = None
