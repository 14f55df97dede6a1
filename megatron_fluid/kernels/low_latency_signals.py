"""Flags of the decode-time all-to-all: many words raised at once, many awaited at once.

A program stores its data, then `signal_all`: CTA barrier, one system fence, one relaxed store a peer by the first thread.
The receiver loads all flags it waits for with acquire, one a thread, until every one has reached the generation. The
scalar `signal` and `wait` of megatron_fluid.kernels.flags do the same for one flag, a round trip each.

Oracle: sequential execution (tests/unit/test_low_latency_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.flags import INTERPRETED, clock_ns

__all__ = ["fence", "publish", "signal_all", "wait_all"]

if INTERPRETED:
    # One program after another in one process: plain loads and stores have the same meaning.
    @triton.jit
    def _acquire(words):
        return tl.load(words)

    @triton.jit
    def fence():
        tl.debug_barrier()

    @triton.jit
    def publish(address, value):
        tl.store(address.to(tl.pointer_type(tl.int32)), value)

    _POLLS = tl.constexpr(2)
else:

    @triton.jit
    def _acquire(words):
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [words.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def fence():
        """Order every store of this program before what its first thread stores next, for the whole system."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p fence.acq_rel.sys; mov.u32 $0, 0; }",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def publish(address, value):
        """First thread only: store the int32 `value` at `address`. After `fence` it is a release."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [address, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    _POLLS = tl.constexpr(1 << 62)


@triton.jit
def signal_all(flag_addresses, first, generation, W: tl.constexpr):
    fence()
    for d in tl.static_range(W):
        publish(tl.load(flag_addresses + d) + first * 4, generation)


@triton.jit
def wait_all(
    flags,
    due,
    generation,
    errors,
    abort,
    operation,
    timeout_ns,
    F: tl.constexpr,
    WORDS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """Until every flag of [0, WORDS) that is `due` (a bool tensor) has reached `generation`. Flags are STRIDE words apart; F of
    them belong to a peer.
    """
    o = tl.arange(0, WORDS)
    late = tl.where(due, _acquire(flags + o * STRIDE) - generation, 0)
    if tl.min(late, 0) < 0:
        start = clock_ns()
        polls = tl.full((), 0, tl.int64)
        first_failure = tl.load(abort) == 0
        limit = tl.where(first_failure, timeout_ns, 0).to(tl.int64)
        waiting = tl.min(late, 0) < 0
        while waiting:
            late = tl.where(due, _acquire(flags + o * STRIDE) - generation, 0)
            polls += 1
            waiting = (tl.min(late, 0) < 0) & (clock_ns() - start <= limit) & (polls < _POLLS)
        if (tl.min(late, 0) < 0) & first_failure:  # what fails after the first is only its consequence
            word = tl.min(tl.where(late < 0, o, WORDS), 0)
            peer = word // F
            seen = generation + tl.min(late, 0)
            one = tl.full((), 1, tl.int64)
            tl.store(errors + peer * 2 + 1, (generation.to(tl.int64) << 32) | (seen.to(tl.int64) & 0xFFFFFFFF))
            tl.store(errors + peer * 2, (one << 62) | (operation * one << 32) | (word % F).to(tl.int64))
            tl.store(abort, 1)
