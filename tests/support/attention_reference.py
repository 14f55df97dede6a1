"""The reference: self-attention of a whole sequence on one process, with the full score matrix."""

import math

import torch
from torch import Tensor

from megatron_fluid.attention.overlap import AttentionWeights
from megatron_fluid.attention.packed import Rotary


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [S, B, heads, D] rotated by its position, as complex numbers."""
    length, dim = x.shape[0], rotary.dim
    position = torch.arange(length, dtype=torch.float64, device=x.device)
    pair = torch.arange(dim // 2, dtype=torch.float64, device=x.device)
    angle = position[:, None] * rotary.theta ** (-2.0 * pair / dim)
    dtype = torch.complex128 if x.dtype == torch.float64 else torch.complex64
    factor = torch.polar(torch.ones_like(angle), angle)[:, None, None, :].to(dtype)
    turning, passing = x[..., :dim], x[..., dim:]
    if rotary.interleaved:
        pairs = torch.view_as_complex(turning.unflatten(-1, (-1, 2)).contiguous()) * factor
        turned = torch.view_as_real(pairs).flatten(-2)
    else:
        first, second = (half.contiguous() for half in turning.chunk(2, -1))
        pairs = torch.complex(first, second) * factor
        turned = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([turned, passing], -1)


def reference_attention(
    x: Tensor, weights: AttentionWeights, num_heads: int, num_kv_heads: int, *, causal: bool = True,
    window: int | None = None, rotary: Rotary | None = None, norm_eps: float = 1e-6,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Self-attention of the whole sequence x [S, B, H] -> [S, B, H] in float32 or float64, for
    autograd. Arguments mean what those of attention.layer.SelfAttention do."""
    length, batch, _ = x.shape
    n = num_heads // num_kv_heads
    packed = x @ weights.w_qkv.t()
    if weights.b_qkv is not None:
        packed = packed + weights.b_qkv
    grouped = packed.view(length, batch, num_kv_heads, n + 2, -1)
    dim = grouped.shape[-1]
    q = grouped[:, :, :, :n].reshape(length, batch, num_heads, dim)
    k, v = grouped[:, :, :, n], grouped[:, :, :, n + 1]
    if weights.q_norm is not None and weights.k_norm is not None:
        q, k = _rms_norm(q, weights.q_norm, norm_eps), _rms_norm(k, weights.k_norm, norm_eps)
    if rotary is not None:
        q, k = _rotate(q, rotary), _rotate(k, rotary)
    k, v = k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    scores = torch.einsum("ibhd,jbhd->bhij", q, k) * scale
    i = torch.arange(length, device=x.device)[:, None]
    j = torch.arange(length, device=x.device)[None, :]
    seen = torch.ones(length, length, dtype=torch.bool, device=x.device)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (j > i - window) & (j < i + window)
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    attended = torch.einsum("bhij,jbhd->ibhd", probabilities, v).flatten(2)
    y = attended @ weights.w_out.t()
    return y if weights.b_out is None else y + weights.b_out
