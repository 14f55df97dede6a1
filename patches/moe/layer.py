"""Megatron's MoELayer with its exchange overlapped: the replacement of `MoELayer.forward`, and what
it needs of a layer from call to call. One class for each transport: rounds, hierarchical, nvlink,
local.

The seam of these classes is the whole forward. Megatron keeps what decides numbers: the router
(scores, auxiliary losses, expert bias, capacity, group limits, padding mask), the shared experts
and every parameter. From the router's result on, the routing plan, dispatch, experts and combine
are ours. Where the experts are Megatron's, or other code calls the phases one by one, the seam is
the token dispatcher (token_dispatcher.py). A CUDA graph may hold the router (graphed_router.py).

Recompute of "moe" keeps the plan of the first forward: the router runs once, outside the
checkpoint, and what is recomputed is the dispatch, the experts and the shared experts. Recompute of
whole layers is Megatron's, around this function.

What is not honoured (limits.py) keeps Megatron's own path. decision.py says how the ranks agree.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden, W ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.moe.hierarchical.choice import ExpertShape
from megatron_fluid.moe.hierarchical.transport import plan_hierarchical, start_hierarchical_moe
from megatron_fluid.moe.local.transport import local_moe, plan_local
from megatron_fluid.moe.rounds.plan import ExactPlan, permute, permute_probs, unpermute
from megatron_fluid.moe.rounds.transport import start_overlapped_moe
from megatron_fluid.patches.arguments import microbatch_room
from megatron_fluid.patches.moe.choices import chosen_of, kept_choices
from megatron_fluid.patches.moe.compile_ahead import compile_layer_ahead
from megatron_fluid.patches.moe.decision import MoEDecisions
from megatron_fluid.patches.moe.fp8 import compile_fp8_kernels_ahead, expire_casts
from megatron_fluid.patches.moe.graphed_router import capture_of, routing_map_of
from megatron_fluid.patches.moe.limits import bounded_unsupported_reason
from megatron_fluid.patches.moe.offload import offload_of
from megatron_fluid.patches.moe.own_experts import OwnExperts, SeparateExperts
from megatron_fluid.patches.moe.router import route

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from megatron_fluid.patches.moe.token_dispatcher import ExchangedLayer

__all__ = [
    "DECISIONS",
    "OverlappedLayer",
    "backend_of",
    "experts_reason_of",
    "forward",
    "init",
    "moe_forward",
    "path_of",
]


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `MoELayer.__init__`: announce for the start-up table what the built layer will do.

    The new __init__ raises ConfigError where a backend is asked for by name and the configuration
    rules it out.
    """

    @functools.wraps(original)
    def fluid_init(self: MoELayer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        DECISIONS.announce_built(self)
        weight = next(self.experts.parameters(), None)
        backend = backend_of(self)[0]
        ours = experts_reason_of(self) is None and backend not in ("rounds", "megatron")
        if weight is not None and ours:
            compile_layer_ahead(self, weight, backend)
            compile_fp8_kernels_ahead(self, weight.device)

    return fluid_init


def _serve_phases(layer: MoELayer) -> None:
    """Let phases that are called one by one reach our exchange: the 1F1B expert overlap never calls
    a layer's forward, in which another layer's token dispatcher is replaced."""
    if layer.config.overlap_moe_expert_parallel_comm:
        from megatron_fluid.patches.moe.token_dispatcher import install

        install(layer, path_of)


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.forward` by the overlapped one, which falls back on `original`."""

    @functools.wraps(original)
    def fluid_forward(self: MoELayer, *args: Any, **kwargs: Any) -> Any:
        return moe_forward(self, original, *args, **kwargs)

    return fluid_forward


def moe_forward(
    layer: MoELayer,
    original: Callable[..., Any],
    hidden_states: Tensor,
    intermediate_tensors: Any = None,
    padding_mask: Tensor | None = None,
) -> Any:
    """The overlapped forward of a layer, or Megatron's own where that is to be kept.

    Args:
        original: Megatron's `MoELayer.forward`.
        hidden_states: [S, B, H].
        intermediate_tensors: set by Megatron when it runs one phase alone, which is left to it.
        padding_mask: [B, S] bool as Megatron has it, or None.

    Returns:
        (output [S, B, H], None), as Megatron's.

    Raises:
        ConfigError: a backend asked for by name is unavailable, or the experts were changed after
            the first forward.
    """
    path = path_of(layer)
    if isinstance(path, OverlappedLayer):
        if (
            intermediate_tensors is not None
            or path.inference_active()
            or path.hooks.logged()
            # Megatron wants sequence parallelism here, and says so.
            or (
                layer.training
                and layer.attn_tp_group.size() > 1
                and not layer.config.sequence_parallel
            )
        ):
            path = None
        elif (changed := path.changed(layer)) is not None:
            DECISIONS.refuse_change(layer, changed)
    if not isinstance(path, OverlappedLayer):  # Megatron's phases, by our token dispatcher or its
        passed = {"intermediate_tensors": intermediate_tensors, "padding_mask": padding_mask}
        return original(layer, hidden_states, **passed)
    if path.captures is not None and path.capturing():
        return path.captures(layer, original, hidden_states, padding_mask)
    return path.forward(layer, hidden_states, padding_mask)


class OverlappedLayer(OwnExperts):
    """What the overlapped forward of one layer needs from call to call. It holds no state of any
    call, and not the layer. Made in the first forward.

    Attributes:
        backend: who moves the tokens.
        columns: the experts in the order in which ranks keep them, where that is not their own
            order. [E]
    """

    backend: str

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        from megatron.core import tensor_parallel
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        super().__init__(layer, config)
        self.group, self.checkpoint = layer.ep_group, tensor_parallel.checkpoint
        self.top_k = int(layer.config.moe_router_topk)
        self.padded = bool(layer.config.moe_pad_expert_input_to_capacity)
        self.columns: Tensor | None = None
        self.captures, self.capturing = capture_of(layer.config), is_graph_capturing

    def start(self, descends: Sequence[bool]) -> None:
        """What every rank of the group has to do with the others before the first call.

        Args:
            descends: whether a rank keeps its experts in descending order. [W]
        """
        self.rounds = shared_rounds(self.group, self.config.timeout_s)
        if self.config.defer_weight_grads:
            get_backward_scheduler().enable()
        if any(descends):
            local = range(len(self.weights.order))
            orders = (reversed(local) if descending else local for descending in descends)
            numbers = [r * len(local) + e for r, order in enumerate(orders) for e in order]
            self.columns = torch.tensor(numbers, device=self.rounds.device)

    def changed(self, layer: MoELayer) -> str | None:
        """Why calls of this rank cannot go on as the ranks have agreed, or None."""
        return self._watch.changed(layer)

    def forward(
        self, layer: MoELayer, hidden_states: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, H], None)."""
        self.gather_parameters()
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()  # [B, S] -> [S, B], as hidden_states
        recompute = layer.moe_layer_recompute and layer.training
        plan, probs = self.route(layer, hidden_states, padding_mask, recompute)
        compute = functools.partial(self._compute, layer, plan)
        if not recompute:
            return compute(hidden_states, probs), None
        return self.checkpoint(compute, False, hidden_states, probs), None

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[Any, Tensor]:
        """Run the router on x [S, B, H] with mask [S, B] bool or None, and plan the exchange: the
        plan and the probabilities, as `experts` takes them. With `recompute` the backward computes
        the experts again, by the same plan.
        """
        raise NotImplementedError

    def kept(self, routing_map: Tensor, probs: Tensor) -> Tensor:
        """The choices of Megatron's maps [T, E], without those that only pad an expert's rows."""
        return kept_choices(routing_map, probs) if self.padded else routing_map

    def experts(self, tokens: Tensor, plan: Any, probs: Tensor) -> Callable[[], Tensor]:
        """Start dispatch, experts and combine of tokens [T, H]; the call that returned finishes
        them and gives the sums [T, H]."""
        raise NotImplementedError

    def _compute(self, layer: MoELayer, plan: Any, hidden_states: Tensor, probs: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H], with the shared experts."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        finish = self.experts(tokens, plan, probs)
        shared = self._shared_experts(layer, hidden_states)
        output = finish().view(hidden_states.shape)
        return output if shared is None else output + shared()

    @staticmethod
    def _shared_experts(layer: MoELayer, hidden_states: Tensor) -> Callable[[], Tensor] | None:
        """Start the shared experts, on their own stream where Megatron overlaps them; gives a way
        to get their output."""
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


class RoundsLayer(OverlappedLayer):
    """Over round-robin P2P exchanges, on CPUs and between NVLink domains. Its probabilities are
    [T, E], zero where a token does not go to an expert."""

    backend = "rounds"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        self.probs_on_input = bool(layer.config.moe_apply_probs_on_input)

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[tuple[ExactPlan, Tensor], Tensor]:
        probs, found = layer.route(x, mask)
        routing_map = self.kept(routing_map_of(layer, found), probs)
        columns = self.columns
        if columns is None:
            return ExactPlan.from_routing_map(routing_map, self.top_k, self.rounds), probs
        in_order = routing_map.index_select(1, columns)
        plan, ids = ExactPlan.from_routing_map(in_order, self.top_k, self.rounds)
        return (plan, torch.where(ids < 0, ids, columns[ids])), probs

    def experts(
        self, tokens: Tensor, plan: tuple[ExactPlan, Tensor], probs: Tensor
    ) -> Callable[[], Tensor]:
        exact, ids = plan
        rows = permute(tokens, exact)
        row_probs: Tensor | None = permute_probs(probs.gather(1, ids.clamp(min=0)), exact)
        if self.probs_on_input:
            assert row_probs is not None
            rows, row_probs = (row_probs.unsqueeze(1) * rows).to(rows.dtype), None
        started = start_overlapped_moe(
            *(rows, row_probs, exact, *self.weights.matrices(), self.activation, self.rounds),
            dx_chunks=self.config.dx_chunks,
            name=self.name,
            fused_main_grad=self.fused_main_grad,
            biases=self.weights.biases(),
        )
        return lambda: unpermute(started.finish(), exact)


class _ChoicesLayer(OverlappedLayer):
    """A layer whose transport takes choices and not maps: its probabilities are [T, K].

    Attributes:
        indices_dtype: of the choices where ranks keep their experts in another order.
        takes_any_probs: whether the transport widens probabilities itself.
    """

    indices_dtype, takes_any_probs = torch.int32, False

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        self._watch.hands_on = True
        # Of each expert, its index in the order of `columns`. [E]
        self._indices: Tensor | None = None
        in_fp8 = config.moe_fp8_weight_grads == "fp8"
        self._precision = {"fp8": self.fp8, "fp8_weight_grads": in_fp8}
        self._settings: dict[str, Any] = {
            "fused_main_grad": self.fused_main_grad,
            "recompute": moe_recompute(config),
            "name": self.name,
        }

    def start(self, descends: Sequence[bool]) -> None:
        super().start(descends)
        if self.columns is not None:
            self._indices = self.columns.argsort().to(self.indices_dtype)

    def choices(self, layer: MoELayer, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(indices of the chosen experts in the order in which ranks keep them [T, K], -1 where
        dropped; probs [T, K], fp32 but for `takes_any_probs`)."""
        if self.fp8:
            expire_casts(layer, self.weights.matrices)
        probs, chosen, compact = route(layer, x, mask)
        if not compact:
            chosen = self.kept(routing_map_of(layer, chosen), probs)
            return chosen_of(probs, chosen, self.top_k, self.columns)
        probs = probs if self.takes_any_probs else probs.float()
        return chosen if self._indices is None else self._indices.take(chosen), probs


class HierarchicalLayer(_ChoicesLayer):
    """Over two levels, where the group is on several hosts."""

    backend = "hierarchical"

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[Any, Tensor]:
        ids, probs = self.choices(layer, x, mask)
        experts, row_bytes = int(layer.config.num_moe_experts), x.shape[-1] * x.element_size()
        shape = ExpertShape.of(*self.weights.matrices())
        given = ids, experts, self.rounds, row_bytes
        learns = torch.is_grad_enabled() or layer.training
        return plan_hierarchical(*given, name=self.name, experts=shape, learns=learns), probs

    def experts(self, tokens: Tensor, plan: Any, probs: Tensor) -> Callable[[], Tensor]:
        arguments = (tokens, probs, plan, *self.weights.matrices(), self.activation, self.rounds)
        settings = {"biases": self.weights.biases(), **self._settings}
        return start_hierarchical_moe(*arguments, **settings).finish


class NvlinkLayer(_ChoicesLayer):
    """Over symmetric memory."""

    backend = "nvlink"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        # Only this path needs Triton.
        from megatron_fluid.moe.nvlink import buffers, transport

        super().__init__(layer, config)
        self._transport, c = transport, layer.config
        shape = int(c.moe_ffn_hidden_size), self.top_k, int(c.num_moe_experts)
        self._buffers = buffers.SizedBuffers(self.group, *shape, microbatch_room())
        bounded = bounded_unsupported_reason(c) is None
        self._factor = config.moe_capacity_factor if bounded else None

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[Any, Tensor]:
        ids, probs = self.choices(layer, x, mask)
        buffers = self._buffers.of(x.numel() // x.shape[-1], x.shape[-1], x.dtype)
        capacity = None
        if self._factor is not None:
            buffers.raise_overflow(self._factor, "moe_capacity_factor")
            capacity = buffers.bounded_rows(self._factor)
        if not recompute:
            return (buffers, ids, None, capacity), probs
        given = buffers, ids, probs, capacity
        handle = self._transport.plan_nvlink(*given, grow=self._buffers.grow)
        return (self._buffers.buffers, ids, handle, capacity), probs

    def experts(self, tokens: Tensor, plan: Any, probs: Tensor) -> Callable[[], Tensor]:
        buffers, ids, handle, capacity = plan
        arguments = (buffers, tokens, ids, probs, *self.weights.matrices(), self.activation)
        settings = {"handle": handle, "capacity": capacity, "grow": self._buffers.grow}
        settings |= {"biases": self.weights.biases(), **self._precision, **self._settings}
        return functools.partial(self._transport.nvlink_moe, *arguments, **settings)


class LocalLayer(_ChoicesLayer):
    """On one expert-parallel rank, which has all experts: no token leaves it."""

    backend = "local"
    # As top-k gives them and compile_ahead.py expects them, in whichever order experts lie.
    indices_dtype, takes_any_probs = torch.int64, True

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        self._settings["offload"] = offload_of(layer.config, config)

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[Any, Tensor]:
        ids, probs = self.choices(layer, x, mask)
        plan = None
        if recompute:
            tokens = x.reshape(-1, x.shape[-1])
            fcs = self.weights.matrices()
            stacked = all(fc.stack is not None for fc in fcs)
            experts = fcs[0].num_experts
            plan = plan_local(tokens, ids, probs, experts, self.activation, stacked)
        return (ids, plan), probs

    def experts(self, tokens: Tensor, plan: Any, probs: Tensor) -> Callable[[], Tensor]:
        ids, planned = plan
        arguments = (self.group, tokens, ids, probs, *self.weights.matrices(), self.activation)
        settings = {"plan": planned, "biases": self.weights.biases(), **self._precision}
        settings |= self._settings
        return functools.partial(local_moe, *arguments, **settings)


def _exchanged(layer: MoELayer, config: FluidConfig, backend: str, ours: bool) -> ExchangedLayer:
    """What serves a layer with our exchange behind Megatron's phases, and with our experts or
    Megatron's."""
    from megatron_fluid.patches.moe.token_dispatcher import EXCHANGES, install  # import Megatron

    install(layer, path_of)  # first: the watch over experts compares the dispatcher's class
    return EXCHANGES[backend](layer, config, SeparateExperts(layer, config) if ours else None)


DECISIONS: MoEDecisions[OverlappedLayer | ExchangedLayer | SeparateExperts] = MoEDecisions(
    {path.backend: path for path in (RoundsLayer, HierarchicalLayer, NvlinkLayer, LocalLayer)},
    _exchanged,
    SeparateExperts,
    _serve_phases,
)


def path_of(layer: MoELayer) -> OverlappedLayer | ExchangedLayer | SeparateExperts | None:
    """What serves a layer, None where Megatron's own path does. In its first call the ranks of its
    group agree."""
    decision = DECISIONS.get(layer)
    if decision is None or not decision.settled:
        decision = DECISIONS.settle(layer)
    return decision.path


backend_of = DECISIONS.exchange_of
experts_reason_of = DECISIONS.experts_reason_of
