"""How long an MoE layer over several hosts takes, computed: from bytes, a link's rate and latency,
and the computation. What `best_form` finds fastest is what moves: in pieces, or all at once. The
suite slow_wire compares it with what is measured.

The time line of one pass is that of transport.py. The pieces of the dispatch are sent at once, each
piece's results when they are computed. The rank computes some of its experts for the tokens of its
own host, then each piece when it has come, then the other experts. To one peer messages go one
after the other; of a link's streams to several peers one gets what the others leave, and a piece is
there when that one has brought its part.

Legend: T tokens of a rank, K top-k, E experts, M hosts; seconds and bytes are of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "FORMS",
    "Form",
    "Link",
    "Work",
    "best_form",
    "chunks_for",
    "hosts_reached",
    "plain_s",
    "two_level_s",
]

MOST_CHUNKS = 8
# A piece below this costs more by its latency, launch and small GEMMs than it hides.
_LEAST_PIECE_BYTES = {"cuda": 4 * 2**20, "cpu": 2**20}


@dataclass(frozen=True)
class Form:
    """How the tokens of a call move and when they are computed. Alike on all ranks.

    Attributes:
        chunks: pieces in which tokens cross to other hosts.
        first: share of the experts of a rank that compute the tokens of its own host before the
            first piece; the others do after the last one.
        joined: every token of a rank is computed at once, when the last has come. In one piece.
    """

    chunks: int = 1
    first: float = 0.5
    joined: bool = False

    def experts_first(self, experts: int) -> int:
        """`first` as a number of so many experts, at least 1."""
        return min(experts, max(1, round(self.first * experts)))


FORMS = (
    Form(first=1.0, joined=True),
    *(
        Form(chunks, first)
        for chunks in (1, 2, 3, 4, MOST_CHUNKS)
        for first in (0.5, 0.75, 1.0, 0.25)
    ),
)
"""What `best_form` chooses among; of equal ones the first. Where the wire takes longer than the
computation it matters little when own tokens are computed: half of the experts first then costs
least if the wire is faster than it was measured to be."""

CUT_SAVES = 0.05
"""Share of a pass's time that cutting has to save. The model leaves out what brings the rows of
several pieces together for weight gradients, and its measured inputs move by as much. Measured:
docs/tuning_notes.md#experts-over-several-hosts-on-cpus"""


@dataclass(frozen=True)
class Link:
    """A rank's way to other hosts.

    Attributes:
        bytes_per_s: rate, of each direction. latency_s: of a message.
        hand_on_bytes_per_s: rate inside a host.
        streams: connections that share it, of TCP: gateways of other hosts, times the ranks of this
            host where they send through one adapter. 1: all get equal parts.
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
        out_bytes, back_bytes: that cross in dispatch and in combine.
        after_s: computation that follows and waits for nothing: weight gradients.
        before_s: routing and its exchange.
        piece_s: what each piece costs, and what the tokens of the own host do.
        pass_s: what it costs to read all experts' matrices for GEMMs of a few rows more: once for
            each piece, and once for the tokens of the own host.
    """

    own_s: float
    crossing_s: float
    out_bytes: float
    back_bytes: float
    after_s: float = 0.0
    before_s: float = 0.0
    piece_s: float = 0.0
    pass_s: float = 0.0


def two_level_s(work: Work, link: Link, form: Form) -> float:
    """Seconds of a pass in this form."""
    chunks = form.chunks
    out, back = work.out_bytes / chunks, work.back_bytes / chunks
    hand_on = (out + back) / link.hand_on_bytes_per_s
    # The last of a link's streams: what the others carry goes before. Measured:
    # docs/tuning_notes.md#experts-over-several-hosts-on-cpus
    others = 1 - 1 / link.streams
    arrivals = [
        work.before_s
        + (k + 1) * link.latency_s
        + (others * work.out_bytes + (k + 1) * out / link.streams) / link.bytes_per_s
        for k in range(chunks)
    ]
    each_s, own_s = work.pass_s + work.piece_s, work.own_s + work.pass_s
    now, first = work.before_s + work.piece_s + form.first * own_s, form.first
    if form.joined:  # the own host's tokens are computed with those that cross
        now, first, each_s = work.before_s, 1.0, each_s + work.own_s
    free, computed = arrivals[-1], list[float]()
    for arrival in arrivals:
        for earlier in computed:  # results of the other streams that left before it came
            arrival += others * back / link.bytes_per_s if earlier < arrival else 0.0
        now = max(now, arrival) + hand_on + work.crossing_s / chunks + each_s
        computed.append(now)
        free = max(free, now) + link.latency_s + back / link.bytes_per_s
    return max(now + (1 - first) * own_s + work.after_s, free)


def plain_s(work: Work, link: Link, by_turns: float = 0.0) -> float:
    """Seconds of a pass that dispatches, computes and combines one after the other.

    Args:
        by_turns: share of the wire's time for which a rank sends while it does not receive, or the
            other way round. Of gloo's all-to-all among W ranks one message of W - 1: what asks for
            a peer's data queues behind the data that this peer is sent.
    """
    wire = (1 + by_turns) * (work.out_bytes + work.back_bytes) / link.bytes_per_s
    computation = work.own_s + work.crossing_s + work.pass_s + work.after_s
    return work.before_s + wire + 2 * link.latency_s + computation


def best_form(passes: Iterable[Work], link: Link, allowed: Iterable[Form] = FORMS) -> Form:
    """The form of least time over these passes, the first of equal ones. Where cutting saves less
    than `CUT_SAVES` of a pass, nothing is cut."""
    works = list(passes)
    times = {form: sum(two_level_s(work, link, form) for work in works) for form in allowed}
    least = min(times.values()) * (1 + 1e-9)  # sums of other parts differ in their last bits
    best = next(form for form, seconds in times.items() if seconds <= least)
    whole = next((form for form in times if form.joined), best)
    return whole if times[best] > (1 - CUT_SAVES) * times[whole] else best


def chunks_for(crossing_bytes: float, device_type: str) -> int:
    """Pieces in which so many bytes of one rank cross where nothing is known of link and
    computation: a power of two, alike where the bytes are alike."""
    pieces = crossing_bytes / _LEAST_PIECE_BYTES[device_type]
    return min(MOST_CHUNKS, 2 ** int(math.log2(pieces))) if pieces >= 2 else 1


def hosts_reached(hosts: int, experts: int, top_k: int) -> float:
    """Hosts other than its own that a token has experts on, on average, where every expert is as
    likely as another."""
    here = experts // hosts
    none = math.comb(experts - here, top_k) / math.comb(experts, top_k)
    return (hosts - 1) * (1 - none)
