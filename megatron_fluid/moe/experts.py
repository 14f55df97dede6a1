"""The experts of one rank: what computes the segments of a call between dispatch and combine, out
of plain functions for grouped GEMMs and the activation, forward, dgrad and wgrad.

The GEMMs of all experts are one launch where megatron_fluid.kernels.grouped_gemm has one for them:
our own kernels on Hopper GPUs (bf16, fp16), torch's on later ones (bf16). Elsewhere they are a loop
over experts, which needs the row counts on the host.

Legend: N rows (n of one segment), sorted by expert, El experts, H hidden, F1 width of fc1's output,
F width of fc2's input.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad
from megatron_fluid.kernels.fp8_grouped_gemm.launch import CompandedRows, Fp8Rows
from megatron_fluid.kernels.grouped_gemm.launch import (
    add_weight_grads,
    can_add_weight_grads,
    can_gate,
    gated_matmul,
    grouped_weight_grad,
    host_ends,
    sends_rows,
    takes_main_grads,
)
from megatron_fluid.kernels.grouped_gemm.stacks import ReversedStack
from megatron_fluid.moe.activations import Activation, RowBiases
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups, grouped_product
from megatron_fluid.moe.transport import Exchange, Segment

__all__ = [
    "Hidden",
    "PlainExperts",
    "Route",
    "Rows",
    "activation_backward",
    "activation_forward",
    "add_to_main_grads",
    "have_triton",
    "merge_rows",
    "split_rows",
    "weight_grads",
]


type Rows = Tensor | Fp8Rows
type Hidden = Tensor | CompandedRows  # fc1's output, as it is kept
type Route = tuple[Tensor | None, RowGroups]  # of a segment in the forward: probabilities, division


def weight_grads(fc: ExpertWeights, dy: Tensor, x: Tensor, groups: RowGroups) -> list[Tensor]:
    """dW of one projection: dy_e.T @ x_e over the rows of each expert, zero for one without rows.

    Args:
        dy: gradient of the projection's output. [N, out]
        x: its input. [N, in]
        groups: the rows of each expert.

    Returns:
        One tensor for each of fc.params.
    """
    left, right = (x, dy) if fc.layout == "in_out" else (dy, x)
    if not left.shape[0]:
        return fc.as_gradients(left.new_zeros(fc.num_experts, left.shape[1], right.shape[1]))
    gradient = grouped_weight_grad(left, right, groups.offsets, groups.ends)
    if not sends_rows(left.device, left.dtype):
        # Kernels of other packages may leave the matrix of an expert without rows unwritten.
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
    overwrite = fc.overwrites_main_grads()
    if can_add_weight_grads(left, right):
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
    counts = [g.counts() for g in groups]

    def merged(tensors: Sequence[Tensor]) -> Tensor:
        parts = [t.split(c) for t, c in zip(tensors, counts, strict=True)]
        return torch.cat([part[e] for e in range(len(counts[0])) for part in parts])

    offsets = torch.stack([g.offsets for g in groups]).sum(0, dtype=torch.int32)
    ends = list(itertools.accumulate(map(sum, zip(*counts, strict=True))))
    first, second = (merged(tensors) for tensors in zip(*pairs, strict=True))
    return first, second, RowGroups(offsets, ends)


def split_rows(rows: Tensor, groups: Sequence[RowGroups]) -> list[Tensor]:
    """The inverse of merge_rows, of one tensor: rows [N, ...] -> S times [N_s, ...]"""
    if len(groups) == 1:
        return [rows]
    counts = [group.counts() for group in groups]
    blocks = rows.split([count for by_source in zip(*counts, strict=True) for count in by_source])
    return [torch.cat(blocks[source :: len(groups)]) for source in range(len(groups))]


@functools.cache
def have_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_fused(
    activation: Activation, h: Tensor, probs: Tensor | None, count: Tensor | None
) -> bool:
    """Whether kernels/activation serves these: rows counted on the device always, others where
    the kernels take them."""
    if count is not None:
        return True
    if not (h.is_cuda and activation.built_in and have_triton()):
        return False
    from megatron_fluid.kernels.activation.kernel import can_fuse

    return can_fuse(activation.name, h, probs)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _sum(h: Tensor, bias: RowBiases | None) -> Tensor:
    """h + bias in fp32 or better: h itself, where it has that dtype and no bias."""
    wide = _wide(h)
    return wide if bias is None else wide + bias.table[bias.experts].to(wide.dtype)


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
        from megatron_fluid.kernels.activation.kernel import fused_activation_forward

        return fused_activation_forward(activation.name, h, probs, count, activation.variant, bias)
    value = activation.value(_sum(h, bias))
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
        consume: whether dh may take h's memory, where a kernel can.

    Returns:
        dh [N, F1], also the gradient of each row's bias, and a [N, F] in h's dtype, and dprobs [N]
        in probs' dtype or None.
    """
    count = None if groups is None else groups.count
    if _is_fused(activation, h, probs, count):
        from megatron_fluid.kernels.activation.kernel import fused_activation_backward

        bounded = groups is not None and groups.ends is None and not groups.filled
        rows, variant = (h, da, probs, count), activation.variant
        return fused_activation_backward(
            activation.name, *rows, bounded=bounded, consume=consume, variant=variant, bias=bias
        )
    with torch.enable_grad():
        leaf = _sum(h, bias).detach().requires_grad_()
        value = activation.forward(leaf)
    wide_da, scale = _wide(da), None if probs is None else probs.unsqueeze(1)
    grad = wide_da if scale is None else (wide_da * scale).to(value.dtype)
    (dh,) = torch.autograd.grad(value, leaf, grad)
    value = value.detach()
    if probs is None or scale is None:
        return dh.to(h.dtype), value.to(h.dtype), None
    dprobs = (value * wide_da).sum(1).to(probs.dtype)
    return dh.to(h.dtype), (value * scale).to(h.dtype), dprobs


