"""The fp8 blockwise casts of kernels/fp8_casts, and their shapes, in plain torch, bit for bit."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fluid.kernels.fp8_casts.packed_rows import packed_width
from megatron_fluid.kernels.fp8_weight_grads.launch import TurnedRows

_E4M3 = torch.float8_e4m3fn


def rows_of(kind: str, rows: int, width: int) -> Tensor:
    """fp32 [rows, width], normal but for what `kind` says."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(3))
    if kind == "outliers":
        x[::2, ::100] *= 3e4
    if kind == "zeros":
        x[:, :130], x[1], x[0, 7] = 0.0, 0.0, -0.0
    if kind == "denormals":
        x = x * 2.0**-130
        x[0] *= 2.0**20
    if kind == "huge":
        x = x * 2.0**120
    if kind == "one scale":
        x = x.clamp(1.0, 3.0)
    if kind == "one value":
        x[:] = 448.0
    return x


def block_scale(blocks: Tensor) -> Tensor:
    """The scale of each block, fp32 [...] of blocks [..., n]: the least power of two, from 2^-126,
    for which none of its values exceeds 448; 1 for zeros, NaN where a value is not finite."""
    largest = (blocks.float().view(torch.int32) & 0x7FFFFFFF).amax(-1)
    exponent = largest >> 23
    shift = 135 - exponent - ((largest & 0x7FFFFF) > 0x600000).int()
    shift = torch.where(largest == 0, 0, shift.clamp(max=126))
    scale = ((127 - shift) << 23).view(torch.float32)
    return torch.where(exponent == 255, torch.nan, scale)


