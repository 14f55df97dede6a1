"""Signals between ranks over symmetric memory, as Triton device functions that other kernels call.

A flag is an int32 word in symmetric memory that exactly one peer writes. It holds the generation of
the last message, or the number of messages, which only grows (modulo 2**32): nothing is ever reset.
`signal` publishes all stores of the calling program and of every earlier kernel on its stream;
`wait` makes them visible. A wait is bounded by `timeout_ns`: past it, `wait` leaves a record in the
error words (megatron_fluid.comm.workspace.ErrorWords), sets the abort word so that later waits give
up at once, and returns.

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

    _POLLS = tl.constexpr(4)
else:

    @triton.jit
    def clock_ns():
        """Nanoseconds of the device's global timer, int64 (coarse: about a microsecond)."""
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    _POLLS = tl.constexpr(1 << 62)


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
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen - value < 0:  # noqa: SIM102  (Triton evaluates both sides of `and`)
        if tl.load(abort) == 0:
            start = clock_ns()
            polls = tl.full((), 0, tl.int64)
            waiting = seen - value < 0
            while waiting:
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                polls += 1
                waiting = (seen - value < 0) & (clock_ns() - start < timeout_ns) & (polls < _POLLS)
            if seen - value < 0:
                one = tl.full((), 1, tl.int64)
                tl.store(
                    errors + peer * 2 + 1,
                    (value.to(tl.int64) << 32) | (seen.to(tl.int64) & 0xFFFFFFFF),
                )
                tl.store(errors + peer * 2, (one << 62) | (operation * one << 32) | round_index)
                tl.store(abort, 1)
    return seen - value >= 0


@triton.jit
def barrier(
    flags, flag_addresses, counter, errors, abort, rank, operation, timeout_ns, W: tl.constexpr
):
    """Barrier in every program: wait until every rank's stream has reached this launch.

    An earlier launch on this stream has advanced `counter` to this generation.
    """
    generation = tl.load(counter)
    # The first program alone signals: the kernel boundary has made all earlier stores of this
    # stream available, and its release publishes them to the peers.
    if tl.program_id(0) == 0:
        for d in tl.static_range(W):
            signal(tl.load(flag_addresses + d) + rank * 4, generation)
    # Every program acquires for itself, so that its own loads see what the peers stored.
    for s in tl.static_range(W):
        wait(flags + s, generation, errors, abort, operation, s, 0, timeout_ns)


@triton.jit
def barrier_kernel(
    flags,
    flag_addresses,
    counter,
    errors,
    abort,
    rank,
    operation,
    round_index,
    timeout_ns,
    W: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Barrier over the ranks on words [SLOT, SLOT + W) of a region. Grid (1,).

    flags int32, flag_addresses int64 [W], counter int32.
    """
    value = advance(counter)
    for d in tl.static_range(W):
        signal(tl.load(flag_addresses + d) + (SLOT + rank) * 4, value)
    for s in tl.static_range(W):
        wait(flags + SLOT + s, value, errors, abort, operation, s, round_index, timeout_ns)


@triton.jit(do_not_specialize=["value"])
def wait_for_peers_kernel(
    flags, errors, abort, value, rank, operation, timeout_ns, W: tl.constexpr
):
    """Wait until the flag of every other rank has reached ``value``. Grid (1,). flags int32 [W]."""
    for step in tl.static_range(1, W):
        source = (rank + W - step) % W
        wait(flags + source, value, errors, abort, operation, source, step, timeout_ns)