class PlainExperts:
    """What computes the segments of one call, in the precision of the weights and without biases.

    Subclasses: BiasedExperts (moe/biases.py), Fp8Experts (moe/fp8_experts.py).

    Attributes:
        fc1, fc2: the projections.
        bias_params: parameters of fc1's and of fc2's biases, whose gradients are autograd's.
    """

    bias_params: tuple[Tensor, ...] = ()

    def __init__(self, fc1: ExpertWeights, fc2: ExpertWeights, activation: Activation) -> None:
        self.fc1, self.fc2, self.activation = fc1, fc2, activation

    def versions(self) -> list[int]:
        """Counts of the parameters' changes in place. They are not saved tensors of autograd, which
        would cost a detour for each of Megatron's parameters, but are held to the same rule."""
        return self.fc1.versions() + self.fc2.versions()

    def packed(self, x: Tensor) -> Tensor:
        """Tokens or gradients [T, H] as a transport moves them that carries packed rows."""
        return x

    def unpacked(self, rows: Tensor) -> Rows:
        """Rows [n, H] of such a transport."""
        return rows

    def hidden(self, rows: Rows, groups: RowGroups) -> Tensor:
        """The output of fc1 without its bias, which the activation adds. [n, F1]"""
        return grouped_product(rows, self.fc1.forward_matrices, groups)

    def forward(
        self, rows: Rows, segment: Segment, exchange: Exchange, keep: bool
    ) -> tuple[Rows, Hidden | None]:
        """Compute a segment from its rows on and start its combine. What the backward needs: the
        rows [n, H], and with `keep` the output of fc1 [n, F1]."""
        assert isinstance(rows, Tensor)
        h, activated = self.activated(rows, segment.groups, segment.probs, keep)
        exchange.combine_product(segment, activated, self.fc2.forward_matrices)
        return rows, h

    def activated(
        self, rows: Tensor, groups: RowGroups, probs: Tensor | None, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the output of fc1 [n, F1], None without `keep`, and what is activated of it and
        multiplied with `probs` [n, F]: by one kernel where there is one."""
        act, matrices = self.activation, self.fc1.forward_matrices
        if probs is not None and can_gate(rows, matrices, probs, act.name if act.plain else ""):
            assert isinstance(matrices, Tensor | ReversedStack)
            activated = rows.new_empty(rows.shape[0], self.fc2.in_width)
            # Tiles are chosen by the ends.
            ends = groups.likely_ends if groups.ends is None else groups.ends
            h = gated_matmul(rows, matrices, groups.offsets, probs, activated, keep, ends=ends)
        else:
            h = grouped_product(rows, matrices, groups)
            activated = activation_forward(act, h, probs, groups.count)
        return h if keep else None, activated

    def backward(
        self, dy: Rows, h: Hidden, route: Route, segment: Segment, exchange: Exchange, consume: bool
    ) -> tuple[Rows, tuple[Rows, Rows]]:
        """The dgrads of a segment, whose combine starts.

        Args:
            dy: gradients of the results. [n, H]
            h: the output of fc1 without its bias. [n, F1]
            route: of the forward's segment.
            segment: of the backward.
            consume: h is not asked for again.

        Returns:
            The gradient of fc1's output [n, F1], and what dW of fc2 is made of: dy and the input of
            fc2 [n, F].
        """
        assert isinstance(h, Tensor) and isinstance(dy, Tensor)
        da = grouped_product(dy, self.fc2.backward_matrices, segment.groups)
        dh, activated, dprobs = activation_backward(self.activation, h, da, *route, consume)
        exchange.combine_product(segment, dh, self.fc1.backward_matrices, dprobs)
        return dh, (dy, activated)

    def weight_grads(self, fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> list[Tensor]:
        """As the function of this name."""
        assert isinstance(dy, Tensor) and isinstance(x, Tensor)
        return weight_grads(fc, dy, x, groups)

    def add_to_main_grads(self, fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> None:
        """As the function of this name."""
        assert isinstance(dy, Tensor) and isinstance(x, Tensor)
        add_to_main_grads(fc, dy, x, groups)

    def bias_grads(
        self, dh: Sequence[Rows], pairs2: Sequence[tuple[Rows, Rows]], routes: Sequence[Route]
    ) -> list[Tensor]:
        """Gradients of bias_params. Of each segment: the gradient of fc1's output, what dW of fc2
        is made of, the forward's route."""
        return []
