"""The standalone MoE layers, overlapped and as a baseline, and a function of permuted tokens.

Legend: T tokens of this rank, K top-k, E experts, El local experts, H hidden, F1 / F widths of an
expert, W ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.backward.deferred_linear import deferred_linear
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.comm.layers import Form, check_input, compare_settings, copy_sharing
from megatron_fluid.comm.p2p_rounds import MultiCardOverlapContext, P2PRounds, shared_rounds
from megatron_fluid.config import current_config, moe_recompute
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_weight_grads.launch import compile_fp8_ahead
from megatron_fluid.kernels.grouped_gemm.launch import compile_ahead
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.autograd import run_experts, start_experts
from megatron_fluid.moe.backends import AllToAllBackend, Backend, LayerShape, choose_backend
from megatron_fluid.moe.call import ExpertCall
from megatron_fluid.moe.config import MoEConfig, MoEConfigDict
from megatron_fluid.moe.expert_weights import ExpertWeights, KeptLayout, computed_dtype
from megatron_fluid.moe.permute import local_experts
from megatron_fluid.moe.room import LayerRoom
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.rounds.transport import RoundsTransport
from megatron_fluid.moe.router import TopKRouter
from megatron_fluid.moe.sharding import (
    Group,
    clip_grad_norm_,
    expert_numbers,
    fill,
    group_of,
    load_experts,
    local_part,
    shard_experts,
)

__all__ = ["MoEBaseline", "MoELayer", "moe_multicard_p2p_overlap_forward"]


_NOT_DEFERRED = WeightGradScheduler()  # never enabled


class MoELayer(nn.Module):
    """MoE with every exchange overlapped: on one rank without any, over symmetric memory inside an
    NVLink domain (bf16), over two levels where ranks are on several hosts, else in round-robin P2P
    exchanges. Collective.

    The first forward decides which (`MoEConfig.backend`) and, over NVLink, sizes the buffers. Where
    a later one brings more tokens to any rank, all ranks make larger ones in it.

    With `MoEConfig.capacity_factor` the layer never waits for the device, over NVLink and on one
    rank, so forward and backward can be captured in a CUDA graph. Choices beyond the capacity
    contribute nothing over NVLink (one rank has room for all), and the next forward raises
    FluidError; a replayed graph runs no forward, so call `check_overflow` after it. Nobody learns
    of more tokens than the first forward had then: a rank that brings them raises ConfigError, and
    its peers end with its message. With `MoEConfig.graph` the same holds inside `graph_room` only;
    a forward outside of it serves any routing.

    Args:
        config: a MoEConfig or a dictionary of its fields: hidden_size, ffn_hidden_size,
            num_experts, top_k, ...
        ep_group: the expert-parallel group, or a DeviceMesh of one dimension; None in a process
            that runs alone, without torch.distributed.
        device, dtype: of the parameters.
        layer_id: number of the layer; names its exchanges and seeds its weights, so layers in one
            model need different ones.

    Attributes:
        weight1: [E, F1, H]; weight2: [E, H, F], as nn.Linear and Megatron keep them. On several
            ranks DTensors, Shard(0): this rank has El of them.
        router.weight: [E, H]
        backend: "local", "nvlink", "hierarchical" or "rounds", None before the first forward.

    Raises:
        ConfigError: experts not divisible by ranks, a missing group, an unknown or missing setting,
            a backend that is unavailable or lacks a setting, more tokens than the buffers hold;
            ranks that differ in their settings; tokens that do not fit.
    """

    takes_fp8 = True
    _backend: Backend | None = None  # chosen by the first forward

    @tells_peers
    def __init__(
        self,
        config: MoEConfig | MoEConfigDict,
        ep_group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layer_id: int = 0,
    ) -> None:
        super().__init__()
        self.config = MoEConfig.of(config)
        self.rounds: P2PRounds = shared_rounds(group_of(ep_group))
        self.layer_id, self.name = layer_id, f"layer {layer_id} moe"
        self._kept: list[KeptLayout | None] = [None, None]  # of weight1 and weight2
        self.num_local_experts = local_experts(self.config.num_experts, self.rounds.world_size)
        c, kwargs = self.config, {"device": device, "dtype": dtype}
        invariant = c.batch_invariant
        self.batch_invariant = current_config().batch_invariant if invariant is None else invariant
        self.activation = dataclasses.replace(
            resolve_activation(c.activation), by_rows=self.batch_invariant
        )

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        gates = 2 if self.activation.gated else 1
        self.router = TopKRouter(
            c.hidden_size, c.num_experts, c.top_k, c.score_function, c.pre_softmax, c.scaling,
            c.aux_loss_coefficient, c.router_dtype, name=f"{self.name} router",
            batch_invariant=self.batch_invariant, **kwargs,  # type: ignore[arg-type]
        )  # fmt: skip
        hidden, ffn, local = c.hidden_size, c.ffn_hidden_size, self.num_local_experts
        self.weight1 = weight(local, gates * ffn, hidden)
        self.weight2 = weight(local, hidden, ffn)
        if self.rounds.world_size > 1:
            kind = self.rounds.device.type
            self.weight1 = shard_experts(self.weight1.detach(), ep_group, kind)
            self.weight2 = shard_experts(self.weight2.detach(), ep_group, kind)
        self._taken: Form | None = None  # the last input's dtype and device that were looked at
        where = {"dtype": self.weight1.dtype, "device": self.weight1.device.type}
        where["batch_invariant"] = self.batch_invariant
        compare_settings(self.rounds.group, type(self).__name__, vars(c) | where)
        shared = c.shared_ffn_hidden_size
        self.shared_weight1 = weight(gates * shared, c.hidden_size) if shared else None
        self.shared_weight2 = weight(c.hidden_size, shared) if shared else None
        activation = self.activation.name if self.activation.built_in else ""
        several = self.rounds.world_size > 1
        like = self.weight1
        if c.fp8_recipe is not None and not self.takes_fp8:
            raise ConfigError.of("fp8_recipe of MoEBaseline", c.fp8_recipe, "None")
        if like.is_meta:  # the caller goes on with to_empty, then init_weights or a state dict
            return
        compile_ahead(like.device, like.dtype, c.hidden_size, activation, sends=several)
        if c.fp8_recipe is not None:
            precision = c.fp8_weight_grads or current_config().moe_fp8_weight_grads
            compile_fp8_ahead(like.device, weight_grads=precision == "fp8")
        self.init_weights()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A layer with parameters of its own; the rounds, their process group and its mesh are one
        for all layers."""
        mesh = getattr(self.weight1, "device_mesh", None)
        copied = copy_sharing(self, memo, self.rounds, self.rounds.group, mesh)
        copied.weight1.grad = copied.weight2.grad = None  # as torch copies a plain parameter
        return copied

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Plain tensors for sharded experts may be of this rank's experts or of all."""
        for name in ("weight1", "weight2"):
            if (key := prefix + name) in state_dict:
                state_dict[key] = load_experts(getattr(self, name), state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoELayer:
        self._taken = None  # parameters may get another dtype or device
        return super()._apply(fn, recurse)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of this layer by their norm over all ranks' experts; see
        megatron_fluid.clip_grad_norm_ for a whole model. Collective."""
        return clip_grad_norm_(self, max_norm, norm_type)

    @property
    def ranks_of_calls(self) -> int:
        """How many ranks come to a call."""
        return self.rounds.world_size

    def extra_repr(self) -> str:
        c, local, like = self.config, self.num_local_experts, self.weight1
        sizes = f"hidden_size={c.hidden_size}, ffn_hidden_size={c.ffn_hidden_size}"
        experts = f"num_experts={c.num_experts} ({local} here), top_k={c.top_k}"
        kind = f"activation={self.activation.name}, shared={c.shared_ffn_hidden_size}"
        ranks = f"ranks={self.rounds.world_size}, rank={self.rounds.rank}"
        where = f"backend={self._backend_text()}, {like.dtype} on {like.device}"
        return f"{sizes}, {experts}, {kind}, {ranks}, {where}, layer_id={self.layer_id}"

    def expert_weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """The parameters as moe/autograd.py takes them, for one call."""
        first, second = map(self._weights_of, (0, 1), ("weight1", "weight2"))
        return first, second

    def _weights_of(self, number: int, name: str) -> ExpertWeights:
        weight, kept = getattr(self, name), self._kept[number]
        if kept is not None and not kept.fits(weight):
            kept = None
        given = self.num_local_experts, "out_in", f"{self.name}: {name}"
        made = ExpertWeights(weight, *given, kept=kept)
        # Weights of a model that takes no steps arrive past their counters: broadcasts, averages.
        if made.kept.cast is not None and not torch.is_grad_enabled():
            made.kept.cast.expire()
        self._kept[number] = made.kept
        return made

    @torch.no_grad()
    def init_weights(self, seed: int = 1234) -> None:
        """Normal weights. An expert's depend on its number and the layer alone, so any number of
        ranks starts alike, also sharded by FSDP2. A layer that was built on the meta device calls
        it after to_empty."""

        def draw(target: Tensor, stream: int) -> None:
            generator = torch.Generator(device=target.device)
            generator.manual_seed((seed * 1_000_003 + self.layer_id) * 1_000_003 + stream)
            target.normal_(std=self.config.init_std, generator=generator)

        for number, weight in enumerate((self.weight1, self.weight2)):
            for e, matrix in zip(expert_numbers(weight), local_part(weight), strict=True):
                draw(matrix, 2 * e + number)
        others = (self.router.weight, self.shared_weight1, self.shared_weight2)
        for number, parameter in enumerate(others):
            if parameter is not None:
                like = local_part(parameter)
                whole = torch.empty(parameter.shape, device=like.device, dtype=like.dtype)
                draw(whole, 2 * self.config.num_experts + number)
                fill(parameter, whole)

    def shared_expert(self, tokens: Tensor) -> Tensor | None:
        """What the shared expert makes of all tokens [T, H], or None without one."""
        if self.shared_weight1 is None or self.shared_weight2 is None:
            return None
        fixed = self.batch_invariant
        names = f"{self.name} shared fc1", f"{self.name} shared fc2"
        h = deferred_linear(tokens, self.shared_weight1, names[0], fixed_tiles=fixed)
        activated = self.activation.value(h)
        return deferred_linear(activated, self.shared_weight2, names[1], fixed_tiles=fixed)

    def _flat(self, tokens: Tensor) -> Tensor:
        hidden = self.config.hidden_size
        if tokens.shape[-1] != hidden:
            name = f"{self.name}: last dimension of tokens"
            raise ConfigError.of(name, tokens.shape[-1], hidden)
        if (tokens.dtype, tokens.device) != self._taken:
            self._taken = check_input(f"{self.name}: tokens", tokens, self.weight1)
            # Ranks of another dtype of as many bytes would read each other's bits.
            what = f"{type(self).__name__}: tokens"
            compare_settings(self.rounds.group, what, {"dtype": computed_dtype(tokens)})
        return tokens.reshape(-1, hidden)

    def _backend_text(self) -> str:
        wanted = self.config.backend or current_config().moe_backend
        return self.backend or f"{wanted} (the first forward settles it)"

    @property
    def backend(self) -> str | None:
        return None if self._backend is None else self._backend.name

    @tells_peers
    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [..., H] -> [..., H]"""
        flat = self._flat(tokens)
        if self._backend is None:
            with torch.inference_mode(False):  # what it makes serves later training
                self._backend = self._choose()
        backend, routing = self._backend, self.router(flat)
        fc1, fc2 = self.expert_weights()
        make_transport = backend.plan(
            *(flat, routing.ids, routing.probs), experts=(fc1, fc2, self.activation), again=False
        )
        call = self._call(x=flat, probs=routing.probs, w1=fc1, w2=fc2)
        started = start_experts(call, make_transport())
        shared = self.shared_expert(flat)
        out = started.finish()
        return (out if shared is None else out + shared).view(tokens.shape)

    def _choose(self) -> Backend:
        """The backend of this layer. Collective."""
        kind = choose_backend(self, self.config.backend or current_config().moe_backend)
        for setting, none in (("capacity_factor", None), ("graph", False), ("fp8_recipe", None)):
            value = getattr(self.config, setting)
            if value is not none and kind.exact_over is not None:
                raise ConfigError.of(setting, value, f"{none} over {kind.exact_over}")
        return kind(self.shape(), self.rounds)

    def shape(self) -> LayerShape:
        """What a backend has to know of this layer."""
        c = self.config
        return LayerShape(
            group=self.rounds.group,
            num_experts=c.num_experts,
            top_k=c.top_k,
            ffn=c.ffn_hidden_size,
            name=self.name,
            dx_chunks=current_config().dx_chunks if c.dx_chunks is None else c.dx_chunks,
            capacity_factor=c.capacity_factor,
            captured=LayerRoom() if c.graph else None,
            batch_invariant=self.batch_invariant,
        )

    def _call(
        self, *, x: Tensor, probs: Tensor, w1: ExpertWeights, w2: ExpertWeights
    ) -> ExpertCall:
        c, config = self.config, current_config()
        return ExpertCall(
            x=x,
            probs=probs,
            w1=w1,
            w2=w2,
            num_experts=self.num_local_experts,
            activation=self.activation,
            fp8=c.fp8_recipe is not None,
            fp8_weight_grads=(c.fp8_weight_grads or config.moe_fp8_weight_grads) == "fp8",
            recompute=moe_recompute(config) if c.recompute is None else c.recompute,
            batch_invariant=self.batch_invariant,
            name=self.name,
        )

    def check_overflow(self) -> None:
        """Raise FluidError if a forward wanted more rows than the capacity. Reads host memory only;
        may lag the device."""
        if self._backend is not None:
            self._backend.check_overflow()


class MoEBaseline(MoELayer):
    """MoELayer with a standard all-to-all: dispatch, all experts, combine, one after the other.
    Nothing is recomputed, and of the experts no weight gradient deferred. Arguments and attributes
    as for MoELayer.
    """

    takes_fp8 = False

    def _backend_text(self) -> str:
        return AllToAllBackend.name

    def _choose(self) -> Backend:
        return AllToAllBackend(self.shape(), self.rounds)

    def shape(self) -> LayerShape:
        return dataclasses.replace(super().shape(), name=f"{self.name} baseline")

    def _call(self, **tensors: Any) -> ExpertCall:
        name, call = f"{self.name} baseline", super()._call(**tensors)
        return dataclasses.replace(call, recompute=(), scheduler=_NOT_DEFERRED, name=name)


def _integers(name: str, values: Tensor | Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    tensor = torch.as_tensor(values)
    if tensor.numel() != torch.Size(shape).numel():
        raise ConfigError.of(name, list(tensor.shape), list(shape))
    return tensor.reshape(shape).tolist()


@tells_peers
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
        ConfigError: sizes that contradict each other; weights of another device or dtype than the
            tokens.
        PeerTimeoutError: a peer did not answer (on a CPU; on a GPU the monitor reports it).
    """
    rounds = overlap_ctx.rounds(ep_group)
    for setting, weight in (("weight1", weight1), ("weight2", weight2)):
        check_input(f"layer {layer_id} moe: tokens, beside {setting}", tokens, weight)
    compare_settings(ep_group, "moe: tokens", {"dtype": computed_dtype(tokens)})
    name, shape = f"layer {layer_id} moe", (rounds.world_size, num_local_experts)
    theirs = num_global_tokens_per_local_expert
    send = _integers("tokens_per_expert", tokens_per_expert, shape)
    recv = _integers("num_global_tokens_per_local_expert", theirs, shape)
    given = (("input_splits", input_splits, send), ("output_splits", output_splits, recv))
    for setting, splits, counts in given:
        found, expected = _integers(setting, splits, shape[:1]), [sum(row) for row in counts]
        if found != expected:
            allowed = f"{expected}, the sums of the counts of each expert"
            raise ConfigError.of(f"{name}: {setting}", found, allowed)
    plan = ExactPlan(rounds.rank, tuple(map(tuple, send)), tuple(map(tuple, recv)))
    call = ExpertCall(
        x=tokens,
        probs=None,
        w1=weight1,
        w2=weight2,
        num_experts=num_local_experts,
        activation=activation_func,
        layout="in_out",
        batch_invariant=current_config().batch_invariant,
        name=name,
    )
    transport = RoundsTransport(plan, rounds, name, current_config().dx_chunks)
    return run_experts(call, transport)
