"""Biases of one rank's experts: what they add to rows that are sorted by expert, and their
gradients.

    h = x @ w1[e].T
    y = (act(h + b1[e]) * p) @ w2[e].T + b2[e] * p          p: the probability of the row

The activation adds b1 (moe/experts.py), in fp32. Gradients are sums of rows over each expert, in
fp32 and in a fixed order. On a GPU the kernels of kernels/activation do what is left here;
elsewhere torch's index operations do.

Shapes: N expert rows of this rank, El local experts, D width of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm.launch import host_ends
from megatron_fluid.moe.activations import Activation, RowBiases
from megatron_fluid.moe.expert_weights import (
    ExpertWeights,
    GivenBiases,
    GivenWeights,
    Packed,
    RowGroups,
    grouped_product,
    params_and_values,
)
from megatron_fluid.moe.experts import (
    Hidden,
    PlainExperts,
    Route,
    Rows,
    activation_backward,
    activation_forward,
    have_triton,
)
from megatron_fluid.moe.transport import Exchange, Segment

__all__ = ["BiasedExperts", "ExpertBiases"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertBiases:
    """One projection's biases of all local experts.

    Args:
        biases: stacked [El, D], a Packed one, or one for each expert (Megatron's parameters).
        num_experts: El.
        width: D.
        name: for errors.

    Attributes:
        params: what was given. One stacked, or El

    Raises:
        ConfigError: the number of experts, or the shape, does not fit.
    """

    def __init__(
        self, biases: GivenWeights, num_experts: int, width: int, name: str = "bias"
    ) -> None:
        self.stacked = isinstance(biases, Tensor | Packed)
        self.params, self._stored = params_and_values(biases)
        found = [list(values.shape) for values in self._stored]
        wanted = [[num_experts, width]] if self.stacked else [[width]] * num_experts
        if found != wanted:
            raise ConfigError.of(name, found, f"{wanted}, of {num_experts} local experts")

    def of_rows(self, groups: RowGroups, rows: int) -> RowBiases:
        """For the activation: the biases, and the expert of each of so many rows."""
        return RowBiases(self._table(), groups.experts_of(rows))

    def add_to(self, rows: Tensor, groups: RowGroups, scale: Tensor | None = None) -> Tensor:
        """rows + bias * scale of each row, rounded once: rows [N, D], scale [N] or longer, None for
        ones -> rows, which are changed in place."""
        table = self._table()
        if _kernels_serve(rows, groups, table, scale):
            from megatron_fluid.kernels.activation.biases import add_biases

            experts = groups.experts_of(rows.shape[0])
            add_biases(rows, table, experts, groups.offsets[-1:], scale)
            return rows
        added = table[_experts_of(rows, groups)]
        if scale is not None:
            added = (added * scale[: len(rows), None]).to(_wide(rows.dtype))
        return rows.add_(added)

    def add_products(self, products: Tensor, rows: Tensor, groups: RowGroups) -> None:
        """Add the product of each row with its expert's bias to products [N] or longer, in place:
        rows [N, D]."""
        table = self._table()
        if _kernels_serve(rows, groups, table, products):
            from megatron_fluid.kernels.activation.biases import add_products

            experts = groups.experts_of(rows.shape[0])
            add_products(products, rows, table, experts, groups.offsets[-1:])
            return
        biases = table.to(_wide(rows.dtype))[_experts_of(rows, groups)]
        products[: len(rows)] += (rows * biases).sum(1).to(products.dtype)

    def sums(self, rows: Tensor, groups: RowGroups, scale: Tensor | None = None) -> Tensor:
        """The sums of rows * scale over each expert, in fixed order: rows [N, D], gradients of what
        a bias was added to; scale as for add_to. [El, D] in fp32 or better"""
        wide = _wide(rows.dtype)
        if scale is not None:
            scale = scale.to(wide)  # a router in fp64 gives fp64
        if _kernels_serve(rows, groups, rows, scale):
            from megatron_fluid.kernels.activation.biases import sum_by_expert

            return sum_by_expert(rows, groups.offsets, scale)
        scaled = rows.to(wide) if scale is None else rows.to(wide) * scale[: len(rows), None]
        # Expert by expert: on a GPU index_add_ adds in another order each time.
        ends = host_ends(groups.offsets, groups.ends)
        return torch.stack([part.sum(0) for part in scaled.tensor_split(ends)[: len(self)]])

    def as_gradients(self, sums: Tensor) -> list[Tensor]:
        """One gradient for each of params: sums [El, D]."""
        sums = sums.to(self.params[0].dtype)
        return [sums.view(self.params[0].shape)] if self.stacked else list(sums.unbind(0))

    def __len__(self) -> int:
        return self._stored[0].shape[0] if self.stacked else len(self.params)

    def _table(self) -> Tensor:
        """All biases, contiguous. [El, D]"""
        found = [values.detach() for values in self._stored]
        return found[0].contiguous() if self.stacked else torch.stack(found)


def _kernels_serve(rows: Tensor, groups: RowGroups, table: Tensor, scale: Tensor | None) -> bool:
    """Whether kernels/activation takes these: on a GPU, and where the rows of Triton kernels
    are counted on the device."""
    if not (rows.is_cuda or groups.count is not None) or not have_triton():
        return False
    if scale is not None and not (scale.is_contiguous() and scale.dtype == torch.float32):
        return False
    fit = rows.dtype in _DTYPES and table.dtype in _DTYPES
    return fit and rows.is_contiguous()


def _experts_of(rows: Tensor, groups: RowGroups) -> Tensor:
    """The expert of each row, where the host knows their counts and all rows are used. [N]"""
    return groups.experts_of(rows.shape[0]).long()


class BiasedExperts(PlainExperts):
    """Experts with biases. See PlainExperts.

    Raises:
        ConfigError: a number of experts or a width does not fit.
    """

    def __init__(
        self, fc1: ExpertWeights, fc2: ExpertWeights, activation: Activation, biases: GivenBiases,
        name: str,
    ) -> None:  # fmt: skip
        super().__init__(fc1, fc2, activation)
        (first, second), experts = biases, fc1.num_experts
        self.bias1 = ExpertBiases(first, experts, fc1.out_width, f"{name}: bias1")
        self.bias2 = ExpertBiases(second, experts, fc2.out_width, f"{name}: bias2")
        self.bias_params = (*self.bias1.params, *self.bias2.params)

    def versions(self) -> list[int]:
        return super().versions() + [param._version for param in self.bias_params]

    def forward(
        self, rows: Rows, segment: Segment, exchange: Exchange, keep: bool
    ) -> tuple[Rows, Hidden | None]:
        groups, probs = segment.groups, segment.probs
        h = self.hidden(rows, groups)
        bias = self.bias1.of_rows(groups, h.shape[0])
        activated = activation_forward(self.activation, h, probs, groups.count, bias)
        product = grouped_product(activated, self.fc2.forward_matrices, groups)
        exchange.combine_rows(segment, self.bias2.add_to(product, groups, probs))
        return rows, h if keep else None

    def backward(
        self, dy: Rows, h: Hidden, route: Route, segment: Segment, exchange: Exchange, consume: bool
    ) -> tuple[Rows, tuple[Rows, Rows]]:
        assert isinstance(h, Tensor) and isinstance(dy, Tensor)
        probs, groups = route
        da = grouped_product(dy, self.fc2.backward_matrices, segment.groups)
        bias = self.bias1.of_rows(groups, h.shape[0])
        given = h, da, probs, groups
        dh, activated, dprobs = activation_backward(self.activation, *given, consume, bias)
        if dprobs is not None:
            self.bias2.add_products(dprobs, dy, groups)
        exchange.combine_product(segment, dh, self.fc1.backward_matrices, dprobs)
        return dh, (dy, activated)

    def bias_grads(
        self, dh: Sequence[Rows], pairs2: Sequence[tuple[Rows, Rows]], routes: Sequence[Route]
    ) -> list[Tensor]:
        # Of several segments in fp32, rounded once.
        found: list[Tensor] = []
        for own, (dy, _), (probs, groups) in zip(dh, pairs2, routes, strict=True):
            assert isinstance(own, Tensor) and isinstance(dy, Tensor)
            sums = [self.bias1.sums(own, groups), self.bias2.sums(dy, groups, probs)]
            found = [a.add_(b) for a, b in zip(found, sums, strict=True)] if found else sums
        return self.bias1.as_gradients(found[0]) + self.bias2.as_gradients(found[1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
