"""Forward and backward of all microbatches as one CUDA graph, under any routing.

`FullCudaGraphWrapper` runs some iterations eagerly, captures one and replays it from then on. In a
graph, layers over symmetric memory have room for a bounded number of expert rows
(megatron_fluid/moe/room.py). Where the routing sends a rank more than that, the surplus is
missing from the iteration. So each iteration asks, once the last microbatch's forward is over,
whether any rank lacked room. If one did, the iteration runs again:

- Gradients are zeroed. Generators, buffers of modules (expert biases and token counts) and sums of
  losses for the log become what they were.
- Forward and backward run eagerly on the same data.
- The margin of all layers' rooms doubles, and the next iteration is captured anew.

The eager iteration before the first capture already has bounded room, so that every kernel of the
graph has been built and run.

Megatron's PagedStashRunner runs iterations again, too. It does not serve here. It asks dispatchers
that have HybridEP's manager. It puts neither generators nor router statistics back. It captures
with the same room again. And it asks at the end of an iteration, when the GPU has nothing to do.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.failed_waits import check_for_failed_waits
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.room import ROOMS, graph_room
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.step_log import OVERFLOWS, TOKEN_COUNTS

__all__ = ["Overflow", "State", "graphed_iteration", "read_ahead", "turn_on_graph"]

_LOGGER = logging.getLogger("megatron_fluid")
_POLL_S = 5e-5
_LONGEST_POLL_S = 0.05
_IMPLEMENTATIONS = ("none", "full_iteration")


def turn_on_graph(args: Any) -> None:
    """Set what --fluid-graph needs among Megatron's parsed arguments.

    Raises:
        ConfigError: a graph of another kind is asked for, too, or this Megatron has none of
            iterations.
    """
    if not current_config().graph:
        return
    if not hasattr(args, "cuda_graph_modules"):
        raise ConfigError.of("--fluid-graph", True, "False before Megatron-Core 0.18")
    if args.cuda_graph_impl not in _IMPLEMENTATIONS:
        allowed = f"{' or '.join(_IMPLEMENTATIONS)} with --fluid-graph"
        raise ConfigError.of("--cuda-graph-impl", args.cuda_graph_impl, allowed)
    if (reason := _eager_reason(args)) is not None:
        return _LOGGER.warning("--fluid-graph has no effect: %s", reason)
    args.cuda_graph_impl = "full_iteration"
    args.te_rng_tracker = True
    args.check_for_nan_in_loss_and_grad = False


def _eager_reason(args: Any) -> str | None:
    """Why training stays eager, or None. A replay repeats what the host did while it captured."""
    if cpu_mode_active():
        return "CPU mode has no CUDA graphs"
    if args.pipeline_model_parallel_size > 1:
        return "--pipeline-model-parallel-size is above 1"
    if args.fp16 and args.loss_scale is None:
        return "--fp16 without --loss-scale: the host changes the scale of the loss"
    for what in ("wgrads", "dgrads", "activations", "tokens_per_expert"):
        if getattr(args, f"save_{what}_interval", None):
            return f"--save-{what.replace('_', '-')}-interval: a replay runs no hooks that save"
    for name in ("qk_clip", "log_max_attention_logit", "moe_routing_trace_path"):
        if getattr(args, name, None):
            return f"--{name.replace('_', '-')}: a replay leaves nothing of it on the host"
    return None


def read_ahead(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `build_pretraining_data_loader`: workers have all microbatches of an iteration ready.

    A graph of an iteration starts when all of them have been read. Of those that workers have not
    made by then each costs milliseconds, in which the GPU has nothing to do.
    """

    @functools.wraps(original)
    def fluid_loader(dataset: Any, consumed_samples: Any) -> Any:
        from megatron.training import get_args

        loader, args = original(dataset, consumed_samples), get_args()
        workers = getattr(loader, "num_workers", 0)
        graphed = getattr(args, "cuda_graph_impl", None) == "full_iteration"
        if workers and graphed and loader is not dataset:
            microbatches = (
                args.global_batch_size // args.micro_batch_size // args.data_parallel_size
            )
            loader.prefetch_factor = max(loader.prefetch_factor, -(-microbatches // workers))
        return loader

    return fluid_loader


class Overflow:
    """Whether a rank of the job lacked room in an iteration, told to all hosts.

    Args:
        device: of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(2, dtype=torch.int32, device=device)  # iterations; lacked room
        on_gpu = device.type == "cuda"
        self._told = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        # The same memory, read without an operation of torch.
        self._on_host = (ctypes.c_int32 * 2).from_address(self._told.data_ptr())
        self._iterations = 0

    def tell(self) -> None:
        """Enqueue it on the current stream, which may be captured. Collective over the job."""
        device = self._words.device
        found = [one.overflow.to(device, non_blocking=True) for one in ROOMS.buffers]
        lacked = torch.stack([torch.zeros_like(self._words[:1]), *found]).amax(0).sign()
        dist.all_reduce(lacked, op=dist.ReduceOp.MAX)
        self._words[1:].copy_(lacked)
        self._words[:1].add_(1)
        self._told.copy_(self._words, non_blocking=True)

    def found(self) -> bool:
        """Wait until the iteration that was launched last has told it.

        Polls get rarer, so that the watch over peers finds the main thread here at each look: a
        collective inside a graph has no timeout of its own.
        """
        self._iterations += 1
        pause = _POLL_S
        while self._on_host[0] != self._iterations:
            check_for_failed_waits(synchronize=False)
            time.sleep(pause)
            pause = min(1.001 * pause, _LONGEST_POLL_S)  # 0.1% of what was waited so far
        return self._on_host[1] != 0


class State:
    """What forward and backward change, besides gradients: kept before an iteration, to run it
    again.

    Args:
        model: chunks of the model.
    """

    def __init__(self, model: list[torch.nn.Module]) -> None:
        self._first = weakref.ref(model[0])
        # Megatron's DistributedDataParallel has something else by the name of `buffers`.
        self._buffers = [one for chunk in model for one in torch.nn.Module.buffers(chunk)]
        self._tensors: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._generators: list[tuple[torch.Generator, int]] = []

    def is_of(self, model: list[torch.nn.Module]) -> bool:
        """Whether it is the state of this model, and not of an earlier one of the process."""
        return self._first() is model[0]

    def keep(self) -> None:
        """Copy it as it is now."""
        tensors = [*self._buffers, *_sums_for_the_log()]
        if list(map(id, tensors)) != list(map(id, self._tensors)):
            self._tensors, self._kept = tensors, [torch.empty_like(one) for one in tensors]
        if tensors:
            torch._foreach_copy_(self._kept, tensors)
        self._generators = [(one, one.get_offset()) for one in _generators()]

    def restore(self) -> None:
        """Make it what it was."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._kept)
        for generator, offset in self._generators:
            generator.set_offset(offset)


def _sums_for_the_log() -> Iterator[Tensor]:
    """What auxiliary losses, those of multi-token prediction and of sparse attention and tokens per
    expert are added to for the log."""
    from megatron.core.transformer.moe.moe_utils import get_moe_metrics_tracker

    yield from (entry.values for entry in get_moe_metrics_tracker().metrics.values())
    for tracker in _loss_trackers().values():
        yield from (value for value in tracker.values() if isinstance(value, Tensor))
    yield from TOKEN_COUNTS.tensors()


def _loss_trackers() -> dict[str, dict[str, Any]]:
    """Where Megatron keeps losses for the log, by the module that does so: those that are
    imported."""
    helpers = {
        "megatron.core.transformer.multi_token_prediction": "MTPLossLoggingHelper",
        "megatron.core.transformer.experimental_attention_variant.dsa": (
            "DSAIndexerLossLoggingHelper"
        ),
    }
    found = (
        (name, getattr(sys.modules.get(name), helper, None)) for name, helper in helpers.items()
    )
    return {name: helper.tracker for name, helper in found if helper is not None}


def _generators() -> list[torch.Generator]:
    """The generators of this rank's GPU, each once."""
    from megatron.core.tensor_parallel.random import get_all_rng_states

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.default_generators[torch.cuda.current_device()]]
    found += [one for one in get_all_rng_states().values() if isinstance(one, torch.Generator)]
    return list({id(one): one for one in found}.values())


# By stage, as FullCudaGraphWrapper keeps its graphs: evaluations make a wrapper each.
_overflows: dict[str, Overflow] = {}
_states: dict[str, State] = {}
_microbatches: dict[str, int] = {}
_groups_of_losses: dict[tuple[str, str], Any] = {}


def graphed_iteration(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `FullCudaGraphWrapper.__call__`."""

    @functools.wraps(original)
    def fluid_iteration(self: Any, *args: Any, **kwargs: Any) -> Any:
        # One eager iteration shows how many rows arrive, one more has room for as many.
        self.cuda_graph_warmup_steps = max(self.cuda_graph_warmup_steps, 2)
        stage = "validation" if kwargs.get("forward_only") else "training"
        chunks = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
        count = kwargs["num_microbatches"]
        if count != _microbatches.setdefault(stage, count):  # --rampup-batch-size
            _microbatches[stage] = count
            _capture_again(self, stage)
        eager = self.cuda_graph_warmup_steps - self.curr_iter(stage)  # iterations still to come
        if eager == 0 and stage == "training":
            _gather_parameters(chunks)
        if eager > 1 or not ROOMS.layers:
            result = original(self, *args, **kwargs)
        else:
            result = _bounded(self, original, stage, chunks, kwargs)
        if stage == "training":
            _name_groups_of_losses()
        return result

    return fluid_iteration


def _capture_again(wrapper: Any, stage: str) -> None:
    """Drop the graph of a stage, if there is one, and let its next iteration be captured."""
    if wrapper.curr_iter(stage) <= wrapper.cuda_graph_warmup_steps:
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    wrapper.reset_cuda_graph(stage)
    # torch refuses a pool whose graph is gone while blocks of it are left.
    sys.modules[type(wrapper).__module__]._shared_graph_pool = None  # type: ignore[attr-defined]
    type(wrapper).curr_iteration[stage] = wrapper.cuda_graph_warmup_steps


def _gather_parameters(chunks: list[Any]) -> None:
    """Let the forward that is captured gather all parameters (--overlap-param-gather), as all its
    replays have to. After an evaluation or a checkpoint Megatron would leave it out, since they are
    gathered then."""
    for chunk in chunks:
        for name in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, name, ()):
                group.param_gather_dispatched = False


def _name_groups_of_losses() -> None:
    """Name the groups over which Megatron reduces the losses of `_loss_trackers` for its log. It
    forgets them at each log, and only a forward on the host names them again."""
    for module, tracker in _loss_trackers().items():
        for name in ("reduce_group", "avg_group") if tracker else ():
            tracker[name] = tracker.get(name) or _groups_of_losses.get((module, name))
            _groups_of_losses[module, name] = tracker[name]


def _bounded(
    wrapper: Any, original: Callable[..., Any], stage: str, chunks: list[torch.nn.Module],
    given: dict[str, Any],
) -> Any:  # fmt: skip
    """An iteration with bounded room: eager, captured or replayed."""
    device = next(chunks[0].parameters()).device
    if stage not in _overflows:
        _overflows[stage] = Overflow(device)
    if stage not in _states or not _states[stage].is_of(chunks):
        _states[stage] = State(chunks)
    overflow, state = _overflows[stage], _states[stage]
    state.keep()
    step = _telling(given["forward_step_func"], given["num_microbatches"], overflow)
    with graph_room():
        result = original(wrapper, **{**given, "forward_step_func": step})
    return _again(wrapper, stage, chunks, given) if overflow.found() else result


def _telling(step: Callable[..., Any], microbatches: int, overflow: Overflow) -> Any:
    """A forward step that tells of lacking room behind the last microbatch."""
    calls = 0

    @functools.wraps(step)
    def telling(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = step(*args, **kwargs)
        calls += 1
        if calls == microbatches:
            overflow.tell()
        return result

    return telling


def _again(wrapper: Any, stage: str, chunks: list[torch.nn.Module], given: dict[str, Any]) -> Any:
    """The iteration once more, eagerly; the next one is captured with more room."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    check_for_failed_waits(synchronize=False)
    OVERFLOWS.append(stage)
    ROOMS.grow()
    _states[stage].restore()
    if stage == "training":
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
    _capture_again(wrapper, stage)
    if dist.get_rank() == 0:
        _LOGGER.warning(
            "%s: a rank received more expert rows than the CUDA graph has room for. The iteration "
            "runs again without it; the next one is captured with room for %d%% more rows than "
            "were seen in any layer",
            stage, round(100 * ROOMS.margin),
        )  # fmt: skip
    read = wrapper.static_loader.static_buffers[stage][: given["num_microbatches"]]
    data = given["data_iterator"]
    data = data if isinstance(data, list) else [data]
    data = [None if one is None else iter(read) for one in data]
    return wrapper.forward_backward_func(**{**given, "data_iterator": data})
