"""What CPU mode puts in the place of functions of torch and of Megatron: the factories that the
rows of table.py name."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from megatron_fluid.patches.cpu.device import DeviceLiterals, get_rng_state, set_rng_state

__all__ = [
    "is_available",
    "init_process_group",
    "barrier",
    "data_loader_iterator",
    "destroy_model_parallel",
    "fork_rng_state",
    "wrapped_torch_norm",
    "engine_run_backward",
    "maybe_move_tensor_to_cpu",
    "distributed_optimizer_state_dict",
    "distributed_optimizer_load",
    "set_main_param",
    "without_cuda_assertion",
    "no_warmup",
    "get_device_arch_version",
]


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
