"""CPU mode: Megatron-Core trains on gloo ranks on a machine without a GPU. READ THE TABLE
`CPU_PATCHES` FIRST.

Every row is in force only where `cpu_mode_active()`, that is where torch finds no GPU, and only
once Megatron is imported; nothing of it ever runs beside a GPU. It changes where Megatron's numbers
are computed, never which: no row touches a formula. What the rows put in place is in device.py
(torch's side), arguments.py (the command line) and replacements.py (Megatron's side).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron_fluid.patches.engine.patch import Patch

__all__ = ["CPU_PATCHES", "GROUP", "claim_cuda_to_tests", "cpu_mode_active"]

GROUP = "CPU mode"
_DEVICE = "megatron_fluid.patches.cpu.device"


@functools.cache
def cpu_mode_active() -> bool:
    """Whether this process has no GPU, so that CPU mode applies. Asked once: the answer must not
    change under a run."""
    import torch

    return not torch.cuda.is_available()


_tests_want_cuda = False


def claim_cuda_to_tests() -> None:
    """Let `torch.cuda.is_available()` be true for test modules: called by the pytest plug-in before
    Megatron is imported."""
    global _tests_want_cuda
    cpu_mode_active()  # asked before the answer changes
    _tests_want_cuda = True


def _claims_cuda() -> bool:
    return _tests_want_cuda and cpu_mode_active()


def _put(name: str) -> Callable[[Any], Any]:
    """A replacement by a class or function of device.py, which is imported only when it is
    needed.

    A function is wrapped anew for each target: reverting tells by identity who holds what.
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


def _value(value: Any) -> Callable[[Any], Any]:
    """A replacement by a value."""
    return lambda original: value


# Attribute of torch.cuda, what stands for it in device.py, and why.
_TORCH_CUDA = (
    ("current_device", "current_device", "the device index that Megatron allocates on"),
    ("set_device", "nothing", "there is no device to choose"),
    ("device_count", "device_count", "Megatron seeds its RNG only where a device is counted"),
    ("synchronize", "nothing", "CPU work is done when it is issued"),
    (
        "Stream",
        "CpuStream",
        "side streams of dispatchers and schedules; CPU work is in program order",
    ),
    ("Event", "CpuEvent", "events order side streams and time them"),
    ("stream", "stream", "runs the block in program order"),
    ("current_stream", "current_stream", "the only stream there is"),
    ("default_stream", "current_stream", "the only stream there is"),
    ("set_stream", "nothing", "the only stream there is"),
    ("is_current_stream_capturing", "never_capturing", "no CUDA graph is captured on a CPU"),
    (
        "get_rng_state",
        "get_rng_state",
        "the generator behind dropout and initialisation is the CPU's",
    ),
    ("random.get_rng_state", "get_rng_state", "the same, by its other name"),
    (
        "set_rng_state",
        "set_rng_state",
        "the generator behind dropout and initialisation is the CPU's",
    ),
    ("manual_seed", "manual_seed", "the generator behind dropout and initialisation is the CPU's"),
)


def _torch_cuda(attribute: str, replacement: str, reason: str) -> Patch:
    return _cpu_patch(
        f"torch.cuda.{attribute}", f"torch:cuda.{attribute}", _put(replacement), reason
    )


def _cpu_patch(
    name: str,
    target: str,
    replacement: Any,
    reason: str,
    signature: str | None = None,
    when: Callable[[], bool] = cpu_mode_active,
    condition: str = "on a machine without a GPU",
) -> Patch:
    return Patch(
        name=f"cpu-{name}",
        target=target,
        replacement=replacement,
        reason=reason,
        signature=signature,
        trigger=None if target.startswith("megatron.") else "megatron.core",
        when=when,
        condition=condition,
        group=GROUP,
    )


def _here(name: str) -> str:
    return f"megatron_fluid.patches.cpu.replacements:{name}"


