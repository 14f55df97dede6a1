"""Megatron's SelfAttention under context parallelism by a2a, its projections beside the exchanges
of heads and sequence.

Where attention.py has taken over the core attention, and the settings allow it, the whole module
runs as megatron_fluid.attention.overlap does: QKV projected rank by rank while heads move,
attention by head groups while its output returns, weight gradients beside the exchanges of
backward. The exchange is over symmetric memory inside an NVLink domain (`--fluid-cp-backend nvlink`
or `auto`), else over peer rounds (`rounds`; `auto` on a CPU). Parameters, checkpoints and random
numbers stay Megatron's, and so do the attention kernel and the rotations; with gradient
accumulation fusion dW goes straight into `main_grad`.

Everything else (attention_limits.py, and what a call brings: masks, packed sequences, inference)
keeps Megatron's projections around the exchanged core attention, and is reported once by name.

Ranks of a group never take different paths: hooks and replaced modules, which one rank may have
alone, are looked for in a layer's first forward, and one rank's are every rank's reason to keep
Megatron's projections. What appears later on is an error on its rank, but for the hooks by which
Megatron saves activations in single iterations, on all ranks: calls with those are Megatron's own.

Legend: S whole sequence, s = S / C a rank's part, b batch, H hidden, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import patches
from megatron_fluid.attention.attention_kernels import CoreCase
from megatron_fluid.attention.exchange.buffers import shared_head_buffers
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.exchange.rounds import RoundsExchange
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange, choose_groups
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.overlap import (
    AttentionCall,
    AttentionWeights,
    overlapped_attention,
    weight_gradient,
)
from megatron_fluid.attention.packed import RotaryTable
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig, current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.attention.core import core_kernel, exchanges_of, withdraw_note
from megatron_fluid.patches.attention.limits import bypassed, module_limit, setting_limit
from megatron_fluid.patches.attention.rotary_tables import rotary_table
from megatron_fluid.patches.cpu.table import cpu_mode_active
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.linears.megatron import into_main_grad
from megatron_fluid.patches.linears.transformer_engine import norm_of_rows
from megatron_fluid.patches.startup_report import note_feature

__all__ = [
    "FEATURE",
    "announce",
    "announce_built",
    "attention_forward",
    "forward",
    "init",
    "leave",
    "overlapped",
]

FEATURE = "overlapped attention"
# Of a forward on one rank: on four H200, at commit dcfe6b4, the exchanges alone were faster with
# 0.9e12 (16,384 positions of Mixtral's: 2.00 ms, overlapped 2.24), the overlapped forward with 6e12
# (128 heads, 16,384 positions: 10.5 ms, 9.7) and 10e12 (18.4 ms, 17.8).
_LEAST_FLOPS = 5e12
ForwardResult = tuple[Tensor, Tensor | None]

# Keyed by module and not stored in it: a layer is copied, pickled and walked by others.
_decisions: weakref.WeakKeyDictionary[Any, _Decision] = weakref.WeakKeyDictionary()
_said: set[str] = set()


def init(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `SelfAttention.__init__`: decide, and tell, whether the built module is overlapped."""

    @functools.wraps(original)
    def fluid_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        announce_built(self)

    return fluid_init


def announce_built(module: Any) -> None:
    """What the new __init__ does besides Megatron's; for any module of a model that was built with
    Megatron's own, too."""
    from megatron.core.transformer.attention import SelfAttention

    if (
        isinstance(module, SelfAttention)
        and module not in _decisions
        and announce(module) is not None
    ):
        patches.count_instance("self-attention")


