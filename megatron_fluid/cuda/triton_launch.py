"""Starting a Triton kernel with little work on the host.

Triton binds, types and hashes the arguments of every launch, which takes longer than many of the
kernels here run. A `Launch` does that once, and then goes to the driver; a `Launcher` keeps one for
each way in which its kernel is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fluid.cuda.driver_launch import DriverLaunch

__all__ = ["Argument", "Launch", "Launcher"]

type Argument = Tensor | int
_MOST_INT32 = (1 << 31) - 1


class Launch:
    """One specialisation of a kernel: its constexprs are fixed, it is compiled by its first launch
    and started directly after that.

    Args:
        kernel: a function under triton.jit.
        num_warps: of one program.
        constants: the constexprs, in the kernel's order.
        fixed: the arguments before those, which are the same in every launch; tensors stay where
            they are.
        maxnreg: the most registers that a thread may take, None for as many as the compiler likes.

    The caller vouches that later launches pass the same types, that integers which vary are marked
    do_not_specialize, and that tensors which are moved by wide accesses begin on 16-byte boundaries
    like the first ones.
    """

    def __init__(
        self,
        kernel: Any,
        num_warps: int,
        constants: Mapping[str, object],
        fixed: Sequence[Argument] = (),
        maxnreg: int | None = None,
    ) -> None:
        self._kernel = kernel
        self._options = {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})
        self._constants = dict(constants)
        self._fixed = tuple(fixed)
        self._num_warps = num_warps
        self._direct: DriverLaunch | None = None
        self._compiled: Any = None
        self._tail: tuple[object, ...] = ()

    def __call__(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Argument],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Start grid[0] * grid[1] programs on `stream`, None for the current one; `arguments` are
        the kernel's first."""
        if self._direct is not None:
            values = [a if type(a) is int else a.data_ptr() for a in arguments]  # type: ignore[union-attr]
            self._direct(*grid, values, None if stream is None else stream.cuda_stream)
        else:
            self._otherwise(grid, arguments, stream)

    def start(self, programs: int, arguments: Sequence[Argument], values: Sequence[int]) -> None:
        """Start so many programs on the current stream; `values`: the arguments, tensors as
        addresses."""
        if self._direct is not None:
            self._direct(programs, 1, values)
        else:
            self._otherwise((programs, 1), arguments, None)

    def _otherwise(
        self, grid: tuple[int, int], arguments: Sequence[Argument], stream: torch.cuda.Stream | None
    ) -> None:
        if self._compiled is not None:
            self._through_triton(grid, arguments, stream)
        else:
            self._first(grid, arguments, stream)

    def _first(
        self, grid: tuple[int, int], arguments: Sequence[Argument], stream: torch.cuda.Stream | None
    ) -> None:
        # Interpreted, every launch is a first one and there are no streams.
        with torch.cuda.stream(stream):
            compiled = self._kernel[grid](
                *arguments, *self._fixed, **self._constants, **self._options
            )
        if not triton.knobs.runtime.interpret:
            self._compiled = compiled
            signature = list(compiled.src.signature.values())
            # An integer 1 among the fixed ones has become a constant.
            kinds = signature[len(arguments) : len(arguments) + len(self._fixed)]
            fixed = [_address(a) for a in self._fixed]
            self._tail = (*fixed, *self._constants.values())
            kept = [a for a, kind in zip(fixed, kinds, strict=True) if kind != "constexpr"]
            self._direct = DriverLaunch.of(compiled, self._num_warps, len(arguments), kept)

    def _through_triton(
        self, grid: tuple[int, int], arguments: Sequence[Argument], stream: torch.cuda.Stream | None
    ) -> None:
        """By Triton's launcher, for what a DriverLaunch does not take."""
        compiled = self._compiled
        raw = (
            torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            if stream is None
            else stream.cuda_stream
        )
        compiled.run(
            *(
                grid[0],
                grid[1],
                1,
                raw,
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
            ),
            *(*[_address(a) for a in arguments], *self._tail),
        )


class Launcher:
    """A kernel under triton.jit, at every specialisation that its calls ask for: a `Launch` for
    each, found by the constants and by the type, alignment and device of the tensors and the width
    of the integers.

    The kernel's parameters are a tensor, tensors and integers, all of the latter marked
    do_not_specialize, and then constexprs.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self._kernel, self._num_warps = kernel, num_warps
        self._launches: dict[tuple[object, ...], Launch] = {}

    def __call__(self, programs: int, arguments: Sequence[Argument], **constants: object) -> None:
        """Start so many programs, if any, on the current stream; `constants` in the kernel's
        order."""
        if not programs:
            return
        values: list[int] = []
        special: list[
            object
        ] = []  # every tensor's type, and the places of unaligned tensors and wide integers
        for argument in arguments:
            if type(argument) is int:
                value, odd = argument, argument > _MOST_INT32
            else:
                value = argument.data_ptr()  # type: ignore[union-attr]
                odd = value & 15 != 0
                special.append(argument.dtype)  # type: ignore[union-attr]
            if odd:
                special.append(len(values))
            values.append(value)
        key = (arguments[0].get_device(), *constants.values(), *special)  # type: ignore[union-attr]
        launch = self._launches.get(key)
        if launch is None:
            launch = self._launches[key] = Launch(self._kernel, self._num_warps, constants)
        launch.start(programs, arguments, values)


def _address(argument: Argument) -> int:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
