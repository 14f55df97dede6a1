"""References of the kernels in plain torch: no Triton, no communication, all ranks in one process.

Shapes: W ranks, C token capacity of a rank, K top-k, El local experts, H hidden, F ffn, N expert
rows of the rank in question. A landing row is s * C + t for token t of rank s.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.machine import INTERPRETED


def publish_reference(ids: Tensor, ranks: int, local_experts: int) -> Tensor:
    """Which ranks each token goes to: int32 [T], bit d for rank d, from ids [T, K] (-1 dropped)."""
    bits = torch.zeros(ids.shape[0], dtype=torch.int32)
    for d in range(ranks):
        bits |= ((ids >= 0) & (ids // local_experts == d)).any(1).to(torch.int32) << d
    return bits


@dataclass(frozen=True)
class PlanReference:
    """offsets [El], row_entry [N] (landing row * K + k), row_prob fp32 [N], inverse [W * C, K]
    (expert row or -1)."""

    offsets: Tensor
    row_entry: Tensor
    row_prob: Tensor
    inverse: Tensor


def plan_reference(ids: Tensor, probs: Tensor, rank: int, local_experts: int) -> PlanReference:
    """`rank`'s plan from all ids and probs [W, C, K]: (rank, token, k) sorted by local expert."""
    top_k, flat = ids.shape[-1], ids.reshape(-1)
    mine = (flat >= rank * local_experts) & (flat < (rank + 1) * local_experts)
    entries = mine.nonzero()[:, 0]
    expert = flat[entries] - rank * local_experts
    order = torch.sort(expert, stable=True).indices
    row_entry = entries[order]
    inverse = torch.full((flat.numel(),), -1, dtype=torch.int32)
    inverse[row_entry] = torch.arange(row_entry.numel(), dtype=torch.int32)
    offsets = torch.bincount(expert, minlength=local_experts).cumsum(0)
    return PlanReference(
        offsets.to(torch.int32),
        row_entry.to(torch.int32),
        probs.reshape(-1)[row_entry].float(),
        inverse.view(-1, top_k),
    )


def dispatch_reference(x: Tensor, plan: PlanReference) -> Tensor:
    """Expert rows [N, H] from all ranks' tokens x [W, C, H]."""
    return x.reshape(-1, x.shape[-1])[plan.row_entry.long() // plan.inverse.shape[1]]


def reduce_reference(y: Tensor, plan: PlanReference) -> Tensor:
    """The sum of a rank's experts per landing row: [W * C, H] in y's dtype, summed in fp32 by k."""
    total = torch.zeros(plan.inverse.shape[0], y.shape[1], dtype=torch.float32)
    for k in range(plan.inverse.shape[1]):
        row = plan.inverse[:, k].long()
        total += torch.where(
            (row >= 0)[:, None], y.float()[row.clamp(min=0)] if y.shape[0] else 0.0, 0.0
        )
    return total.to(y.dtype)


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values as a kernel stores them in dtype: Triton's interpreter cuts bits off for bf16,
    where a GPU rounds."""
    if not INTERPRETED or dtype != torch.bfloat16:
        return x.to(dtype)
    return (x.contiguous().view(torch.int32) & -0x10000).view(torch.float32).to(dtype)
