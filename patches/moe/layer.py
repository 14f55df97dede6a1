"""Overlapped replacement of Megatron's `MoELayer.forward`, for every transport.

Megatron still runs the router (scores, auxiliary losses, expert bias, capacity, group limits,
padding mask) and the shared experts, and holds every parameter. This package takes the router's
result and does the rest: routing plan, dispatch, experts and combine. If Megatron computes the
experts, or other code calls the layer's phases one by one, only the token dispatcher is replaced
(token_dispatcher.py). Megatron may capture the router in a CUDA graph (graphed_router.py).

Recompute of "moe" reuses the routing plan: the router runs once, outside the checkpoint. Dispatch,
experts and shared experts run again. Recompute of whole layers is Megatron's, around this function.

An unsupported setting (limits.py) keeps Megatron's own path. In decision.py the ranks of a group
agree on the path.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden, W ranks.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.config import FluidConfig
from megatron_fluid.kernels.grouped_gemm.launch import compile_ahead
from megatron_fluid.moe.autograd import start_experts
from megatron_fluid.moe.backends import MakeTransport
from megatron_fluid.patches.moe.decision import MoEDecisions, PartReasons
from megatron_fluid.patches.moe.exchange import chosen_of, make_backend
from megatron_fluid.patches.moe.fp8 import compile_fp8_kernels_ahead, follow_microbatches
from megatron_fluid.patches.moe.graphed_router import Held, capture, held_by_graphs, routing_map_of
from megatron_fluid.patches.moe.offload import offload_of
from megatron_fluid.patches.moe.own_experts import (
    Looked,
    OwnExperts,
    Projections,
    routes_as_megatron,
)
from megatron_fluid.patches.moe.recompute import recompute_of
from megatron_fluid.patches.moe.separate_experts import (
    PhaseByPhase,
    SeparateExperts,
    delayed_gradients,
)
from megatron_fluid.patches.step_log import TOKEN_COUNTS

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = [
    "DECISIONS",
    "OverlappedLayer",
    "backward_dw",
    "routed_experts_compute",
    "backend_of",
    "compact_route",
    "experts_reason_of",
    "forward",
    "init",
    "moe_forward",
    "path_of",
    "topk_routing",
]


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MoELayer.__init__`: announce for the start-up report what the built layer will do, and
    begin to compile its kernels.

    The new __init__ raises ConfigError where a backend is asked for by name and the configuration
    rules it out.
    """
    announcing = DECISIONS.announcing(original)

    @functools.wraps(original)
    def fluid_init(self: MoELayer, *args: Any, **kwargs: Any) -> None:
        announcing(self, *args, **kwargs)
        follow_microbatches(self)
        weight, backend = next(self.experts.parameters(), None), DECISIONS.backend(self)
        if backend is not None and self.config.overlap_moe_expert_parallel_comm:
            # The 1F1B expert overlap calls a layer's phases one by one, and never its forward, in
            # which the dispatcher is otherwise replaced.
            _install_dispatcher(self)
        if weight is None or backend in (None, "rounds") or experts_reason_of(self) is not None:
            return
        sends, hidden = backend != "local", self.config.hidden_size
        compile_ahead(weight.device, weight.dtype, hidden, "swiglu", sends=sends)
        compile_fp8_kernels_ahead(self, weight.device)

    return fluid_init


def _install_dispatcher(layer: MoELayer) -> None:
    from megatron_fluid.patches.moe.token_dispatcher import install  # imports Megatron

    install(layer, path_of)


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.forward` by the overlapped one, which falls back on `original`."""

    @functools.wraps(original)
    def fluid_forward(self: MoELayer, *args: Any, **kwargs: Any) -> Any:
        return moe_forward(self, original, *args, **kwargs)

    return fluid_forward


@tells_peers
def moe_forward(
    layer: MoELayer,
    original: Callable[..., Any],
    hidden_states: Tensor,
    intermediate_tensors: Any = None,
    padding_mask: Tensor | None = None,
) -> Any:
    """Run the overlapped forward of a layer, or Megatron's own if the layer keeps that path.

    Args:
        original: Megatron's `MoELayer.forward`.
        hidden_states: [S, B, H].
        intermediate_tensors: set when Megatron runs one phase alone; its own forward does that.
        padding_mask: [B, S] bool, or None.

    Returns:
        (output [S, B, H], None), as Megatron's.

    Raises:
        ConfigError: a backend asked for by name is unavailable, or the experts were changed after
            the first forward.
    """
    path = path_of(layer)
    looked: Looked | None = None
    if isinstance(path, OverlappedLayer):
        # Megatron raises here: training with tensor parallelism needs sequence parallelism.
        refused = layer.training and layer.attn_tp_group.size() > 1
        refused = refused and not layer.config.sequence_parallel
        if intermediate_tensors is None and not refused:
            looked = path.look(layer)
    if looked is None or not isinstance(
        path, OverlappedLayer
    ):  # with its token dispatcher or this package's
        passed = {"intermediate_tensors": intermediate_tensors, "padding_mask": padding_mask}
        return original(layer, hidden_states, **passed)
    if path.captures is not None and path.captures():
        return capture(layer, original, hidden_states, padding_mask)
    return path.forward(layer, hidden_states, padding_mask, looked)


class OverlappedLayer(OwnExperts):
    """The overlapped path of one layer, made in its first forward and used by every call. It holds
    no state of a call, and no reference to the layer.

    Attributes:
        transports: the backend (moe/backends.py), which plans the transport of each call.
        captures: says whether a CUDA graph that ends after the router is captured; None without
            such graphs.
        columns: expert numbers in the order in which the ranks store them; None if ascending. [E]
    """

    def __init__(self, layer: MoELayer, config: FluidConfig, backend: str) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        super().__init__(layer, config)
        c = layer.config
        self.checkpoint = tensor_parallel.checkpoint
        self.columns: Tensor | None = None
        self._indices: Tensor | None = None  # position of each expert in `columns`. [E]
        self.captures = is_graph_capturing if held_by_graphs(c) is Held.ROUTER else None
        self.transports = make_backend(layer, config, backend, fused=True)
        over = self.transports.exact_over
        self.fp8 = self.fp8 and over is None
        self.recompute = recompute_of(config, over and f"over {over}")
        self.offload = offload_of(c, config) if backend == "local" else None

    def start(self, descends: Sequence[bool]) -> None:
        """Prepare the first call with what the ranks have agreed on.

        Args:
            descends: whether each rank stores its experts in descending order. [W]
        """
        if self.config.defer_weight_grads:
            get_backward_scheduler().enable()
        if any(descends):
            local = range(len(self.weights.order))
            orders = (reversed(local) if descending else local for descending in descends)
            numbers = [r * len(local) + e for r, order in enumerate(orders) for e in order]
            self.columns = torch.tensor(numbers, device=self.transports.rounds.device)
            self._indices = self.columns.argsort()

    def forward(
        self,
        layer: MoELayer,
        hidden_states: Tensor,
        padding_mask: Tensor | None,
        looked: Looked | None = None,
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, H], None). looked: this call's parameters; None reads them."""
        self.gather_parameters()
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()  # [B, S] -> [S, B], as hidden_states
        recompute = layer.moe_layer_recompute and layer.training
        fcs = self.projections(layer, looked)
        plan, probs = self.route(layer, hidden_states, padding_mask, recompute, fcs)
        if not recompute:
            return self._compute(layer, plan, fcs, hidden_states, probs), None
        # Each pass reads the parameters itself: they may move before the recompute.
        compute = functools.partial(self._compute, layer, plan, None)
        return self.checkpoint(compute, False, hidden_states, probs), None

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool, fcs: Projections
    ) -> tuple[MakeTransport, Tensor]:
        """Run the router on x [S, B, H] with mask [S, B] bool or None, and plan the exchange.
        Returns the plan and the probabilities [T, K]. With `recompute` the backward runs the
        experts again with the same plan.
        """
        ids, probs = self.choices(layer, x, mask)
        if TOKEN_COUNTS.recording:
            TOKEN_COUNTS.add(self, ids, self.transports.shape.num_experts)
        plan = self.transports.plan(
            *(x.reshape(-1, x.shape[-1]), ids, probs),
            experts=(*fcs, self.activation),
            again=recompute,
        )
        return plan, probs

    def choices(self, layer: MoELayer, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (chosen experts [T, K], probs [T, K]). An expert is given by its position in the
        ranks' storage order, -1 if dropped."""
        compact = False
        if self.transports.ascending or self.batch_invariant:
            probs, chosen = layer.route(x, mask)
        else:
            probs, chosen, compact = compact_route(layer, x, mask)
        if compact:
            return chosen if self._indices is None else self._indices.take(chosen), probs
        routing_map = routing_map_of(layer, chosen)
        if not self.batch_invariant or self._indices is None:
            return chosen_of(layer, probs, routing_map, self.columns)
        # Ascending by number: the order in which ranks store their experts depends on the ranks.
        ids, probs = chosen_of(layer, probs, routing_map)
        return torch.where(ids < 0, ids, self._indices.take(ids.clamp(min=0).long())), probs

    def _compute(
        self, layer: MoELayer, plan: MakeTransport, fcs: Projections | None, hidden_states: Tensor,
        probs: Tensor,
    ) -> Tensor:  # fmt: skip
        """[S, B, H] -> [S, B, H], with the shared experts."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        call = self.call(tokens, probs, self.weights.matrices() if fcs is None else fcs)
        started = start_experts(call, plan())
        shared = self._shared_experts(layer, hidden_states)
        output = started.finish().view(hidden_states.shape)
        return output if shared is None else output + shared()

    @staticmethod
    def _shared_experts(layer: MoELayer, hidden_states: Tensor) -> Callable[[], Tensor] | None:
        """Start the shared experts, on their own stream if Megatron overlaps them. Returns a
        function that gives their output, or None if there are none."""
        if not layer.use_shared_expert:
            return None
        if not layer.shared_expert_overlap:
            output = layer.shared_experts_compute(hidden_states)
            return lambda: output
        shared = layer.shared_experts
        shared.pre_forward_comm(hidden_states)
        shared.linear_fc1_forward_and_act()
        shared.linear_fc2_forward()
        shared.post_forward_comm()
        return shared.get_output


def _make_path(
    layer: MoELayer, config: FluidConfig, backend: str | None, parts: PartReasons,
    descends: Sequence[bool],
) -> Any:  # fmt: skip
    """Make what serves a layer, as MakePath says."""
    if backend is not None and parts.by_phase is None:
        path = OverlappedLayer(layer, config, backend)
        path.start(descends)
        return path
    exchange = None
    if backend is not None:
        _install_dispatcher(layer)  # before SeparateExperts, which records the dispatcher's class
        exchange = make_backend(layer, config, backend, fused=False)
    experts = SeparateExperts(layer, config) if parts.experts is None else None
    return PhaseByPhase(exchange, experts)


DECISIONS = MoEDecisions(_make_path)


def path_of(layer: MoELayer) -> OverlappedLayer | PhaseByPhase | None:
    """Return the path of a layer, or None if it keeps Megatron's own. The ranks of its group agree
    on it in the layer's first call."""
    decision = DECISIONS.get(layer)
    if decision is not None and decision.group is not layer.ep_group:  # wrapped, or made again
        decision = None if DECISIONS.regrouped(decision, layer) else decision
    if decision is None or not decision.settled:
        with torch.inference_mode(False):  # tensors made here are used in training
            decision = DECISIONS.settle(layer)
    return decision.path


# The phases of Megatron's MoELayer in which SeparateExperts compute: between dispatch and combine,
# and where its schedule asks for weight gradients that it delays.


def routed_experts_compute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.routed_experts_compute`, Megatron's phase between dispatch and combine,
    where a layer has SeparateExperts."""

    @functools.wraps(original)
    def fluid_routed_experts(self: MoELayer, hidden_states: Tensor, probs: Tensor) -> Any:
        experts = _separate_experts(self)
        looked = None if experts is None else experts.look(self)
        if experts is None or looked is None:
            return original(self, hidden_states, probs)
        dispatcher = self.token_dispatcher
        rows, counts, row_probs = dispatcher.dispatch_postprocess(hidden_states, probs)
        if self.config.overlap_moe_expert_parallel_comm:
            storages = {x.untyped_storage().data_ptr() for x in (rows, hidden_states)}
            # The schedule frees what enters a phase after it.
            rows = rows.clone() if len(storages) == 1 else rows
        output = experts.compute(self, looked, rows, counts.tolist(), row_probs)
        return dispatcher.combine_preprocess(output), None

    return fluid_routed_experts


def backward_dw(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.backward_dw`, by which Megatron's schedule asks for delayed weight
    gradients: those of SeparateExperts wait in a queue."""

    @functools.wraps(original)
    def fluid_backward_dw(
        self: MoELayer, routed_experts: bool = True, shared_experts: bool = False
    ) -> Any:
        queue = delayed_gradients(self)
        if routed_experts and queue is not None:
            experts = _separate_experts(self)
            served = queue.run() > 0 or (experts is not None and experts.look(self) is not None)
            routed_experts = not served
        return original(self, routed_experts=routed_experts, shared_experts=shared_experts)

    return fluid_backward_dw


