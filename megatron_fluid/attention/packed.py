"""Packed query/key/value buffers: splitting into heads, norm, rotation, and packing of gradients.

A part (layouts.HeadPart) of head-parallel activations is [S, B, width], its columns the part's
heads with their keys and values. Splitting is a view: with G key/value heads of n query heads each,
q is [S, B G, n, D] and k, v are [S, B G, 1, D]: key/value heads count as batch entries, so that
every stride is regular and the attention kernel reads the buffer in place. Rotary position
embedding is applied to q and k in place (with q/k norm, whose backward needs its input, into a
second buffer). The gradients of q, k and v are rotated back and written into one packed buffer,
which the exchange sends.

Rotation happens on the head-parallel side, where row s is position s, whatever the sequence layout
outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.layouts import HeadPart
from megatron_fluid.attention.tables import cached_tables
from megatron_fluid.backward.autograd import once_differentiable
from megatron_fluid.cuda.triton_launch import power_of_two
from megatron_fluid.errors import ConfigError

__all__ = [
    "Norm",
    "Rotary",
    "RotaryTable",
    "Triple",
    "aligned_heads",
    "split_flat",
    "ceil_div",
    "head_strides",
    "normalize",
    "pack_backward",
    "pack_gradients",
    "pack_in_one_pass",
    "rotary_arguments",
    "rotate_",
    "rotated",
    "split",
    "split_apart",
]


Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of the first ``dim`` dimensions of a head.

    Args:
        dim: rotated dimensions, even; the rest passes.
        theta: base of the frequencies.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, dim / 2), (1, dim / 2 + 1), ...
    """

    dim: int
    theta: float = 10000.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or self.dim < 2 or self.dim % 2:
            raise ConfigError.of("rotary_dim", self.dim, "even numbers of at least 2")
        if not isinstance(self.theta, int | float) or not 0 < self.theta < float("inf"):
            raise ConfigError.of("rope_theta", self.theta, "finite numbers above 0")

    def table(self, length: int, device: torch.device, dtype: torch.dtype) -> RotaryTable:
        """Cosines and sines of positions 0 .. length - 1 for activations of ``dtype``: float32, or
        float64 for float64."""
        exact = torch.float64
        even = torch.arange(0, self.dim, 2, device=device, dtype=exact)
        frequencies = self.theta ** (-even / self.dim)
        angles = torch.arange(length, device=device, dtype=exact)[:, None] * frequencies
        wide = exact if dtype == exact else torch.float32
        return RotaryTable(angles.cos().to(wide), angles.sin().to(wide), self.interleaved)


