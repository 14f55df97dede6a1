"""Starting a Triton kernel with little work on the host.

Triton binds, types and hashes the arguments of every launch, which takes longer than many of the
kernels here run. A `Launch` does that once and then calls the driver directly
(megatron_fluid.cuda.driver_launch); a `Launcher` keeps one `Launch` for each way in which its
kernel is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fluid.cuda.driver_launch import DriverLaunch, direct_launch
from megatron_fluid.errors import ConfigError

__all__ = ["Argument", "Launch", "Launcher", "aligned", "power_of_two"]

type Argument = Tensor | int
_MAX_INT32 = (1 << 31) - 1


def power_of_two(n: int) -> int:
    """Return the least power of two that is at least `n`; 1 for 0, which Triton's own rounds to
    0."""
    return 1 << max(n - 1, 0).bit_length()


def aligned(x: Tensor) -> Tensor:
    """Return x if it is contiguous and 16-byte aligned, as prepared launches require, else such a
    copy."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class Launch:
    """One specialisation of a kernel: its first call compiles it, later calls start it directly.

    The kernel's parameters are the arguments of a call, the fixed ones, the integers of a call
    (`start_aligned` alone) and the constexprs, in this order.

    Args:
        kernel: a function under triton.jit.
        num_warps: warps of one program.
        constants: the constexprs, in the kernel's order.
        fixed: arguments that are the same in every call; tensors stay where they are.
        maxnreg: upper bound on the registers of a thread; None leaves it to the compiler.
        words: names of tensors that the kernel takes as int32 words, whatever their dtype.
        unaligned: names of tensors that `start_aligned` takes at any address.

    The caller vouches that later calls pass the same types and None in the same places, that
    integers which vary are marked do_not_specialize and fit the type of the first call, and that
    tensors which are moved by wide accesses begin on 16-byte boundaries like the first ones.
    """

    def __init__(
        self,
        kernel: Any,
        num_warps: int,
        constants: Mapping[str, object],
        fixed: Sequence[Argument] = (),
        maxnreg: int | None = None,
        words: Sequence[str] = (),
        unaligned: Sequence[str] = (),
    ) -> None:
        self._kernel, self._num_warps = kernel, num_warps
        self._options = {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})
        self._constants, self._fixed = dict(constants), tuple(fixed)
        self._names = getattr(getattr(kernel, "jit_func", kernel), "arg_names", ())
        self._words = frozenset(words)
        self._masks = [0 if name in unaligned else 15 for name in self._names]
        self._direct: DriverLaunch | None = None
        self._compiled: Any = None

    def __call__(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Argument],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Start grid[0] * grid[1] programs on `stream`; None means the current stream."""
        if self._direct is not None:
            values = [a if type(a) is int else a.data_ptr() for a in arguments]  # type: ignore[union-attr]
            self._direct(*grid, values, None if stream is None else stream.cuda_stream)
        else:
            self._by_triton(grid, arguments, (), stream)

    def start(
        self, grid: tuple[int, int], arguments: Sequence[Argument], values: Sequence[int]
    ) -> None:
        """As a call on the current stream; `values`: the arguments, tensors as addresses."""
        if self._direct is not None:
            self._direct(*grid, values, None)
        else:
            self._by_triton(grid, arguments, (), None)

    def start_aligned(
        self, programs: int, tensors: Sequence[Tensor | None], integers: Sequence[int]
    ) -> None:
        """Start `programs` programs on the current stream.

        Raises:
            ConfigError: a tensor's address is not a multiple of 16.
        """
        values: list[int] = []
        low_bits = 0
        for tensor, mask in zip(tensors, self._masks, strict=False):
            if tensor is not None:
                address = tensor.data_ptr()
                low_bits |= address & mask
                values.append(address)
        if low_bits:
            self._refuse_unaligned(tensors)
        if self._direct is not None:
            values += integers
            self._direct(programs, 1, values, None)
        else:
            self._by_triton((programs, 1), tensors, integers, None)

    def _by_triton(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Argument | None],
        integers: Sequence[int],
        stream: torch.cuda.Stream | None,
    ) -> None:
        compiled = self._compiled
        if compiled is None:
            self._first(grid, arguments, integers, stream)
            return
        # The compiled kernel needs more than a DriverLaunch gives: Triton's launcher starts it.
        if stream is None:
            raw = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        else:
            raw = stream.cuda_stream
        compiled.run(
            *(*grid, 1, raw, compiled.function, compiled.packed_metadata, None, None, None),
            *map(_address, (*arguments, *self._fixed)),
            *integers,
            *self._constants.values(),
        )

    def _first(
        self,
        grid: tuple[int, int],
        arguments: Sequence[Argument | None],
        integers: Sequence[int],
        stream: torch.cuda.Stream | None,
    ) -> None:
        if self._words:
            arguments = [
                a.view(torch.int32) if isinstance(a, Tensor) and name in self._words else a
                for name, a in zip(self._names, arguments, strict=False)
            ]
        given = (*arguments, *self._fixed, *integers)
        # Interpreted, every launch is a first one and there are no streams.
        with torch.cuda.stream(stream):
            compiled = self._kernel[grid](*given, **self._constants, **self._options)
        if triton.knobs.runtime.interpret:
            return
        self._compiled = compiled
        # An integer 1 among the fixed ones has become a constant.
        kinds = list(compiled.src.signature.values())[len(arguments) :]
        pairs = zip(self._fixed, kinds, strict=False)
        fixed = [a for a, kind in pairs if kind != "constexpr"]
        present = [a for a in arguments if a is not None]
        tensors = itertools.takewhile(lambda a: isinstance(a, Tensor), (*present, *fixed))
        self._direct = direct_launch(
            compiled,
            self._num_warps,
            len(present),
            [_address(a) for a in fixed],  # type: ignore[misc]
            trailing=len(integers),
            pointers=len(list(tensors)),
        )

    def _refuse_unaligned(self, tensors: Sequence[Tensor | None]) -> None:
        for name, tensor, mask in zip(self._names, tensors, self._masks, strict=False):
            found = 0 if tensor is None else tensor.data_ptr() & mask
            if found:
                above, allowed = f"{found} above a multiple of 16", "a multiple of 16"
                raise ConfigError.of(f"address of {name}", above, allowed)


class Launcher:
    """A kernel under triton.jit, at every specialisation that its calls ask for.

    A `Launch` for each is found by the constants and by the dtype, alignment and device of the
    tensors and the width of the integers. The kernel's parameters are a tensor, tensors and
    integers, all of the latter marked do_not_specialize, and then constexprs.
    """

    def __init__(self, kernel: Any, num_warps: int) -> None:
        self._kernel, self._num_warps = kernel, num_warps
        self._launches: dict[tuple[object, ...], Launch] = {}

    def __call__(
        self, programs: int, arguments: Sequence[Argument], rows: int = 1, /, **constants: object
    ) -> None:
        """Start a grid of (`programs`, `rows`) on the current stream, nothing if `programs` is 0.

        `constants` come in the kernel's order.
        """
        if not programs:
            return
        values: list[int] = []
        # The dtype of every tensor, and the indices of unaligned tensors and wide integers.
        special: list[object] = []
        for argument in arguments:
            if type(argument) is int:
                value, odd = argument, argument > _MAX_INT32
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
        launch.start((programs, rows), arguments, values)


def _address(argument: Argument | None) -> int | None:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument
