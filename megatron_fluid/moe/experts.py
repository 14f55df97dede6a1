"""The experts of one rank: grouped GEMMs and an activation, forward, dgrad and wgrad, as plain
functions.

The GEMMs of all experts are one launch where megatron_fluid.kernels.grouped_gemm has one for them:
our own kernels on Hopper GPUs (bf16, fp16), torch's on later ones (bf16). Elsewhere they are a loop
over experts, which needs the row counts on the host.

Legend: N rows (sorted by expert), El experts, H hidden, F1 width of fc1's output, F width of fc2's
input.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad, mark_all_added_to_main_grad
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Matrices, Fp8Rows, fp8_grouped_matmul
from megatron_fluid.kernels.grouped_gemm.launch import (
    add_weight_grads,
    can_add_weight_grads,
    grouped_matmul,
    grouped_weight_grad,
    host_ends,
    sends_rows,
    takes_main_grads,
)
from megatron_fluid.moe.activations import Activation, RowBiases
from megatron_fluid.moe.expert_weights import ExpertWeights, Matrices

__all__ = [
    "RowGroups",
    "activation_backward",
    "activation_forward",
    "add_to_main_grads",
    "adds_one_by_one",
    "grouped_product",
    "have_triton",
    "merge_rows",
    "weight_grads",
]


@dataclass(slots=True)
class RowGroups:
    """How rows sorted by expert are divided among the experts.

    Attributes:
        offsets: end of each expert's rows, on the rows' device. int32 [El]
        ends: the offsets on the host, or None where the host does not know them. The rows may then
            be fewer than the tensors that hold them.
        likely_ends: offsets of an earlier call, for choices that only speed depends on.
        count: number of rows, on the device, for transports whose rows Triton kernels serve. int32
            [1]
        filled: whether all rows of the tensors are used, but for choices that were dropped.
        experts: what experts_of has made, or None.
    """

    offsets: Tensor
    ends: Sequence[int] | None = None
    likely_ends: Sequence[int] | None = None
    count: Tensor | None = None
    filled: bool = False
    experts: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_counts(cls, counts: Sequence[int], offsets: Tensor | None = None) -> RowGroups:
        """From the rows of each expert, and the offsets if a tensor holds them already."""
        ends = list(itertools.accumulate(counts))
        return cls(torch.tensor(ends, dtype=torch.int32) if offsets is None else offsets, ends)

    @property
    def num_rows(self) -> int:
        return host_ends(self.offsets, self.ends)[-1]

    def experts_of(self, rows: int) -> Tensor:
        """The expert of each of so many rows of the tensors, made once; El for rows behind the last
        expert's. int32 [rows]"""
        if self.experts is None or self.experts.shape[0] != rows:
            each = torch.arange(rows, device=self.offsets.device, dtype=torch.int32)
            self.experts = torch.searchsorted(self.offsets, each, right=True, out_int32=True)
        return self.experts

    def part(self, begin: int, end: int) -> RowGroups:
        """The division of rows begin .. end - 1 alone. The host knows the ends."""
        assert self.ends is not None
        if (begin, end) == (0, self.ends[-1]):
            return self
        ends = [min(max(e, begin), end) - begin for e in self.ends]
        return RowGroups((self.offsets - begin).clamp(0, end - begin), ends)


def grouped_product(x: Tensor | Fp8Rows, matrices: Matrices, groups: RowGroups) -> Tensor:
    """x[rows of e] @ matrices[e]: x [N, in], El matrices [in, out] -> [N, out]; of fp8 rows with
    their Fp8Matrices in bf16."""
    if isinstance(x, Fp8Rows):
        assert isinstance(matrices, Fp8Matrices)
        return fp8_grouped_matmul(x, matrices, groups.offsets, groups.ends)
    if not x.shape[0]:
        return x.new_empty((0, matrices[0].shape[-1]))
    return grouped_matmul(x, matrices, groups.offsets, groups.ends)


def adds_one_by_one(rows: int, experts: int) -> bool:
    """Whether main_grads of experts with so many rows in all take less time in one GEMM an expert
    than in the grouped kernel, whose tiles wait for their old sums.
    """
    # Measured: docs/tuning_notes.md#grouped-gemm
    return rows >= 3072 * experts


def weight_grads(
    fc: ExpertWeights, dy: Tensor, x: Tensor, groups: RowGroups, fused_main_grad: bool = False
) -> list[Tensor]:
    """dW of one projection: dy_e.T @ x_e over the rows of each expert, zero for one without rows.

    Args:
        dy: gradient of the projection's output. [N, out]
        x: its input. [N, in]
        groups: the rows of each expert.
        fused_main_grad: add dW to main_grad, in its precision.

    Returns:
        What autograd is given, one tensor for each of fc.params: dW, or with fused_main_grad a
        placeholder.
    """
    if fused_main_grad:
        add_to_main_grads(fc, dy, x, groups)
        return mark_all_added_to_main_grad(fc.params)
    left, right = (x, dy) if fc.layout == "in_out" else (dy, x)
    if not left.shape[0]:
        shape = (fc.num_experts, left.shape[1], right.shape[1])
        return fc.as_gradients(left.new_zeros(shape))
    gradient = grouped_weight_grad(left, right, groups.offsets, groups.ends)
    if not sends_rows(left.device, left.dtype):
        # Other kernels than ours may leave the matrix of an expert without rows unwritten.
        if groups.ends is None:
            rows = groups.offsets.diff(prepend=groups.offsets.new_zeros(1))
            gradient.masked_fill_((rows == 0).view(-1, 1, 1), 0.0)
            return fc.as_gradients(gradient)
        for e, (start, end) in enumerate(itertools.pairwise([0, *groups.ends])):
            if start == end:
                gradient[e].zero_()
    return fc.as_gradients(gradient)


def add_to_main_grads(fc: ExpertWeights, dy: Tensor, x: Tensor, groups: RowGroups) -> None:
    """Add dW of one projection to the main_grads of its parameters, in their precision, or write it
    there where Megatron asks for that. Arguments as for weight_grads."""
    left, right = (x, dy) if fc.layout == "in_out" else (dy, x)
    alone = groups.ends is not None and adds_one_by_one(left.shape[0], fc.num_experts)
    overwrite = fc.overwrites_main_grads()
    if not alone and can_add_weight_grads(left, right):
        grads, found = fc.kernel_grads(takes_main_grads)
        if found.fit:
            given = left, right, groups.offsets, found.addresses, grads
            add_weight_grads(*given, overwrite=overwrite)
            return
    spans = itertools.pairwise([0, *host_ends(groups.offsets, groups.ends)])
    for grad, span in zip(fc.main_grads(), spans, strict=True):
        rows = slice(*span)
        add_product_to_main_grad(grad, left[rows], right[rows], overwrite)


def merge_rows(
    pairs: Sequence[tuple[Any, Any]], groups: Sequence[RowGroups]
) -> tuple[Tensor, Tensor, RowGroups]:
    """Pairs of row tensors of several sources, each sorted by expert, as one pair sorted by expert
    (sources in their order within).

    Args:
        pairs: S times ([N_s, ...], [N_s, ...])
        groups: the division of each source's rows, known to the host where there are several.
    """
    if len(pairs) == 1:
        return *pairs[0], groups[0]
    spans = [itertools.pairwise([0, *(g.ends or ())]) for g in groups]
    counts = [[end - start for start, end in ends] for ends in spans]
    blocks = [(s, e) for e in range(len(counts[0])) for s in range(len(counts))]

    def merged(tensors: Sequence[Tensor]) -> Tensor:
        parts = [t.split(c) for t, c in zip(tensors, counts, strict=True)]
        return torch.cat([parts[s][e] for s, e in blocks])

    offsets = torch.stack([g.offsets for g in groups]).sum(0, dtype=torch.int32)
    ends = list(itertools.accumulate(map(sum, zip(*counts, strict=True))))
    first, second = (merged(tensors) for tensors in zip(*pairs, strict=True))
    return first, second, RowGroups(offsets, ends)


@functools.cache
def have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_fused(
    activation: Activation, h: Tensor, probs: Tensor | None, count: Tensor | None
) -> bool:
    """Whether moe/fused_activation.py serves these: rows counted on the device always, others where
    the kernels take them."""
    if count is not None:
        return True
    if not (h.is_cuda and activation.built_in and have_triton()):
        return False
    from megatron_fluid.moe.fused_activation import can_fuse

    return can_fuse(activation.name, h, probs)


# On a CPU, elements of h that an activation takes at once: its temporaries stay in the core's
# cache, and the allocator need not ask the kernel for their pages. Measured:
# docs/tuning_notes.md#experts-over-several-hosts-on-cpus
_BLOCK = 2**18


