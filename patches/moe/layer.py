"""Megatron's MoELayer with its exchange overlapped: the replacement of `MoELayer.forward`.

The seam is the whole forward, not its phases. Megatron keeps what decides numbers: the router
(scores, auxiliary losses, expert bias, capacity, group limits, padding mask), the shared experts
and every parameter. From the router's `probs` [T, E] and `routing_map` [T, E] on, the routing plan,
dispatch, experts and combine are ours. The phases that other code calls one by one (the 1F1B expert
overlap, CUDA graphs, `intermediate_tensors`) stay Megatron's own.

Recompute of "moe" keeps the plan of the first forward: the router runs once, outside the
checkpoint, and what is recomputed is the dispatch, the experts and the shared experts. Recompute of
whole layers is Megatron's, around this function.

What the overlapped path does not honour keeps Megatron's own path: limits.py holds the list. A
backend asked for by name that cannot be had raises `ConfigError` on every rank of the group. Ranks
of a group never take different paths: what they found is exchanged once, in a layer's first
forward.

Shapes: S sequence, B batch, T = S * B tokens of this rank, E experts, El local experts, H hidden, F
ffn.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig, current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.rounds.plan import ExactPlan, permute, permute_probs, unpermute
from megatron_fluid.moe.rounds.transport import start_overlapped_moe
from megatron_fluid.patches.cpu.table import cpu_mode_active
from megatron_fluid.patches.moe.limits import unsupported_reason
from megatron_fluid.patches.startup_report import note_feature
from megatron_fluid.topology import detect_domains

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "Overlapped",
    "announce_built",
    "backend_of",
    "expert_order",
    "forward",
    "init",
    "moe_forward",
]

FEATURE = "overlapped MoE layer"

logger = logging.getLogger("megatron_fluid")


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Replace `MoELayer.__init__`: as Megatron's, then note for the start-up table what the layer
    will do.

    The new __init__ raises ConfigError where a backend is asked for by name and the configuration
    rules it out.
    """

    @functools.wraps(original)
    def fluid_init(self: MoELayer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        announce_built(self)

    return fluid_init


def announce_built(module: Any) -> None:
    """What the new __init__ does besides Megatron's; for any module of a model that was built with
    Megatron's own, too."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if isinstance(module, MoELayer) and module not in _decisions:
        announce(module)
        if patches.off_reason("moe-layer") is None:
            patches.count_instance("moe-layer")


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `MoELayer.forward` by the overlapped one, which falls back on `original`."""

    @functools.wraps(original)
    def fluid_forward(
        self: MoELayer,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        return moe_forward(self, original, hidden_states, intermediate_tensors, padding_mask)

    return fluid_forward


# Keyed by layer and not stored in it: a layer is copied, pickled and walked by others.
_decisions: weakref.WeakKeyDictionary[MoELayer, _Decision] = weakref.WeakKeyDictionary()


class _Decision:
    """What a layer does under the settings that were in force when it was built.

    Attributes:
        config: those settings.
        settled: whether the ranks of its group have agreed.
        reason: why it keeps Megatron's own path, or None.
        path: what the overlapped path needs, once it is settled.
    """

    def __init__(self, config: FluidConfig) -> None:
        self.config = config
        self.settled = False
        self.reason: str | None = None
        self.path: Overlapped | None = None

    @property
    def backend(self) -> str:
        """The name of what moves the tokens, as far as it is known."""
        if self.path is not None:
            return self.path.backend
        if self.config.moe_backend == "auto":
            return (
                "rounds"
                if cpu_mode_active()
                else "nvlink where all GPUs of the group reach each other's memory"
            )
        return self.config.moe_backend


def announce(layer: MoELayer) -> None:
    """Note for the start-up table what a newly built layer will do under the configuration in
    force, which it keeps.

    Raises:
        ConfigError: a backend is asked for by name and the model's configuration rules it out.
    """
    config = current_config()
    _decisions[layer] = decision = _Decision(config)
    reason = _reason(config, layer.ep_group, _left_out(layer) or _unsupported(config, layer.config))
    if reason is not None:
        _refuse_if_explicit(config, layer, reason)
        decision.reason, decision.settled = reason, True
    note_feature(
        FEATURE,
        reason is None,
        reason or f"{decision.backend}, {layer.ep_group.size()} expert-parallel ranks",
    )


def backend_of(layer: MoELayer) -> tuple[str, str | None]:
    """What a layer does, as ("rounds" or "nvlink", None) or ("megatron", why); before its first
    forward, what it is about to do.
    """
    decision = _decisions.get(layer)
    if decision is None:
        decision = _Decision(current_config())
        decision.reason = _unsupported(decision.config, layer.config, layer)
    return (decision.backend, None) if decision.reason is None else ("megatron", decision.reason)


def expert_order(layer: MoELayer) -> list[int] | None:
    """The order in which an overlapped layer computes its local experts, None before its first
    overlapped forward."""
    decision = _decisions.get(layer)
    return None if decision is None or decision.path is None else list(decision.path.weights.order)


def moe_forward(
    layer: MoELayer,
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    intermediate_tensors: Any = None,
    padding_mask: torch.Tensor | None = None,
) -> Any:
    """The overlapped forward of a layer, or Megatron's own where that is to be kept.

    Args:
        layer: the layer.
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
    decision = _decisions.get(layer)
    if decision is None or not decision.settled:
        decision = _settle(layer)
    path = decision.path
    if (
        path is None
        or intermediate_tensors is not None
        or _inference_engine_active()
        or path.hooks.logged()
    ):
        return original(
            layer,
            hidden_states,
            intermediate_tensors=intermediate_tensors,
            padding_mask=padding_mask,
        )
    if layer.training and layer.attn_tp_group.size() > 1 and not layer.config.sequence_parallel:
        # It raises: Megatron wants sequence parallelism here.
        return original(layer, hidden_states, padding_mask=padding_mask)
    return path.forward(layer, hidden_states, padding_mask)


@torch.inference_mode(
    False
)  # what is made in a validation before training has to serve training, too
def _settle(layer: MoELayer) -> _Decision:
    """Look at the built layer, and agree with the other ranks of its group: one rank's reason is
    every rank's."""
    decision = _decisions.get(layer)
    if decision is None:  # built before the patches were applied
        decision = _decisions[layer] = _Decision(current_config())
    config, group = decision.config, layer.ep_group
    reason = _reason(config, group, _unsupported(config, layer.config, layer))
    mine = _Finding(reason) if reason is not None else _look(layer, config)
    found = [mine]
    if group.size() > 1:
        found = [mine] * group.size()
        dist.all_gather_object(found, mine, group=group)
    reason = reason or _first([finding.unsupported for finding in found])
    if reason is None:
        path, reason = _choose(layer, config, _first([finding.no_nvlink for finding in found]))
        if path is not None:
            path.start([finding.descends for finding in found])
            decision.path = path
    if reason is not None:
        _refuse_if_explicit(config, layer, reason)
        _say_once(reason)
    decision.reason, decision.settled = reason, True
    return decision


@dataclass(frozen=True)
class _Finding:
    """What one rank tells the others of its group.

    Attributes:
        unsupported: why its layer has to keep Megatron's own path, or None.
        no_nvlink: why `auto` cannot take the NVLink path for it, or None.
        descends: whether it keeps its experts in descending order.
    """

    unsupported: str | None
    no_nvlink: str | None = None
    descends: bool = False


def _look(layer: MoELayer, config: FluidConfig) -> _Finding:
    from megatron_fluid.patches.moe.expert_parameters import ExpertWeights

    no_nvlink = None
    if config.moe_backend == "auto" and not cpu_mode_active():
        from megatron_fluid.patches.moe.nvlink import configuration_reason

        no_nvlink = configuration_reason(layer.config)
    return _Finding(None, no_nvlink, ExpertWeights(layer.experts).arrange())


def _first(reasons: Sequence[str | None]) -> str | None:
    """The first rank's reason, with the rank."""
    return next(
        (f"rank {rank} of the group: {reason}" for rank, reason in enumerate(reasons) if reason),
        None,
    )


def _choose(
    layer: MoELayer, config: FluidConfig, no_nvlink: str | None
) -> tuple[Overlapped | None, str | None]:
    """The path of a supported layer; or None, and why Megatron's own is kept. Collective over the
    layer's group.

    `auto` takes symmetric memory where the group's GPUs reach each other's, else peer rounds: on
    CPUs, and between NVLink domains. Inside one domain NCCL's kernels and the GEMMs want the same
    SMs, and rounds are slower than one all-to-all.
    """
    if config.moe_backend == "rounds" or (config.moe_backend == "auto" and cpu_mode_active()):
        return Overlapped(layer, config), None
    from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
    from megatron_fluid.patches.moe.nvlink import NvlinkPath

    if config.moe_backend == "nvlink":
        return NvlinkPath(layer, config), None
    no_nvlink = no_nvlink or symmetric_unsupported_reason(layer.ep_group)
    if no_nvlink is None:
        return NvlinkPath(layer, config), None
    if len(set(detect_domains(layer.ep_group, config.timeout_s))) > 1:
        return Overlapped(layer, config), None
    return (
        None,
        f"no symmetric memory ({no_nvlink}), and peer rounds do not pay inside one NVLink domain",
    )


def _reason(config: FluidConfig, group: dist.ProcessGroup, unsupported: str | None) -> str | None:
    if config.moe_backend == "megatron":
        return "moe_backend='megatron'"
    if unsupported is None and config.moe_backend == "auto" and group.size() == 1:
        return "expert_model_parallel_size=1: there is no exchange to overlap"
    return unsupported


def _left_out(layer: MoELayer) -> str | None:
    """Why the layer's forward stays Megatron's, whatever is decided here: the user left the patch
    of it out; or None."""
    why = None if getattr(layer, "needs_no_patch", False) else patches.off_reason("moe-layer")
    return None if why is None else f"the patch moe-layer is left out: {why}"


def _unsupported(
    config: FluidConfig, model: TransformerConfig, layer: MoELayer | None = None
) -> str | None:
    """Why the path that is asked for cannot serve a model, or a layer of it."""
    reason = unsupported_reason(model, layer)
    if reason is None and config.moe_backend == "nvlink":
        return _nvlink_reason(model)
    return reason


def _nvlink_reason(model: TransformerConfig) -> str | None:
    from megatron_fluid.patches.moe.nvlink import configuration_reason

    return configuration_reason(model)


def _refuse_if_explicit(config: FluidConfig, layer: MoELayer, reason: str) -> None:
    if config.moe_backend in ("auto", "megatron"):
        return
    # What rules out the NVLink path alone (settings, and so alike on all ranks) leaves peer rounds.
    rounds = config.moe_backend == "nvlink" and reason == _nvlink_reason(layer.config)
    allowed = "auto, rounds or megatron" if rounds else "auto or megatron"
    raise ConfigError.of("moe_backend", config.moe_backend, f"{allowed}, because {reason}")


@functools.cache
def _say_once(reason: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning("MoE layers keep Megatron's own path: %s", reason)


def _inference_engine_active() -> bool:
    from megatron.core.inference.utils import InferenceMode

    return InferenceMode.is_active()


class Overlapped:
    """What the overlapped path of one layer needs from call to call. It holds no state of any call,
    and not the layer.
    """

    backend = "rounds"

    def __init__(self, layer: MoELayer, config: FluidConfig) -> None:
        from megatron_fluid.patches.engine.module_hooks import ModuleHooks
        from megatron_fluid.patches.moe.expert_parameters import ExpertWeights, resolve

        self.config = config
        self.group = layer.ep_group
        self.weights = ExpertWeights(layer.experts)
        self.weights.arrange()
        self.hooks = ModuleHooks(experts=layer.experts)
        self.activation = resolve(layer.config)
        self.top_k = int(layer.config.moe_router_topk)
        self.probs_on_input = bool(layer.config.moe_apply_probs_on_input)
        self.fused_main_grad = bool(layer.config.gradient_accumulation_fusion)
        self.name = f"{'MTP ' if layer.is_mtp_layer else ''}MoE layer {layer.layer_number}"
        self.columns: torch.Tensor | None = None

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
            numbers = [
                rank * len(local) + e
                for rank, d in enumerate(descends)
                for e in (reversed(local) if d else local)
            ]
            self.columns = torch.tensor(numbers, device=self.rounds.device)

    def prepare(self) -> None:
        """What calling the experts' modules would have done first."""
        if not self.hooks.registered():
            return
        if (hook := self.hooks.foreign()) is not None:
            raise ConfigError.of(
                "hooks",
                hook,
                "hooks on experts from before the layer's first forward, or moe_backend megatron",
            )
        self.hooks.run_parameter_gather()

    def plan(self, routing_map: torch.Tensor) -> tuple[ExactPlan, torch.Tensor]:
        """The routing plan, and the expert of each choice, -1 where there is none [T, K], of a
        routing map [T, E]."""
        if self.columns is None:
            return ExactPlan.from_routing_map(routing_map, self.top_k, self.rounds)
        plan, ids = ExactPlan.from_routing_map(
            routing_map.index_select(1, self.columns), self.top_k, self.rounds
        )
        return plan, torch.where(ids < 0, ids, self.columns[ids])

    def forward(
        self, layer: MoELayer, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """[S, B, H] -> ([S, B, H], None)."""
        self.prepare()
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()  # [B, S] -> [S, B], as hidden_states

        probs, routing_map = layer.route(hidden_states, padding_mask)
        plan, ids = self.plan(routing_map)
        compute = functools.partial(self._compute, layer, plan, ids)
        if not (layer.moe_layer_recompute and layer.training):
            return compute(hidden_states, probs), None

        from megatron.core import tensor_parallel

        return tensor_parallel.checkpoint(compute, False, hidden_states, probs), None

    def _compute(
        self,
        layer: MoELayer,
        plan: ExactPlan,
        ids: torch.Tensor,
        hidden_states: torch.Tensor,
        probs: torch.Tensor,
    ) -> torch.Tensor:
        """Dispatch, experts and combine, and the shared experts while the first tokens travel. [S,
        B, H]

        Args:
            plan: the routing plan; a recomputation comes with the same one.
            ids: the expert of each choice, -1 where there is none. [T, K]
            hidden_states: [S, B, H].
            probs: [T, E], zero where a token does not go to an expert.
        """
        rows = permute(hidden_states.reshape(-1, hidden_states.shape[-1]), plan)
        row_probs: torch.Tensor | None = permute_probs(probs.gather(1, ids.clamp(min=0)), plan)
        if self.probs_on_input:
            assert row_probs is not None
            rows, row_probs = (row_probs.unsqueeze(1) * rows).to(rows.dtype), None
        w1, w2 = self.weights.current()
        started = start_overlapped_moe(
            rows,
            row_probs,
            plan,
            w1,
            w2,
            self.activation,
            self.rounds,
            dx_chunks=self.config.dx_chunks,
            name=self.name,
            fused_main_grad=self.fused_main_grad,
        )
        shared = self._shared_experts(layer, hidden_states)
        output = unpermute(started.finish(), plan).view(hidden_states.shape)
        return output if shared is None else output + shared()

    @staticmethod
    def _shared_experts(
        layer: MoELayer, hidden_states: torch.Tensor
    ) -> Callable[[], torch.Tensor] | None:
        """Start the shared experts, on their own stream where Megatron overlaps them; gives a way
        to get their output.
        """
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
