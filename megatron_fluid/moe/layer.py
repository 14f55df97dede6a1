"""The standalone MoE layers: overlapped, and the all-to-all baseline; and the same as a function of
permuted tokens.

Legend: T tokens of this rank, K top-k, E experts, El local experts, H hidden, F1 / F widths of an
expert, W ranks.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.backward.deferred_linear import deferred_linear
from megatron_fluid.backward.functions import once_differentiable
from megatron_fluid.comm.all_to_all import all_to_all_rows
from megatron_fluid.comm.copies import copy_sharing
from megatron_fluid.comm.overlap_context import MultiCardOverlapContext
from megatron_fluid.comm.p2p_rounds import P2PRounds, shared_rounds
from megatron_fluid.config import MOE_BACKENDS, current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.backend import SizedBuffers, choose_backend, nvlink_unsupported_reason
from megatron_fluid.moe.experts import (
    ExpertWeights,
    RowGroups,
    activation_backward,
    activation_forward,
    grouped_input_grad,
    grouped_linear,
    grouped_weight_grad,
)
from megatron_fluid.moe.rounds.autograd import overlapped_moe, start_overlapped_moe
from megatron_fluid.moe.rounds.plan import (
    ExactPlan,
    local_experts,
    permute,
    permute_probs,
    unpermute,
)
from megatron_fluid.moe.router import Routing, TopKRouter

__all__ = ["MoEBaseline", "MoEConfig", "MoELayer", "moe_multicard_p2p_overlap_forward"]


@dataclass(frozen=True)
class MoEConfig:
    """The shape and the settings of an MoE layer.

    Attributes:
        hidden_size: H.
        ffn_hidden_size: F, of each expert.
        num_experts: E, a multiple of the number of ranks.
        top_k: K.
        activation: a name in moe.activations.ACTIVATIONS, or a callable.
        score_function, pre_softmax, scaling: the router's, see moe.router.route.
        aux_loss_coefficient: weight of the load-balancing loss; 0 for none. Where the main loss is
            scaled, so is this by moe.router.set_aux_loss_scale.
        shared_ffn_hidden_size: width of an expert that every token passes; 0 for none.
        dx_chunks: pieces in which each peer's dX is computed and sent back, over rounds; None takes
            FluidConfig's.
        backend: who moves MoELayer's tokens, "nvlink", "rounds" or "auto"; None takes FluidConfig's
            ("megatron" there is "rounds" here).
        init_std: standard deviation of the initial weights.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu"
    score_function: str = "softmax"
    pre_softmax: bool = False
    scaling: float | None = None
    aux_loss_coefficient: float = 0.0
    shared_ffn_hidden_size: int = 0
    dx_chunks: int | None = None
    backend: str | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden_size", "ffn_hidden_size", "num_experts", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError.of(name, value, "an integer of at least 1")
        width = self.shared_ffn_hidden_size
        if isinstance(width, bool) or not isinstance(width, int) or width < 0:
            raise ConfigError.of("shared_ffn_hidden_size", width, "an integer of 0 or more")
        chunks = self.dx_chunks
        if chunks is not None and (
            isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1
        ):
            raise ConfigError.of("dx_chunks", chunks, "an integer of at least 1, or None")
        allowed = [name for name in MOE_BACKENDS if name != "megatron"]
        if self.backend is not None and self.backend not in allowed:
            raise ConfigError.of("backend", self.backend, f"{', '.join(allowed)}, or None")
        for name in ("aux_loss_coefficient", "init_std"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError.of(name, getattr(self, name), "0 or more")

    @classmethod
    def of(cls, config: MoEConfig | Mapping[str, Any], **defaults: Any) -> MoEConfig:
        """From a dictionary (unknown and missing names are errors), or as it is."""
        if isinstance(config, MoEConfig):
            return config
        fields = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(config) - set(fields))
        if unknown:
            raise ConfigError.of("config", ", ".join(unknown), ", ".join(fields))
        needed = [
            n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in config
        ]
        if needed:
            raise ConfigError(
                f"config: {', '.join(needed)} not found, needed besides "
                f"{', '.join(config) or 'nothing'}"
            )
        return cls(**{**defaults, **config})


