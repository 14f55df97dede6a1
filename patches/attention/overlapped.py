"""The overlapped forward of one of Megatron's SelfAttention modules, on megatron_fluid.attention.

Legend: S whole sequence, s = S / C a rank's part, b batch, H hidden, D head dim.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.exchange.registry import EXCHANGES, open_exchange
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.overlap import (
    AttentionCall,
    AttentionWeights,
    overlapped_attention,
    weight_gradient,
)
from megatron_fluid.attention.packed import RotaryTable, rotated
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.core import softmax_offset, window_of
from megatron_fluid.patches.attention.core_recompute import recomputed, recomputes_here
from megatron_fluid.patches.attention.decision import ForwardResult, OverlappedModule
from megatron_fluid.patches.attention.head_norms import HeadNorms
from megatron_fluid.patches.attention.limits import bypassed
from megatron_fluid.patches.attention.packed_sequences import foreign_pack_reason, pack_table
from megatron_fluid.patches.attention.rotary_tables import rotary_table
from megatron_fluid.patches.attention.tensor_parallel import TensorParallelism
from megatron_fluid.patches.attention.transformer_engine import core_kernel
from megatron_fluid.patches.linears import norm_of_rows
from megatron_fluid.patches.overlap_decision import Reason
from megatron_fluid.patches.weight_gradients import weight_gradient_of

__all__ = ["OverlappedAttention"]


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
        self.interleaved = bool(model.rotary_interleaved)
        self.rope_scale = float(attention._yarn_concentration_factor)
        # Megatron rotates unfused where rotations are scaled.
        self.fused_rope = bool(model.apply_rope_fusion) and self.rope_scale == 1.0
        self.output_gate = bool(model.attention_output_gate)
        self.window = window_of(model, layer)
        self.recomputes_core = bool(attention.checkpoint_core_attention)
        self.dropout = float(model.attention_dropout)
        self.name = f"attention of layer {layer}"
        self.scheduler = get_backward_scheduler()
        if config.defer_weight_grads:
            self.scheduler.enable()
        self.qkv_gradient = weight_gradient_of(self.qkv, weight_gradient)
        self.output_gradient = weight_gradient_of(self.projection, weight_gradient)
        self._exchange = functools.lru_cache(maxsize=16)(self._make_exchange)
        self._call = functools.lru_cache(maxsize=16)(self._make_call)

    def changed(self, attention: Any) -> str | None:
        found = super().changed(attention)
        for name, linear in (("linear_qkv", self.qkv), ("linear_proj", self.projection)):
            if found is None and type(linear._parameters.get("weight")) is not torch.nn.Parameter:
                found = f"{name} has no plain weight"
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
        how = self.interleaved, self.fused_rope, self.rope_scale
        group = self.group if packed is None else None
        table = rotary_table(part, x.dtype, group, *how, reader=self)
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
        call = self._call(rows, x.shape[1], x.dtype, x.device, packed is not None)
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

    def _make_exchange(self, rows: int, batch: int, dtype: Any, layout: str) -> HeadExchange:
        world = self.heads.world
        sequence = SequenceLayout(rows * world, world, layout)
        settings: dict[str, Any] = {}
        if self.backend == "nvlink":
            # Transformer Engine reads each of q, k and v for itself: they are laid out so where
            # they arrive, but for a norm's backward, and where norms in the kernel's graph give q
            # and k storages of their own (v would begin inside one, which it refuses).
            settings["apart"] = "alone" in self.core.__dict__ and not self.norms.any
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
            groups=1 if self.dropout else None,
            **settings,
        )

    def _make_call(
        self, rows: int, batch: int, dtype: Any, device: Any, packed: bool
    ) -> AttentionCall:
        """A call without rotations, and without the lengths of a pack: each has its own."""
        # A pack's rows are exchanged as they stand, and ordered before the attention kernel.
        exchange = self._exchange(rows, batch, dtype, "contiguous" if packed else "zigzag")
        heads = exchange.heads
        return AttentionCall(
            exchange,
            self._kernel(heads.groups, None, None),
            CoreCase(heads.head_dim, dtype, device.type, self.causal),
            dx_chunks=self.config.dx_chunks,
            norm_eps=self.norms.query.eps if self.norms.on_arrival else 1e-6,
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
        kernel, norms = core_kernel(self.core, groups, packed), self.norms
        has_offset = softmax_offset(self.core) is not None
        table = table if norms.in_graph else None

        def attend(
            q: Tensor, k: Tensor, v: Tensor, case: CoreCase, part: Any, core: tuple[Tensor, ...]
        ) -> Tensor:
            tensors = iter(core)
            offset = next(tensors)[part.head_slice] if has_offset else None
            if norms.in_graph:
                q, k = (rotated(t, table) for t in norms.apply(q, k, tensors))
            result: Tensor = kernel.run(q, k, v, case, offset)
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
                return recomputed(attend, self.dropout > 0, q, k, v, case, part, core)
            return attend(q, k, v, case, part, core)

        return CoreKernel(kernel.name, kernel.unsupported_reason, run)


def _bias(linear: Any) -> Tensor | None:
    """A linear's bias; Transformer Engine's have an empty one where there is none."""
    bias: Tensor | None = linear.bias if getattr(linear, "use_bias", True) else None
    return bias
