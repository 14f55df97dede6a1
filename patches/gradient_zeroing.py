"""Gradient buffers are zeroed but for what the first microbatch writes.

Megatron zeroes all gradient buffers before each iteration, and the experts' kernels then read the
zeros and add. Nearly all parameters of an MoE model are experts'. Here their part is left as it is,
marked fresh (megatron_fluid.backward.fresh_grads), and the first backward writes it.

Which part, is decided in `_ParamAndGradBuffer.reset`, from what was seen since the one before: our
kernels have reported the gradients (gradient_readiness.py), a reduction of them was asked for, in
which the guard below stands, and nobody else ran the experts. So the first iteration zeroes all,
and so does the one after any that was different. `_off_reason` names the settings that rule it out.

Gradients that are fresh are zeroed after all before anybody else looks at them:

- a bucket group begins to reduce: a layer was left out (start_grad_sync);
- autograd has a gradient to add (the hook of gradient_readiness.py);
- a module that owns the parameters, or Megatron's experts around it, is called where gradients are
  wanted: its kernels may add to main_grad (`_Guard`);
- the distributed optimizer takes its gradients (optimizer_copies.py); others read them after the
  reduction.

A replay of a CUDA graph runs none of this. Where a graph may hold layers with experts all is
zeroed, and so is, from then on, what anybody captures. A graph of a whole iteration
(--cuda-graph-impl full_iteration) writes what was fresh when it was captured, and `whole_iteration`
stands around its replays: what is fresh and not written by the graph is zeroed before, and what it
has written is no longer fresh after.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.fresh_grads import GradGroup, group_of, group_with, settle_all
from megatron_fluid.backward.fresh_grads import whole_iteration as captured_groups

__all__ = ["GradientZeroing", "reset", "serve_elsewhere", "start_grad_sync", "whole_iteration"]

# What CUDA graphs may hold while the experts run outside of them. Those of impl local that hold
# attn hold whole layers.
_OUTSIDE = {
    "transformer_engine": frozenset({"attn", "mlp", "mamba", "moe_router", "moe_preprocess"}),
    "local": frozenset({"mlp", "mamba"}),
}
_bounds = operator.itemgetter(0, 1)


class _Served(GradGroup):
    """Parameters of one buffer whose gradients our kernels have reported together.

    Attributes:
        written, synced, elsewhere: seen since the buffer was reset: our kernels have written the
            gradients, their reduction was asked for, another reader may have been at work.
        spans: where the gradients lie in the buffer, [begin, end) each; empty where they are always
            zeroed.
    """

    def __init__(self, params: Sequence[Tensor], spans: list[tuple[int, int]]) -> None:
        super().__init__(params)
        self.spans = spans
        self.written = self.synced = self.elsewhere = False

    def needs_no_zeros(self, buffer: Tensor) -> bool:
        """Whether the next backward will write the gradients, as far as one can tell: those that
        lie in `buffer`."""
        if self.elsewhere or self.captured:
            return False
        if not (self.fresh or (self.written and self.synced)):
            return False
        first: Tensor = self.params[0].main_grad  # type: ignore[attr-defined]
        return first.data_ptr() == _place(buffer, self.spans[0])

    def next_iteration(self, fresh: bool) -> None:
        self.written = self.synced = self.elsewhere = False
        if fresh:
            self.mark()
        else:
            self.clear()

    def dissolve(self) -> None:
        super().dissolve()
        self.elsewhere, self.spans = True, []


class _Guard:
    """The forward pre-hook of modules that our kernels stand for. It stays where it is."""

    def __init__(self, group: _Served) -> None:
        self._group = weakref.ref(group)

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        group = self._group()
        if group is not None and torch.is_grad_enabled():
            group.settle()
            group.elsewhere = True

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled module takes its hooks along; a guard belongs to these parameters."""
        return _no_guard, ()


def _no_guard() -> Callable[..., None]:
    return _nothing


def _nothing(module: torch.nn.Module, inputs: Any) -> None:
    pass


