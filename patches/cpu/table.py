"""CPU mode: Megatron-Core trains on gloo ranks on a machine without a GPU. READ THE TABLE
`CPU_PATCHES` FIRST.

Every row is in force only where `cpu_mode_active()`, that is where torch finds no GPU, and only
once Megatron is imported; nothing of it ever runs beside a GPU. It changes where Megatron's numbers
are computed, never which: no row touches a formula. What the rows put in place is in cpu_device.py
(torch's side), cpu_arguments.py (the command line) and here (Megatron's side).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_fluid.patches.engine.engine import Patch

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
    """A replacement by a class or function of cpu_device.py, which is imported only when it is
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


# --- torch ---


def is_available(original: Callable[[], bool]) -> Callable[[], bool]:
    """The truth for the packages that act on it, and true for anybody else, which in a test session
    is a test module."""

    @functools.wraps(original)
    def cpu_is_available() -> bool:
        asker = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return original() if asker in ("torch", "triton", "megatron", "megatron_fluid") else True

    return cpu_is_available


def init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL needs a GPU: gloo takes its place, and no rank is bound to a device."""

    @functools.wraps(original)
    def cpu_init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return original(
            "gloo" if backend is None or "nccl" in backend else backend, *args, **kwargs
        )

    return cpu_init_process_group


def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo refuses `device_ids`, which only tell NCCL which GPU to synchronise."""

    @functools.wraps(original)
    def cpu_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return cpu_barrier


def data_loader_iterator(original: Callable[..., None]) -> Callable[..., None]:
    """A data loader draws its workers' seed from the host's generator; dropout's, on a GPU, does
    not notice."""

    @functools.wraps(original)
    def cpu_init(self: Any, loader: Any) -> None:
        from megatron_fluid.patches.cpu.device import get_rng_state, set_rng_state

        state = get_rng_state()
        try:
            original(self, loader)
        finally:
            set_rng_state(state)

    return cpu_init


# --- Megatron-Core ---


def destroy_model_parallel(original: Callable[[], None]) -> Callable[[], None]:
    """Close the process groups that Megatron forgets: each gloo group keeps threads that wake a
    hundred times a second.

    Peers may still be reading from the groups that are destroyed now, so the ones before them are
    closed: since those were destroyed all ranks have met, in building the groups of now.
    """
    retired: list[Any] = []

    @functools.wraps(original)
    def cpu_destroy_model_parallel() -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state

        groups = [
            group for group in parallel_state._global_process_group_list or () if group is not None
        ]
        original()
        if not groups:
            return
        known = set(dist.distributed_c10d._world.pg_map)
        for group in [group for group in retired if group in known]:
            dist.destroy_process_group(group)
        retired[:] = groups

    return cpu_destroy_model_parallel


def fork_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """`CudaRNGStatesTracker.fork` without its check that the CPU generator stays as it was: here it
    is the generator."""

    @contextlib.contextmanager
    def cpu_fork(self: Any, name: str = "model-parallel-rng") -> Iterator[None]:
        from megatron_fluid.patches.cpu.device import get_rng_state, set_rng_state

        if name not in self.states_:
            raise ValueError(
                f"RNG state {name!r} is not tracked; tracked are {sorted(self.states_)}"
            )
        outer, outer_state = self._current_state_name, get_rng_state()
        set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = get_rng_state()
            set_rng_state(outer_state)
            self._current_state_name = outer

    return cpu_fork


def wrapped_torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`WrappedTorchNorm.__new__` for sequence parallelism: marks the parameters, so that Megatron
    sums their gradients."""

    @functools.wraps(original)
    def cpu_torch_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        import copy

        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = original(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return cpu_torch_norm


def engine_run_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch leaves a function mode while `backward` runs under it; autograd functions of Megatron
    allocate in there."""

    @functools.wraps(original)
    def cpu_engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        from megatron_fluid.patches.cpu.device import DeviceLiterals

        with DeviceLiterals():
            return original(*args, **kwargs)

    return cpu_engine_run_backward


