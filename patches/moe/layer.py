"""Megatron's MoELayer with its exchange overlapped: the replacement of `MoELayer.forward`, and what
it needs of a layer from call to call. One class for each transport: rounds, nvlink, local.

The seam is the whole forward, not its phases. Megatron keeps what decides numbers: the router
(scores, auxiliary losses, expert bias, capacity, group limits, padding mask), the shared experts
and every parameter. From the router's result on, the routing plan, dispatch, experts and combine
are ours. The phases that other code calls one by one (the 1F1B expert overlap,
`intermediate_tensors`) stay Megatron's own. A CUDA graph may hold the router (graphed_router.py).

Recompute of "moe" keeps the plan of the first forward: the router runs once, outside the
checkpoint, and what is recomputed is the dispatch, the experts and the shared experts. Recompute of
whole layers is Megatron's, around this function.

What is not honoured (limits.py) keeps Megatron's own path. decision.py says how the ranks agree.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden, W ranks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig, current_config, moe_recompute
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm import compile_fp8_ahead
from megatron_fluid.kernels.grouped_gemm import compile_ahead
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.local.transport import local_moe, plan_local
from megatron_fluid.moe.rounds.plan import ExactPlan, permute, permute_probs, unpermute
from megatron_fluid.moe.rounds.transport import start_overlapped_moe
from megatron_fluid.patches.arguments import microbatch_room
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.moe.decision import MoEDecisions
from megatron_fluid.patches.moe.fp8 import computes_in_fp8, expire_casts, subscribe
from megatron_fluid.patches.moe.graphed_router import capture_of, routing_map_of
from megatron_fluid.patches.moe.limits import unsupported_reason
from megatron_fluid.patches.moe.router import route
from megatron_fluid.patches.overlap_decision import Decision

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = [
    "DECISIONS",
    "OverlappedLayer",
    "backend_of",
    "expert_order",
    "forward",
    "init",
    "moe_forward",
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
        if self.config.fp8:
            subscribe(self)
        weight = next(self.experts.parameters(), None)
        if weight is not None and backend_of(self)[0] not in ("rounds", "megatron"):
            compile_ahead(weight.device, weight.dtype, self.config.hidden_size)
            if self.config.fp8:
                compile_fp8_ahead(weight.device)

    return fluid_init


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
        ConfigError: a backend asked for by name cannot be had; or a hook was put on an expert after
            the first forward.
    """
    decision = DECISIONS.get(layer)
    if decision is None or not decision.settled:
        decision = DECISIONS.settle(layer)
    path = decision.path
    if (
        path is None
        or intermediate_tensors is not None
        or path.inference_active()
        or path.hooks.logged()
        # Megatron wants sequence parallelism here, and says so.
        or (
            layer.training and layer.attn_tp_group.size() > 1 and not layer.config.sequence_parallel
        )
    ):
        passed = {"intermediate_tensors": intermediate_tensors, "padding_mask": padding_mask}
        return original(layer, hidden_states, **passed)
    if path.captures is not None and path.capturing():
        return path.captures(layer, original, hidden_states, padding_mask)
    return path.forward(layer, hidden_states, padding_mask)


class OverlappedLayer:
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
        from megatron.core.inference.utils import InferenceMode
        from megatron.core.transformer.cuda_graphs import is_graph_capturing

        from megatron_fluid.patches.moe.expert_parameters import ExpertParameters, resolve

        self.config, self.group = config, layer.ep_group
        self.activation = resolve(layer.config)
        self.weights = ExpertParameters(layer.experts)
        self.weights.arrange()
        self.hooks = ModuleHooks(experts=layer.experts)
        self.inference_active, self.checkpoint = InferenceMode.is_active, tensor_parallel.checkpoint
        self.top_k = int(layer.config.moe_router_topk)
        self.fused_main_grad = bool(layer.config.gradient_accumulation_fusion)
        self.name = f"{'MTP ' if layer.is_mtp_layer else ''}MoE layer {layer.layer_number}"
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

    def forward(
        self, layer: MoELayer, hidden_states: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, None]:
        """[S, B, H] -> ([S, B, H], None)."""
        self._run_hooks()
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

    def _run_hooks(self) -> None:
        """What calling the experts' modules would have done first."""
        if not self.hooks.registered():
            return
        if (hook := self.hooks.foreign()) is not None:
            allowed = "hooks on experts before the layer's first forward, or moe_backend megatron"
            raise ConfigError.of("hooks", hook, allowed)
        self.hooks.run_parameter_gather()

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
        probs, routing_map = layer.route(x, mask)
        routing_map = routing_map_of(layer, routing_map)
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
            *(rows, row_probs, exact, *self.weights.current(), self.activation, self.rounds),
            dx_chunks=self.config.dx_chunks,
            name=self.name,
            fused_main_grad=self.fused_main_grad,
        )
        return lambda: unpermute(started.finish(), exact)


