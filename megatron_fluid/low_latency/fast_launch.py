"""Launching a Triton kernel without Triton's argument binding, which takes longer on the host than
these kernels on the device: the driver is called directly (megatron_fluid.cuda.driver_launch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fluid.cuda.driver_launch import DriverLaunch
from megatron_fluid.errors import ConfigError

__all__ = ["FastLaunch", "OwnTensors", "address", "as_words", "compile_only"]


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's memory begins."""
    return None if tensor is None else tensor.data_ptr()


def as_words(tensor: Tensor | None) -> Tensor | None:
    """A view of rows of bytes as int32."""
    return None if tensor is None else tensor.view(torch.int32)


_compile_only = False


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches inside compile their kernel, which leaves it in Triton's cache, and start
    nothing."""
    global _compile_only
    _compile_only = True
    try:
        yield
    finally:
        _compile_only = False


class OwnTensors:
    """Tensors that a caller passes on every launch: their addresses are read once."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self.addresses = tuple(t.data_ptr() for t in tensors)


class FastLaunch:
    """One specialisation of a Triton kernel, compiled on its first call and then started through
    the driver.

    The kernel takes the call's tensors, then the caller's own tensors, then integers, then
    constexprs, and marks every integer `do_not_specialize`. While `cold`, the call's tensors are
    passed as tensors, typed as the kernel wants them; after that as addresses. The caller vouches
    that later tensors have the same types and are None in the same places, and that no integer is
    negative. Addresses must be multiples of 16, except that of `bound_m`, a single word.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], num_warps: int) -> None:
        self._kernel = kernel
        self._constants = dict(constants)
        self._num_warps = num_warps
        self._names = getattr(kernel, "jit_func", kernel).arg_names
        self._bound = self._names.index("bound_m") if "bound_m" in self._names else -1
        self._compiled: Any = None
        self._direct: DriverLaunch | None = None
        self.cold = True

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | int | None],
        own: OwnTensors,
        integers: Sequence[int],
    ) -> None:
        """Start `programs` programs on the current stream."""
        bits = 0
        for index, tensor in enumerate(tensors):
            if tensor is not None and index != self._bound:
                bits |= tensor.data_ptr() if isinstance(tensor, Tensor) else tensor
        if bits & 15:
            self._refuse(tensors)
        if _compile_only:
            self._kernel.warmup(
                *tensors,
                *own.tensors,
                *integers,
                grid=(programs,),
                **self._constants,
                num_warps=self._num_warps,
            )
            return
        if self.cold:
            compiled = self._kernel[(programs,)](
                *tensors, *own.tensors, *integers, **self._constants, num_warps=self._num_warps
            )
            if not triton.knobs.runtime.interpret:
                present = sum(t is not None for t in tensors)
                pointers = present + len(own.addresses)
                self._direct = DriverLaunch.of(
                    compiled, self._num_warps, present, own.addresses, len(integers), pointers
                )
                self._compiled, self.cold = compiled, False
            return
        direct = self._direct
        if direct is not None:
            direct(programs, 1, [*[t for t in tensors if t is not None], *integers])  # type: ignore[list-item]
            return
        compiled = self._compiled
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(
            programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *tensors, *own.addresses, *integers, *self._constants.values(),
        )  # fmt: skip

    def _refuse(self, tensors: Sequence[Tensor | int | None]) -> None:
        for index, tensor in enumerate(tensors):
            found = tensor.data_ptr() if isinstance(tensor, Tensor) else tensor or 0
            if index != self._bound and found % 16:
                raise ConfigError.of(
                    f"address of {self._names[index]}",
                    f"{found % 16} above a multiple of 16",
                    "a multiple of 16",
                )
