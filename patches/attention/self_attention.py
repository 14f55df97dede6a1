"""Megatron's SelfAttention under context parallelism by a2a, its projections overlapped with the
exchanges of heads and sequence: the replacement of `Attention.forward`.

Where core.py or transformer_engine.py has taken over the core attention, and the settings allow it,
the whole module runs as megatron_fluid.attention.overlap does: QKV is projected
rank by rank while heads move, attention runs by head groups while its output returns, and weight
gradients are computed during the exchanges of backward. The exchange is over symmetric memory
inside an NVLink domain (`--fluid-cp-backend nvlink` or `auto`), else in P2P rounds (`rounds`;
`auto` on a CPU). Parameters, checkpoints and random numbers stay Megatron's, and so do the
attention kernel and the rotations.

Everything else (limits.py, and what a call brings: masks, foreign packs, inference) keeps
Megatron's projections around the exchanged core attention, and is reported once by name.
decision.py and overlap_decision.py say how the ranks agree on it. Calls with the hooks by which
Megatron saves activations in single iterations, on all ranks, are Megatron's own.

Megatron's recomputation of the core attention by itself (`recompute_modules core_attn`) stays:
backward computes the kernel again from queries, keys and values, with the random numbers of the
first time.

Legend: S whole sequence, s = S / C a rank's part, b batch, H hidden, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.exchange.registry import EXCHANGES, open_exchange
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.overlap import (
    AttentionCall,
    AttentionWeights,
    overlap_slower_reason,
    overlapped_attention,
    weight_gradient,
)
from megatron_fluid.attention.packed import RotaryTable, rotated
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.core import exchanges_of, softmax_offset
from megatron_fluid.patches.attention.core_recompute import recomputed, recomputes_here
from megatron_fluid.patches.attention.decision import (
    AttentionDecisions,
    ForwardResult,
    OverlappedModule,
)
from megatron_fluid.patches.attention.head_norms import HeadNorms
from megatron_fluid.patches.attention.limits import OVERLAP_LIMITS, bypassed, module_reason
from megatron_fluid.patches.attention.packed_sequences import foreign_pack_reason, pack_table
from megatron_fluid.patches.attention.rotary_tables import rotary_table
from megatron_fluid.patches.linears import norm_of_rows, weight_gradient_of
from megatron_fluid.patches.overlap_decision import Reason
from megatron_fluid.topology import real_group

__all__ = ["DECISIONS", "OverlappedAttention", "forward", "init", "leave", "overlapped"]


class OverlappedAttention(OverlappedModule):
    """The overlapped forward of one SelfAttention; arguments as of OverlappedModule."""

    def __init__(self, attention: Any, config: FluidConfig, backend: str) -> None:
        super().__init__(attention, bypassed(attention), config, backend)
        self.qkv, self.projection = attention.linear_qkv, attention.linear_proj
        self.tensor = TensorParallelism(
            attention.pg_collection.tp, bool(attention.config.sequence_parallel)
        )
        self.norms = HeadNorms(attention.q_layernorm, attention.k_layernorm)
        model, layer = attention.config, attention.layer_number
        self.rotates = not (model.no_rope_freq and model.no_rope_freq[layer - 1])
        self.rotation = _rotation(attention)
        self.output_gate = bool(model.attention_output_gate)
        self.recomputes_core = bool(attention.checkpoint_core_attention)
        self.dropout = float(model.attention_dropout)
        self.dropouts = [m for m in self.core.modules() if isinstance(m, torch.nn.Dropout)]
        self.name = f"attention of layer {layer}"
        self.scheduler = get_backward_scheduler()
        if config.defer_weight_grads:
            self.scheduler.enable()
        self.qkv_gradient = weight_gradient_of(self.qkv, weight_gradient)
        self.output_gradient = weight_gradient_of(self.projection, weight_gradient)
        self._exchange = functools.lru_cache(maxsize=16)(self._make_exchange)
        self._call = functools.lru_cache(maxsize=16)(self._make_call)

    @property
    def draws(self) -> bool:
        """Whether attention draws random numbers in training: p may change between calls."""
        return self.dropout > 0 or any(dropout.p for dropout in self.dropouts)

    def changed(self, attention: Any) -> str | None:
        found = super().changed(attention)
        for name, linear in (("linear_qkv", self.qkv), ("linear_proj", self.projection)):
            if found is None and type(linear._parameters.get("weight")) is not torch.nn.Parameter:
                found = f"{name} has no plain weight"
        if found is None and _rotation(attention) != self.rotation:
            found = "rotary_interleaved, apply_rope_fusion or _yarn_concentration_factor changed"
        return found

    def prepare(
        self, x: Tensor, mask: Tensor | None, given: dict[str, Any]
    ) -> tuple[RotaryTable | None, Any] | Reason:
        rotations, packed = given.pop("rotary_pos_emb", None), given.pop("packed_seq_params", None)
        # None of the others is anything in training.
        reason = next((f"{name} is given" for name in given), None)
        if reason is None and packed is not None:
            if self.masks_matter:
                reason = "packed_seq_params is given, which Megatron's local attention refuses"
            else:
                reason = foreign_pack_reason(packed)
        if reason is None:
            reason = self.call_reason(x, mask, self.tensor.rows(x), self.qkv, self.projection)
        table = None
        if reason is None:
            table, reason = self.rotations(x, rotations, packed)
        return (table, packed) if reason is None else Reason(reason)

    def rotations(
        self, x: Tensor, given: Any, packed: Any = None
    ) -> tuple[RotaryTable | None, str | None]:
        """The rotations of the whole sequence, or of the ranks' rows of a pack, if any; and why
        those that were given cannot be had so, if so."""
        if given is None or not self.rotates:
            return None, None
        part = given[0] if isinstance(given, tuple) else given
        if isinstance(given, tuple) and given[1] is not part:
            return None, "queries and keys have rotations of their own"
        rows = self.tensor.rows(x)
        by_row = part is not None and part.dim() == 4 and part.shape[1:3] == (1, 1)
        if packed is None:
            by_row = by_row and part.shape[0] == rows
        if not by_row or part.shape[3] > self.heads.head_dim:
            return None, "rotations are not one for each row"
        group = self.group if packed is None else None
        table = rotary_table(part, x.dtype, group, *self.rotation, reader=self)
        if table is not None and packed is not None:
            table = pack_table(packed, rows, self.heads.world, table)
        return table, "rotations are not by pairs" if table is None else None

    def forward(
        self, attention: Any, x: Tensor, table: RotaryTable | None = None, packed: Any = None
    ) -> ForwardResult:
        """[s, b, H] and the rotations of the whole sequence -> ([s, b, H], the output projection's
        bias or None)."""
        self.hooks.run_parameter_gather()
        qkv, projection = self.qkv, self.projection
        rows, in_kernel = self.tensor.rows(x), self.norms.in_graph
        eps = getattr(self.norms.query, "eps", None)  # may change between calls, as p of dropout
        sizes = rows, x.shape[1], x.dtype, x.device
        call = self._call(*sizes, packed is not None, self.draws, eps)
        if packed is not None or (in_kernel and table is not None):
            kernel = self._kernel(call.exchange.heads.groups, table, packed)
            call = dataclasses.replace(call, kernel=kernel)
        if table is not None and not in_kernel:
            call = dataclasses.replace(call, table=table)
        skip = getattr(projection, "skip_bias_add", None)
        returned, bias = projection.te_return_bias if skip is None else skip, _bias(projection)
        weights = AttentionWeights(
            qkv.weight,
            projection.weight,
            _bias(qkv),
            # Once, and not by each rank that has a partial sum.
            None if returned or self.tensor.ranks > 1 else bias,
            *self.norms.weights(x, self.heads.head_dim),
            core=self._core_tensors(),
        )
        if hasattr(qkv, "layer_norm_weight"):
            x = norm_of_rows(qkv, x)
        y = overlapped_attention(self.tensor.enter(x), weights, call, self.scheduler)
        y = self.tensor.leave(y)
        if self.tensor.ranks > 1 and bias is not None and not returned:
            y = y + bias
        for linear in (qkv, projection):
            if linear.__dict__.get("is_first_microbatch"):
                linear.is_first_microbatch = False
        return y, bias if returned else None

    def _make_exchange(
        self, rows: int, batch: int, dtype: Any, layout: str, draws: bool
    ) -> HeadExchange:
        world = self.heads.world
        sequence = SequenceLayout(rows * world, world, layout)
        settings: dict[str, Any] = {}
        if self.backend == "nvlink":
            # Transformer Engine reads each of q, k and v for itself: they are laid out so where
            # they arrive, but for a norm's backward, and where norms in the kernel's graph give q
            # and k storages of their own (v would begin inside one, which it refuses).
            settings["apart"] = self.core.ignores_masks and not self.norms.any
        else:
            shared_rounds(self.group, self.config.timeout_s)
        name = "symmetric" if self.backend == "nvlink" else "rounds"
        return open_exchange(
            name,
            EXCHANGES[name].connect(self.group),
            self.heads,
            sequence,
            batch,
            dtype.itemsize,
            # With dropout all heads in one call: random numbers fall where Megatron's do.
            groups=1 if draws else None,
            **settings,
        )

    def _make_call(
        self,
        rows: int,
        batch: int,
        dtype: Any,
        device: Any,
        packed: bool,
        draws: bool,
        eps: float | None,
    ) -> AttentionCall:
        """A call without rotations, and without the lengths of a pack: each has its own."""
        # A pack's rows are exchanged as they stand, and ordered before the attention kernel.
        layout = "contiguous" if packed else "zigzag"
        exchange = self._exchange(rows, batch, dtype, layout, draws)
        heads = exchange.heads
        return AttentionCall(
            exchange,
            self._kernel(heads.groups, None, None),
            CoreCase(heads.head_dim, dtype, device.type, self.causal),
            dx_chunks=self.config.dx_chunks,
            norm_eps=eps if eps is not None and self.norms.on_arrival else 1e-6,
            output_gate=self.output_gate,
            shards=self.tensor.shards,
            name=self.name,
            qkv_gradient=self.qkv_gradient,
            output_gradient=self.output_gradient,
        )

    def _core_tensors(self) -> tuple[Tensor, ...]:
        """What the attention kernel reads besides queries, keys and values: the learnable offset of
        the softmax, and the parameters of norms in its graph."""
        offset = softmax_offset(self.core)
        return (*(() if offset is None else (offset,)), *self.norms.tensors())

    def _kernel(self, groups: int, table: RotaryTable | None, packed: Any) -> CoreKernel:
        """The core attention's kernel, after norms and rotations that are in its graph, and
        recomputed in backward where Megatron recomputes the core attention."""
        kernel, norms = self.core.kernel(groups, packed), self.norms
        has_offset = softmax_offset(self.core) is not None
        table = table if norms.in_graph else None

        def attend(
            q: Tensor, k: Tensor, v: Tensor, case: CoreCase, part: Any, core: tuple[Tensor, ...]
        ) -> Tensor:
            tensors = iter(core)
            offset = next(tensors)[part.head_slice] if has_offset else None
            if norms.in_graph:
                q, k = (rotated(t, table) for t in norms.apply(q, k, tensors))
            result: Tensor = kernel(q, k, v, case, offset)
            return result

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            case: CoreCase,
            part: Any = None,
            core: tuple[Tensor, ...] = (),
        ) -> Tensor:
            if self.recomputes_core and self.core.training and recomputes_here():
                return recomputed(attend, self.draws, q, k, v, case, part, core)
            return attend(q, k, v, case, part, core)

        return run


def _rotation(attention: Any) -> tuple[bool, bool, float]:
    """Whether a module rotates by neighbouring pairs (else by halves) and fused, and by what its
    cosines and sines are multiplied (YaRN)."""
    model, scale = attention.config, float(attention._yarn_concentration_factor)
    # Megatron rotates unfused where rotations are scaled.
    return bool(model.rotary_interleaved), bool(model.apply_rope_fusion) and scale == 1.0, scale


def _bias(linear: Any) -> Tensor | None:
    """A linear's bias; Transformer Engine's have an empty one where there is none."""
    bias: Tensor | None = linear.bias if getattr(linear, "use_bias", True) else None
    return bias


@dataclasses.dataclass(frozen=True)
class TensorParallelism:
    """The gather, scatter and sums that Megatron's projections do by themselves under tensor
    parallelism, around one module's overlapped forward.

    Under sequence parallelism a rank holds s / T of the rows. They are gathered before the
    projection of queries, keys and values, and the partial sums of the output projection are
    reduce-scattered; it is also the call's ``RowShards``, which do that inside the forward. Without
    it every rank has all rows, and the sums are all-reduced.

    Args:
        group: the tensor-parallel group.
        sequence_parallel: whether its ranks hold the rows in parts.
    """

    group: Any
    sequence_parallel: bool

    def gather(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.mappings import _gather_along_first_dim

        whole: Tensor = _gather_along_first_dim(x, self.group)
        return whole

    def scatter_sum(self, dx: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.mappings import _reduce_scatter_along_first_dim

        mine: Tensor = _reduce_scatter_along_first_dim(dx, self.group)
        return mine

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    @property
    def shards(self) -> TensorParallelism | None:
        """Who gathers rows inside the overlapped forward."""
        return self if self.ranks > 1 and self.sequence_parallel else None

    def rows(self, x: Tensor) -> int:
        """s, of the rows x that the module was given."""
        return x.shape[0] * (self.ranks if self.sequence_parallel else 1)

    def enter(self, x: Tensor) -> Tensor:
        """The rows; the gradient of all of them is summed over the group."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        if self.ranks == 1 or self.sequence_parallel:
            return x
        entered: Tensor = copy_to_tensor_model_parallel_region(x, group=self.group)
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """The sum over the group of partial sums y [s, b, H], or this rank's part of it."""
        from megatron.core.tensor_parallel import (
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        if self.ranks == 1:
            return y
        if self.sequence_parallel:
            left: Tensor = reduce_scatter_to_sequence_parallel_region(y, group=self.group)
        else:
            left = reduce_from_tensor_model_parallel_region(y, group=self.group)
        return left


class _SelfAttentionDecisions(AttentionDecisions[OverlappedAttention]):
    feature, patch = "overlapped attention", "self-attention"
    limits, path = OVERLAP_LIMITS, OverlappedAttention
    overlap_texts = (
        "heads move over NVLink, beside the projections",
        "heads move in peer rounds, beside the projections",
    )

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.attention import SelfAttention

        return isinstance(module, SelfAttention)

    def group(self, layer: Any) -> dist.ProcessGroup:
        if layer.pg_collection.tp.size() == 1:
            return super().group(layer)
        # Tensor-parallel ranks gather and scatter together, so that they have to agree, too.
        from megatron.core import parallel_state

        return real_group(parallel_state.get_tensor_and_context_parallel_group())

    def module_reason(self, layer: Any) -> str | None:
        return _groups_reason(layer) or module_reason(layer)

    def slower_reason(self, config: FluidConfig, layer: Any) -> str | None:
        hides = config.tp_overlap != "off" and bool(layer.config.sequence_parallel)
        return overlap_slower_reason(layer.pg_collection.tp.size() if hides else 1)

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        if config.cp_backend != "rounds":
            return None
        exchanges = exchanges_of(layer.core_attention)
        # A core attention that keeps its own exchange does so under any of the other two.
        others = ("auto", "megatron") if exchanges is None else exchanges.other_backends()
        return f"{', '.join(others)}: {reason}"


DECISIONS = _SelfAttentionDecisions()
forward = DECISIONS.forward  # wraps Attention.forward, which SelfAttention inherits
init = DECISIONS.announcing  # wraps SelfAttention.__init__


def leave(attention: Any) -> None:
    """Let a built module keep Megatron's projections, around what exchanges its heads: the other
    half of a comparison."""
    DECISIONS.leave(attention)


def overlapped(attention: Any) -> str | None:
    """The backend of a module that is overlapped (before its first forward, is about to be),
    "nvlink" or "rounds"; None of any other."""
    found = DECISIONS.get(attention)
    return None if found is None else found.backend


def _groups_reason(attention: Any) -> str | None:
    """Why the ranks of a tensor-parallel module cannot agree, or None."""
    from megatron.core import parallel_state

    tensor, context = attention.pg_collection.tp, attention.pg_collection.cp
    if tensor.size() == 1:
        return None
    both = parallel_state.get_tensor_and_context_parallel_group(check_initialized=False)
    if both is not None and both.size() == tensor.size() * context.size():
        return None
    return "its process groups are not those of parallel_state"