def forward(original: Callable[..., ForwardResult]) -> Callable[..., ForwardResult]:
    """Wrap `Attention.forward`, which SelfAttention inherits."""

    @functools.wraps(original)
    def fluid_forward(
        self: Any, hidden_states: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> ForwardResult:
        return attention_forward(self, original, hidden_states, attention_mask, *args, **kwargs)

    return fluid_forward


def attention_forward(
    attention: Any,
    original: Callable[..., ForwardResult],
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    key_value_states: Tensor | None = None,
    inference_context: Any = None,
    rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
    *rest: Any,
    **others: Any,
) -> ForwardResult:
    """The overlapped forward of a module, or Megatron's own where that is to be kept.

    Args:
        attention: the module.
        original: Megatron's `Attention.forward`.
        hidden_states: [s, b, H].
        attention_mask, key_value_states, inference_context, rotary_pos_emb, rest, others: as
        Megatron's.

    Returns:
        (output [s, b, H], the output projection's bias where the caller is to add it, else None),
        as Megatron's.

    Raises:
        ConfigError: a hook was put on one of its modules, or one was replaced, after the first
            forward; or before, where peer rounds are asked for by name.
    """
    decision = _decisions.get(attention)
    if decision is None or not decision.settled:
        decision = _settle(attention)
    path = decision.path
    if path is not None:
        reason = _unusual(key_value_states, inference_context, rest, others)
        reason = reason or path.why_not(hidden_states, attention_mask)
        table = None
        if reason is None:
            table, reason = path.rotations(hidden_states, rotary_pos_emb)
        if reason is None:
            path.check(
                attention
            )  # now that nothing comes in which the others would wait for this rank without a bound
            return path.forward(hidden_states, table)
        _say("in some calls", reason)
    return original(
        attention,
        hidden_states,
        attention_mask,
        key_value_states,
        inference_context,
        rotary_pos_emb,
        *rest,
        **others,
    )


# What Attention.forward takes besides; none of it is anything in training on plain sequences.
_REST = (
    "rotary_pos_cos",
    "rotary_pos_sin",
    "rotary_pos_cos_sin",
    "attention_bias",
    "packed_seq_params",
    "sequence_len_offset",
)


def _unusual(
    key_value_states: Any, inference_context: Any, rest: tuple[Any, ...], others: dict[str, Any]
) -> str | None:
    """The name of an argument that the overlapped forward does not know."""
    if key_value_states is not None:
        return "key_value_states is given"
    if inference_context is not None:
        return "inference_context is given"
    for name, value in (*zip(_REST, rest, strict=False), *others.items()):
        if value is not None:
            return f"{name} is given"
    return None


@dataclasses.dataclass
class _Decision:
    """What a module does under the settings that were in force when it was built.

    Attributes:
        config: those settings.
        backend: who moves its heads, "nvlink" or "rounds", if it is overlapped, as far as this rank
            knows; else None.
        reason: what this rank has found against it in its modules, which others may not have; or
            None.
        settled: whether the ranks of its group have agreed.
        path: what the overlapped forward needs, once it is settled.
    """

    config: FluidConfig
    backend: str | None = None
    reason: str | None = None
    settled: bool = True
    path: _Overlapped | None = None


def announce(attention: Any, late: bool = False) -> str | None:
    """Decide for a built module, under the configuration in force, which it keeps; and note it for
    the start-up table.

    Args:
        attention: the module.
        late: it is being called already, so that the ranks have to agree before one of them may
            refuse.

    Returns:
        As ``overlapped``.

    Raises:
        ConfigError: peer rounds are asked for by name, and cannot be had.
    """
    from megatron.core.transformer.attention import SelfAttention

    config = current_config()
    _decisions[attention] = decision = _Decision(config)
    if not isinstance(attention, SelfAttention) or attention.pg_collection.cp.size() == 1:
        return None
    reason, backend = _left_out(attention) or _unsupported(attention, config), None
    if reason is None:
        backend, reason = _backend(attention, config)
    if reason is None:
        decision.settled = False  # settings are alike on all ranks, modules need not be
        reason = decision.reason = module_limit(attention)
    if reason is not None:
        if decision.settled or not late:
            _refuse_if_explicit(config, attention, reason)
        note_feature(FEATURE, False, reason)
        return None
    decision.backend = backend
    withdraw_note(exchanges_of(attention.core_attention))  # type: ignore[arg-type]
    how = "heads move over NVLink" if backend == "nvlink" else "heads move in peer rounds"
    note_feature(FEATURE, True, f"{how}, beside the projections")
    return backend


def _settle(attention: Any) -> _Decision:
    """Look at the module as it is in its first forward, and agree with the other ranks: one rank's
    reason is every rank's."""
    late = attention not in _decisions  # a copy, or built before the patches were applied
    if late:
        announce(attention, late)
    decision = _decisions[attention]
    if decision.settled:
        return decision
    mine = decision.reason or _keeps_its_exchange(attention) or module_limit(attention)
    mine = mine or ModuleHooks(**bypassed(attention)).foreign()
    found = _of_all_ranks(mine, attention.pg_collection.cp)
    reason = mine or next(
        (f"rank {rank} of the group: {other}" for rank, other in enumerate(found) if other), None
    )
    if reason is None:
        assert decision.backend is not None
        decision.path = _Overlapped(attention, decision.config, decision.backend)
    else:
        _refuse_if_explicit(decision.config, attention, reason)
        if decision.backend is not None:  # as the start-up table has said
            _say("from the first call on", reason)
        decision.backend = None
    decision.settled = True
    return decision


def _refuse_if_explicit(config: FluidConfig, attention: Any, reason: str) -> None:
    if config.cp_backend == "rounds":
        exchanges = exchanges_of(attention.core_attention)
        # A core attention that keeps its own exchange does so under any of the other two.
        allowed = ("auto", "megatron") if exchanges is None else exchanges.other_backends()
        raise ConfigError.of("cp_backend", "rounds", f"{', '.join(allowed)}: {reason}")


def _of_all_ranks(mine: str | None, group: dist.ProcessGroup) -> list[str | None]:
    """What every rank of a group has found. Collective."""
    found = [mine] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return found


def leave(attention: Any) -> None:
    """Let a built module keep Megatron's projections, around what exchanges its heads: the other
    half of a comparison."""
    _decisions[attention] = _Decision(current_config())


def overlapped(attention: Any) -> str | None:
    """The backend of a module that is overlapped (before its first forward, is about to be),
    "nvlink" or "rounds"; None of any other."""
    decision = _decisions.get(attention)
    return None if decision is None else decision.backend


def _say(when: str, reason: str) -> None:
    """Rank 0 prints each reason once that is known only after the start-up table."""
    if reason not in _said:
        _said.add(reason)
        note_feature(FEATURE, False, f"{when}: {reason}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"megatron_fluid: {FEATURE} off {when}: {reason}", flush=True)


# ---- what is served
# ----------------------------------------------------------------------------------------------------------
def _backend(attention: Any, config: FluidConfig) -> tuple[str, str | None]:
    """Who moves heads and rows, and why neither can, if so."""
    nvlink_unsupported_reason = exchanges_of(attention.core_attention).nvlink_unsupported_reason  # type: ignore[union-attr]
    if config.cp_backend in ("auto", "nvlink") and nvlink_unsupported_reason is None:
        return "nvlink", None
    if config.cp_backend == "rounds" or cpu_mode_active():
        return "rounds", None
    return (
        "",
        f"{nvlink_unsupported_reason}; peer rounds are taken where they are asked for (--fluid-cp-backend "
        "rounds)",
    )


def _left_out(attention: Any) -> str | None:
    """Why the module's forward stays Megatron's, whatever is decided here: the user left the patch
    of it out; or None."""
    why = (
        None
        if getattr(attention, "needs_no_patch", False)
        else patches.off_reason("self-attention")
    )
    return None if why is None else f"the patch self-attention is left out: {why}"


def _unsupported(attention: Any, config: FluidConfig) -> str | None:
    """Why settings rule out that this module is overlapped, on all ranks alike; or None."""
    if config.cp_backend in ("collective", "megatron"):
        return f"cp_backend={config.cp_backend} was asked for"
    return setting_limit(attention.config) or _keeps_its_exchange(attention)


def _keeps_its_exchange(attention: Any) -> str | None:
    """Why its core attention cannot be bypassed, or None; it may be another one by the first
    forward, on one rank alone."""
    core = attention.core_attention
    return (
        None
        if exchanges_of(core) is not None
        else f"its {type(core).__name__} keeps its own exchange"
    )


# ---- the overlapped forward
# --------------------------------------------------------------------------------------------------
class _Overlapped:
    """What the overlapped forward of one module needs from call to call. It holds no state of any
    call, and not the module.

    Args:
        attention: the module.
        config: the settings in force when it was built.
        backend: "nvlink" or "rounds".
    """

    def __init__(self, attention: Any, config: FluidConfig, backend: str) -> None:
        from megatron.core.inference.utils import InferenceMode

        exchanges = exchanges_of(attention.core_attention)
        assert exchanges is not None
        self.config, self.backend = config, backend
        self.group, self.heads = exchanges.group, exchanges.heads
        self.rank = exchanges.group.rank()
        self.qkv, self.projection, self.core = (
            attention.linear_qkv,
            attention.linear_proj,
            attention.core_attention,
        )
        self.q_norm, self.k_norm = attention.q_layernorm, attention.k_layernorm
        self.masks_matter = (
            "alone" not in self.core.__dict__
        )  # Transformer Engine ignores a mask beside causal and no_mask
        self.causal = attention.attn_mask_type.name == "causal"
        model = attention.config
        layer = attention.layer_number
        self.rotates = not (model.no_rope_freq and model.no_rope_freq[layer - 1])
        self.interleaved, self.fused_rope = (
            bool(model.rotary_interleaved),
            bool(model.apply_rope_fusion),
        )
        self.name = f"attention of layer {layer}"
        self.modules = bypassed(attention)
        self.hooks = ModuleHooks(**self.modules)
        self.scheduler = get_backward_scheduler()
        if config.defer_weight_grads:
            self.scheduler.enable()
        self.qkv_gradient = _weight_gradient(self.qkv)
        self.output_gradient = _weight_gradient(self.projection)
        self.inference_active = InferenceMode.is_active
        self._call = functools.lru_cache(maxsize=16)(self._make_call)

    def check(self, attention: Any) -> None:
        """Refuse what calling this rank's modules would do besides since the first forward, when
        the ranks chose this path together."""
        held = attention._modules
        found = next(
            (
                f"{name} was replaced"
                for name, module in self.modules.items()
                if held.get(name) is not module
            ),
            None,
        )
        found = found or self.hooks.replaced() or self.hooks.foreign()
        if found is not None:
            allowed = "hooks and replaced modules from before its first forward, or cp_backend collective or megatron"
            raise ConfigError.of(f"{self.name}, after its first forward", found, allowed)

    def why_not(self, x: Tensor, mask: Tensor | None) -> str | None:
        """Why this call keeps Megatron's own projections, on all ranks alike; or None."""
        if mask is not None and self.masks_matter:
            return "attention_mask is given: without it (--no-create-attention-mask-in-dataloader) causal attention needs none"
        weight = self.qkv.weight
        if x.dim() != 3 or x.dtype != weight.dtype or x.dtype != self.projection.weight.dtype:
            return f"its input is {x.dtype}, its weights are {weight.dtype} and {self.projection.weight.dtype}"
        if x.shape[0] % 2:
            return "an odd number of rows"  # which the core attention refuses by name
        if (
            self.config.cp_backend == "auto"
            and self.backend == "nvlink"
            and self._flops(*x.shape[:2]) < _LEAST_FLOPS
        ):
            return "too little work to be cut in pieces (--fluid-cp-backend nvlink takes it all the same)"
        if self.inference_active() or torch.is_autocast_enabled(x.device.type) or _quantises():
            return "autocast or inference is on"
        return self.hooks.logged()

    def rotations(self, x: Tensor, given: Any) -> tuple[RotaryTable | None, str | None]:
        """The rotations of the whole sequence, if any; and why those that were given cannot be had
        so, if so."""
        if given is None or not self.rotates:
            return None, None
        part = given[0] if isinstance(given, tuple) else given
        if isinstance(given, tuple) and given[1] is not part:
            return None, "queries and keys have rotations of their own"
        if (
            part is None
            or part.dim() != 4
            or part.shape[:3] != (x.shape[0], 1, 1)
            or part.shape[3] > self.heads.head_dim
        ):
            return None, "rotations are not one for each row"
        table = rotary_table(part, x.dtype, self.group, self.interleaved, self.fused_rope)
        return table, "rotations are not by pairs" if table is None else None

    def _flops(self, rows: int, batch: int) -> float:
        """Of a forward on one rank: the projections of its rows, and its heads' attention over the
        whole sequence."""
        heads, length = self.heads, rows * self.heads.world
        seen = length / 2 if self.causal else length
        attention = 4 * batch * length * seen * heads.head_dim * heads.num_heads / heads.world
        return (
            2 * rows * batch * (self.qkv.weight.numel() + self.projection.weight.numel())
            + attention
        )

    def forward(self, x: Tensor, table: RotaryTable | None) -> ForwardResult:
        """[s, b, H] and the rotations of the whole sequence -> ([s, b, H], the output projection's
        bias or None)."""
        self.hooks.run_parameter_gather()
        qkv, projection = self.qkv, self.projection
        call = self._call(x.shape[0], x.shape[1], x.dtype, x.device, table)
        skip = getattr(projection, "skip_bias_add", None)
        returned, bias = projection.te_return_bias if skip is None else skip, _bias(projection)
        weights = AttentionWeights(
            qkv.weight,
            projection.weight,
            _bias(qkv),
            None if returned else bias,
            _norm_weight(self.q_norm),
            _norm_weight(self.k_norm),
        )
        if hasattr(qkv, "layer_norm_weight"):
            x = norm_of_rows(qkv, x)
        y = overlapped_attention(x, weights, call, self.scheduler)
        for linear in (qkv, projection):
            if linear.__dict__.get("is_first_microbatch"):
                linear.is_first_microbatch = False
        return y, bias if returned else None

    def _make_call(
        self, rows: int, batch: int, dtype: Any, device: Any, table: RotaryTable | None
    ) -> AttentionCall:
        heads, length = self.heads, rows * self.heads.world
        sequence = SequenceLayout(length, heads.world, "zigzag")
        exchange: HeadExchange
        if self.backend == "nvlink":
            groups = choose_groups(heads, length, batch, dtype.itemsize)
            heads = dataclasses.replace(heads, groups=groups)
            # Transformer Engine reads each of q, k and v for itself: they are laid out so where
            # they arrive, but for a norm's backward.
            apart = "alone" in self.core.__dict__ and self.q_norm is None
            exchange = SymmetricExchange(shared_head_buffers(self.group), heads, sequence, apart)
        else:
            rounds = shared_rounds(self.group, self.config.timeout_s)
            exchange = RoundsExchange(rounds, heads, sequence)
        return AttentionCall(
            exchange,
            core_kernel(self.core, heads.groups),
            CoreCase(heads.head_dim, dtype, device.type, self.causal),
            table,
            dx_chunks=self.config.dx_chunks,
            norm_eps=1e-6 if self.q_norm is None else self.q_norm.eps,
            name=self.name,
            qkv_gradient=self.qkv_gradient,
            output_gradient=self.output_gradient,
        )


def _quantises() -> bool:
    """Whether a context of Transformer Engine's for FP8 is open."""
    state = getattr(
        sys.modules.get("transformer_engine.pytorch.module.base"), "FP8GlobalStateManager", None
    )
    return state is not None and bool(state.is_fp8_enabled())


def _bias(linear: Any) -> Tensor | None:
    """A linear's bias; Transformer Engine's have an empty one where there is none."""
    bias: Tensor | None = linear.bias if getattr(linear, "use_bias", True) else None
    return bias


def _norm_weight(norm: Any) -> Tensor | None:
    """The weight of a norm of queries or keys, [D]; wide where it is stored less one, as 16 bits
    would lose its digits."""
    if norm is None:
        return None
    weight: Tensor = norm.weight
    return weight.float() + 1 if getattr(norm, "zero_centered_gamma", False) else weight


def _weight_gradient(linear: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """dW of a linear; with gradient accumulation fusion it goes into main_grad, and autograd gets
    what makes Megatron's hooks fire."""
    fused = getattr(linear, "gradient_accumulation_fusion", None)
    fused = bool(linear.fuse_wgrad_accumulation if fused is None else fused)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        into = into_main_grad(linear.weight, fused)
        if into is None:
            return weight_gradient(dy, x)
        standing_in = into(x.flatten(0, 1), dy.flatten(0, 1))
        # None where nobody looks for a mark (not Megatron's DistributedDataParallel): the queue
        # delivers tensors.
        return torch.zeros_like(linear.weight) if standing_in is None else standing_in

    return gradient
