"""Starting a Triton kernel with little work on the host.

Triton binds, types and hashes the arguments of every launch, which takes longer than many of the
kernels here run. A `Launch` does that once and then calls the driver directly, with a parameter
block that one struct call packs; a `Launcher` keeps one `Launch` for each way in which its kernel
is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_fluid.cuda import driver_api
from megatron_fluid.errors import ConfigError

__all__ = ["Argument", "Launch", "Launcher", "aligned", "parameter_bytes", "power_of_two"]

type Argument = Tensor | int

# Triton appends this many pointers to every kernel's parameters; null, as no kernel uses them.
_SCRATCH = 2

# How struct packs a parameter into its 8 bytes; an integer that does not fit raises struct.error.
_FORMAT = {"i32": "i4x", "u32": "I4x", "i64": "q", "u64": "Q"}
_POINTER = "Q"

# (columns, rows, values, stream): starts columns * rows programs on a raw stream, None for the
# current one. values: the parameters that vary.
type DriverLaunch = Callable[[int, int, Sequence[int], int | None], None]
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
        self, kernel: Any, num_warps: int, constants: Mapping[str, object],
        fixed: Sequence[Argument] = (), maxnreg: int | None = None, words: Sequence[str] = (),
        unaligned: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._kernel, self._num_warps = kernel, num_warps
        self._options = {"num_warps": num_warps} | ({} if maxnreg is None else {"maxnreg": maxnreg})
        self._constants, self._fixed = dict(constants), tuple(fixed)
        self._names = getattr(getattr(kernel, "jit_func", kernel), "arg_names", ())
        self._words, self._unaligned = frozenset(words), frozenset(unaligned)
        self._direct: DriverLaunch | None = None
        self._make: Any = None  # as _direct_launch returns it
        self._kept: list[Any] = []  # addresses of the fixed ones that the compiled kernel takes
        self._compiled: Any = None

    def __call__(
        self, grid: tuple[int, int], arguments: Sequence[Argument],
        stream: torch.cuda.Stream | None = None, values: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Start grid[0] * grid[1] programs on `stream`; None means the current stream.

        values: the arguments with tensors as their addresses, where the caller has them.
        """
        if self._direct is not None:
            if values is None:
                values = [a if type(a) is int else a.data_ptr() for a in arguments]  # type: ignore[union-attr]
            self._direct(*grid, values, None if stream is None else stream.cuda_stream)
        else:
            self._by_triton(grid, arguments, (), stream)

    def start_aligned(
        self, programs: int, tensors: Sequence[Tensor | None], integers: Sequence[int],
        moving: Sequence[int] = (),
    ) -> Any:  # fmt: skip
        """Start `programs` programs on the current stream.

        The result, None where Triton starts the kernel, makes if called at once what starts them
        again with other tensors in the places `moving`, which it takes in that order.

        Raises:
            ConfigError: a tensor's address is not a multiple of 16.
        """
        self._refuse_unaligned(tensors, range(len(tensors)))
        if self._direct is not None:
            values = [tensor.data_ptr() for tensor in tensors if tensor is not None]
            self._direct(programs, 1, [*values, *integers], None)
        else:
            self._by_triton((programs, 1), tensors, integers, None)
        return self._make and partial(self._again, programs, tensors, integers, moving)

    def _again(self, programs: int, tensors: Any, integers: Any, moving: Any) -> Any:
        present = [place for place, tensor in enumerate(tensors) if tensor is not None]
        kept = [_address(tensors[place]) for place in present if place not in moving]
        varying = [present.index(place) for place in moving if place in present]
        _, start, block = self._make(varying, [*kept, *self._kept, *integers])

        def again(now: Sequence[Tensor | None]) -> None:
            slot = bits = 0
            for tensor in now:
                if tensor is not None:
                    block[slot] = address = tensor.data_ptr()
                    bits |= address
                    slot += 1
            if bits & 15:
                self._refuse_unaligned(now, moving)
            start(programs, 1)

        return again

    def _by_triton(
        self, grid: tuple[int, int], arguments: Sequence[Argument | None], integers: Sequence[int],
        stream: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        """Start the kernel for the first time, which compiles it, or where it needs more than a
        DriverLaunch gives."""
        if (compiled := self._compiled) is not None:
            current, device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
            raw = current(device()) if stream is None else stream.cuda_stream
            compiled.run(
                *(*grid, 1, raw, compiled.function, compiled.packed_metadata, None, None, None),
                *map(_address, (*arguments, *self._fixed)), *integers, *self._constants.values(),
            )  # fmt: skip
            return
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
        self._kept, pointers = [_address(a) for a in fixed], len(list(tensors))
        count = len(present) + len(fixed) + len(integers)
        self._make = _direct_launch(compiled, self._num_warps, count, pointers)
        if self._make is not None:
            behind = range(len(present) + len(fixed), count)
            self._direct, _, _ = self._make([*range(len(present)), *behind], self._kept)

    def _refuse_unaligned(self, tensors: Sequence[Tensor | None], places: Sequence[int]) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            offset = 0 if tensor is None else tensor.data_ptr() & 15
            if offset and (name := self._names[place]) not in self._unaligned:
                above, allowed = f"{offset} above a multiple of 16", "a multiple of 16"
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
        launch((programs, rows), arguments, None, values)


def _address(argument: Argument | None) -> int | None:
    return argument.data_ptr() if isinstance(argument, Tensor) else argument


def _direct_launch(compiled: Any, num_warps: int, count: int, pointers: int) -> Any:
    """Return `_launch` for a kernel that Triton compiled on the current device, but for its last
    two arguments.

    None where the kernel does not take exactly `count` parameters, the first `pointers` as
    pointers, the others as pointers or integers (another Triton release), or wants more than a
    plain launch.
    """
    metadata = compiled.metadata
    types = [t for t in compiled.src.signature.values() if t != "constexpr"]
    expected = (
        len(types) == count
        and all(t[0] in "*iu" for t in types)
        and all(t[0] == "*" for t in types[:pointers])
    )
    special = (
        metadata.num_ctas != 1
        or metadata.launch_cooperative_grid
        or metadata.launch_pdl
        or metadata.shared > 48 << 10
        or getattr(metadata, "global_scratch_size", 0)
        or getattr(metadata, "profile_scratch_size", 0)
    )
    if special or not expected or _parameter_widths(compiled.function) != parameter_bytes(types):
        return None
    known = compiled.function, torch.cuda.current_device(), 32 * num_warps, metadata.shared, types
    return partial(_launch, *known)


def _launch(
    function: int, device: int, threads: int, shared: int, types: Sequence[str],
    varying: Sequence[int], constants: Sequence[int],
) -> tuple[DriverLaunch, Callable[..., None], Any]:  # fmt: skip
    """Return a launch that takes the parameters `varying`, by their places; a start, of (columns,
    rows), that takes them from the block; and this block of one start, where they are first.

    The other parameters are `constants`. The variables of closures take less time to read than
    attributes.
    """
    count = len(types) + _SCRATCH
    pack = struct.Struct("=" + "".join(_FORMAT.get(types[i], _POINTER) for i in varying)).pack_into
    # The parameters, what varies first, so that one call packs it; behind them their addresses, in
    # the kernel's order.
    block = (ctypes.c_int64 * (2 * count))()
    first = ctypes.addressof(block)
    block[len(varying) : len(types)] = list(constants)
    order = [*varying, *(i for i in range(count) if i not in varying)]
    for slot, parameter in enumerate(order):
        block[count + parameter] = first + 8 * slot
    addresses, streams = first + 8 * count, driver_api.streams
    raw_stream = torch._C._cuda_getCurrentRawStream
    cu_launch = driver_api.driver().cuLaunchKernel
    handle = driver_api.driver().CUfunction(function)
    # The main thread and autograd's may start the same kernel: the block belongs to one.
    lock = threading.Lock()

    def start(columns: int, rows: int, stream: int | None = None) -> None:
        on = streams[raw_stream(device) if stream is None else stream]
        status = cu_launch(handle, columns, rows, 1, threads, 1, 1, shared, on, addresses, 0)[0]
        if status:
            shape = (columns, rows, 1, threads, 1, 1, shared)
            driver_api.retry_with_context(
                status, device, "cuLaunchKernel", handle, *shape, on, addresses, 0
            )

    def launch(columns: int, rows: int, values: Sequence[int], stream: int | None = None) -> None:
        with lock:
            pack(block, 0, *values)
            start(columns, rows, stream)

    return launch, start, block


def parameter_bytes(types: Sequence[str]) -> list[int]:
    """Bytes of each parameter of a kernel that Triton compiled for parameters of these types."""
    return [8 if t.startswith("*") or t.endswith("64") else 4 for t in types] + [8] * _SCRATCH


def _parameter_widths(function: int) -> list[int]:
    """Bytes of each parameter of a kernel, as the driver sees them; none where it cannot say
    (before CUDA 12.4)."""
    driver, widths = driver_api.driver(), list[int]()
    handle = driver.CUfunction(function)
    with contextlib.suppress(RuntimeError):  # the driver lacks the function
        while len(widths) < 256:
            status, _, width = driver.cuFuncGetParamInfo(handle, len(widths))
            if status:
                break
            widths.append(width)
    return widths
