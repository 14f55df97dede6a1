"""CPU mode: Megatron-Core trains on gloo ranks on a machine without a GPU, if the user asks for it
(`--fluid-cpu`, MEGATRON_FLUID_CPU=1). READ THE TABLE `CPU_PATCHES` FIRST.

A row is applied only if `cpu_mode_active()`, once Megatron is imported; none of it runs where there
is a GPU. The rows change where Megatron's numbers are computed and no formula. What they put in
place is in device.py (torch.cuda), replacements.py (functions of torch and Megatron, each below its
row) and arguments.py (the command line).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron_fluid.patches.cpu.mode import cpu_patch
from megatron_fluid.patches.cpu.replacements import MEGATRON_PATCHES, TORCH_PATCHES
from megatron_fluid.patches.engine.patch import Patch

__all__ = ["CPU_PATCHES"]

_DEVICE = "megatron_fluid.patches.cpu.device"


def _put(name: str) -> Callable[[Any], Any]:
    """A factory that gives a class or function of device.py, imported when the patch is applied.
    Each target gets a wrapper of its own, because reverting compares by identity.
    """

    def factory(original: Any) -> Any:
        new = getattr(importlib.import_module(_DEVICE), name)
        if isinstance(new, type):
            return new

        @functools.wraps(new)
        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            return new(*args, **kwargs)

        return on_cpu

    return factory


def _switch(name: str, attribute: str, reason: str) -> Patch:
    return cpu_patch(name, f"{_DEVICE}:switches.{attribute}", lambda original: True, reason)


_GENERATOR = "the generator behind dropout and initialisation is the CPU's"
_ONE_STREAM = "the only stream there is"
# Attribute of torch.cuda, what stands for it in device.py, and why.
_TORCH_CUDA = (
    ("current_device", "current_device", "the device index that Megatron allocates on"),
    ("set_device", "nothing", "there is no device to choose"),
    ("device_count", "device_count", "Megatron seeds its RNG only where a device is counted"),
    ("synchronize", "nothing", "CPU work is done when it is issued"),
    ("Stream", "CpuStream", "dispatchers have side streams; CPU work is in program order"),
    ("Event", "CpuEvent", "events order side streams and time them"),
    ("stream", "stream", "runs the block in program order"),
    ("current_stream", "current_stream", _ONE_STREAM),
    ("default_stream", "current_stream", _ONE_STREAM),
    ("set_stream", "nothing", _ONE_STREAM),
    ("is_current_stream_capturing", "never_capturing", "no CUDA graph is captured on a CPU"),
    ("get_rng_state", "get_rng_state", _GENERATOR),
    ("random.get_rng_state", "get_rng_state", "the same, by its other name"),
    ("set_rng_state", "set_rng_state", _GENERATOR),
    ("manual_seed", "manual_seed", _GENERATOR),
)

CPU_PATCHES: tuple[Patch, ...] = (
    # torch's side. Megatron calls these by name in a few hundred places; none of them exists
    # without a GPU.
    _switch(
        "device-literals",
        "device_literals",
        'reads "cuda" as "cpu" wherever torch is given a device: Megatron has the word in over a '
        "hundred places",
    ),
    _switch(
        "eager",
        "run_compiled_functions_eagerly",
        "runs torch.compile's functions as written: compiling them for a CPU takes longer than a "
        "short run",
    ),
    *(
        cpu_patch(f"torch.cuda.{attribute}", f"torch:cuda.{attribute}", _put(new), reason)
        for attribute, new, reason in _TORCH_CUDA
    ),
    cpu_patch(
        "record_stream",
        "torch:Tensor.record_stream",
        _put("nothing"),
        "informs the GPU's allocator of a side stream",
    ),
    *TORCH_PATCHES,
    cpu_patch(
        "set_cuda_rng_state",
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        _put("set_rng_state"),
        "sets CUDA's generator through torch's internals",
        signature="(new_state, device=-1, graph_safe=False)",
    ),
    *MEGATRON_PATCHES,
)
