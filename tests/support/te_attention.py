"""Stand-ins for the classes of Transformer Engine that Megatron's SelfAttention is built of: the
real ones need a GPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 8


def normed(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, centered: bool) -> Tensor:
    """RMSNorm, with a bias LayerNorm, in fp32 or wider; centered: the weight is stored less one."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = gamma.to(wide.dtype) + centered
    if beta is not None:
        return F.layer_norm(wide, wide.shape[-1:], weight, beta.to(wide.dtype), eps).to(x.dtype)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class Linear(nn.Module):
    """What Megatron's TELayerNormColumnParallelLinear and TERowParallelLinear hold, by Transformer
    Engine 2.20's names."""

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, bias: bool, skip_bias_add: bool, **_: Any
    ) -> None:
        super().__init__()
        self.config, self.use_bias, self.te_return_bias = config, bias, skip_bias_add and bias
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else torch.empty(0)
        self.te_quant_params, self.calls = None, 0
        self.fuse_wgrad_accumulation, self.is_first_microbatch = False, True

    def _rows(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        bias = self.bias if self.use_bias and not self.te_return_bias else None
        y = F.linear(self._rows(x), self.weight, bias)
        return y, self.bias if self.te_return_bias else None


class NormLinear(Linear):
    def __init__(self, inputs: int, outputs: int, *, config: Any, **rest: Any) -> None:
        super().__init__(inputs, outputs, config=config, **rest)
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs))
        self.layer_norm_bias = (
            nn.Parameter(torch.empty(inputs)) if config.normalization == "LayerNorm" else None
        )
        self.normalization, self.eps = config.normalization, config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def _rows(self, x: Tensor) -> Tensor:
        norm = self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        return normed(x, *norm)


class _Core(nn.Module):
    """Has the constructor, the call and the softmax offset of Megatron's TEDotProductAttention, and
    knows no context parallelism."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
        softmax_scale=None, k_channels=None, v_channels=None, num_splits=None,
        cp_comm_type="p2p", pg_collection=None,
    ):  # fmt: skip
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        self.config, self.calls = config, 0
        self.heads, self.groups = config.num_attention_heads, config.num_query_groups
        self.dropout, self.scale, size = config.attention_dropout, softmax_scale, config.window_size
        windowed = is_layer_window_attention(size, config.window_attn_skip_freq, layer_number)
        self.window = size if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(self.heads)
        elif config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.heads))

    def forward(
        self, query, key, value, attention_mask, attn_mask_type, attention_bias=None,
        packed_seq_params=None, num_splits=None,
    ):  # fmt: skip
        self.calls += 1
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        assert (query.size(2), key.size(2)) == (self.heads, self.groups)
        # A share: as Transformer Engine's get_qkv_layout takes it without a copy.
        if self.heads != HEADS:
            assert all(t.is_contiguous() for t in (query, key, value))
            offsets = [t.storage_offset() for t in (query, key, value)]
            assert offsets in ([0, 0, 0], [0, query.numel(), query.numel() + key.numel()])
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        causal = attn_mask_type.name == "causal"
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scale = query.size(3) ** -0.5 if self.scale is None else self.scale
        scores = (q @ k.transpose(2, 3)).float() * scale
        row = torch.arange(query.size(0))
        distance = row[:, None] - row[None, :]
        seen = distance >= 0 if causal else distance == distance
        if self.window is not None:
            before, after = self.window
            seen = seen & (distance <= before) & (distance >= -after)
        if packed:
            of = _sequence_of(packed_seq_params, query.size(0))
            seen = seen & (of[:, None] == of[None, :]) & (of >= 0)[None, :]
            seen[of < 0, 0] = True  # padding sees something, and what it gives is dropped
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], 3)
        with get_cuda_rng_tracker().fork():
            probabilities = F.dropout(scores.softmax(3), self.dropout, self.training)
        y = probabilities[..., : query.size(0)].to(v.dtype) @ v
        if packed:
            return (y * (of >= 0)[:, None]).squeeze(0).transpose(0, 1).flatten(1)
        return y.permute(2, 0, 1, 3).flatten(2)


def _sequence_of(packed: Any, length: int) -> Tensor:
    """The sequence of each row of a pack; -1 of padding."""
    of = torch.full((length,), -1)
    bounds = zip(packed.cu_seqlens_q_padded[:-1], packed.cu_seqlens_q.diff(), strict=True)
    for index, (begin, count) in enumerate(bounds):
        of[int(begin) : int(begin + count)] = index
    return of


class TENorm(nn.Module):
    """Transformer Engine's RMSNorm: its weight may be stored less one."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size)), eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        bias = getattr(self, "bias", None)
        return normed(x, self.weight, bias, self.eps, self.zero_centered_gamma)


class TELayerNorm(TENorm):
    """Transformer Engine's LayerNorm."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = nn.Parameter(torch.empty(hidden_size))


def know_stand_ins() -> None:
    """Let the patch take the stand-ins for Transformer Engine's classes."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_fluid.patches.attention import head_norms
    from megatron_fluid.patches.attention import limits as attention_limits

    stand_ins = {"RMSNorm": TENorm, "LayerNorm": TELayerNorm}
    attention_limits._qkv_types = lambda: (ColumnParallelLinear, NormLinear)
    attention_limits._projection_types = lambda: (RowParallelLinear, Linear)
    head_norms.of_transformer_engine = lambda *names: tuple(stand_ins[name] for name in names)


def patched_core() -> type:
    """The stand-in for Transformer Engine's core attention, with the patch of its constructor."""
    from megatron_fluid.patches.attention.transformer_engine import te_dot_product_attention

    class Patched(_Core):
        __init__ = te_dot_product_attention(_Core.__init__)  # type: ignore[assignment]

    return Patched