class GradientZeroing:
    """What one DistributedDataParallel has seen of our kernels."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = weakref.ref(ddp)
        self._off: str | None = _off_reason(ddp)
        self._modules: dict[int, list[torch.nn.Module]] = {}

    def reported(self, params: Sequence[Tensor]) -> None:
        """Our kernels have written the gradients of `params`, of one projection."""
        if self._off is not None:
            return
        group = group_with(params[0])
        if isinstance(group, _Served) and group.written and len(group.params) == len(params):
            return  # nothing new in this iteration
        group = group_of(params) or self._serve(params)
        if isinstance(group, _Served):
            group.written = True

    def _serve(self, params: Sequence[Tensor]) -> _Served | None:
        """Get to know parameters that are reported together for the first time."""
        ddp = self._ddp()
        if ddp is None:
            return None
        others = {group_with(param) for param in params} - {None}
        for other in others:
            other.dissolve()  # type: ignore[union-attr]
        buffers = (*ddp.buffers, *ddp.expert_parallel_buffers)
        buffer = next((b for b in buffers if params[0] in b.param_index_map), None)
        # What is written now by this call and now by that is always zeroed.
        spans = [] if buffer is None or others else _spans(buffer, params)
        group = _Served(params, spans)
        if spans:
            bucket_groups = {id(g): g for g in map(ddp.param_to_bucket_group.get, params)}
            for owner in (buffer, *bucket_groups.values()):
                known = owner.__dict__.setdefault("_fluid_grad_groups", [])
                known[:] = [other for other in known if other.spans] + [group]
            for module in self._users(ddp, params):
                module.register_forward_pre_hook(_Guard(group))
        return group

    def _users(self, ddp: Any, params: Sequence[Tensor]) -> Iterable[torch.nn.Module]:
        """The modules that own these parameters, and those around them up to a layer's experts:
        Megatron's experts may compute without a call of their linears."""
        if any(id(param) not in self._modules for param in params):
            self._modules = _owners(ddp.module)
        found = (module for p in params for module in self._modules.get(id(p), ()))
        return {id(module): module for module in found}.values()


def _off_reason(ddp: Any) -> str | None:
    """Why all gradients of a model are zeroed, or None."""
    from megatron.core.distributed import DistributedDataParallel

    if not isinstance(ddp, DistributedDataParallel):
        return "another class holds the buffers"
    config, settings = ddp.config, ddp.ddp_config
    if settings.use_megatron_fsdp:
        return "Megatron-FSDP's buffers come and go"
    if settings.reuse_grad_buf_for_mxfp8_param_ag:
        return "parameters are gathered into the gradients' memory"
    if settings.overlap_param_gather and not settings.use_distributed_optimizer:
        return "parameters are gathered into the gradients' memory"
    if config.cuda_graph_impl != "none":
        modules = {module.name for module in config.cuda_graph_modules or ()}
        outside = _OUTSIDE.get(config.cuda_graph_impl, frozenset())
        whole = config.cuda_graph_impl == "full_iteration"
        if not whole and (not modules or not modules <= outside):
            return "a CUDA graph may hold layers with experts, and its replays add"
    return None


