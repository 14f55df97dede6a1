"""A computed time line of an MoE layer's forward over a wire between hosts: with and without
overlap. It is for the table of many hosts in docs/several_nodes.md; nothing in the package uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Forward", "Wire", "hosts_reached", "plain_s", "two_level_s"]


@dataclass(frozen=True)
class Wire:
    """A rank's connection to other hosts.

    Attributes:
        bytes_per_s: rate of each direction. latency_s: of a message.
        inside_bytes_per_s: rate inside a host.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    inside_bytes_per_s: float = math.inf


@dataclass(frozen=True)
class Forward:
    """The forward of one rank.

    Attributes:
        own_s: computation of tokens that stay on their host. crossing_s: of those that cross.
        bytes_each_way: cross in the dispatch, and again in the combine.
        before_s: routing and its exchange.
        piece_s: overhead of each piece, and of the tokens of the rank's own host.
    """

    own_s: float
    crossing_s: float
    bytes_each_way: float
    before_s: float = 0.0
    piece_s: float = 0.0


def plain_s(forward: Forward, wire: Wire) -> float:
    """Return the seconds of a forward that dispatches, computes and combines one after the
    other."""
    moving = 2 * (forward.bytes_each_way / wire.bytes_per_s + wire.latency_s)
    return forward.before_s + moving + forward.own_s + forward.crossing_s


def two_level_s(forward: Forward, wire: Wire, chunks: int) -> float:
    """Return the seconds of a forward over two levels, in the order of moe/hierarchical/plan.py:
    half of the own tokens' experts, each piece when it has arrived, the other half while the last
    last results cross back. A rank's messages go one after the other, all dispatches first."""
    each = forward.bytes_each_way / chunks
    inside_s, back_s = 2 * each / wire.inside_bytes_per_s, each / wire.bytes_per_s
    now = forward.before_s + forward.piece_s + forward.own_s / 2
    arrivals = [
        forward.before_s + piece * (wire.latency_s + each / wire.bytes_per_s)
        for piece in range(1, chunks + 1)
    ]
    free = arrivals[-1]  # when the wire has carried everything so far
    for arrival in arrivals:
        now = max(now, arrival) + inside_s + forward.crossing_s / chunks + forward.piece_s
        free = max(free, now) + wire.latency_s + back_s
    return max(now + forward.own_s / 2, free)


def hosts_reached(hosts: int, experts: int, top_k: int) -> float:
    """Return the mean number of other hosts on which a token has experts, for even routing."""
    here = experts // hosts
    none = math.comb(experts - here, top_k) / math.comb(experts, top_k)
    return (hosts - 1) * (1 - none)
