"""The experts of one rank in fp8: forward and dgrad by kernels/fp8_grouped_gemm, each operand
cast in one pass, weight gradients in fp8 (moe/fp8_weight_grads.py) or in bf16.

    forward:  cast x -> dispatch -> fc1 -> SwiGLU * probability, cast -> fc2
    backward: cast dy -> dispatch -> dgrad of fc2 -> backward of SwiGLU, cast -> dgrad of fc1;
              dW2 = dy^T a and dW1 = dh^T x from the casts of dy and dh, the x that was multiplied
              and a, cast with dh; or from bf16 a and dh and the dy and x that were multiplied

Where the transport does not carry packed rows, x and dy are cast when they have arrived, and dW2 in
bf16 is made of bf16 dy.

Kept for the backward: x in fp8, fc1's output companded to int8 (kernels/fp8_casts). Weights
are cast when they have changed.

Legend: N rows (sorted by expert), El experts, H hidden, F width of fc2's input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fluid.cuda.streams import current_capture
from megatron_fluid.kernels.fp8_casts.launch import (
    cast_rows,
    cast_weights,
    restore_rows,
    swiglu_backward_cast,
    swiglu_backward_in_fp8,
    swiglu_cast,
)
from megatron_fluid.kernels.fp8_casts.packed_rows import pack_rows, unpack_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import (
    CompandedRows,
    Fp8Matrices,
    Fp8Rows,
    fp8_grouped_matmul,
)
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import RowGroups

__all__ = [
    "WeightCast",
    "arrived_rows",
    "backward_product",
    "cast_segment",
    "forward_product",
    "hidden_product",
    "in_bf16",
    "packed_tokens",
    "weight_cast",
]


type _Rows = Tensor | Fp8Rows


class WeightCast:
    """One projection's weights in fp8, in both layouts, cast again when they have changed: by the
    parameters' version counters, or by `expire`.

    What changes a parameter past its counter (through `.data`, as Megatron's distributed optimizer
    does) has to call `expire`. Each CUDA-graph capture casts them anew, so that a replay casts what
    the weights are then; a capture of several microbatches casts them once.
    """

    def __init__(self) -> None:
        self._cast: tuple[Fp8Matrices, Fp8Matrices] | None = None
        self._versions: list[int] | None = None
        self._capture: tuple[int, int] | None = None

    def expire(self) -> None:
        self._versions = None

    def forward_matrices(self, fc: ExpertWeights) -> Fp8Matrices:
        """[El, out, in], as the weights are now."""
        versions = fc.versions()
        # Of another capture, or another stream of this one, it may come too late in a replay.
        capture = current_capture()
        if self._cast is None or (versions, capture) != (self._versions, self._capture):
            self._make(fc)
            self._versions, self._capture = versions, capture
        assert self._cast is not None
        return self._cast[0]

    def backward_matrices(self) -> Fp8Matrices:
        """[El, in, out], as they were in the last forward."""
        assert self._cast is not None, "a forward comes first"
        return self._cast[1]

    def _make(self, fc: ExpertWeights) -> None:
        first = fc.matrices[0]
        experts, (out, width) = fc.num_experts, first.shape
        if self._cast is None:
            self._cast = (
                _matrices(first, experts, out, width),
                _matrices(first, experts, width, out),
            )
        stack = fc.stack
        if stack is not None and stack.stride()[1:] == (width, 1) and stack.stride(0) % 8 == 0:
            cast_weights(stack, self._cast)
            return
        for e, matrix in enumerate(fc.matrices):
            part = [Fp8Matrices(m.values[e : e + 1], m.scales[e : e + 1]) for m in self._cast]
            cast_weights(matrix.contiguous().unsqueeze(0), (part[0], part[1]))


def _matrices(like: Tensor, experts: int, out: int, width: int) -> Fp8Matrices:
    values = like.new_empty((experts, out, width), dtype=torch.float8_e4m3fn)
    scales = like.new_empty((experts, out // 128, width // 128), dtype=torch.float32)
    return Fp8Matrices(values, scales)


def weight_cast(fc: ExpertWeights) -> WeightCast:
    """The cast of the weights of `fc`, which lives as long as they lie where they do."""
    found: WeightCast | None = fc.kept.cast
    if found is None:
        found = fc.kept.cast = WeightCast()
    return found


def packed_tokens(x: Tensor) -> Tensor:
    """Tokens [T, H] in fp8, as rows that a transport moves (kernels/fp8_casts)."""
    return pack_rows(x.contiguous())


def arrived_rows(rows: Tensor, hidden: int) -> Fp8Rows:
    """Packed rows of a segment, [N, hidden] in fp8."""
    return unpack_rows(rows, hidden)


def cast_segment(rows: Tensor | Fp8Rows, groups: RowGroups) -> Fp8Rows:
    """rows [N, H] in fp8, where they are not yet."""
    if isinstance(rows, Fp8Rows):
        return rows
    return cast_rows(rows.contiguous(), groups.count)


def _probs(rows: Tensor, probs: Tensor | None) -> Tensor:
    if probs is None:
        return torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
    return probs.float().contiguous()


def hidden_product(x: Tensor | Fp8Rows, fc1: ExpertWeights, groups: RowGroups) -> Tensor:
    """fc1's output bf16 [N, 2F]."""
    rows = cast_segment(x, groups)
    weights = weight_cast(fc1).forward_matrices(fc1)
    return fp8_grouped_matmul(rows, weights, groups.offsets, groups.ends)


