"""Top-k and softmax over the chosen in one kernel, and its backward; the choices of a routing map.

Equal logits: the expert with the lower number comes first. References:
megatron_fluid.moe.router.route (post-softmax); the loop in tests/unit/kernels/test_topk_router.py.

Shapes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "chosen_backward_kernel",
    "chosen_kernel",
    "topk_softmax_backward_kernel",
    "topk_softmax_kernel",
]


LOWEST = tl.constexpr(-3.4028234663852886e38)  # of the finite numbers in fp32


@triton.jit(do_not_specialize=["T"])
def topk_softmax_kernel(
    logits,  # fp32 [T, E]
    ids,  # int32 [T, K] out
    probs,  # fp32 [T, K] out
    T,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BT),). EP and KP are E and K rounded up to powers of two."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    real = (t < T)[:, None] & (e < E)[None, :]
    left = tl.load(logits + t[:, None] * E + e[None, :], mask=real, other=float("-inf"))
    # A comparison with NaN decides nothing, and could leave a number of the padding: NaN counts as
    # the largest, as in torch.topk. -inf stays above the padding and what is struck out.
    left = tl.where(left != left, float("inf"), left)
    left = tl.where(real & (left < LOWEST), LOWEST, left)
    best = tl.full((BT, KP), float("-inf"), tl.float32)
    # K searches in turn: the best that is left, recorded and then struck out.
    for kk in tl.static_range(K):
        value, found = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
        value = tl.where(value == LOWEST, float("-inf"), value)
        best = tl.where(k[None, :] == kk, value[:, None], best)
        tl.store(ids + t * K + kk, found.to(tl.int32), mask=t < T)
        left = tl.where(e[None, :] == found[:, None], float("-inf"), left)
    # Softmax over the chosen alone.
    weight = tl.exp(best - tl.max(best, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    tl.store(probs + t[:, None] * K + k[None, :], weight, mask=(t < T)[:, None] & (k < K)[None, :])


@triton.jit(do_not_specialize=["T"])
def topk_softmax_backward_kernel(
    ids,  # int32 [T, K]
    probs,  # fp32 [T, K]
    grad,  # fp32 [T, K]
    out,  # [T, E] out, any float type
    T,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits: p * (g - sum p g) at the chosen experts, zero elsewhere. Grid (ceil(T
    / BT),)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, EP)
    k = tl.arange(0, KP)
    at = t[:, None] * K + k[None, :]
    chosen = (t < T)[:, None] & (k < K)[None, :]
    p = tl.load(probs + at, mask=chosen, other=0.0)
    g = tl.load(grad + at, mask=chosen, other=0.0)
    # One program owns a token's row: it adds the K slopes in registers and stores the row once.
    mean = tl.sum(p * g, 1)
    total = tl.zeros((BT, EP), tl.float32)
    for kk in tl.static_range(K):
        expert = tl.load(ids + t * K + kk, mask=t < T, other=-1)
        weight = tl.load(probs + t * K + kk, mask=t < T, other=0.0)
        slope = tl.load(grad + t * K + kk, mask=t < T, other=0.0)
        total += tl.where(e[None, :] == expert[:, None], (weight * (slope - mean))[:, None], 0.0)
    target = out + t[:, None] * E + e[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(t < T)[:, None] & (e < E)[None, :])


@triton.jit
def _rank_of(
    routing_map, columns, t, T, E: tl.constexpr, EP: tl.constexpr, HAS_COLUMNS: tl.constexpr
):
    """For column p of tokens t: the address in [T, E] of its expert, whether that is chosen, and
    how many chosen ones come before it."""
    p = tl.arange(0, EP)
    expert = p
    if HAS_COLUMNS:
        expert = tl.load(columns + p, mask=p < E, other=0).to(tl.int32)
    at = t[:, None] * E + expert[None, :]
    chosen = tl.load(routing_map + at, mask=(t < T)[:, None] & (p < E)[None, :], other=0).to(
        tl.int32
    )
    return at, chosen != 0, tl.cumsum(chosen, 1) - chosen


@triton.jit(do_not_specialize=["T"])
def chosen_kernel(
    probs,  # [T, E], any float type
    routing_map,  # bool as uint8 [T, E]
    columns,  # integers [E] (HAS_COLUMNS): the expert at each position
    ids,  # int32 [T, K] out: positions of the first K that are chosen, -1 after the last
    picked,  # fp32 [T, K] out: their probabilities, 0 after the last
    T,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BT),)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    at, chosen, rank = _rank_of(routing_map, columns, t, T, E, EP, HAS_COLUMNS)
    kept = chosen & (rank < K)
    slot = t[:, None] * K + rank
    position = tl.broadcast_to(tl.arange(0, EP)[None, :], (BT, EP))
    tl.store(ids + slot, position, mask=kept)
    tl.store(picked + slot, tl.load(probs + at, mask=kept, other=0.0).to(tl.float32), mask=kept)
    # The slots behind a token's last choice.
    k = tl.arange(0, KP)
    rest = (
        (k[None, :] >= tl.sum(chosen.to(tl.int32), 1)[:, None])
        & (k < K)[None, :]
        & (t < T)[:, None]
    )
    tl.store(ids + t[:, None] * K + k[None, :], tl.full((BT, KP), -1, tl.int32), mask=rest)
    tl.store(picked + t[:, None] * K + k[None, :], tl.zeros((BT, KP), tl.float32), mask=rest)


@triton.jit(do_not_specialize=["T"])
def chosen_backward_kernel(
    grad,  # fp32 [T, K]
    routing_map,  # bool as uint8 [T, E]
    columns,  # integers [E] (HAS_COLUMNS)
    out,  # [T, E] out, any float type: gradient of probs
    T,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BT),)."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    at, chosen, rank = _rank_of(routing_map, columns, t, T, E, EP, HAS_COLUMNS)
    value = tl.load(grad + t[:, None] * K + rank, mask=chosen & (rank < K), other=0.0)
    tl.store(
        out + at,
        value.to(out.dtype.element_ty),
        mask=(t < T)[:, None] & (tl.arange(0, EP) < E)[None, :],
    )
