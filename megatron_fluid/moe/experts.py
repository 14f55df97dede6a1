"""The experts of one rank: two grouped GEMMs and an activation, forward, dgrad and wgrad, as plain
functions.

The GEMMs of all experts are one launch, with offsets on the device, where
megatron_fluid.kernels.grouped_gemm has one for them: our own kernels on Hopper GPUs (bf16, fp16),
torch's on later ones (bf16). Elsewhere they are a loop over experts with the host's counts. Nothing
here reads from the device.

Legend: N rows (sorted by expert), El experts, H hidden, F1 width of fc1's output, F width of fc2's
input.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import (
    add_product_to_main_grad,
    mark_all_added_to_main_grad,
)
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels import grouped_gemm
from megatron_fluid.kernels.grouped_gemm import (
    add_weight_grads,
    can_add_weight_grads,
    can_gate,
    can_group,
    gated_matmul,
    grouped_matmul,
)
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.fused_activation import (
    can_fuse,
    fused_activation_backward,
    fused_activation_forward,
)

__all__ = [
    "ExpertWeights",
    "RowGroups",
    "accumulate_weight_grad",
    "activation_backward",
    "activation_forward",
    "adds_one_by_one",
    "expert_major",
    "grouped_activated",
    "grouped_input_grad",
    "grouped_linear",
    "grouped_weight_grad",
]


@dataclass(frozen=True)
class RowGroups:
    """How rows are divided among experts.

    Attributes:
        counts: rows of each expert, known to the host. [El]
        offsets: end of each expert's rows, on the rows' device; None on a CPU. [El] int32
    """

    counts: Sequence[int]
    offsets: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return sum(self.counts)

    def part(self, begin: int, end: int) -> RowGroups:
        """The division of rows begin .. end - 1 alone."""
        if (begin, end) == (0, self.num_rows):
            return self
        counts, first = [], 0
        for count in self.counts:
            counts.append(max(0, min(end, first + count) - max(begin, first)))
            first += count
        offsets = None if self.offsets is None else (self.offsets - begin).clamp(0, end - begin)
        return RowGroups(counts, offsets)


class ExpertWeights:
    """One projection's weights of all local experts, in whichever layout they live. Never copied.

    Args:
        weights: a stacked tensor, or one matrix for each expert (Megatron's parameters).
        num_experts: El.
        layout: "out_in" is nn.Linear's and Megatron's: [El, out, in], or El times [out, in].
            "in_out" is the transposed one: [El, in, out], also folded into two dimensions ([in, El
            * out] or [El * in, out], as GroupedMLP had it, whose memory is [El, in, out]).
        name: for errors.

    Attributes:
        params: what was given. One stacked, or El
        stack: a view of all experts' matrices, without gradient, if they lie in memory at equal
            distances, else None. [El, out, in]
        out_width, in_width: of a matrix.

    Raises:
        ConfigError: the number of experts, or the shape, does not fit.
    """

    stack: Tensor | None

    def __init__(
        self,
        weights: Tensor | Sequence[Tensor],
        num_experts: int,
        layout: str = "out_in",
        name: str = "weight",
        in_width: int | None = None,
    ) -> None:
        if layout not in ("out_in", "in_out"):
            raise ConfigError.of("layout", layout, "out_in, in_out")
        self.layout, self.num_experts = layout, num_experts
        self.params: tuple[Tensor, ...] = (
            (weights,) if isinstance(weights, Tensor) else tuple(weights)
        )
        self.stacked = isinstance(weights, Tensor)
        self._transposed: Tensor | None = None
        self._places = [_place(param) for param in self.params]
        if not self.stacked:
            found = [list(param.shape) for param in self.params]
            if len(self.params) != num_experts or any(
                len(shape) != 2 or shape != found[0] for shape in found
            ):
                raise ConfigError.of(
                    name, found, f"{num_experts} matrices of one shape, one for each local expert"
                )
            matrices = [param.detach() for param in self.params]
            self._views: list[Tensor] | None = (
                [m.t() for m in matrices] if layout == "in_out" else matrices
            )
            self.stack = _neighbours(self._views)
        else:
            stack = self.params[0].detach()
            if stack.dim() == 2 and layout == "in_out" and in_width is not None:
                if not stack.is_contiguous() or stack.numel() % (num_experts * in_width):
                    raise ConfigError.of(
                        name,
                        list(stack.shape),
                        f"a contiguous [{in_width}, experts * out] of {num_experts} experts",
                    )
                stack = stack.view(num_experts, in_width, -1)
            if stack.dim() != 3 or stack.shape[0] != num_experts:
                raise ConfigError.of(
                    name,
                    list(self.params[0].shape),
                    f"three dimensions, the first being {num_experts} local experts",
                )
            self.stack = stack.transpose(1, 2) if layout == "in_out" else stack
            self._views = None
        self._addresses: tuple[list[int], Tensor] | None = None
        self.out_width, self.in_width = (
            self.matrices[0].shape if self.stack is None else self.stack.shape[-2:]
        )

    def holds(self, weights: Tensor | Sequence[Tensor]) -> bool:
        """Whether this was made of these very tensors, and their memory is still the same."""
        given = (weights,) if isinstance(weights, Tensor) else weights
        return (
            len(given) == len(self.params)
            and all(a is b for a, b in zip(given, self.params, strict=True))
            and [_place(param) for param in given] == self._places
        )

    @property
    def matrices(self) -> list[Tensor]:
        """Views of each expert's matrix, without gradient. El times [out, in]"""
        if self._views is None:
            assert self.stack is not None
            self._views = list(self.stack.unbind(0))
        return self._views

    @property
    def transposed(self) -> Tensor | None:
        """stack, transposed. [El, in, out]"""
        if self._transposed is None and self.stack is not None:
            self._transposed = self.stack.transpose(1, 2)
        return self._transposed

    def requires_grad(self) -> bool:
        return any(param.requires_grad for param in self.params)

    def deferrable(self) -> bool:
        """Whether the gradients may bypass autograd's graph: leaves, all of them trained or
        none."""
        return all(
            p.is_leaf and p.requires_grad == self.params[0].requires_grad for p in self.params
        )

    def main_grads(self) -> list[Tensor]:
        """Megatron's gradient buffers, a matrix for each expert. El times [out, in]"""
        if self.stacked:
            main_grad: Tensor = self.params[0].main_grad  # type: ignore[attr-defined]
            return list(main_grad.view(self.num_experts, self.out_width, self.in_width).unbind(0))
        return list(map(operator.attrgetter("main_grad"), self.params))

    def main_grad_addresses(self, grads: Sequence[Tensor]) -> Tensor:
        """Where `grads`, which are main_grads(), begin, for a kernel: int64 [El] on their device,
        made again when one of them moved.
        """
        addresses = list(map(Tensor.data_ptr, grads))
        if self._addresses is None or addresses != self._addresses[0]:
            self._addresses = (
                addresses,
                torch.tensor(addresses, dtype=torch.int64, device=grads[0].device),
            )
        return self._addresses[1]

    def as_gradients(self, gradient: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """What grouped_weight_grad made, one tensor for each of params, in its shape."""
        if isinstance(gradient, Tensor):
            if not self.stacked:
                return list(gradient.unbind(0))
            shape = self.params[0].shape
            return [gradient if gradient.shape == shape else gradient.view(shape)]
        return list(gradient)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _neighbours(matrices: Sequence[Tensor]) -> Tensor | None:
    """One view of matrices that lie in one storage at equal distances (as after
    DistributedDataParallel), else None."""
    first = matrices[0]
    if len(matrices) == 1:
        return first.unsqueeze(0)
    step = matrices[1].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for i, matrix in enumerate(matrices):
        if matrix.untyped_storage().data_ptr() != storage or matrix.stride() != first.stride():
            return None
        if step <= 0 or matrix.storage_offset() != first.storage_offset() + i * step:
            return None
    return first.as_strided(
        (len(matrices), *first.shape), (step, *first.stride()), first.storage_offset()
    )


def grouped_linear(x: Tensor, weights: ExpertWeights, groups: RowGroups) -> Tensor:
    """y = x @ w_e.T for each row's expert e: x [N, in] -> y [N, out]"""
    if x.shape[0] == 0:
        return x.new_empty((0, weights.out_width))
    if (
        weights.transposed is not None
        and groups.offsets is not None
        and can_group(x, weights.transposed)
    ):
        return grouped_matmul(x, weights.transposed, groups.offsets)
    y = x.new_empty((x.shape[0], weights.out_width))
    for rows, matrix in _pieces(groups, weights):
        torch.mm(x[rows], matrix.t(), out=y[rows])
    return y


def grouped_activated(
    x: Tensor,
    weights: ExpertWeights,
    groups: RowGroups,
    activation: Activation,
    probs: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """h = grouped_linear(x) and activation_forward of it, in one kernel where there is one: x [N,
    in], probs [N] or None -> [N, F1], [N, F]
    """
    stack, offsets = weights.transposed, groups.offsets
    name = activation.name if activation.built_in else ""
    if stack is None or offsets is None or probs is None or not can_gate(x, stack, probs, name):
        h = grouped_linear(x, weights, groups)
        return h, activation_forward(activation, h, probs)
    out = x.new_empty(x.shape[0], weights.out_width // 2)
    ends = list(itertools.accumulate(groups.counts))
    kept = gated_matmul(x, stack, offsets, probs, out, ends=ends)
    assert kept is not None
    return kept, out


def grouped_input_grad(dy: Tensor, weights: ExpertWeights, groups: RowGroups) -> Tensor:
    """dx = dy @ w_e for each row's expert e: dy [N, out] -> dx [N, in]"""
    if dy.shape[0] == 0:
        return dy.new_empty((0, weights.in_width))
    if weights.stack is not None and groups.offsets is not None and can_group(dy, weights.stack):
        return grouped_matmul(dy, weights.stack, groups.offsets)
    dx = dy.new_empty((dy.shape[0], weights.in_width))
    for rows, matrix in _pieces(groups, weights):
        torch.mm(dy[rows], matrix, out=dx[rows])
    return dx


def _pieces(groups: RowGroups, weights: ExpertWeights) -> list[tuple[slice, Tensor]]:
    pieces, first = [], 0
    for count, matrix in zip(groups.counts, weights.matrices, strict=True):
        if count:
            pieces.append((slice(first, first + count), matrix))
        first += count
    return pieces


def grouped_weight_grad(
    dy: Tensor, x: Tensor, weights: ExpertWeights, groups: RowGroups
) -> Tensor | list[Tensor]:
    """dw_e = dy_e.T @ x_e over the rows of each expert, in the weights' own layout; zero for an
    expert without rows.

    Args:
        dy: [N, out]
        x: [N, in]
        groups: the rows of each expert over all sources (see expert_major).

    Returns:
        [El, out, in] or, for layout "in_out", [El, in, out]; a list of matrices where the weights
        are one for each expert and the loop computed them.
    """
    left, right = (x, dy) if weights.layout == "in_out" else (dy, x)
    shape = (left.shape[1], right.shape[1])
    if groups.offsets is not None and left.shape[0] and can_group(left, right):
        gradient = grouped_gemm.grouped_weight_grad(left, right, groups.offsets)
        for e, count in enumerate(groups.counts):
            if count == 0:
                gradient[e].zero_()
        return gradient
    stack = left.new_empty((weights.num_experts, *shape)) if weights.stacked else None
    out = (
        [left.new_empty(shape) for _ in weights.params] if stack is None else list(stack.unbind(0))
    )
    first = 0
    for count, matrix in zip(groups.counts, out, strict=True):
        if count:
            torch.mm(left[first : first + count].t(), right[first : first + count], out=matrix)
        else:
            matrix.zero_()
        first += count
    return out if stack is None else stack


def adds_one_by_one(rows: int, experts: int) -> bool:
    """Whether gradients of experts with so many rows in all are added to main_grad faster by one
    GEMM an expert than by the grouped kernel, whose tiles wait for their old sums: with 4,100 rows
    an expert it took 1.2 times as long on an H200, with 2,000 as long.
    """
    return rows >= 3072 * experts


def accumulate_weight_grad(
    dy: Tensor, x: Tensor, weights: ExpertWeights, groups: RowGroups
) -> list[Tensor]:
    """main_grad += dW for every expert, in main_grad's precision (Megatron's gradient accumulation
    fusion).

    Args:
        dy, x, groups: as for grouped_weight_grad.

    Returns:
        For each parameter what autograd is to be given instead of the gradient.
    """
    left, right = (x, dy) if weights.layout == "in_out" else (dy, x)
    overwritten = any(getattr(param, "overwrite_main_grad", False) for param in weights.params)
    alone = adds_one_by_one(left.shape[0], weights.num_experts)
    if groups.offsets is not None and not overwritten and weights.layout == "out_in" and not alone:
        grads = weights.main_grads()
        if can_add_weight_grads(left, right, grads):
            add_weight_grads(left, right, groups.offsets, weights.main_grad_addresses(grads), grads)
            return mark_all_added_to_main_grad(weights.params)
    first = 0
    for e, count in enumerate(groups.counts):
        param = weights.params[0] if weights.stacked else weights.params[e]
        main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
        if weights.stacked:
            main_grad = main_grad.view(weights.num_experts, left.shape[1], right.shape[1])[e]
        rows = slice(first, first + count)
        overwrite = bool(getattr(param, "overwrite_main_grad", False))
        add_product_to_main_grad(main_grad, left[rows], right[rows], overwrite)
        first += count
    return mark_all_added_to_main_grad(weights.params)


def expert_major(segments: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> Tensor:
    """Rows of several sources, each sorted by expert, as one tensor sorted by expert (sources in
    their order within).

    Args:
        segments: rows of each source. S times [N_s, ...]
        counts: rows of each expert in each segment. [S][El]
    """
    if len(segments) == 1:
        return segments[0]
    starts = [0] * len(segments)
    pieces = []
    for e in range(len(counts[0])):
        for s, segment in enumerate(segments):
            count = counts[s][e]
            if count:
                pieces.append(segment[starts[s] : starts[s] + count])
                starts[s] += count
    return torch.cat(pieces) if pieces else segments[0]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def activation_forward(activation: Activation, h: Tensor, probs: Tensor | None) -> Tensor:
    """a = act(h) * p, computed in fp32 or better: h [N, F1], probs [N] or None -> a [N, F] in h's
    dtype"""
    if activation.built_in and can_fuse(activation.name, h, probs):
        return fused_activation_forward(activation.name, h, probs)
    value = activation.forward(_wide(h))
    return (value if probs is None else value * probs.unsqueeze(1)).to(h.dtype)


def activation_backward(
    activation: Activation, h: Tensor, da: Tensor, probs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward of activation_forward, and a again for the weight gradient of fc2.

    Args:
        h: pre-activation. [N, F1]
        da: gradient of a. [N, F]
        probs: [N] or None

    Returns:
        dh [N, F1] and a [N, F] in h's dtype, and dprobs [N] in probs' dtype or None.
    """
    if activation.built_in and can_fuse(activation.name, h, probs):
        return fused_activation_backward(activation.name, h, da, probs)
    wide_h, wide_da = _wide(h), _wide(da)
    value = activation.forward(wide_h)
    if probs is None:
        return activation.backward(wide_h, wide_da).to(h.dtype), value.to(h.dtype), None
    scale = probs.unsqueeze(1)
    dprobs = (value * wide_da).sum(1).to(probs.dtype)
    dh = activation.backward(wide_h, (wide_da * scale).to(wide_h.dtype))
    return dh.to(h.dtype), (value * scale).to(h.dtype), dprobs
