"""Cost model of a pass over two levels: its time from bytes, the wire's rate and latency, and the
computation. `best_form` picks how tokens move. The suite slow_wire compares it with measured times.

The time line of a pass is that of transport.py: the pieces of the dispatch are sent at once, the
results of each when they are computed. A rank computes some experts for the tokens of its own host,
then each piece when it has arrived, then the other experts. Messages to one peer go one after the
other. Of the streams of a wire to several peers one gets what the others leave, and a piece has
arrived when that one has brought its part.

Seconds and bytes are of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FORMS", "Form", "Wire", "Work", "best_form", "chunks_for", "two_level_s"]

MOST_CHUNKS = 8
# A piece below this costs more by its latency, launch and small GEMMs than it hides.
_LEAST_PIECE_BYTES = {"cuda": 4 * 2**20, "cpu": 2**20}


@dataclass(frozen=True)
class Form:
    """How the tokens of a call move and when they are computed. The same on all ranks.

    Attributes:
        chunks: pieces in which tokens cross to other hosts.
        first: share of a rank's experts that compute the tokens of its own host before the first
            piece; the others do so after the last one.
        joined: all tokens of a rank are computed together, once all have arrived; in one piece.
    """

    chunks: int = 1
    first: float = 0.5
    joined: bool = False

    def experts_first(self, experts: int) -> int:
        """Return how many of a rank's experts come first, at least 1."""
        return min(experts, max(1, round(self.first * experts)))


FORMS = (
    Form(first=1.0, joined=True),
    *(
        Form(chunks, first)
        for chunks in (1, 2, 3, 4, MOST_CHUNKS)
        for first in (0.5, 0.75, 1.0, 0.25)
    ),
)
"""The choices of `best_form`, which takes the first of equal ones. Where the wire takes longer than
the computation it hardly matters when a rank's own tokens are computed: half of the experts first
then loses least if the wire is faster than measured."""

CUT_SAVES = 0.05
"""Least share of a pass's time that several pieces must save. The model leaves out the copies that
bring the rows of several pieces together for weight gradients, and its inputs vary by as much.
Measured: docs/tuning_notes.md#experts-over-several-hosts-on-cpus"""


@dataclass(frozen=True)
class Wire:
    """A rank's connection to other hosts.

    Attributes:
        bytes_per_s: rate of each direction. latency_s: of a message.
        hand_on_bytes_per_s: rate inside a host.
        streams: TCP connections that share the wire: gateways of other hosts, times the ranks of
            this host where they send through one adapter. 1: all get equal parts.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    hand_on_bytes_per_s: float = math.inf
    streams: int = 1


@dataclass(frozen=True)
class Work:
    """One pass, forward or backward.

    Attributes:
        own_s: computation of tokens that stay on their host. crossing_s: of those that cross.
        out_bytes, back_bytes: cross in dispatch and in combine.
        after_s: computation that follows and waits for nothing: weight gradients.
        before_s: routing and its exchange.
        piece_s: overhead of each piece, and of the tokens of the rank's own host.
        pass_s: time to read all experts' matrices once, paid as often as piece_s.
    """

    own_s: float
    crossing_s: float
    out_bytes: float
    back_bytes: float
    after_s: float = 0.0
    before_s: float = 0.0
    piece_s: float = 0.0
    pass_s: float = 0.0


def two_level_s(work: Work, wire: Wire, form: Form) -> float:
    """Return the seconds of a pass in this form."""
    chunks = form.chunks
    out, back = work.out_bytes / chunks, work.back_bytes / chunks
    hand_on = (out + back) / wire.hand_on_bytes_per_s
    # On the last of the streams: what the others carry goes before. Measured:
    # docs/tuning_notes.md#experts-over-several-hosts-on-cpus
    others = 1 - 1 / wire.streams
    arrivals = [
        work.before_s
        + (k + 1) * wire.latency_s
        + (others * work.out_bytes + (k + 1) * out / wire.streams) / wire.bytes_per_s
        for k in range(chunks)
    ]
    each_s, own_s = work.pass_s + work.piece_s, work.own_s + work.pass_s
    now, first = work.before_s + work.piece_s + form.first * own_s, form.first
    if form.joined:  # the own host's tokens are computed with those that cross
        now, first, each_s = work.before_s, 1.0, each_s + work.own_s
    free, computed = arrivals[-1], list[float]()
    for arrival in arrivals:
        for earlier in computed:  # results of the other streams that left before it came
            arrival += others * back / wire.bytes_per_s if earlier < arrival else 0.0
        now = max(now, arrival) + hand_on + work.crossing_s / chunks + each_s
        computed.append(now)
        free = max(free, now) + wire.latency_s + back / wire.bytes_per_s
    return max(now + (1 - first) * own_s + work.after_s, free)


def best_form(passes: Iterable[Work], wire: Wire, allowed: Iterable[Form] = FORMS) -> Form:
    """Return the form of least time over these passes, the first of equal ones; one piece where
    several save less than `CUT_SAVES`."""
    works = list(passes)
    times = {form: sum(two_level_s(work, wire, form) for work in works) for form in allowed}
    least = min(times.values()) * (1 + 1e-9)  # sums of other parts differ in their last bits
    best = next(form for form, seconds in times.items() if seconds <= least)
    whole = next((form for form in times if form.joined), best)
    return whole if times[best] > (1 - CUT_SAVES) * times[whole] else best


def chunks_for(crossing_bytes: float, device_type: str) -> int:
    """Return the number of pieces for so many crossing bytes of a rank, without regard to the wire
    and the computation: a power of two."""
    pieces = crossing_bytes / _LEAST_PIECE_BYTES[device_type]
    return min(MOST_CHUNKS, 2 ** int(math.log2(pieces))) if pieces >= 2 else 1
