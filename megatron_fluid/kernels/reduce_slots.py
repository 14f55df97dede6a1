"""Sum of W equally shaped slots, one a rank, in fp32 and in rank order, with an optional bias.

Oracle: ``slots.float().sum(0)`` taken slot by slot, plus bias (see ``tests/unit/test_kernels_reduce_slots.py``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["reduce_slots"]


@triton.jit
def _reduce_slots(slots, bias, out, numel, n, W: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    total = tl.load(slots + offsets, mask=mask, other=0.0).to(tl.float32)
    for w in tl.static_range(1, W):
        total += tl.load(slots + w * numel + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + offsets % n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


def reduce_slots(slots: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Sum ``[W, M, N]`` over the first dimension, slot 0 first, in fp32.

    Args:
        slots: contiguous, bf16, fp16 or fp32.
        bias: ``[N]``, added once after the sum.
        out: ``[M, N]`` contiguous, of the slots' dtype; made where not given.
    """
    ranks, m, n = slots.shape
    if out is None:
        out = torch.empty((m, n), dtype=slots.dtype, device=slots.device)
    numel = m * n
    if numel:
        block = 4096
        grid = (triton.cdiv(numel, block),)
        _reduce_slots[grid](
            slots, out if bias is None else bias, out, numel, n, ranks, bias is not None, block, num_warps=8
        )
    return out
