"""What computes the segments of one call, forward and backward, between dispatch and combine.

Legend: n rows of a segment (sorted by expert), H hidden, F1 width of fc1's output, F width of fc2's
input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from megatron_fluid.kernels.fp8_grouped_gemm.launch import CompandedRows, Fp8Rows
from megatron_fluid.kernels.grouped_gemm.launch import can_gate, gated_matmul
from megatron_fluid.kernels.grouped_gemm.stacks import ReversedStack
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import (
    RowGroups,
    activation_backward,
    activation_forward,
    add_to_main_grads,
    grouped_product,
    merge_rows,
    weight_grads,
)
from megatron_fluid.moe.transport import Exchange, Segment

__all__ = ["Hidden", "PlainExperts", "Route", "Rows"]

type Rows = Tensor | Fp8Rows
type Hidden = Tensor | CompandedRows  # fc1's output, as it is kept
type Route = tuple[Tensor | None, RowGroups]  # of a segment in the forward: probabilities, division


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

    def trained(self) -> bool:
        """Whether a weight is trained."""
        return self.fc1.requires_grad() or self.fc2.requires_grad()

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

    def weight_grads(
        self, fc: ExpertWeights, pairs: Callable[[], Sequence[tuple[Rows, Rows]]],
        groups: Sequence[RowGroups], fused_main_grad: bool,
    ) -> list[Tensor]:  # fmt: skip
        """dW of one projection for autograd, see weight_grads. pairs: gives of each segment the
        gradient of the projection's output and its input."""
        return weight_grads(fc, *merge_rows(pairs(), groups), fused_main_grad)

    def add_to_main_grads(
        self, fc: ExpertWeights, pairs: Callable[[], Sequence[tuple[Rows, Rows]]],
        groups: Sequence[RowGroups],
    ) -> None:  # fmt: skip
        """As weight_grads, but dW is added to the parameters' main_grads."""
        add_to_main_grads(fc, *merge_rows(pairs(), groups))

    def bias_grads(
        self, dh: Sequence[Rows], pairs2: Sequence[tuple[Rows, Rows]], routes: Sequence[Route]
    ) -> list[Tensor]:
        """Gradients of bias_params. Of each segment: the gradient of fc1's output, what dW of fc2
        is made of, the forward's route."""
        return []