def _spans(buffer: Any, params: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where the gradients of `params` lie in the buffer; empty unless each is there, dense and in
    fp32."""
    data = buffer.grad_data
    if data.dtype != torch.float32 or any(p not in buffer.param_index_map for p in params):
        return []
    spans = [_bounds(buffer.param_index_map[param]) for param in params]
    for param, (begin, end) in zip(params, spans, strict=True):
        grad: Tensor = param.main_grad  # type: ignore[attr-defined]
        place = _place(data, (begin, end))
        alike = grad.dtype == data.dtype and grad.is_contiguous() and grad.numel() == end - begin
        if not alike or grad.data_ptr() != place:
            return []
    return spans


def _place(buffer: Tensor, span: tuple[int, int]) -> int:
    """The address of a part of a buffer."""
    return buffer.data_ptr() + span[0] * buffer.element_size()


def _owners(root: torch.nn.Module) -> dict[int, list[torch.nn.Module]]:
    """By identity of a parameter the modules that own it, with those around each up to one that is
    called `experts`."""
    named = dict(root.named_modules(remove_duplicate=False))
    found: dict[int, list[torch.nn.Module]] = {}
    for name, module in named.items():
        around, parts = [module], name.split(".")
        if "experts" in parts:
            top = parts.index("experts") + 1
            around += [named[".".join(parts[:end])] for end in range(top, len(parts))]
        for param in module._parameters.values():
            if param is not None:
                found.setdefault(id(param), []).extend(around)
    return found


def serve_elsewhere(params: Iterable[Tensor]) -> None:
    """The gradients of `params` are about to be computed by other kernels than ours, which may add
    to main_grad."""
    if not torch.is_grad_enabled():
        return
    for group in {group_with(param) for param in params}:
        if isinstance(group, _Served):
            group.settle()
            group.elsewhere = True


def reset(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `_ParamAndGradBuffer.reset`, which zeroes a buffer: but for what needs no zeros."""

    @functools.wraps(original)
    def fluid_reset(self: Any) -> None:
        groups: list[_Served] = self.__dict__.get("_fluid_grad_groups", [])
        spared = [group for group in groups if group.needs_no_zeros(self.grad_data)]
        if spared and self.grad_data.is_cuda and torch.cuda.is_current_stream_capturing():
            spared = []  # a replay is to zero what its additions find
        if spared:
            if parts := [*_gaps(self, spared), *self.extra_main_grads]:
                torch._foreach_zero_(parts)
        else:
            original(self)
        fresh = set(spared)
        for group in groups:
            group.next_iteration(group in fresh)

    return fluid_reset


def _gaps(buffer: Any, spared: Sequence[_Served]) -> list[Tensor]:
    """The parts of a buffer around the gradients of groups, kept with it."""
    kept: tuple[Tensor, list[_Served], list[Tensor]] | None = buffer.__dict__.get("_fluid_gaps")
    data: Tensor = buffer.grad_data
    if kept is not None and kept[0] is data and kept[1] == spared:
        return kept[2]
    spans = sorted(span for group in spared for span in group.spans)
    at, gaps = 0, list[Tensor]()
    for begin, end in [*spans, (data.numel(), data.numel())]:
        if begin > at:
            gaps.append(data[at:begin])
        at = end
    buffer._fluid_gaps = data, spared, gaps
    return gaps


def start_grad_sync(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `_ParamAndGradBucketGroup.start_grad_sync`, before which all gradients are to be
    read."""

    @functools.wraps(original)
    def fluid_start(self: Any, *args: Any, **kwargs: Any) -> None:
        for group in self.__dict__.get("_fluid_grad_groups", ()):
            group.settle()
            group.synced = True
        original(self, *args, **kwargs)

    return fluid_start


def whole_iteration(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `FullCudaGraphWrapper.__call__`, which captures an iteration's forward and backward, and
    then replays them."""

    @functools.wraps(original)
    def fluid_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("forward_only", True):
            return original(self, *args, **kwargs)
        graph = self.cuda_graph["training"]
        if graph is not None:
            with _replayed(graph):
                return original(self, *args, **kwargs)
        with captured_groups() as found:  # or an iteration before that
            result = original(self, *args, **kwargs)
        if (graph := self.cuda_graph["training"]) is not None:
            served = [group for group in found if isinstance(group, _Served)]
            graph._fluid_writes = [(group, group.synced) for group in served]
        return result

    return fluid_call


@contextlib.contextmanager
def _replayed(graph: Any) -> Iterator[None]:
    """The time of one replay, of which Python sees nothing."""
    writes: list[tuple[_Served, bool]] = graph.__dict__.get("_fluid_writes", [])
    fresh = [group for group, _ in writes if group.fresh]
    for group in fresh:
        group.clear()
    settle_all()  # the others, to which the graph adds
    # Nobody has zeroed these since they were written: the graph's share is added.
    sums = [p for group, _ in writes if group.written or group.elsewhere for p in group.params]
    before = [param.main_grad.clone() for param in sums]  # type: ignore[attr-defined]
    try:
        yield
    except BaseException:  # such as a data set that has come to its end, before the replay
        for group in fresh:
            group.mark()
        raise
    if sums:
        torch._foreach_add_([param.main_grad for param in sums], before)  # type: ignore[attr-defined]
    for group, synced in writes:
        group.written, group.synced = True, group.synced or synced