def _blocks(activation: Activation, h: Tensor) -> list[slice]:
    """Rows that a CPU takes at once; one slice where they are few, or of a caller's own function,
    which may look at all rows."""
    rows, width = h.shape
    step = max(1, _BLOCK // max(width, 1))
    if h.device.type != "cpu" or not activation.built_in or rows <= step:
        return [slice(0, rows)]
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _sum(h: Tensor, bias: RowBiases | None) -> Tensor:
    """h + bias in fp32 or better: h itself, where it has that dtype and no bias."""
    wide = _wide(h)
    if bias is None:
        return wide
    return wide + bias.table.index_select(0, bias.experts).to(wide.dtype)


def activation_forward(
    activation: Activation,
    h: Tensor,
    probs: Tensor | None,
    count: Tensor | None = None,
    bias: RowBiases | None = None,
) -> Tensor:
    """a = act(h + bias) * p, computed in fp32 or better from h on: h + bias is not rounded to h's
    dtype.

    Args:
        h: the product of fc1, pre-activation but for the bias. [N, F1]
        probs: [N], or longer with `count` (see RowGroups); None for ones.
        bias: of fc1, or None.

    Returns:
        a [N, F] in h's dtype.
    """
    if _is_fused(activation, h, probs, count):
        from megatron_fluid.moe.fused_activation import fused_activation_forward

        given = activation.name, h, probs, count, activation.variant, bias
        return fused_activation_forward(*given)
    blocks = _blocks(activation, h)
    if len(blocks) == 1:
        return _activated(activation, h, probs, bias)
    out = h.new_empty((h.shape[0], h.shape[1] // activation.gates))
    for rows in blocks:
        weights = None if probs is None else probs[rows]
        added = None if bias is None else bias.part(rows)
        out[rows] = _activated(activation, h[rows], weights, added)
    return out


def _activated(
    activation: Activation, h: Tensor, probs: Tensor | None, bias: RowBiases | None
) -> Tensor:
    value = activation.forward(_sum(h, bias))
    return (value if probs is None else value * probs.unsqueeze(1)).to(h.dtype)


def activation_backward(
    activation: Activation,
    h: Tensor,
    da: Tensor,
    probs: Tensor | None,
    groups: RowGroups | None = None,
    consume: bool = False,
    bias: RowBiases | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward of activation_forward, and a again for the weight gradient of fc2.

    Args:
        da: gradient of a, whose memory a may take. [N, F]
        consume: whether dh may take h's memory.

    Returns:
        dh [N, F1], also the gradient of each row's bias, and a [N, F] in h's dtype, and dprobs [N]
        in probs' dtype or None.
    """
    count = None if groups is None else groups.count
    if _is_fused(activation, h, probs, count):
        from megatron_fluid.moe.fused_activation import fused_activation_backward

        bounded = groups is not None and groups.ends is None and not groups.filled
        rows, variant = (h, da, probs, count), activation.variant
        return fused_activation_backward(
            activation.name, *rows, bounded=bounded, consume=consume, variant=variant, bias=bias
        )
    blocks = _blocks(activation, h)
    if len(blocks) == 1:
        return _activation_slopes(activation, h, da, probs, bias)
    dh, a = h if consume else torch.empty_like(h), da
    dprobs = None if probs is None else probs.new_empty(h.shape[0])
    for own in blocks:
        weights = None if probs is None else probs[own]
        added = None if bias is None else bias.part(own)
        given = activation, h[own], da[own], weights, added
        dh[own], a[own], found = _activation_slopes(*given)
        if dprobs is not None and found is not None:
            dprobs[own] = found
    return dh, a, dprobs


def _activation_slopes(
    activation: Activation, h: Tensor, da: Tensor, probs: Tensor | None, bias: RowBiases | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    wide_h, wide_da = _sum(h, bias), _wide(da)
    value = activation.forward(wide_h)
    if probs is None:
        return activation.backward(wide_h, wide_da).to(h.dtype), value.to(h.dtype), None
    scale = probs.unsqueeze(1)
    dprobs = (value * wide_da).sum(1).to(probs.dtype)
    dh = activation.backward(wide_h, (wide_da * scale).to(wide_h.dtype))
    return dh.to(h.dtype), (value * scale).to(h.dtype), dprobs
