"""Signals between ranks over symmetric memory, as Triton device functions that other kernels call.

A flag is an int32 word in symmetric memory that exactly one peer writes. It holds the generation of
the last message, or the number of messages, which only grows (modulo 2**32): nothing is ever reset.
`signal` publishes all stores of the calling program and of every earlier kernel on its stream;
`wait` makes them visible. A wait is bounded by `timeout_ns`: past it, `wait` leaves a record in the
error words (megatron_fluid.comm.workspace.ErrorWords), sets the abort word so that later waits give
up at once, and returns False.

A rank whose abort word is set signals nobody any more, and stores nothing into its peers' memory
where a kernel can see it. Peers that are late then read what was sent to them, and nothing newer,
until their own waits time out. The memory that a failed wait was for is marked: `mark` fills it
with NaN of any float type, or the kernel that waited does so.

Reference: sequential execution in one process, where every flag is set before anyone waits
(tests/unit/kernels/test_flags.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETED",
    "advance",
    "barrier",
    "barrier_kernel",
    "clock_ns",
    "mark",
    "signal",
    "wait",
    "wait_for_peers_kernel",
]

INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    # The interpreter runs one program after another in one process: a flag that is not set when it
    # is awaited never will be, so a wait ends after a few polls.
    @triton.jit
    def clock_ns():
        return tl.full((), 0, tl.int64)

    _POLLS, _LOOKS = tl.constexpr(4), tl.constexpr(1)
else:

    @triton.jit
    def clock_ns():
        """Nanoseconds of the device's global timer, int64 (coarse: about a microsecond)."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    # Polls, and how many of them there are to one look at the clock and the abort word.
    _POLLS, _LOOKS = tl.constexpr(1 << 62), tl.constexpr(16)


@triton.jit
def advance(counter):
    """Add one to the int32 word `counter`, which this rank alone uses, and return the new value.

    Only one program of a launch may call it: the update is not atomic.
    """
    value = tl.load(counter) + 1
    tl.store(counter, value)
    return value


@triton.jit
def signal(flag_address, value):
    """Store `value` into the int32 word at `flag_address` (an int64 address, often a peer's) with
    release semantics at system scope.
    """
    # The barrier orders the stores of all threads of this program before the one thread's release.
    tl.debug_barrier()
    tl.atomic_xchg(flag_address.to(tl.pointer_type(tl.int32)), value, sem="release", scope="sys")


@triton.jit
def wait(flag, value, errors, abort, operation, peer, round_index, timeout_ns):
    """Spin until the int32 word at pointer `flag` has reached generation `value`, then acquire at
    system scope.

    Returns True when it did, False after `timeout_ns` or when an earlier wait has already given up
    (`abort` is not 0). `errors` is int64 [W, 2]; the record of peer p is (1 << 62 | operation << 32
    | round, expected << 32 | seen).
    """
    # Warps that part inside a loop miss each other's barriers, those of the atomics' results. So
    # what ends the loop is the answer of an atomic, which all warps share: a clock and a load are
    # read by each warp for itself.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen - value < 0:  # noqa: SIM102  (Triton evaluates both sides of `and`)
        if tl.atomic_or(abort, 0, sem="relaxed", scope="gpu") == 0:
            start = clock_ns()
            polls = tl.full((), 0, tl.int64)
            late = tl.full((), 0, tl.int32)
            waiting = seen - value < 0
            while waiting:
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                polls += 1
                waiting = seen - value < 0
                if waiting & (polls % _LOOKS == 0):
                    late = ((clock_ns() - start >= timeout_ns) | (polls >= _POLLS)).to(tl.int32)
                    # The first thread's opinion is stored, and seen by all at the next look.
                    waiting = tl.atomic_or(abort, late, sem="relaxed", scope="gpu") == 0
            if seen - value < 0:
                # Nothing is said of a peer that was not waited for as long as that.
                one = tl.full((), 1, tl.int64)
                record = (value.to(tl.int64) << 32) | (seen.to(tl.int64) & 0xFFFFFFFF)
                tl.store(errors + peer * 2 + 1, record, mask=late != 0)
                record = (one << 62) | (operation * one << 32) | round_index
                tl.store(errors + peer * 2, record, mask=late != 0)
    return seen - value >= 0


@triton.jit
def barrier(
    flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, W: tl.constexpr
):
    """Barrier in every program: wait until every rank's stream has reached this launch.

    An earlier launch on this stream has advanced `counter` to this generation. Returns whether
    every rank has come and no earlier wait of this rank has failed: only then may this program read
    what the peers stored.
    """
    generation = tl.load(counter)
    sound = tl.load(abort) == 0
    # The first program alone signals: the kernel boundary has made all earlier stores of this
    # stream available, and its release publishes them to the peers.
    if (tl.program_id(0) == 0) & sound:
        for d in tl.static_range(W):
            signal(tl.load(flag_addresses + d) + rank * 4, generation)
    # Every program acquires for itself, so that its own loads see what the peers stored.
    for s in tl.static_range(W):
        sound = sound & wait(flags + s, generation, errors, abort, operation, s, 0, timeout_ns)
    return sound


@triton.jit
def mark(address, words):
    """Fill `words` int32 words at an int64 `address` with a pattern that is NaN in bf16, fp16, fp32
    and fp64. By one program, for the memory that its failed wait was for."""
    start = tl.full((), 0, tl.int64)
    target = address.to(tl.pointer_type(tl.int32))
    while start < words:
        o = start + tl.arange(0, 1024)
        tl.store(target + o, tl.full((1024,), 0x7FFF7FFF, tl.int32), mask=o < words)
        start += 1024


@triton.jit(do_not_specialize=["awaited", "words"])
def barrier_kernel(
    awaited, words, flags, flag_addresses, counter, errors, abort, rank, operation, round_index,
    timeout_ns, W: tl.constexpr, SLOT: tl.constexpr, MARK: tl.constexpr,
):  # fmt: skip
    """Barrier over the ranks on words [SLOT, SLOT + W) of a region. Grid (1,).

    flags int32, flag_addresses int64 [W], counter int32. MARK: the memory that peers were to write,
    `words` int32 words at the address `awaited`, is filled with NaN if the barrier fails.
    """
    value = advance(counter)
    sound = tl.load(abort) == 0
    if sound:
        for d in tl.static_range(W):
            signal(tl.load(flag_addresses + d) + (SLOT + rank) * 4, value)
    for s in tl.static_range(W):
        sound = sound & wait(
            flags + SLOT + s, value, errors, abort, operation, s, round_index, timeout_ns
        )
    if MARK:  # noqa: SIM102  (decided at compile time)
        if not sound:
            mark(awaited, words)


@triton.jit(do_not_specialize=["value", "awaited", "words"])
def wait_for_peers_kernel(
    flags, errors, abort, value, awaited, words, rank, operation, timeout_ns, W: tl.constexpr
):
    """Wait until the flag of every other rank has reached ``value``. Grid (1,). flags int32 [W].

    If one does not, the `words` int32 words at the address `awaited` are filled with NaN.
    """
    sound = tl.load(abort) == 0
    for step in tl.static_range(1, W):
        source = (rank + W - step) % W
        sound = sound & wait(
            flags + source, value, errors, abort, operation, source, step, timeout_ns
        )
    if not sound:
        mark(awaited, words)
