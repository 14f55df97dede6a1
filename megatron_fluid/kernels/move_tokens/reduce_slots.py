"""Sum of W equally shaped slots, one a rank, in fp32 and in rank order, with an optional bias.

Reference: ``slots.float().sum(0)`` taken slot by slot, plus bias (see
``tests/unit/kernels/test_reduce_slots.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launcher

__all__ = ["reduce_slots", "reduce_slots_kernel"]

_BLOCK = 4096


@triton.jit(do_not_specialize=["numel", "n"])
def reduce_slots_kernel(
    slots, bias, out, numel, n,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [numel] := the sum of slots [W, numel], plus bias [n] by column. Grid (numel / BLOCK,).

    ALIGNED: numel is divisible by 16, so that every slot can be read by wide loads.
    """
    if ALIGNED:
        numel = numel // 16 * 16  # the same number, but one whose alignment the compiler sees
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    total = tl.load(slots + offsets, mask=mask, other=0.0).to(tl.float32)
    for w in tl.static_range(1, W):
        total += tl.load(slots + tl.cast(numel, tl.int64) * w + offsets, mask=mask, other=0.0).to(
            tl.float32
        )
    if HAS_BIAS:
        total += tl.load(bias + offsets % n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)


_launch = Launcher(reduce_slots_kernel, 8)


def reduce_slots(slots: Tensor, bias: Tensor | None = None) -> Tensor:
    """Sum ``[W, M, N]`` over the first dimension, slot 0 first, in fp32.

    Args:
        slots: contiguous, bf16, fp16 or fp32.
        bias: ``[N]``, contiguous, added once after the sum.

    Returns:
        ``[M, N]`` of the slots' dtype.
    """
    ranks, m, n = slots.shape
    out = slots.new_empty(m, n)
    numel = m * n
    if numel:
        _launch(
            -(-numel // _BLOCK), (slots, out if bias is None else bias, out, numel, n),
            W=ranks, HAS_BIAS=bias is not None, ALIGNED=numel % 16 == 0, BLOCK=_BLOCK,
        )  # fmt: skip
    return out
