"""Flags of the decode-time all-to-all: many words raised at once, many awaited at once.

A program stores its data, then `signal_all`: CTA barrier, one system fence, one relaxed store a
peer by the first thread. The receiver polls all flags it waits for with relaxed loads, which are in
flight together (each acquire load waits for the one before it), and once every one has reached the
generation it acquires them. The scalar `signal` and `wait` of megatron_fluid.kernels.flags do the
same for one flag, a round trip each.

`peer_addresses` is called before the first store: a load behind stores to unknown addresses would
wait for its round trip between them.

Reference: sequential execution (tests/unit/low_latency/test_kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.kernels.flags import INTERPRETED, clock_ns

__all__ = [
    "HOISTED_PEERS",
    "every_thread",
    "fence",
    "peer_address",
    "peer_addresses",
    "publish",
    "signal_all",
    "wait_all",
]

HOISTED_PEERS = tl.constexpr(8)  # addresses of more peers would crowd the registers

if INTERPRETED:
    # One program after another in one process: plain loads and stores have the same meaning.
    @triton.jit
    def _acquire(words):
        return tl.load(words)

    @triton.jit
    def _relaxed(words):
        return tl.load(words)

    @triton.jit
    def fence():
        tl.debug_barrier()

    @triton.jit
    def every_thread(sound):
        return sound

    @triton.jit
    def publish(address, value):
        tl.store(address.to(tl.pointer_type(tl.int32)), value)

    _POLLS = tl.constexpr(2)
else:

    @triton.jit
    def _acquire(words):
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];", "=r,l", [words.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def _relaxed(words):
        return tl.inline_asm_elementwise(
            "ld.relaxed.sys.global.b32 $0, [$1];", "=r,l", [words.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def fence():
        """Order every store of this program before what its first thread stores next, for the whole
        system."""
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; @p "
            "fence.acq_rel.sys; mov.u32 $0, 0; }",
            "=r", [], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def every_thread(sound):
        """Whether the scalar `sound` holds in every thread of this program; a barrier of them all.

        Each warp loads a scalar for itself. Of a word that another program or GPU writes meanwhile
        they may find different values, and warps that part would miss each other's barriers.
        """
        voted = tl.inline_asm_elementwise(
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; barrier.cta.red.and.pred q, 0, p; "
            "selp.s32 $0, 1, 0, q; }",
            "=r,r", [sound.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        return voted > 0

    @triton.jit
    def publish(address, value):
        """First thread only: store the int32 `value` at `address`. After `fence` it is a
        release."""
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p st.relaxed.sys.global.b32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r", [address, value], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    _POLLS = tl.constexpr(1 << 62)


@triton.jit
def peer_addresses(addresses, rank, W: tl.constexpr):
    """Where the memory of ranks rank, rank + 1, ... (modulo W) begins: a tuple, for
    `peer_address`."""
    found = ()
    if W <= HOISTED_PEERS:
        for n in tl.static_range(W):
            found = found + (tl.load(addresses + (rank + n) % W),)  # type: ignore[assignment]
    return found


@triton.jit
def peer_address(found, addresses, rank, n: tl.constexpr, W: tl.constexpr):
    """Entry n of `peer_addresses`, loaded now where they are too many to hold."""
    if W <= HOISTED_PEERS:
        return found[n]
    return tl.load(addresses + (rank + n) % W)


@triton.jit
def signal_all(flag_addresses, rank, first, generation, W: tl.constexpr):
    """Raise word `first` of every rank's flags."""
    flags_of = peer_addresses(flag_addresses, rank, W)  # their round trip passes behind the fence
    fence()
    for n in tl.static_range(W):
        publish(peer_address(flags_of, flag_addresses, rank, n, W) + first * 4, generation)


@triton.jit
def wait_all(
    flags, due, generation, errors, abort, operation, timeout_ns,
    F: tl.constexpr, WORDS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Until every flag of [0, WORDS) that is `due` (a bool tensor) has reached `generation`. Flags
    are STRIDE words apart; F of them belong to a peer.

    Returns whether all of them have: else nothing that peers store may be taken for what they sent.
    """
    o = tl.arange(0, WORDS)
    sound = tl.full((), 1, tl.int32) > 0
    late = tl.where(due, _relaxed(flags + o * STRIDE) - generation, 0)
    waiting = tl.min(late, 0) < 0
    if waiting:
        start = clock_ns()
        polls = tl.full((), 0, tl.int64)
        # Every warp reads the clock and the abort word for itself, and may find others than the
        # next: no barrier below depends on them but those of reductions, which give all one value.
        first_failure = tl.min(tl.where(tl.load(abort) == 0, late, 0), 0) < 0
        limit = tl.where(first_failure, timeout_ns, 0).to(tl.int64)
        while waiting:
            late = tl.where(due, _relaxed(flags + o * STRIDE) - generation, 0)
            polls += 1
            in_time = (clock_ns() - start <= limit) & (polls < _POLLS)
            waiting = tl.min(tl.where(in_time, late, 0), 0) < 0
        word = tl.min(tl.where(late < 0, o, WORDS), 0)
        sound = word == WORDS
        if (word < WORDS) & first_failure:  # what fails after the first is only its consequence
            peer = word // F
            seen = generation + tl.sum(tl.where(o == word, late, 0), 0)
            one = tl.full((), 1, tl.int64)
            tl.store(
                errors + peer * 2 + 1,
                (generation.to(tl.int64) << 32) | (seen.to(tl.int64) & 0xFFFFFFFF),
            )
            tl.store(
                errors + peer * 2, (one << 62) | (operation * one << 32) | (word % F).to(tl.int64)
            )
            tl.store(abort, 1)
    _acquire(flags + o * STRIDE)
    return every_thread(sound)  # and what one thread has acquired, the others see after it