class _ExpertMLP(torch.autograd.Function):
    """Experts on rows that have all arrived, without any overlap: rows [R, H] sorted by source,
    then expert."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        call: tuple[ExactPlan, Activation, ExpertWeights, ExpertWeights],
        *params: Tensor,
    ) -> Tensor:
        plan, activation, fc1, fc2 = call
        x, p = _to_expert_major(rows, plan), _to_expert_major(probs, plan)
        groups = _all_sources(plan, rows.device)
        h = grouped_linear(x, fc1, groups)
        y = grouped_linear(activation_forward(activation, h, p), fc2, groups)
        ctx.call = call
        ctx.save_for_backward(x, h, p, *params)
        return _to_source_major(y, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        plan, activation, fc1, fc2 = ctx.call
        x, h, p = ctx.saved_tensors[:3]
        groups = _all_sources(plan, x.device)
        dy = _to_expert_major(grad_y, plan)
        dh, a, dp = activation_backward(activation, h, grouped_input_grad(dy, fc2, groups), p)
        dx = grouped_input_grad(dh, fc1, groups)
        dw1 = fc1.as_gradients(grouped_weight_grad(dh, x, fc1, groups))
        dw2 = fc2.as_gradients(grouped_weight_grad(dy, a, fc2, groups))
        assert dp is not None
        return _to_source_major(dx, plan), _to_source_major(dp, plan), None, *dw1, *dw2


def _all_sources(plan: ExactPlan, device: torch.device) -> RowGroups:
    totals = [sum(column) for column in zip(*plan.recv_counts, strict=True)]
    offsets = None
    if device.type == "cuda":
        table = torch.stack(
            [plan.recv_offsets(source, device) for source in range(plan.world_size)]
        )
        offsets = table.sum(0, dtype=torch.int32)
    return RowGroups(totals, offsets)


def _to_expert_major(rows: Tensor, plan: ExactPlan) -> Tensor:
    blocks = rows.split([count for counts in plan.recv_counts for count in counts])
    local = plan.num_local_experts
    return torch.cat(
        [blocks[source * local + e] for e in range(local) for source in range(plan.world_size)]
    )


def _to_source_major(rows: Tensor, plan: ExactPlan) -> Tensor:
    blocks = rows.split(
        [counts[e] for e in range(plan.num_local_experts) for counts in plan.recv_counts]
    )
    world = plan.world_size
    return torch.cat(
        [
            blocks[e * world + source]
            for source in range(world)
            for e in range(plan.num_local_experts)
        ]
    )


class _MoEModule(nn.Module):
    """Router, experts and shared expert; what differs is how tokens get to the experts."""

    layout = "out_in"

    def __init__(
        self,
        config: MoEConfig | Mapping[str, Any],
        ep_group: dist.ProcessGroup | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layer_id: int = 0,
    ) -> None:
        super().__init__()
        self.config = MoEConfig.of(config)
        self.rounds: P2PRounds = shared_rounds(ep_group)
        self.layer_id, self.name = layer_id, f"layer {layer_id} moe"
        self.activation = resolve_activation(self.config.activation)
        self.num_local_experts = local_experts(self.config.num_experts, self.rounds.world_size)
        c, kwargs = self.config, {"device": device, "dtype": dtype}
        width = c.ffn_hidden_size * (2 if self.activation.gated else 1)
        self.router = TopKRouter(
            c.hidden_size, c.num_experts, c.top_k, c.score_function, c.pre_softmax, c.scaling,
            c.aux_loss_coefficient, name=f"{self.name} router", **kwargs,  # type: ignore[arg-type]
        )  # fmt: skip
        shapes = [(width, c.hidden_size), (c.hidden_size, c.ffn_hidden_size)]
        if self.layout == "in_out":
            shapes = [(columns, rows) for rows, columns in shapes]
        self.weight1 = nn.Parameter(torch.empty(self.num_local_experts, *shapes[0], **kwargs))  # type: ignore[arg-type]
        self.weight2 = nn.Parameter(torch.empty(self.num_local_experts, *shapes[1], **kwargs))  # type: ignore[arg-type]
        self._mark_experts()
        self.shared_weight1: nn.Parameter | None = None
        self.shared_weight2: nn.Parameter | None = None
        if c.shared_ffn_hidden_size:
            shared = c.shared_ffn_hidden_size
            shared_width = shared * (2 if self.activation.gated else 1)
            self.shared_weight1 = nn.Parameter(torch.empty(shared_width, c.hidden_size, **kwargs))  # type: ignore[arg-type]
            self.shared_weight2 = nn.Parameter(torch.empty(c.hidden_size, shared, **kwargs))  # type: ignore[arg-type]
        self.init_weights()

    def _mark_experts(self) -> None:
        for weight in (self.weight1, self.weight2):
            weight.allreduce = False  # type: ignore[attr-defined]  # Megatron's mark: no reduction over expert parallelism

    def __deepcopy__(self, memo: dict[int, Any]) -> _MoEModule:
        """A layer with parameters of its own; the rounds, and their process group, are one for all
        layers."""
        copied = copy_sharing(self, memo, self.rounds)
        copied._mark_experts()  # torch copies a parameter without its attributes
        return copied

    @torch.no_grad()
    def init_weights(self, seed: int = 1234) -> None:
        """Normal weights. An expert's depend on its number and the layer alone, so any number of
        ranks starts alike."""
        first = self.rounds.rank * self.num_local_experts

        def draw(target: Tensor, stream: int) -> None:
            generator = torch.Generator(device=target.device)
            generator.manual_seed((seed * 1_000_003 + self.layer_id) * 1_000_003 + stream)
            target.normal_(std=self.config.init_std, generator=generator)

        for e in range(self.num_local_experts):
            # Drawn as [out, in] in both layouts, so that MoEBaseline and MoELayer start from the
            # same numbers.
            for number, weight in enumerate((self.weight1, self.weight2)):
                matrix = weight[e].t() if self.layout == "in_out" else weight[e]
                drawn = torch.empty(matrix.shape, device=matrix.device, dtype=matrix.dtype)
                draw(drawn, 2 * (first + e) + number)
                matrix.copy_(drawn)
        others = (self.router.weight, self.shared_weight1, self.shared_weight2)
        for number, parameter in enumerate(others):
            if parameter is not None:
                draw(parameter, 2 * self.config.num_experts + number)

    def shared_expert(self, tokens: Tensor) -> Tensor | None:
        """What the shared expert makes of all tokens [T, H], or None without one."""
        if self.shared_weight1 is None or self.shared_weight2 is None:
            return None
        h = deferred_linear(tokens, self.shared_weight1, f"{self.name} shared fc1")
        return deferred_linear(
            self.activation.forward(h), self.shared_weight2, f"{self.name} shared fc2"
        )

    def _flat(self, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] != self.config.hidden_size:
            raise ConfigError.of(
                f"{self.name}: last dimension of tokens", tokens.shape[-1], self.config.hidden_size
            )
        return tokens.reshape(-1, self.config.hidden_size)


class MoEBaseline(_MoEModule):
    """MoE with a standard all-to-all: dispatch, all experts, combine, one after the other.
    Collective.

    Args:
        config: a MoEConfig or a dictionary of its fields: hidden_size, ffn_hidden_size,
            num_experts, top_k, ...
        ep_group: the expert-parallel group.
        device, dtype: of the parameters.
        layer_id: number of the layer; names it in errors and seeds its weights.

    Attributes:
        weight1: [El, H, F1]; weight2: [El, F, H]: the layout that moe_multicard_p2p_overlap_forward
            takes.
        router.weight: [E, H]

    Raises:
        ConfigError: experts not divisible by ranks, a missing group, an unknown or missing setting.
    """

    layout = "in_out"

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., H] -> [..., H]"""
        flat = self._flat(tokens)
        routing = self.router(flat)
        plan = ExactPlan.from_topk(
            routing.ids, self.config.num_experts, self.rounds, f"{self.name} row counts"
        )
        sent, received, name = plan.send_rows, plan.recv_rows, f"{self.name} baseline"
        rows = all_to_all_rows(permute(flat, plan), sent, received, self.rounds, f"{name} dispatch")
        probs = all_to_all_rows(
            permute_probs(routing.probs, plan), sent, received, self.rounds, f"{name} probs"
        )
        hidden, local = self.config.hidden_size, self.num_local_experts
        fc1 = ExpertWeights(self.weight1, local, self.layout, f"{name}: weight1", in_width=hidden)
        fc2 = ExpertWeights(
            self.weight2,
            local,
            self.layout,
            f"{name}: weight2",
            in_width=self.config.ffn_hidden_size,
        )
        y = _ExpertMLP.apply(
            rows, probs, (plan, self.activation, fc1, fc2), self.weight1, self.weight2
        )
        out = unpermute(all_to_all_rows(y, received, sent, self.rounds, f"{name} combine"), plan)
        shared = self.shared_expert(flat)
        return (out if shared is None else out + shared).view(tokens.shape)


