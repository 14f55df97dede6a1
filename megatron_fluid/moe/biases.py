"""Biases of one rank's experts: what they add to rows that are sorted by expert, and their
gradients.

    h = x @ w1[e].T + b1[e]
    y = (act(h) * p) @ w2[e].T + b2[e] * p          p: the probability of the row

They are small beside the weights: El vectors, whose gradients are sums over rows. The host knows
the row counts.

Shapes: N expert rows of this rank, El local experts, D width of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.expert_weights import ExpertWeights, GivenWeights, Packed, params_and_values
from megatron_fluid.moe.experts import RowGroups

__all__ = ["ExpertBiases", "GivenBiases", "expert_biases"]

# Of fc1 and of fc2: stacked [El, D], or one for each expert.
type GivenBiases = tuple[GivenWeights, GivenWeights]


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

    def add_to(self, rows: Tensor, groups: RowGroups, scale: Tensor | None = None) -> Tensor:
        """rows + bias * scale of each row: rows [N, D], scale [N] or longer, None for ones ->
        [N, D] in rows' dtype, in whose memory it may be."""
        bias = self._of_rows(groups)
        if scale is None:
            return rows.add_(bias)
        return rows.add_((bias * scale[: rows.shape[0], None]).to(_wide(rows.dtype)))

    def products(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """The product of each row with its expert's bias: rows [N, D] -> [N], fp32 or better."""
        wide = _wide(rows.dtype)
        return (rows.to(wide) * self._of_rows(groups).to(wide)).sum(1)

    def gradients(
        self, rows: Tensor, groups: RowGroups, scale: Tensor | None = None
    ) -> list[Tensor]:
        """The sums of rows * scale over each expert, in fixed order: rows [N, D], gradients of what
        a bias was added to; scale as for add_to. One tensor for each of params."""
        # A product with the selection of each expert's rows: one GEMM, repeatable.
        count = rows.shape[0]
        select = torch.arange(len(self), device=rows.device)[:, None] == self._experts(groups)
        wide = _wide(rows.dtype)
        weights = select.to(wide) if scale is None else select * scale[:count].to(wide)
        sums = (weights @ rows.to(wide)).to(self.params[0].dtype)
        return [sums.view(self.params[0].shape)] if self.stacked else list(sums.unbind(0))

    def __len__(self) -> int:
        return self._stored[0].shape[0] if self.stacked else len(self.params)

    def _experts(self, groups: RowGroups) -> Tensor:
        """The expert of each row. int64 [N]"""
        assert groups.ends is not None, "the host knows the row counts"
        rows = torch.arange(groups.num_rows, device=groups.offsets.device, dtype=torch.int32)
        return torch.searchsorted(groups.offsets, rows, right=True)

    def _of_rows(self, groups: RowGroups) -> Tensor:
        found = [values.detach() for values in self._stored]
        table = found[0] if self.stacked else torch.stack(found)
        experts = self._experts(groups).to(table.device)
        return table.index_select(0, experts)


def expert_biases(
    given: GivenBiases | None, fc1: ExpertWeights, fc2: ExpertWeights, name: str
) -> tuple[ExpertBiases, ExpertBiases] | None:
    """The biases of a layer, checked against its weights; None without any.

    Raises:
        ConfigError: a number of experts or a width does not fit.
    """
    if given is None:
        return None
    first, second = (
        ExpertBiases(biases, fc.num_experts, fc.out_width, f"{name}: bias{number}")
        for biases, fc, number in zip(given, (fc1, fc2), (1, 2), strict=True)
    )
    return first, second


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