class _ChoicesLayer(OverlappedLayer):
    """A layer whose transport takes choices and not maps: its probabilities are [T, K]."""

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        super().__init__(layer, config)
        # Of each expert, its index in the order of `columns`. [E] int32
        self._indices: Tensor | None = None
        self._prepared: tuple[ExpertWeights, ExpertWeights] | None = None
        self._addresses: list[int] = []
        self._settings: dict[str, Any] = {
            "fused_main_grad": self.fused_main_grad,
            "recompute": moe_recompute(config),
            "fp8": computes_in_fp8(layer),
            "name": self.name,
        }

    def start(self, descends: Sequence[bool]) -> None:
        super().start(descends)
        self._indices = None if self.columns is None else self.columns.argsort().int()

    def choices(self, layer: MoELayer, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(indices of the chosen experts in the order in which ranks keep them [T, K], -1 where
        dropped; fp32 probs [T, K])."""
        if self._settings["fp8"]:
            expire_casts(layer, self.matrices())
        probs, chosen, compact = route(layer, x, mask)
        if not compact:
            chosen = routing_map_of(layer, chosen)
            return _chosen_of(probs, chosen, self.top_k, self.columns)
        return chosen if self._indices is None else self._indices.take(chosen), probs.float()

    def matrices(self) -> tuple[ExpertWeights, ExpertWeights]:
        """The parameters as grouped GEMMs take them, prepared anew only when one was replaced or
        moved."""
        w1, w2 = self.weights.current()
        # Of a hundred parameters in every call: map, whose loop is in C.
        addresses = [*map(Tensor.data_ptr, w1), *map(Tensor.data_ptr, w2)]
        found = self._prepared
        if found is None or addresses != self._addresses or not _same(found, (w1, w2)):
            first, second = (ExpertWeights(w, len(w), name=n) for w, n in ((w1, "w1"), (w2, "w2")))
            found = self._prepared = first, second
            self._addresses = addresses
        return found


class NvlinkLayer(_ChoicesLayer):
    """Over symmetric memory."""

    backend = "nvlink"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        # Only this path needs Triton.
        from megatron_fluid.moe.nvlink import buffers, transport

        super().__init__(layer, config)
        self._transport, c = transport, layer.config
        shape = int(c.moe_ffn_hidden_size), self.top_k, int(c.num_moe_experts)
        self._buffers = buffers.SizedBuffers(self.group, self.name, *shape, microbatch_room())

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[Any, Tensor]:
        ids, probs = self.choices(layer, x, mask)
        buffers = self._buffers.of(x.numel() // x.shape[-1], x.shape[-1], x.dtype)
        handle = self._transport.plan_nvlink(buffers, ids, probs) if recompute else None
        return (buffers, ids, handle), probs

    def experts(self, tokens: Tensor, plan: Any, probs: Tensor) -> Callable[[], Tensor]:
        buffers, ids, handle = plan
        arguments = (buffers, tokens, ids, probs, *self.matrices(), self.activation.name)
        nvlink_moe = self._transport.nvlink_moe
        return functools.partial(nvlink_moe, *arguments, handle=handle, **self._settings)


class LocalLayer(_ChoicesLayer):
    """On one expert-parallel rank, which has all experts: no token leaves it."""

    backend = "local"

    def route(
        self, layer: MoELayer, x: Tensor, mask: Tensor | None, recompute: bool
    ) -> tuple[Any, Tensor]:
        ids, probs = self.choices(layer, x, mask)
        plan = None
        if recompute:
            tokens = x.reshape(-1, x.shape[-1])
            fcs = self.matrices()
            stacked, experts = all(fc.stack is not None for fc in fcs), fcs[0].num_experts
            plan = plan_local(self.group, tokens, ids, probs, experts, self.activation, stacked)
        return (ids, plan), probs

    def experts(self, tokens: Tensor, plan: Any, probs: Tensor) -> Callable[[], Tensor]:
        ids, planned = plan
        arguments = (self.group, tokens, ids, probs, *self.matrices(), self.activation)
        return functools.partial(local_moe, *arguments, plan=planned, **self._settings)


DECISIONS = MoEDecisions({path.backend: path for path in (RoundsLayer, NvlinkLayer, LocalLayer)})


def backend_of(layer: MoELayer) -> tuple[str, str | None]:
    """What a layer does, as ("rounds" or "nvlink", None) or ("megatron", why); before its first
    forward, what it is about to do."""
    decision = DECISIONS.get(layer)
    if decision is None:
        config = current_config()
        reason = DECISIONS.setting_reason(config, layer) or unsupported_reason(layer.config, layer)
        decision = Decision(config, DECISIONS.backend_of(config, layer), reason)
    return (str(decision.backend), None) if not decision.reason else ("megatron", decision.reason)


def expert_order(layer: MoELayer) -> list[int] | None:
    """The order in which an overlapped layer computes its local experts, None before its first
    overlapped forward."""
    decision = DECISIONS.get(layer)
    return None if decision is None or decision.path is None else list(decision.path.weights.order)


def _same(prepared: tuple[ExpertWeights, ...], found: tuple[Sequence[Tensor], ...]) -> bool:
    """Whether the objects are the same; comparing tuples would go on to the values."""
    return all(
        all(map(operator.is_, held.params, now)) for held, now in zip(prepared, found, strict=True)
    )


def _chosen_of(
    probs: Tensor, routing_map: Tensor, top_k: int, columns: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The choices of maps [T, E]: by a kernel on a GPU, else by torch."""
    if probs.is_cuda:
        from megatron_fluid.moe.fused_router import chosen_of

        return chosen_of(probs, routing_map, top_k, columns)
    if columns is not None:
        probs, routing_map = probs.index_select(1, columns), routing_map.index_select(1, columns)
    # Stable: the chosen experts in ascending order, then the others.
    kept, ids = routing_map.int().sort(dim=1, descending=True, stable=True)
    kept, ids = kept[:, :top_k], ids[:, :top_k]
    return torch.where(kept != 0, ids, -1), probs.gather(1, ids).float()
