"""Reference of the decode-time all-to-all: plain torch over the tensors of all ranks, without
communication. It stays in the package so that users can check their own integration against it.

Slots are in (source, token, k) order. Shapes: D sources with m tokens each, K top-k, L experts of a
rank, R rows an expert can hold, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Expected", "combine_reference", "dispatch_reference"]


@dataclass(frozen=True)
class Expected:
    """What one rank receives.

    Attributes:
        counts: int32 [L].
        rows: per expert the (source, token, k) of its rows, in slot order.
    """

    counts: Tensor
    rows: list[list[tuple[int, int, int]]]

    def gather(self, expert: int, per_source: Sequence[Tensor]) -> Tensor:
        """The rows of `expert` out of one [m, ...] tensor per source."""
        rows = [per_source[source][token] for source, token, _ in self.rows[expert]]
        return torch.stack(rows) if rows else per_source[0].new_zeros((0, *per_source[0].shape[1:]))


def dispatch_reference(ids: Sequence[Tensor], rank: int, local_experts: int) -> Expected:
    """What rank `rank` receives for expert ids [m, K] of every source.

    Ids outside the experts are masked. An expert that a token names twice receives it once.
    """
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(local_experts)]
    first = rank * local_experts
    for source, table in enumerate(ids):
        for token, line in enumerate(table.to(torch.int64).tolist()):
            for k, expert in enumerate(line):
                if first <= expert < first + local_experts and expert not in line[:k]:
                    rows[expert - first].append((source, token, k))
    return Expected(torch.tensor([len(r) for r in rows], dtype=torch.int32), rows)


def combine_reference(
    ids: Sequence[Tensor], weights: Sequence[Tensor], expert_y: Sequence[Tensor], local_experts: int
) -> list[Tensor]:
    """fp32 [m, H] of every source: the weighted sum of its tokens' expert rows.

    expert_y: one [L, R, H] per rank, in the slots of `dispatch_reference`.
    """
    first, fp32 = expert_y[0], torch.float32
    hidden, device = first.shape[-1], first.device
    out = [torch.zeros(len(table), hidden, dtype=fp32, device=device) for table in ids]
    for rank, y in enumerate(expert_y):
        expected = dispatch_reference(ids, rank, local_experts)
        for expert, rows in enumerate(expected.rows):
            for slot, (source, token, _) in enumerate(rows):
                named = ids[source][token].to(torch.int64) == rank * local_experts + expert
                weight = weights[source][token].float()[named].sum()
                out[source][token] += weight * y[expert, slot].float()
    return out
