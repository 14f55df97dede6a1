"""How long an MoE layer over several hosts takes, computed: from bytes, a link's rate and latency,
and the computation. `chunks_for` follows from it; the suite slow_wire compares it with what is
measured.

The time line of one pass is that of transport.py. The link of a rank sends one message after the
other: the pieces of the dispatch at once, each piece's results when they are computed. The rank
computes pieces in their order, and a crossing one only when it has come.

Legend: T tokens of a rank, K top-k, E experts, M hosts; seconds and bytes are of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Link", "Work", "best_chunks", "chunks_for", "hosts_reached", "plain_s", "two_level_s"]

MOST_CHUNKS = 8
# A piece below this costs more by its latency, launch and small GEMMs than it hides.
_LEAST_PIECE_BYTES = {"cuda": 4 * 2**20, "cpu": 256 * 2**10}


@dataclass(frozen=True)
class Link:
    """A rank's way to other hosts.

    Attributes:
        bytes_per_s: rate. latency_s: of a message.
        hand_on_bytes_per_s: rate inside a host.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    hand_on_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Work:
    """One pass, forward or backward.

    Attributes:
        own_s: computation of tokens that stay on their host. crossing_s: of those that cross.
        out_bytes, back_bytes: that cross in dispatch and in combine.
        after_s: computation that follows and waits for nothing: weight gradients.
        before_s: routing and its exchange.
        piece_s: what a piece more costs.
    """

    own_s: float
    crossing_s: float
    out_bytes: float
    back_bytes: float
    after_s: float = 0.0
    before_s: float = 0.0
    piece_s: float = 0.0


def two_level_s(work: Work, link: Link, chunks: int) -> float:
    """Seconds of a pass whose tokens cross in so many pieces."""
    out, back = work.out_bytes / chunks, work.back_bytes / chunks
    hand_on = (out + back) / link.hand_on_bytes_per_s
    arrivals = [
        work.before_s + (k + 1) * (link.latency_s + out / link.bytes_per_s) for k in range(chunks)
    ]
    free, now = arrivals[-1], work.before_s
    own_s = work.own_s / (chunks + 1) + work.piece_s
    for arrival in arrivals:
        now += own_s
        now = max(now, arrival) + hand_on + work.crossing_s / chunks + work.piece_s
        free = max(free, now) + link.latency_s + back / link.bytes_per_s
    return max(now + own_s + work.after_s, free)


def plain_s(work: Work, link: Link) -> float:
    """Seconds of a pass that dispatches, computes and combines one after the other."""
    wire = (work.out_bytes + work.back_bytes) / link.bytes_per_s + 2 * link.latency_s
    return work.before_s + wire + work.own_s + work.crossing_s + work.after_s


def best_chunks(work: Work, link: Link, allowed: Sequence[int] = (1, 2, 4, MOST_CHUNKS)) -> int:
    """The number of pieces of least time; of equal ones the smallest."""
    return min(allowed, key=lambda chunks: (two_level_s(work, link, chunks), chunks))


def chunks_for(crossing_bytes: float, device_type: str) -> int:
    """Pieces in which so many bytes of one rank cross: a power of two, alike where the bytes are
    alike."""
    pieces = crossing_bytes / _LEAST_PIECE_BYTES[device_type]
    return min(MOST_CHUNKS, 2 ** int(math.log2(pieces))) if pieces >= 2 else 1


def hosts_reached(hosts: int, experts: int, top_k: int) -> float:
    """Hosts other than its own that a token has experts on, on average, where every expert is as
    likely as another."""
    here = experts // hosts
    none = math.comb(experts - here, top_k) / math.comb(experts, top_k)
    return (hosts - 1) * (1 - none)