def cast_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, width] -> e4m3 [N, width], scales fp32 [width / 128, N]."""
    rows, width = x.shape
    blocks = x.float().reshape(rows, width // 128, 128)
    scale = block_scale(blocks)
    cast = (blocks / scale.unsqueeze(2)).to(_E4M3)
    return cast.view(rows, width), scale.t().contiguous()


def restore_rows(cast: Tensor, scales: Tensor) -> Tensor:
    """e4m3 [N, width], scales [width / 128, >= N] -> fp32 [N, width]."""
    rows, width = cast.shape
    blocks = cast.float().view(rows, width // 128, 128)
    return (blocks * scales[:, :rows].t().unsqueeze(2)).view(rows, width)


def pack_rows(x: Tensor) -> Tensor:
    """x [T, width] -> bf16 [T, packed_width(width)]: values, scales and zeros, byte by byte."""
    values, scales = cast_rows(x)
    (rows, width), blocks = x.shape, x.shape[1] // 128
    out = x.new_zeros((rows, 2 * packed_width(width)), dtype=torch.uint8)
    out[:, :width] = values.view(torch.uint8)
    out[:, width : width + 4 * blocks] = scales.t().contiguous().view(torch.uint8)
    return out.view(torch.bfloat16)


def compand_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, width] -> int8 [N, width], scales fp32 [width / 128, N]: value = q * |q| * scale."""
    rows, width = x.shape
    blocks = x.float().reshape(rows, width // 128, 128)
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(2).view(torch.float32)
    finite = largest.isfinite()
    scale = torch.where(largest < 2.0**-100, 0.0, largest * (1.0 / 16129.0))
    inverse = torch.where(finite & (scale > 0), 1.0 / scale, 0.0).unsqueeze(2)
    q = torch.round(torch.sqrt(torch.where(finite.unsqueeze(2), blocks.abs(), 0.0) * inverse))
    scale = torch.where(finite, scale, torch.nan)
    return (q * blocks.sign().nan_to_num(0.0)).to(torch.int8).view(
        rows, width
    ), scale.t().contiguous()


def restore_companded(kept: Tensor, scales: Tensor) -> Tensor:
    """int8 [N, width], scales [width / 128, >= N] -> fp32 [N, width]."""
    rows, width = kept.shape
    q = kept.float().view(rows, width // 128, 128)
    return (q * q.abs() * scales[:, :rows].t().unsqueeze(2)).view(rows, width)


def cast_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [El, J, K] -> e4m3 [El, J, K], scales fp32 [El, J / 128, K / 128]."""
    experts, j, k = w.shape
    blocks = w.float().reshape(experts, j // 128, 128, k // 128, 128)
    scale = block_scale(blocks.transpose(2, 3).flatten(3))
    cast = (blocks / scale[:, :, None, :, None]).to(_E4M3)
    return cast.view(experts, j, k), scale


def restore_weights(cast: Tensor, scales: Tensor) -> Tensor:
    """e4m3 [El, J, K], scales [El, J / 128, K / 128] -> fp32 [El, J, K]."""
    wide = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return cast.float() * wide


def swiglu_backward(h: Tensor, da: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, 2F], da [N, F], probs [N] -> dh [N, 2F], a [N, F], dprobs [N], all fp32."""
    gate, up = h.float().chunk(2, 1)
    s = torch.sigmoid(gate)
    value, slope = gate * s, s * (1 + gate * (1 - s))
    grad, p = da.float(), probs.unsqueeze(1)
    dh = torch.cat([grad * p * up * slope, grad * p * value], 1)
    return dh, value * up * p, (grad * value * up).sum(1)


def turned(x: Tensor, ends: Sequence[int], unused: int = 0) -> TurnedRows:
    """x [N, W], W features; the rows of expert e end at ends[e]. Cast and turned, as
    kernels/fp8_weight_grads lays it out: e4m3 [W, P], scales [P / 128, W], P the places of the
    blocks in use. Behind these come `unused` blocks of NaNs."""
    parts = [
        pad(x[start:end].float(), (0, 0, 0, -(end - start) % 128))
        for start, end in itertools.pairwise([0, *ends])
    ]
    values, scales = cast_rows(torch.cat(parts).t())
    values = pad(values.float(), (0, 128 * unused), value=torch.nan).to(_E4M3)
    return TurnedRows(values.contiguous(), pad(scales, (0, 0, 0, unused), value=torch.nan))


def turn_rows(cast: Tensor, scales: Tensor, ends: Sequence[int]) -> TurnedRows:
    """e4m3 [N, W], scales [W / 128, >= N] -> turned."""
    return turned(restore_rows(cast, scales), ends)


def scaled_grouped_product(
    x: Tensor, scales: Tensor, w: Tensor, w_scales: Tensor, ends: Sequence[int]
) -> Tensor:
    """x[rows of e] @ w[e].T with the scales of both: e4m3 [N, K], scales [K / 128, >= N], e4m3 [El,
    J, K], scales [El, J / 128, K / 128] -> fp32 [N, J], zero in rows of no expert. fp32 sums of 128
    along the depth, each scaled and added in fp32; a kernel differs by the roundings within."""
    out = x.new_zeros((x.shape[0], w.shape[1]), dtype=torch.float32)
    start = 0
    for expert, end in enumerate(ends):
        for block in range(x.shape[1] // 128):
            at = slice(128 * block, 128 * block + 128)
            part = x[start:end, at].float() @ w[expert, :, at].float().t()
            columns = w_scales[expert, :, block].repeat_interleave(128)
            out[start:end] += part * (scales[block, start:end, None] * columns)
        start = end
    return out


def turned_weight_grads(left: TurnedRows, right: TurnedRows, ends: Sequence[int]) -> Tensor:
    """Sum over the rows of e of left[:, n] right[:, n], fp32 [El, A,
    B], zero for an expert without rows. ends: where each expert's rows end."""
    features = left.values.shape[0], right.values.shape[0]
    out = left.scales.new_zeros((len(ends), *features))
    block = 0
    for expert, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        for _ in range(-(-(end - start) // 128)):
            at = slice(128 * block, 128 * block + 128)
            part = left.values[:, at].float() @ right.values[:, at].float().t()
            out[expert] += part * (left.scales[block, :, None] * right.scales[block, None, :])
            block += 1
    return out
