"""CPU mode: Megatron-Core trains on gloo ranks on a machine without a GPU, if the user asks for it
(`--fluid-cpu`, MEGATRON_FLUID_CPU=1). `CPU_PATCHES` is the table of what it replaces.

A row is applied only if `cpu_mode_active()`, once Megatron is imported; none of it runs where there
is a GPU. The rows change where Megatron's numbers are computed and no formula. device.py stands in
for torch.cuda, and arguments.py adapts the command line. Functions of torch and Megatron are below,
each under its row.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu.mode import cpu_patch, replaces
from megatron_fluid.patches.engine.patch import Patch

__all__ = ["CPU_PATCHES"]

# This module is imported before torch, so torch and device.py are imported where they are used.

CPU_PATCHES: list[Patch] = []
_replaces = functools.partial(replaces, CPU_PATCHES)

# --- torch: Megatron calls these by name in a few hundred places ---

_DEVICE = "megatron_fluid.patches.cpu.device"


def _put(name: str, original: Any) -> Any:
    """Return a class or function of device.py. Each target gets a wrapper of its own, because
    reverting compares by identity."""
    new = getattr(importlib.import_module(_DEVICE), name)
    if isinstance(new, type):
        return new

    @functools.wraps(new)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        return new(*args, **kwargs)

    return on_cpu


_GENERATOR = "the generator behind dropout and initialisation is the CPU's"
_ONE_STREAM = "the only stream there is"
# Attribute of torch, what stands for it in device.py, and why.
_TORCH = (
    ("cuda.current_device", "current_device", "the device index that Megatron allocates on"),
    ("cuda.set_device", "nothing", "there is no device to choose"),
    ("cuda.device_count", "device_count", "Megatron seeds its RNG only where a device is counted"),
    ("cuda.synchronize", "nothing", "CPU work is done when it is issued"),
    ("cuda.Stream", "CpuStream", "dispatchers have side streams; CPU work is in program order"),
    ("cuda.Event", "CpuEvent", "events order side streams and time them"),
    ("cuda.stream", "stream", "runs the block in program order"),
    ("cuda.current_stream", "current_stream", _ONE_STREAM),
    ("cuda.default_stream", "current_stream", _ONE_STREAM),
    ("cuda.set_stream", "nothing", _ONE_STREAM),
    ("cuda.is_current_stream_capturing", "never_capturing", "no CUDA graph is captured on a CPU"),
    ("cuda.get_rng_state", "get_rng_state", _GENERATOR),
    ("cuda.random.get_rng_state", "get_rng_state", "the same, by its other name"),
    ("cuda.set_rng_state", "set_rng_state", _GENERATOR),
    ("cuda.manual_seed", "manual_seed", _GENERATOR),
    ("Tensor.record_stream", "nothing", "informs the GPU's allocator of a side stream"),
)
# Switch of device.py, and why it is on.
_SWITCHES = {
    "device_literals": 'reads "cuda" as "cpu" wherever torch is given a device: Megatron has the '
    "word in over a hundred places",
    "run_compiled_functions_eagerly": "runs torch.compile's functions as written: compiling them "
    "for a CPU takes longer than a short run",
}
CPU_PATCHES += [
    cpu_patch(name.replace("_", "-"), f"{_DEVICE}:switches.{name}", lambda original: True, reason)
    for name, reason in _SWITCHES.items()
]
CPU_PATCHES += [
    cpu_patch(f"torch.{name}", f"torch:{name}", functools.partial(_put, new), reason)
    for name, new, reason in _TORCH
]


@_replaces(
    "backward",
    "torch.autograd:_engine_run_backward",
    "torch leaves a function mode while backward runs, in which autograd functions of Megatron "
    "allocate",
    checked=False,
)
def engine_run_backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron_fluid.patches.cpu.device import DeviceLiterals

    with DeviceLiterals():
        return original(*args, **kwargs)


@_replaces(
    "init_process_group",
    "torch.distributed:init_process_group",
    "gloo in the place of NCCL, and no device bound to a rank",
    checked=False,
)
def init_process_group(
    original: Callable[..., Any], backend: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    kwargs.pop("device_id", None)
    return original("gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs)


@_replaces(
    "barrier",
    "torch.distributed:barrier",
    "gloo refuses device_ids, which Megatron always passes to tell NCCL the GPU",
    checked=False,
)
def barrier(
    original: Callable[..., Any], group: Any = None, async_op: bool = False, device_ids: Any = None,
    **of_newer_torch: Any,
) -> Any:  # fmt: skip
    return original(group=group, async_op=async_op, **of_newer_torch)


@_replaces(
    "data-loader",
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
    "draws a seed from what is dropout's generator here: a resumed run would differ from one that "
    "went through",
)
def data_loader_iterator(original: Callable[..., None], self: Any, loader: Any) -> None:
    from megatron_fluid.patches.cpu.device import get_rng_state, set_rng_state

    state = get_rng_state()
    try:
        original(self, loader)
    finally:
        set_rng_state(state)


# --- Megatron ---

CPU_PATCHES.append(
    cpu_patch(
        "set_cuda_rng_state",
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        functools.partial(_put, "set_rng_state"),
        "sets CUDA's generator through torch's internals",
        signature="(new_state, device=-1, graph_safe=False)",
    )
)


@_replaces(
    "share-storage",
    "megatron.core.tensor_parallel.random:_get_share_storage",
    "compiles C++ at the first recomputation, and waits forever where a process was killed while "
    "it compiled",
)
def get_share_storage(original: Any) -> Callable[[Any, Any], None]:
    """Return a function that copies the bytes of its second tensor's storage into its first's."""

    def share_storage(destination: Any, source: Any) -> None:
        # Storages have no version: autograd must not see that a discarded output is filled again.
        storage, found = destination.untyped_storage(), source.untyped_storage()
        storage.resize_(found.nbytes())
        storage.copy_(found)

    return share_storage


@_replaces(
    "torch-norm",
    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    "torch's norms, the only ones without Apex or Transformer Engine, are refused under sequence "
    "parallelism",
)
def wrapped_torch_norm(
    original: Callable[..., Any],
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> Any:
    """Mark the parameters instead of refusing, so that Megatron sums their gradients."""
    rest = hidden_size, eps, persist_layer_norm, zero_centered_gamma, normalization
    if not config.sequence_parallel:
        return original(cls, config, *rest)
    unsplit = copy.copy(config)
    unsplit.sequence_parallel = False
    norm = original(cls, unsplit, *rest)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


@_replaces(
    "move-to-cpu",
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    "leaves out the conversion to numpy for a tensor on the CPU",
)
def maybe_move_tensor_to_cpu(
    original: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    import torch

    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@_replaces(
    "optimizer-state",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
    "with torch's Adam, the only one without Apex or Transformer Engine, no checkpoint can be "
    "loaded",
)
def distributed_optimizer_state_dict(original: Callable[..., Any], self: Any) -> Any:
    """Give the parameters step 0 during the call: Megatron reads the step from their states, which
    are empty before the first step."""
    if self.optimizer.state:
        return original(self)
    import torch

    for group in self.optimizer.param_groups:
        for parameter in group["params"]:
            self.optimizer.state[parameter] = {"step": torch.tensor(0.0)}
    try:
        return original(self)
    finally:
        self.optimizer.state.clear()


@_replaces(
    "optimizer-step",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
    "with torch's Adam, all parameters share one step counter after a checkpoint was loaded, and "
    "each advances it",
)
def distributed_optimizer_load(original: Callable[..., None], self: Any, state_dict: Any) -> None:
    original(self, state_dict)
    for state in self.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


@_replaces(
    "optimizer-load",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    "an fp32 checkpoint, the usual precision on a CPU, is loaded into views of parameters that "
    "require grad",
)
def set_main_param(original: Callable[..., Any], self: Any, model_param: Any, tensors: Any) -> None:
    """Load without autograd, and without the step counter: it is no shard, and `load_state_dict`
    has set it already."""
    import torch

    group, order = self.model_param_group_index_map[model_param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    kept = {key: state.pop(key) for key in ("step",) if key in state}
    try:
        with torch.no_grad():
            original(self, model_param, tensors)
    finally:
        state.update(kept)


@_replaces(
    "validate_args",
    "megatron.training.arguments:validate_args",
    "gives settings that need a GPU the value that means the same without one, and says so",
)
def validate_args(original: Callable[..., Any], args: Any, defaults: Any = {}) -> Any:  # noqa: B006 (Megatron's)
    from megatron_fluid.patches.cpu.arguments import adapt_arguments

    adapt_arguments(args)
    return original(args, defaults)


@_replaces(
    "validate_yaml",
    "megatron.training.yaml_arguments:validate_yaml",
    "a YAML file goes past the settings above, so it is refused by name",
)
def validate_yaml(original: Callable[..., Any], args: Any, defaults: Any = {}) -> Any:  # noqa: B006 (Megatron's)
    allowed = "the command line's flags in CPU mode"
    raise ConfigError.of("yaml_cfg", args.yaml_cfg, allowed)


@_replaces(
    "jit-warmup",
    "megatron.training.initialize:_warmup_jit_function",
    "draws from the generator behind initialisation here, as often as a microbatch is large: "
    "routers would depend on it",
)
def no_warmup(original: Any, tp_size: Any = None) -> None:
    """Does nothing: nothing is compiled."""


@_replaces(
    "device-arch",
    "megatron.training.utils.common_utils:get_device_arch_version",
    "argument checks ask for the GPU's architecture",
)
def get_device_arch_version(original: Any) -> int:
    return 9  # Hopper: Megatron requires no extra setting for it


@_replaces(
    "latent-attention",
    "megatron.core.transformer.multi_latent_attention:MultiLatentAttention.__init__",
    "latent attention needs heads of two sizes, which Megatron has by Transformer Engine only",
)
def multi_latent_attention(
    original: Callable[..., None],
    self: Any,
    config: Any,
    submodules: Any,
    layer_number: int,
    attn_mask_type: Any,
    attention_type: str,
    cp_comm_type: str | None = None,
    pg_collection: Any = None,
    pp_layer_offset: int | None = None,
    name: str | None = None,
) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron_fluid.patches.cpu.latent_attention import LatentDotProductAttention

    if submodules.core_attention is DotProductAttention:
        submodules = dataclasses.replace(submodules, core_attention=LatentDotProductAttention)
    mask_and_type = layer_number, attn_mask_type, attention_type
    rest = cp_comm_type, pg_collection, pp_layer_offset, name
    original(self, config, submodules, *mask_and_type, *rest)


def _allow_no_cuda(original: tuple[Any, ...]) -> tuple[Any, ...]:
    """Defaults of initialize_megatron, where the one of allow_no_cuda is the first or, in 0.17, the
    fourth."""
    place = len(original) - 6 if len(original) == 9 else 0
    return (*original[:place], True, *original[place + 1 :])


CPU_PATCHES.append(
    cpu_patch(
        "initialize_megatron",
        "megatron.training.initialize:initialize_megatron.__defaults__",
        _allow_no_cuda,
        "training asserts that CUDA is available",
    )
)