def forward_product(
    x: Tensor | Fp8Rows, fc1: ExpertWeights, fc2: ExpertWeights, groups: RowGroups,
    probs: Tensor | None, keep: bool,
) -> tuple[Fp8Rows, CompandedRows | None, Fp8Rows, Fp8Matrices]:  # fmt: skip
    """x [N, H] in fp8, fc1's output [N, 2F] with `keep`, and the operands of fc2: [N, F], El times
    [H, F].

    probs: [N] or longer, None for ones.
    """
    rows = cast_segment(x, groups)
    h = hidden_product(rows, fc1, groups)
    activated, kept = swiglu_cast(h, _probs(h, probs), keep, groups.count)
    return rows, kept, activated, weight_cast(fc2).forward_matrices(fc2)


def backward_product(
    dy: Tensor | Fp8Rows, hidden: Tensor | CompandedRows, fc1: ExpertWeights, fc2: ExpertWeights,
    groups: RowGroups, probs: Tensor | None, fp8_weight_grads: bool,
) -> tuple[Fp8Rows, Fp8Matrices, _Rows, tuple[_Rows, _Rows], Tensor | None]:  # fmt: skip
    """The operands of fc1's dgrad, [N, 2F] and El times [H, 2F]; dh [N, 2F]; dy [N, H] and a [N,
    F], for the weight gradient of fc2; and dprobs [N] in probs' dtype or None. dh, dy and a in fp8
    with `fp8_weight_grads`, else in bf16.

    dy [N, H]; hidden: fc1's output [N, 2F].
    """
    rows = cast_segment(dy, groups)
    weights = weight_cast(fc2).backward_matrices()
    da = fp8_grouped_matmul(rows, weights, groups.offsets, groups.ends)
    pair: tuple[_Rows, _Rows]
    if fp8_weight_grads:
        cast, a, dprobs = swiglu_backward_in_fp8(hidden, da, _probs(da, probs), groups.count)
        dh: _Rows = cast
        pair = rows, a
    else:
        found = swiglu_backward_cast(hidden, da, _probs(da, probs), groups.count)
        dh, cast, activated, dprobs = found
        pair = dy, activated
    grads = None if probs is None else dprobs.to(probs.dtype)
    return cast, weight_cast(fc1).backward_matrices(), dh, pair, grads


def in_bf16(
    pairs: Sequence[tuple[Tensor | Fp8Rows, Tensor | Fp8Rows]], groups: Sequence[RowGroups]
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a weight gradient in bf16 in place of fp8, which stands for it."""

    def restored(rows: Tensor | Fp8Rows, count: Tensor | None) -> Tensor:
        return restore_rows(rows, count) if isinstance(rows, Fp8Rows) else rows

    found = zip(pairs, groups, strict=True)
    return [(restored(grad, g.count), restored(x, g.count)) for (grad, x), g in found]
