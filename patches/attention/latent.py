"""The overlapped forward of Megatron's latent attention (MLA) under context parallelism by a2a.

Megatron projects compressed rows up to all heads, and the core attention exchanges heads. Here the
compressed rows are gathered, which are a fraction of that, and each rank projects them to its own
heads of the whole sequence: as many products, and each gather is overlapped with its projection,
in backward the scatter of its gradient too (megatron_fluid.tensor_parallel over the
context-parallel group). The output returns by head groups while the next group is attended.

Projections down, norms, the output projection, parameters and checkpoints stay Megatron's.

Legend: S whole sequence, s = S / C a rank's part, b batch, H hidden, n heads, D width of a head of
queries and keys, R of their rotated part, Dv of values.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.attention_kernels import CoreCase
from megatron_fluid.attention.exchanged import return_rows
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.overlap import gather_slower_reason
from megatron_fluid.backward.autograd import once_differentiable
from megatron_fluid.comm.waits import group_waits
from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.attention.core import softmax_offset
from megatron_fluid.patches.attention.decision import (
    AttentionDecisions,
    ForwardResult,
    OverlappedModule,
)
from megatron_fluid.patches.attention.limits import (
    LATENT_LIMITS,
    OVERLAP_LIMITS,
    latent_module_reason,
    projected_up,
)
from megatron_fluid.patches.attention.packed_sequences import Reorder
from megatron_fluid.patches.linears import into_main_grad, is_fused, norm_of_rows
from megatron_fluid.patches.overlap_decision import Reason
from megatron_fluid.tensor_parallel import all_gather_matmul

__all__ = ["DECISIONS", "OverlappedLatentAttention", "forward", "init"]


class OverlappedLatentAttention(OverlappedModule):
    """The overlapped forward of one MLASelfAttention; arguments as of OverlappedModule."""

    def __init__(self, attention: Any, config: FluidConfig, backend: str) -> None:
        modules = projected_up(attention) | {"core_attention": attention.core_attention}
        super().__init__(attention, modules, config, backend)
        model = attention.config
        self.widths = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
        self.q_up, self.kv_up = projected_up(attention).values()

    def prepare(self, x: Tensor, mask: Tensor | None, given: dict[str, Any]) -> tuple[()] | Reason:
        reason = next((f"{name} is given" for name in given), None)
        reason = reason or self.call_reason(x, mask, x.shape[0], self.q_up, self.kv_up)
        return () if reason is None else Reason(reason)

    def forward(self, attention: Any, x: Tensor, *prepared: Any) -> ForwardResult:
        self.hooks.run_parameter_gather()
        model, (rows, batch) = attention.config, x.shape[:2]
        plain, rotated, _ = self.widths
        q_rows, kv_rows = attention._qkv_down_projection(x)
        kv_rows, k_rotated = kv_rows.split([model.kv_lora_rank, rotated], dim=-1)
        if model.q_lora_rank is not None:
            q_rows = attention.q_layernorm(q_rows)
        kv_rows = attention.kv_layernorm(kv_rows)
        layout = SequenceLayout(rows * self.group.size(), self.group.size(), "zigzag")
        angles, scale = _angles(attention.rotary_pos_emb, layout.length)
        order = _orders(layout, x.device)
        k_rotated = Reorder.apply(_Gather.apply(k_rotated, self.group), *order)
        queries = self._up(self.q_up, q_rows, order)
        keys = self._up(self.kv_up, kv_rows, order)
        heads = self.exchanges.heads
        mine = heads.num_heads // heads.world
        q = queries.view(layout.length, batch, mine, plain + rotated)
        q_plain, q_rotated = q.split([plain, rotated], dim=-1)
        k_plain, v = keys.view(layout.length, batch, mine, -1).split(
            [plain, self.widths[2]], dim=-1
        )
        turn = functools.partial(_rotate, angles, scale, model.rotary_interleaved)
        q = torch.cat([q_plain, turn(q_rotated)], dim=-1)
        k_rotated = turn(k_rotated.unsqueeze(2)).expand(-1, -1, mine, -1)
        k = torch.cat([k_plain, k_rotated], dim=-1)
        return attention.linear_proj(self._attend(q, k, v.contiguous(), rows))  # type: ignore[no-any-return]

    def _up(self, linear: Any, rows: Tensor, order: tuple[Tensor, Tensor]) -> Tensor:
        """[s, b, K] of each rank -> [S, b, columns of this rank's heads], by position."""
        if hasattr(linear, "layer_norm_weight"):
            rows = norm_of_rows(linear, rows)
        weight, ranks = linear.weight, self.group.size()
        mine = weight.shape[0] // ranks
        own = slice(self.group.rank() * mine, (self.group.rank() + 1) * mine)
        up = all_gather_matmul(
            rows.flatten(0, 1),
            weight[own],
            self.group,
            transpose_b=True,
            weight_grad=into_main_grad(weight, is_fused(linear), own),
        )
        whole: Tensor = Reorder.apply(up.view(-1, rows.shape[1], mine), *order)
        return whole

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
        """[S, b, heads of this rank, D or Dv] -> [s, b, n Dv]."""
        exchange = self.exchanges.of(q, rows=rows)
        heads, offset = exchange.heads, softmax_offset(self.core)
        kernel = self.core.kernel(heads.groups)
        case = CoreCase(q.shape[3], q.dtype, q.device.type, self.causal)
        first = heads.part(exchange.rank, 0).q_heads[0]

        def attended() -> Any:
            for group in range(heads.groups):
                part = heads.part(exchange.rank, group)
                own = slice(part.q_heads[0] - first, part.q_heads[-1] + 1 - first)
                mine = None if offset is None else offset[part.head_slice]
                y = kernel(q[:, :, own], k[:, :, own], v[:, :, own], case, mine)
                yield y.reshape(*q.shape[:2], len(part.q_heads), v.shape[3])

        return return_rows(exchange, attended())


class _Gather(torch.autograd.Function):
    """Few columns of the rows of every rank [s, b, C], rank by rank [S, b, C]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.rows = group, rows.shape[0]
        rows = rows.contiguous()
        whole = rows.new_empty((rows.shape[0] * group.size(), *rows.shape[1:]))
        group_waits(group).collective(
            "latent attention's shared rows",
            lambda: dist.all_gather_into_tensor(whole, rows, group=group, async_op=True),
        )
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # Each rank has the gradient from its own heads: sum them. gloo has no reduce-scatter, and
        # there are few columns.
        total = grads[0].contiguous()
        group_waits(ctx.group).collective(
            "gradients of latent attention's shared rows",
            lambda: dist.all_reduce(total, group=ctx.group, async_op=True),
        )
        return total.narrow(0, ctx.group.rank() * ctx.rows, ctx.rows).clone(), None


@functools.lru_cache(maxsize=32)
def _orders(layout: SequenceLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """The gathered row of each position, and the position of each gathered row."""
    with torch.inference_mode(False):
        positions = layout.order(device)
        return torch.argsort(positions), positions


def _angles(rotary: Any, length: int) -> tuple[Tensor, float]:
    """Of all positions [S, 1, 1, R], and by what cosines and sines are multiplied (YaRN)."""
    # Of packed sequences Megatron does not cut them by rank.
    found = rotary(length, packed_seq=True)
    return found if isinstance(found, tuple) else (found, 1.0)


def _rotate(angles: Tensor, scale: float, interleaved: bool, x: Tensor) -> Tensor:
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    turned: Tensor = _apply_rotary_pos_emb_bshd(
        x, angles, interleaved, mla_rotary_interleaved=True, mscale=scale
    )
    return turned


class _LatentDecisions(AttentionDecisions[OverlappedLatentAttention]):
    feature, patch = "overlapped latent attention", "latent-attention"
    compared = ("params_dtype", "hidden_size", "q_lora_rank", "kv_lora_rank", "v_head_dim")
    limits, path = (*OVERLAP_LIMITS, *LATENT_LIMITS), OverlappedLatentAttention
    overlap_texts = (
        "compressed rows are gathered over NVLink, beside the projections up",
        "compressed rows are gathered by collectives, beside the projections up",
    )

    def is_layer(self, module: Any) -> bool:
        from megatron.core.transformer.multi_latent_attention import MLASelfAttention

        return isinstance(module, MLASelfAttention)

    def module_reason(self, layer: Any) -> str | None:
        return latent_module_reason(layer)

    def slower_reason(self, config: FluidConfig, layer: Any) -> str | None:
        model = layer.config
        compressed = (model.q_lora_rank or model.hidden_size) + model.kv_lora_rank
        head = 2 * (model.qk_head_dim + model.qk_pos_emb_head_dim) + model.v_head_dim
        ranks = self.group(layer).size()
        return gather_slower_reason(compressed, model.num_attention_heads * head // ranks)

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        return None  # heads are exchanged around its core attention all the same


DECISIONS = _LatentDecisions()
forward = DECISIONS.forward  # wraps MultiLatentAttention.forward
init = DECISIONS.announcing  # wraps MLASelfAttention.__init__