class MoELayer(_MoEModule):
    """MoE with every exchange overlapped: over symmetric memory inside an NVLink domain (bf16),
    else in peer rounds. Collective.

    The first forward decides which (`MoEConfig.backend`) and, over NVLink, sizes the buffers: later
    ones bring at most the tokens that any rank then had.

    Args:
        config: a MoEConfig or a dictionary of its fields.
        ep_group: the expert-parallel group.
        device, dtype: of the parameters.
        layer_id: number of the layer; names its exchanges, so layers in one model need different
            ones.

    Attributes:
        weight1: [El, F1, H]; weight2: [El, H, F], as nn.Linear and Megatron keep them.
        router.weight: [E, H]
        backend: "nvlink" or "rounds", None before the first forward.

    Raises:
        ConfigError: experts not divisible by ranks, a missing group, an unknown or missing setting,
            a backend that cannot be had, more tokens than the buffers hold.
    """

    layout = "out_in"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        self.backend: str | None = None
        self._prepared: tuple[ExpertWeights, ExpertWeights] | None = None
        self._domain = SizedBuffers(
            self.rounds.group, self.name, c.ffn_hidden_size, c.top_k, c.num_experts
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _MoEModule:
        # The buffers are shared; a copy without any yet has them sized by its own first forward.
        memo[id(self._domain)] = copy.copy(self._domain)
        prepared, self._prepared = self._prepared, None  # of the original's parameters
        try:
            return super().__deepcopy__(memo)
        finally:
            self._prepared = prepared

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., H] -> [..., H]"""
        flat = self._flat(tokens)
        if self.backend is None:
            name = self.activation.name
            if not self.activation.built_in:
                name = f"{name}, the caller's own"  # not the kernel's of that name
            reason = nvlink_unsupported_reason(
                self.config.hidden_size, name, self.weight1.dtype, self.weight1.device
            )
            self.backend = choose_backend(
                self.rounds.group, self.config.backend or current_config().moe_backend, reason
            )
        routing = self.router(flat)
        out, shared = (self._nvlink if self.backend == "nvlink" else self._rounds)(flat, routing)
        return (out if shared is None else out + shared).view(tokens.shape)

    def _nvlink(self, flat: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        from megatron_fluid.moe.nvlink.autograd import nvlink_moe  # needs Triton

        domain = self._domain.of(flat.shape[0], flat.shape[1], flat.dtype)
        shared = self.shared_expert(flat)
        ids, probs = routing.ids, routing.probs.float()
        fc1, fc2 = self._expert_weights()
        return nvlink_moe(
            domain, flat, ids, probs, fc1, fc2, self.activation.name, name=self.name
        ), shared

    def _expert_weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """The parameters as nvlink_moe takes them, made again when one was replaced."""
        found = self._prepared
        if found is None or not (found[0].holds(self.weight1) and found[1].holds(self.weight2)):
            local = self.num_local_experts
            found = self._prepared = (
                ExpertWeights(self.weight1, local, name=f"{self.name}: weight1"),
                ExpertWeights(self.weight2, local, name=f"{self.name}: weight2"),
            )
        return found

    def _rounds(self, flat: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        plan = ExactPlan.from_topk(
            routing.ids, self.config.num_experts, self.rounds, f"{self.name} row counts"
        )
        chunks = (
            current_config().dx_chunks if self.config.dx_chunks is None else self.config.dx_chunks
        )
        started = start_overlapped_moe(
            permute(flat, plan),
            permute_probs(routing.probs, plan),
            plan,
            self.weight1,
            self.weight2,
            self.activation,
            self.rounds,
            chunks,
            name=self.name,
            layout=self.layout,
        )
        shared = self.shared_expert(flat)
        return unpermute(started.finish(), plan), shared


def _integers(name: str, values: Tensor | Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    tensor = torch.as_tensor(values)
    if tensor.numel() != torch.Size(shape).numel():
        raise ConfigError.of(name, list(tensor.shape), list(shape))
    return tensor.reshape(shape).tolist()


def moe_multicard_p2p_overlap_forward(
    tokens: Tensor,
    input_splits: Tensor | Sequence[int],
    output_splits: Tensor | Sequence[int],
    weight1: Tensor,
    weight2: Tensor,
    ep_group: dist.ProcessGroup,
    activation_func: str | Activation | Callable[[Tensor], Tensor],
    overlap_ctx: MultiCardOverlapContext,
    layer_id: int,
    num_local_experts: int,
    tokens_per_expert: Tensor | Sequence[int],
    num_global_tokens_per_local_expert: Tensor | Sequence[Any],
) -> Tensor:
    """Experts over permuted tokens, every exchange in overlapped rounds. Differentiable; collective
    over the group.

    The counts are read on the host: give them as CPU tensors or lists, or the device is waited for.

    Args:
        tokens: rows sorted by (destination rank, expert). [N, H]
        input_splits, output_splits: rows to and from every rank. [W]
        weight1: [El, H, F1], or folded to [H, El * F1] (its memory being [El, H, F1]).
        weight2: [El, F, H], or folded to [El * F, H].
        ep_group: the expert-parallel group.
        activation_func: as torch.nn.functional.gelu, or a name in moe.activations.ACTIVATIONS.
        overlap_ctx: the context; it is bound to ep_group.
        layer_id: number of the layer; tells exchanges apart.
        num_local_experts: El.
        tokens_per_expert: rows of this rank for every expert. [E]
        num_global_tokens_per_local_expert: rows from every rank for this rank's experts. [1, W, El]
            or [W, El]

    Returns:
        The experts' results in the order of tokens. [N, H]

    Raises:
        ConfigError: sizes that contradict each other.
        PeerTimeoutError: a peer did not answer (on a CPU; on a GPU the monitor reports it).
    """
    rounds = overlap_ctx.rounds(ep_group)
    world, name = rounds.world_size, f"layer {layer_id} moe"
    send = _integers("tokens_per_expert", tokens_per_expert, (world, num_local_experts))
    recv = _integers(
        "num_global_tokens_per_local_expert",
        num_global_tokens_per_local_expert,
        (world, num_local_experts),
    )
    for setting, splits, counts in (
        ("input_splits", input_splits, send),
        ("output_splits", output_splits, recv),
    ):
        found, expected = _integers(setting, splits, (world,)), [sum(row) for row in counts]
        if found != expected:
            raise ConfigError.of(
                f"{name}: {setting}", found, f"{expected}, the sums of the counts of each expert"
            )
    plan = ExactPlan(rounds.rank, tuple(map(tuple, send)), tuple(map(tuple, recv)))
    return overlapped_moe(
        tokens,
        None,
        plan,
        weight1,
        weight2,
        activation_func,
        rounds,
        current_config().dx_chunks,
        name=name,
        layout="in_out",
    )