def _separate_experts(layer: MoELayer) -> SeparateExperts | None:
    """This package's experts of a layer that runs phase by phase, or None."""
    path = path_of(layer)
    return path.experts if isinstance(path, PhaseByPhase) else None


def backend_of(layer: MoELayer) -> tuple[str, str | None]:
    """Return (backend that moves the layer's tokens, None), or ("megatron", the reason). Before the
    first forward this is the expected backend."""
    backend = DECISIONS.backend(layer)
    return ("megatron", DECISIONS.parts_of(layer).exchange) if backend is None else (backend, None)


def experts_reason_of(layer: MoELayer) -> str | None:
    """Return why Megatron computes a layer's experts; None if this package does."""
    return DECISIONS.parts_of(layer).experts


# Compact routing: Megatron's router returns its choices as [T, K], not scattered into dense maps
# [T, E]. The router itself is unchanged: gating, z-loss, top-k, aux losses, expert bias. Only its
# top-k function is called with `dense_output=True`. Routing stays dense if anything needs the maps,
# or if another function makes them.

# `wanted`: the next routing of this thread is compact, and stores its expert numbers in `ids`.
# `needs_map`: it still returns a routing map, from which the router counts for the expert bias.
_request = threading.local()


def topk_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `topk_routing_with_score_function`: only routings that `compact_route` asks for
    change."""

    if "dense_output" not in inspect.signature(original).parameters:
        return original  # Megatron before 0.17: choices are read from the dense maps

    @functools.wraps(original)
    def fluid_topk_routing(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not getattr(_request, "wanted", False):
            return original(logits, *args, **kwargs)
        _request.wanted = False
        learning = torch.is_grad_enabled()
        # Without gradients Megatron does not sort the experts of a token. Rows are summed in that
        # order, so forward and recompute would differ in rounding.
        with torch.enable_grad():
            logits = logits if learning else logits.detach()
            probs, ids = original(logits, *args, **kwargs, dense_output=True)
        _request.ids = ids
        if not _request.needs_map:
            return probs, ids
        routing_map = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        return probs, routing_map.scatter_(1, ids, True)

    return fluid_topk_routing


def compact_route(
    layer: MoELayer, hidden_states: Tensor, padding_mask: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Call `layer.route(hidden_states, padding_mask)`, compact if the result is the same.

    Args:
        layer: the layer that owns the router.
        hidden_states: [S, B, H].
        padding_mask: [S, B] bool, or None.

    Returns:
        (probs [T, K], expert numbers [T, K], True), each token's best expert first; or Megatron's
        (probs [T, E], routing_map bool [T, E], False).
    """
    _request.ids, _request.wanted = None, _can_be_compact(layer)
    _request.needs_map = _request.wanted and layer.router.enable_expert_bias
    try:
        probs, routing_map = layer.route(hidden_states, padding_mask)
        ids = _request.ids
    finally:
        _request.wanted, _request.ids = False, None
    return (probs, routing_map, False) if ids is None else (probs, ids, True)


def _can_be_compact(layer: MoELayer) -> bool:
    """Whether nothing needs the dense maps, except the token counts for the expert bias."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    router: Any = layer.router
    return (
        routes_as_megatron(router)
        and type(layer).route is MoELayer.route
        and layer.config.moe_expert_capacity_factor is None  # drops choices in the maps
        and not layer.config.moe_router_fusion  # Transformer Engine's kernel returns only maps
        and router.router_replay is None
        and not (router._forward_hooks or router._backward_hooks or router._backward_pre_hooks)
        and "route" not in layer.__dict__
    )