def maybe_move_tensor_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron forgets the conversion to numpy for a tensor that is on the CPU already."""

    @functools.wraps(original)
    def cpu_maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        import torch

        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return cpu_maybe_move_tensor_to_cpu


def distributed_optimizer_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """`DistributedOptimizer.state_dict` before the first step, which is when a checkpoint is
    loaded.

    With torch's Adam (without Apex or Transformer Engine) Megatron reads the step from the
    parameters' states, and before the first step there are none. For the time of the call they are
    given step 0.
    """

    @functools.wraps(original)
    def cpu_state_dict(self: Any) -> Any:
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

    return cpu_state_dict


def distributed_optimizer_load(original: Callable[..., None]) -> Callable[..., None]:
    """`DistributedOptimizer.load_state_dict` gives torch's Adam one step counter for all
    parameters, so each step counts many."""

    @functools.wraps(original)
    def cpu_load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    return cpu_load_state_dict


def set_main_param(original: Callable[..., Any]) -> Callable[..., Any]:
    """Load one parameter's shard into torch's Adam: without autograd, and without its step counter.

    In fp32 the shard is a view of the parameter itself. The counter is no shard; `load_state_dict`
    has set it already.
    """

    @functools.wraps(original)
    def cpu_set_main_param(self: Any, model_param: Any, tensors: Any) -> None:
        import torch

        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {key: state.pop(key) for key in ("step",) if key in state}
        try:
            with torch.no_grad():
                original(self, model_param, tensors)
        finally:
            state.update(kept)

    return cpu_set_main_param


def without_cuda_assertion(original: tuple[Any, ...]) -> tuple[Any, ...]:
    """Defaults of `initialize_megatron` with `allow_no_cuda` (its first parameter) true."""
    return (True, *original[1:])


def no_warmup(original: Callable[..., Any]) -> Callable[..., Any]:
    """Nothing is compiled, so nothing needs to be called before."""
    return lambda tp_size=None: None


def get_device_arch_version(original: Callable[..., Any]) -> Callable[..., Any]:
    """An architecture for which Megatron asks for nothing of its own."""
    return lambda: 9


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
    return f"megatron_fluid.patches.cpu.table:{name}"


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
    _torch_cuda("current_device", "current_device", "the device index that Megatron allocates on"),
    _torch_cuda("set_device", "nothing", "there is no device to choose"),
    _torch_cuda(
        "device_count", "device_count", "Megatron seeds its RNG only where a device is counted"
    ),
    _torch_cuda("synchronize", "nothing", "CPU work is done when it is issued"),
    _torch_cuda(
        "Stream",
        "CpuStream",
        "side streams of dispatchers and schedules; CPU work is in program order",
    ),
    _torch_cuda("Event", "CpuEvent", "events order side streams and time them"),
    _torch_cuda("stream", "stream", "runs the block in program order"),
    _torch_cuda("current_stream", "current_stream", "the only stream there is"),
    _torch_cuda("default_stream", "current_stream", "the only stream there is"),
    _torch_cuda("set_stream", "nothing", "the only stream there is"),
    _torch_cuda(
        "is_current_stream_capturing", "never_capturing", "no CUDA graph is captured on a CPU"
    ),
    _torch_cuda(
        "get_rng_state",
        "get_rng_state",
        "the generator behind dropout and initialisation is the CPU's",
    ),
    _torch_cuda("random.get_rng_state", "get_rng_state", "the same, by its other name"),
    _torch_cuda(
        "set_rng_state",
        "set_rng_state",
        "the generator behind dropout and initialisation is the CPU's",
    ),
    _torch_cuda(
        "manual_seed", "manual_seed", "the generator behind dropout and initialisation is the CPU's"
    ),
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
        signature="(cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False, "
        "normalization='LayerNorm')",
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