CPU_PATCHES: tuple[Patch, ...] = (
    # torch's side. Megatron calls these by name in a few hundred places; none of them exists
    # without a GPU.
    _cpu_patch(
        "device-literals",
        f"{_DEVICE}:switches.device_literals",
        _value(True),
        'reads "cuda" as "cpu" wherever torch is given a device: Megatron has the word in over a '
        "hundred places",
    ),
    _cpu_patch(
        "backward",
        "torch.autograd:_engine_run_backward",
        _here("engine_run_backward"),
        "keeps that reading in force while backward runs",
    ),
    _cpu_patch(
        "eager",
        f"{_DEVICE}:switches.run_compiled_functions_eagerly",
        _value(True),
        "runs torch.compile's functions as written: compiling them for a CPU takes longer than a "
        "short run",
    ),
    *(_torch_cuda(*row) for row in _TORCH_CUDA),
    _cpu_patch(
        "record_stream",
        "torch:Tensor.record_stream",
        _put("nothing"),
        "tells the GPU's allocator about a side stream",
    ),
    _cpu_patch(
        "init_process_group",
        "torch.distributed:init_process_group",
        _here("init_process_group"),
        "gloo in the place of NCCL, and no device bound to a rank",
    ),
    _cpu_patch(
        "barrier",
        "torch.distributed:barrier",
        _here("barrier"),
        "gloo refuses device_ids, which Megatron always passes",
        signature="(group=None, async_op=False, device_ids=None)",
    ),
    _cpu_patch(
        "data-loader",
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
        _here("data_loader_iterator"),
        "draws a seed from what is dropout's generator here: a resumed run would differ from one "
        "that went through",
        signature="(self, loader)",
    ),
    _cpu_patch(
        "is_available",
        "torch:cuda.is_available",
        _here("is_available"),
        "tells test modules that CUDA is there, which skip nearly everything otherwise",
        signature="()",
        when=_claims_cuda,
        condition="under the pytest plug-in, on a machine without a GPU",
    ),
    # Megatron's side.
    _cpu_patch(
        "destroy-groups",
        "megatron.core.parallel_state:destroy_model_parallel",
        _here("destroy_model_parallel"),
        "forgets its process groups without closing them, and each gloo group keeps polling "
        "threads",
        signature="()",
    ),
    _cpu_patch(
        "set_cuda_rng_state",
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        _put("set_rng_state"),
        "sets CUDA's generator through torch's internals",
        signature="(new_state, device=-1, graph_safe=False)",
    ),
    _cpu_patch(
        "rng-fork",
        "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        _here("fork_rng_state"),
        "warns when the CPU's generator moves, which on a CPU it must",
        signature="(self, name='model-parallel-rng')",
    ),
    _cpu_patch(
        "torch-norm",
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        _here("wrapped_torch_norm"),
        "torch's norms, the only ones without Apex or Transformer Engine, are refused under "
        "sequence parallelism",
        signature="(cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, "
        "zero_centered_gamma=False, normalization='LayerNorm')",
    ),
    _cpu_patch(
        "move-to-cpu",
        "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
        _here("maybe_move_tensor_to_cpu"),
        "leaves out the conversion to numpy for a tensor on the CPU",
        signature="(tensor, as_numpy=False, record_stream=False)",
    ),
    _cpu_patch(
        "optimizer-state",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        _here("distributed_optimizer_state_dict"),
        "with torch's Adam, the only one without Apex or Transformer Engine, no checkpoint can be "
        "loaded",
        signature="(self)",
    ),
    _cpu_patch(
        "optimizer-step",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        _here("distributed_optimizer_load"),
        "with torch's Adam, all parameters share one step counter after a checkpoint was loaded, "
        "and each advances it",
        signature="(self, state_dict)",
    ),
    _cpu_patch(
        "optimizer-load",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
        _here("set_main_param"),
        "an fp32 checkpoint, the usual precision on a CPU, is loaded into views of parameters that "
        "require grad",
        signature="(self, model_param, tensors)",
    ),
    _cpu_patch(
        "validate_args",
        "megatron.training.arguments:validate_args",
        "megatron_fluid.patches.cpu.arguments:validate_args",
        "gives settings that need a GPU the value that means the same without one, and says so",
        signature="(args, defaults={})",
    ),
    _cpu_patch(
        "validate_yaml",
        "megatron.training.yaml_arguments:validate_yaml",
        "megatron_fluid.patches.cpu.arguments:validate_yaml",
        "a YAML file goes past the settings above, so it is refused by name",
        signature="(args, defaults={})",
    ),
    _cpu_patch(
        "initialize_megatron",
        "megatron.training.initialize:initialize_megatron.__defaults__",
        _here("without_cuda_assertion"),
        "training asserts that CUDA is available",
    ),
    _cpu_patch(
        "jit-warmup",
        "megatron.training.initialize:_warmup_jit_function",
        _here("no_warmup"),
        "draws from the generator behind initialisation here, as often as a microbatch is large: "
        "routers would depend on it",
        signature="(tp_size=None)",
    ),
    _cpu_patch(
        "device-arch",
        "megatron.training.utils.common_utils:get_device_arch_version",
        _here("get_device_arch_version"),
        "argument checks ask for the GPU's architecture",
        signature="()",
    ),
)
