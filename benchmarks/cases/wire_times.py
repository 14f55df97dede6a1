"""Times of an exchange without overlap, beside the cost model of moe/hierarchical/model.py."""

from __future__ import annotations

import math

from megatron_fluid.moe.hierarchical.model import Wire, Work

__all__ = ["hosts_reached", "plain_s"]


def plain_s(work: Work, wire: Wire, by_turns: float = 0.0) -> float:
    """Return the seconds of a pass that dispatches, computes and combines one after the other.

    Args:
        by_turns: share of the wire's time in which a rank only sends or only receives. For gloo's
            all-to-all of W ranks one message of W - 1: the request for a peer's data queues behind
            the data that goes to this peer.
    """
    moving = (1 + by_turns) * (work.out_bytes + work.back_bytes) / wire.bytes_per_s
    computation = work.own_s + work.crossing_s + work.pass_s + work.after_s
    return work.before_s + moving + 2 * wire.latency_s + computation


def hosts_reached(hosts: int, experts: int, top_k: int) -> float:
    """Return the mean number of other hosts on which a token has experts, for even routing."""
    here = experts // hosts
    none = math.comb(experts - here, top_k) / math.comb(experts, top_k)
    return (hosts - 1) * (1 - none)
