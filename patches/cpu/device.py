"""Streams, events, devices and RNG states of torch.cuda on a CPU. replacements.py puts them in
place, in CPU mode only.

CPU work runs in program order, so streams and events do nothing (events read the host's clock): a
CPU run checks mathematics, never races or overlap.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.overrides
from torch.overrides import TorchFunctionMode

__all__ = [
    "CpuEvent",
    "CpuStream",
    "DeviceLiterals",
    "current_device",
    "current_stream",
    "device_count",
    "get_rng_state",
    "manual_seed",
    "never_capturing",
    "nothing",
    "set_rng_state",
    "stream",
    "switches",
]

_CPU = torch.device("cpu")
# Megatron's optimizers sort parameters by the name of their tensor type, and know the CUDA names
# alone.
_ASKS_FOR_CUDA_TYPE_NAMES = "megatron.core.optimizer"


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for set_device, synchronize, set_stream and Tensor.record_stream."""


def never_capturing() -> bool:
    """No CUDA graph is ever being captured."""
    return False


class CpuEvent:
    """Stands for torch.cuda.Event: always complete. `elapsed_time` is the host's time between two
    records, in ms."""

    wait = synchronize = nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time_s: float | None = None

    def record(self, stream: "CpuStream | None" = None) -> None:
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "CpuEvent") -> float:
        if self.time_s is None or end.time_s is None:
            raise ValueError("both events must be recorded before their elapsed time is taken")
        return (end.time_s - self.time_s) * 1e3


class CpuStream:
    """Stands for torch.cuda.Stream: work is complete when it returns, so no wait blocks."""

    device = _CPU
    device_index = cuda_stream = 0
    __init__ = wait_stream = wait_event = synchronize = nothing

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


_stream = CpuStream()


def current_stream(device: Any = None) -> CpuStream:
    """The only stream there is."""
    return _stream


def stream(stream: CpuStream | None) -> nullcontext[None]:
    """Run the block, and any other that is entered by the same context, as torch's does."""
    return nullcontext()


def current_device() -> int:
    """The device index; `DeviceLiterals` takes every index for the CPU."""
    return 0


def device_count() -> int:
    """As many devices as this host has ranks (LOCAL_WORLD_SIZE), so that each rank may set its
    own."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the generator that every CPU operation draws from, uint8."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda", graph_safe: bool = False) -> None:
    """Set the generator that every CPU operation draws from."""
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the generator that every CPU operation draws from."""
    torch.default_generator.manual_seed(int(seed))


class DeviceLiterals(TorchFunctionMode):
    """Reads "cuda" as "cpu" wherever torch is given a device (`device="cuda"`, `.to(0)`,
    `.cuda()`), and pins no memory.

    A mode holds for the thread that entered it. On a CPU the same thread runs backward.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        if kwargs:
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if (special := _SPECIAL.get(func)) is not None:
            return special(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _on_cpu(device: Any) -> Any:
    """The CPU for anything that names a CUDA device; everything else as it is."""
    if isinstance(device, str | torch.device):
        return _CPU if str(device).startswith("cuda") else device
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return _CPU if is_index else device


def _tensor_to(func: Callable[..., Any], tensor: Any, *rest: Any, **kwargs: Any) -> Any:
    if rest:  # the first is the only place for a device
        rest = (_on_cpu(rest[0]), *rest[1:])
    return func(tensor, *rest, **kwargs)


def _tensor_type(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    answer = func(*args, **kwargs)
    if isinstance(answer, str):
        # Frame 0 is this function, 1 the mode, 2 whoever asked; only Megatron's optimizers see
        # another name.
        asker = sys._getframe(2).f_globals.get("__name__", "")
        if asker.startswith(_ASKS_FOR_CUDA_TYPE_NAMES) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
    return answer


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.Tensor.to: _tensor_to,
    # Itself, unless it is on the meta device, which is as much an error as it is on a GPU.
    torch.Tensor.cuda: lambda func, tensor, *args, **kwargs: tensor.to(_CPU),
    torch.Tensor.pin_memory: lambda func, tensor, *args, **kwargs: tensor,
    torch.Tensor.type: _tensor_type,
}


def _leave(mode: TorchFunctionMode) -> None:
    """Take a mode off the stack, below others that have been entered since and stay."""
    above: list[TorchFunctionMode] = []
    stack = torch.overrides._get_current_function_mode_stack()
    if not any(entered is mode for entered in stack):
        return  # entered in another thread, whose end took it along
    while (top := torch.overrides._pop_mode()) is not mode:
        above.append(top)
    for entered in reversed(above):
        torch.overrides._push_mode(entered)


def _switch(enter: Callable[[], Any], leave: Callable[[Any], None]) -> property:
    """A context that stays entered, as an attribute that a patch can set to True and False."""
    entered: list[Any] = []

    def put(self: object, on: bool) -> None:
        if on and not entered:
            entered.append(enter())
        elif not on and entered:
            leave(entered.pop())

    return property(lambda self: bool(entered), put)


class _Switches:
    """Whether a `DeviceLiterals` mode is in force in the thread that switched it on, and whether
    torch.compile's functions run as written: compiling Megatron's small fused functions for a CPU
    takes a C++ compiler and longer than a short run."""

    __slots__ = ()
    device_literals = _switch(lambda: DeviceLiterals().__enter__(), _leave)
    run_compiled_functions_eagerly = _switch(
        lambda: torch.compiler.set_stance("force_eager"),
        lambda stance: stance.__exit__(None, None, None),
    )


switches = _Switches()
