"""The wire between hosts: the only thing that is measured while ranks train."""

from __future__ import annotations

import time

import torch

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.group_resources import drop_resource, group_resource
from megatron_fluid.comm.p2p_rounds import P2PRounds, Transfer
from megatron_fluid.moe.hierarchical.model import Wire
from megatron_fluid.topology import HostLayout

__all__ = ["forget_wires", "host_wire"]

_WIRE = "moe hierarchical wire"
_OPERATION = "measure the wire between hosts"
# Sizes grow until a message takes long enough for its rate.
_LATENCY_SAMPLES, _RATE_SAMPLES = 8, 5
_LONG_ENOUGH_S, _PROBE_BYTES = 0.03, tuple(2**n for n in range(17, 24))


def host_wire(rounds: P2PRounds) -> Wire:
    """Return the wire of the slowest rank of a group, as its first rank tells it. Measured once:
    in the first call all ranks exchange longer and longer messages with their gateways. Collective
    over the group in that call.

    Raises:
        PeerTimeoutError: a rank does not take part.
    """
    return group_resource(rounds.group, _WIRE, lambda: _measure(rounds))


def forget_wires() -> None:
    """Let the next call of every group measure its wire again. All ranks must do so between the
    same calls."""
    drop_resource(_WIRE)


def _measure(rounds: P2PRounds) -> Wire:
    layout, rank, talk = HostLayout(tuple(rounds.domains)), rounds.rank, agreement(rounds.group)
    here, others = layout.hosts[rank], layout.num_hosts - 1
    targets = {layout.gateway(rank, host) for host in range(layout.num_hosts) if host != here}
    sources = {
        source
        for source, host in enumerate(layout.hosts)
        if host != here and layout.gateway(source, here) == rank
    }

    def seconds(size: int) -> float:
        """Time in which this rank sends and receives a message of every gateway."""
        message = torch.empty(size, dtype=torch.uint8)
        transfers: list[Transfer] = [
            (peer, [message] * (peer in targets), [torch.empty_like(message)] * (peer in sources))
            for peer in sorted(targets | sources)
        ]
        start = [(p, s[:1], r[:1]) for p, s, r in transfers]
        rounds.exchange(f"{_OPERATION}, start", 0, start).wait()
        begun = time.perf_counter()
        rounds.exchange(_OPERATION, 0, transfers).wait()
        return time.perf_counter() - begun

    def slowest(size: int, samples: int) -> float:
        """The least of several samples, since other work of the hosts can nearly double one.
        Measured: docs/tuning_notes.md#experts-over-several-hosts-on-cpus"""
        least = min(seconds(size) for _ in range(samples))
        return max(talk.gather(_OPERATION, least))

    latency = slowest(1, _LATENCY_SAMPLES)
    for size in _PROBE_BYTES:
        if slowest(size, 1) >= _LONG_ENOUGH_S:
            break
    took = max(slowest(size, _RATE_SAMPLES) - latency, 1e-9)
    streams = others * max(map(len, layout.members))
    told: Wire = talk.first(_OPERATION, Wire(size * others / took, latency, streams=streams))
    return told