@dataclass(frozen=True)
class RotaryTable:
    """Cosines and sines [S, dim / 2]; ``interleaved`` as in Rotary."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def rows(self, rows: slice) -> RotaryTable:
        return RotaryTable(self.cos[rows], self.sin[rows], self.interleaved)


def _heads(buffer: Tensor, part: HeadPart) -> tuple[Tensor, int]:
    """The buffer as [S, B', heads, D] and how many of the leading heads are queries; then follow
    the key and the value."""
    rows, batch, _ = buffer.shape
    q, kv = len(part.q_heads), len(part.kv_heads)
    return buffer.view(rows, batch * kv, q // kv + 2, part.head_dim), q // kv


def split(buffer: Tensor, part: HeadPart) -> Triple:
    """Views q [S, B', h, D], k and v [S, B', g, D] of a packed [S, B, width] buffer; for B' see the
    module."""
    if part.value_dim != part.head_dim:
        return _split_two_sizes(buffer, part)
    heads, n = _heads(buffer, part)
    q, k, v = heads.split_with_sizes((n, 1, 1), 2)
    return q, k, v


def _split_two_sizes(buffer: Tensor, part: HeadPart) -> Triple:
    """``split`` where heads of values have a width of their own."""
    rows, batch, width = buffer.shape
    kv, dim = len(part.kv_heads), part.head_dim
    n = len(part.q_heads) // kv
    sizes = n * dim, dim, part.value_dim
    pieces = buffer.view(rows, batch * kv, width // kv).split_with_sizes(sizes, 2)
    q, k, v = (t.unflatten(2, (count, -1)) for t, count in zip(pieces, (n, 1, 1), strict=True))
    return q, k, v


def split_apart(buffer: Tensor, part: HeadPart) -> Triple:
    """``split`` of a buffer that holds all queries, then all keys, then all values."""
    kv = len(part.kv_heads)
    shapes = [(heads // kv, dim) for heads, dim in part.shapes]
    return split_flat(buffer.view(-1), buffer.shape[0], buffer.shape[1] * kv, shapes)


def split_flat(flat: Tensor, rows: int, batch: int, shapes: Sequence[tuple[int, int]]) -> Triple:
    """Queries, keys and values [rows, batch, heads, D] that lie one after the other, of (heads, D)
    each."""
    pieces = flat.split([rows * batch * heads * dim for heads, dim in shapes])
    q, k, v = (t.view(rows, batch, *shape) for t, shape in zip(pieces, shapes, strict=True))
    return q, k, v


def _turn(source: Tensor, target: Tensor, table: RotaryTable, inverse: bool) -> None:
    """target = source rotated; both [S, B', h, D], the same memory or apart. One wide temporary,
    one rounding."""
    if source.is_cuda:
        from megatron_fluid.kernels.head_exchange.rotary import rotate_heads

        rotate_heads(source, target, table.cos, table.sin, table.interleaved, inverse)
        return
    dim = 2 * table.cos.shape[1]
    cos, sin = table.cos[:, None, None, :], table.sin[:, None, None, :]
    sin = -sin if inverse else sin
    first, second = slice(0, dim // 2), slice(dim // 2, dim)
    if table.interleaved:
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    a, b = source[..., first].to(cos.dtype), source[..., second].to(cos.dtype)
    turned = a * cos - b * sin, b * cos + a * sin
    target[..., first] = turned[0].to(target.dtype)
    target[..., second] = turned[1].to(target.dtype)
    if target.data_ptr() != source.data_ptr():
        target[..., dim:] = source[..., dim:]


def rotate_(buffer: Tensor, part: HeadPart, table: RotaryTable | None) -> None:
    """Rotate queries and keys of a packed [rows, B, width] buffer in place by ``table``'s rows."""
    if table is None or buffer.numel() == 0:
        return
    heads, n = _heads(buffer, part)
    both = heads[:, :, : n + 1]
    _turn(both, both, table, inverse=False)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, table: RotaryTable) -> Tensor:
        ctx.table, target = table, torch.empty_like(heads)
        _turn(heads, target, table, inverse=False)
        return target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient, target = grads[0].contiguous(), torch.empty_like(grads[0])
        _turn(gradient, target, ctx.table, inverse=True)
        return target, None


def rotated(heads: Tensor, table: RotaryTable | None) -> Tensor:
    """Queries or keys [S, B', h, D] rotated by their positions, differentiable once."""
    if table is None or heads.numel() == 0:
        return heads
    turned: Tensor = _Rotate.apply(heads, table)  # type: ignore[no-untyped-call]
    return turned


def pack_gradients(
    gradients: Triple, part: HeadPart, table: RotaryTable | None, target: Tensor
) -> None:
    """Write the gradients of q, k, v, [S, B, heads, D] or as ``split`` gives them, rotated back,
    into a packed [S, B, width] buffer."""
    if target.numel() == 0:
        return
    into = split(target, part)
    for gradient, to, turns in zip(gradients, into, (True, True, False), strict=True):
        gradient = gradient.reshape(to.shape)
        if turns and table is not None:
            _turn(gradient, to, table, inverse=True)
        else:
            to.copy_(gradient)


@cached_tables(256)
def _pack_table(part: HeadPart, apart: bool, device: torch.device) -> Tensor:
    """int32 [slots, 3]: kind, the key/value head that counts as a batch entry, and the head, in the
    views of ``split``.

    ``apart``: key/value heads never count as batch entries.
    """
    kv, n = len(part.kv_heads), len(part.q_heads) // len(part.kv_heads)
    lines = []
    for g in range(kv):
        lines += [(0, 0, g * n + i) if apart else (0, g, i) for i in range(n)]
        lines += [(kind, 0, g) if apart else (kind, g, 0) for kind in (1, 2)]
    return torch.tensor(lines, dtype=torch.int32, device=device)


def ceil_div(count: int, size: int) -> int:
    """Blocks of ``size`` that hold ``count``; Triton's own is slow on the host."""
    return -(-count // size)


def head_strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of position, batch entry and head in units of 16 bytes."""
    size, strides = tensor.element_size(), tensor.stride()
    return strides[0] * size // 16, strides[1] * size // 16, strides[2] * size // 16


def aligned_heads(tensor: Tensor) -> Tensor:
    """The heads [S, B', h, D], copied unless each starts at a multiple of 16 bytes."""
    size, (row, entry, head, last) = tensor.element_size(), tensor.stride()
    fits = last == 1 and not (tensor.data_ptr() | row * size | entry * size | head * size) % 16
    return tensor if fits else tensor.contiguous()


def rotary_arguments(
    table: RotaryTable | None, unused: Tensor, dim: int
) -> tuple[tuple[Tensor, Tensor], dict[str, int], bool]:
    """What the kernels that rotate heads of ``dim`` take: cosines and sines (``unused`` without a
    table), how many pairs are rotated and what is left, and whether pairs are interleaved."""
    pairs = 0 if table is None else table.cos.shape[1]
    sizes = {"HALF": pairs, "HALF_P": power_of_two(pairs), "REST_P": power_of_two(dim - 2 * pairs)}
    if table is None:
        return (unused, unused), sizes, False
    return (table.cos, table.sin), sizes, table.interleaved


@dataclass(frozen=True)
class Norm:
    """RMS norm of queries and keys over D: its weights [D] and epsilon."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


def pack_in_one_pass(
    gradients: Triple,
    part: HeadPart,
    table: RotaryTable | None,
    target: Tensor,
    norm: Norm | None = None,
    raw: Tensor | None = None,
    apart: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """``pack_backward`` by one kernel; heads must be a multiple of 16 bytes.

    ``apart``: the gradients are [S, B, heads, D] with all heads of a kind side by side, and not as
    ``split`` gives them.
    """
    import triton.language as tl

    from megatron_fluid.kernels.head_exchange.launch import pack_heads

    length, batch, width = target.shape
    dim, rows = part.head_dim, 32
    slots, blocks = width // dim, ceil_div(length * batch, rows)
    wide = torch.float64 if target.dtype == torch.float64 else torch.float32
    q, k, v = (aligned_heads(gradient) for gradient in gradients)
    before = partial = q_weight = k_weight = target  # unused without a norm
    if norm is not None and raw is not None:
        before, q_weight, k_weight = raw, norm.q_weight, norm.k_weight
        partial = torch.zeros((blocks, slots, dim), dtype=wide, device=target.device)
    kinds = _pack_table(part, apart, target.device)
    angles, sizes, interleaved = rotary_arguments(table, target, dim)
    tensors = (q, k, v, target, before, partial, kinds, q_weight, k_weight, *angles)
    strides = (*head_strides(q), *head_strides(k), *head_strides(v))
    pack_heads(
        blocks * slots,
        (*tensors, length * batch, batch, q.shape[1] // batch, *strides),
        EPS=0.0 if norm is None else norm.eps,
        SLOTS=slots,
        D=dim,
        **sizes,
        VEC=16 // target.element_size(),
        ROWS=rows,
        NORM=norm is not None,
        INTERLEAVED=interleaved,
        WIDE=tl.float64 if wide == torch.float64 else tl.float32,
    )
    if norm is None:
        return None
    by_slot = partial.sum(0)
    of_q, of_k = ((by_slot * (kinds[:, :1] == kind)).sum(0) for kind in (0, 1))
    return of_q, of_k


def pack_backward(
    gradients: Triple,
    part: HeadPart,
    table: RotaryTable | None,
    target: Tensor,
    norm: Norm | None = None,
    raw: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Write the gradients of the parts of ``split`` into a packed [S, B, width] buffer, back
    through rotation and, where ``norm`` was given ``raw`` [S, B, width], through the norm.

    Returns the gradients of the norm's weights [D], wide; None without a norm.
    """
    if table is None and norm is None and part.value_dim == part.head_dim:
        # A plain copy: torch.cat costs the host less than launching the Triton kernel.
        torch.cat(gradients, 2, out=_heads(target, part)[0])
        return None
    if target.is_cuda and target.numel() and part.head_dim * target.element_size() % 16 == 0:
        return pack_in_one_pass(gradients, part, table, target, norm, raw)
    pack_gradients(gradients, part, table, target)
    return None if norm is None or raw is None else _normalize_backward(raw, target, part, norm)


def _rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def normalize(raw: Tensor, target: Tensor, part: HeadPart, norm: Norm) -> None:
    """RMS-normalise queries and keys of packed ``raw`` into packed ``target``; values are
    copied."""
    if raw.numel() == 0:
        return
    source, into = split(raw, part), split(target, part)
    for tensor, result, weight in zip(source, into, (norm.q_weight, norm.k_weight), strict=False):
        unit, _ = _rms(tensor, norm.eps)
        result.copy_(unit * weight)
    into[2].copy_(source[2])


def _normalize_backward(
    raw: Tensor, gradient: Tensor, part: HeadPart, norm: Norm
) -> tuple[Tensor, Tensor]:
    """Turn the packed gradient of the normalised buffer into that of ``raw``, in place; returns the
    weights' gradients [D], wide."""
    weights = []
    source, grads = split(raw, part), split(gradient, part)
    for tensor, grad, weight in zip(source, grads, (norm.q_weight, norm.k_weight), strict=False):
        unit, inverse = _rms(tensor, norm.eps)
        wide = grad.to(unit.dtype)
        weights.append((wide * unit).sum((0, 1, 2)))
        scaled = wide * weight
        grad.copy_((scaled - unit * (scaled * unit).mean(-1, keepdim=True)) * inverse)
    return weights[0], weights[1]
