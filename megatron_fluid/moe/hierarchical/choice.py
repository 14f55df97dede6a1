"""In which form the tokens of a call move: the model's best, of what link and experts were measured
to take.

On CPUs the first call of a group measures both, all ranks at once, and every rank takes the slowest
rank's figures; `forget_links` lets the next call measure the link anew. On GPUs, and with
`FluidConfig.deterministic`, the number of pieces follows from bytes alone, so that the same call
always sums in the same order.

Legend: W ranks, C most tokens of a rank, K top-k, E experts, El experts of one rank, H hidden, F1 /
F widths of an expert.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import drop_resource, group_resource
from megatron_fluid.comm.p2p_rounds import P2PRounds, Transfer, bounded_collective
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.hierarchical.model import Form, Link, Work, best_form, chunks_for
from megatron_fluid.moe.hierarchical.plan import Wishes, hosts_of_choices, reached_hosts
from megatron_fluid.moe.rounds.plan import local_experts
from megatron_fluid.topology import HostLayout

__all__ = ["ExpertCost", "ExpertShape", "choose_form", "expert_cost", "forget_links", "host_link"]

_LINK = "moe hierarchical link"
# A message is long enough for its rate where it takes so long; none is longer than the last.
_LATENCY_SAMPLES, _RATE_SAMPLES = 8, 5
_LONG_ENOUGH_S, _PROBE_BYTES = 0.03, tuple(2**n for n in range(17, 24))
# GEMMs of fewer rows are slower by more than the matrices that they read, and pieces seldom have so
# few. Measured: docs/tuning_notes.md#experts-over-several-hosts-on-cpus
_FEW_ROWS, _MANY_ROWS, _TIMED_EXPERTS, _SAMPLES = 64, 192, 8, 5
# Python, messages, gathers and sums of a piece, of a core's time. Measured:
# docs/tuning_notes.md#experts-over-several-hosts-on-cpus
_PIECE_S = 2e-3


class ExpertShape(NamedTuple):
    """Widths H, F1 and F of an expert, and the dtype of its matrices."""

    hidden: int
    fc1_width: int
    ffn: int
    dtype: torch.dtype

    @classmethod
    def of(cls, fc1: ExpertWeights, fc2: ExpertWeights) -> ExpertShape:
        return cls(fc1.in_width, fc1.out_width, fc2.in_width, fc1.params[0].dtype)


class ExpertCost(NamedTuple):
    """Seconds of fc1 and fc2: for each row more, and to read all matrices of a rank once; and what
    a piece costs beside them."""

    row_s: float
    pass_s: float
    piece_s: float = _PIECE_S


def choose_form(
    ids: Tensor, counts: Sequence[int], num_experts: int, rounds: P2PRounds, row_bytes: int,
    experts: ExpertShape | None, wishes: Wishes,
) -> Form:  # fmt: skip
    """The form of one call, alike on all ranks. Collective over the group.

    Args:
        ids, counts: of all ranks. [W, C, K], [W]
        row_bytes: of one token.
        experts: None where they are not known: bytes alone decide.
        wishes: as gather_ids gives them.
    """
    layout, top_k = HostLayout(tuple(rounds.domains)), ids.shape[2]
    if experts is None or ids.device.type != "cpu" or wishes.by_bytes:
        # Of the rank with most tokens, as if each went to other hosts as often as it can.
        most = max(counts) * min(top_k, layout.num_hosts - 1)
        return Form(chunks_for(most * row_bytes, ids.device.type))
    link = host_link(rounds)
    cost = expert_cost(rounds, experts, local_experts(num_experts, rounds.world_size))
    counted = _rows(ids, num_experts, layout)
    # Alike for calls that are nearly alike, and then computed once.
    own, crossing, tokens = (float(f"{number:.3g}") for number in counted)
    return _form_for(own, crossing, tokens, row_bytes, top_k, cost, link, wishes.learns)


@functools.lru_cache(1024)
def _form_for(
    own: float, crossing: float, tokens: float, row_bytes: int, top_k: int, cost: ExpertCost,
    link: Link, learns: bool,
) -> Form:  # fmt: skip
    passes = works(own, crossing, tokens, row_bytes, top_k, cost)
    return best_form(passes if learns else passes[:1], link)


def works(
    own: float, crossing: float, tokens: float, row_bytes: int, top_k: int, cost: ExpertCost
) -> tuple[Work, Work]:
    """Forward and backward of one call on one rank, but for routing and activations.

    Args:
        own, crossing: expert rows of tokens of its own host, and of others.
        tokens: that cross.
        row_bytes: of one token.
    """
    rows, probs = tokens * row_bytes, tokens * top_k * 4
    own_s, crossing_s = own * cost.row_s, crossing * cost.row_s
    each = {"piece_s": cost.piece_s, "pass_s": cost.pass_s}
    forward = Work(own_s, crossing_s, rows + probs, rows, **each)
    after_s = own_s + crossing_s
    backward = Work(own_s, crossing_s, rows, rows + probs, after_s, **each)
    return forward, backward


def _rows(ids: Tensor, num_experts: int, layout: HostLayout) -> tuple[float, float, float]:
    """Of a rank on average: expert rows of tokens that stay on their host, of tokens that cross,
    and tokens that cross."""
    hosts, world = hosts_of_choices(ids, num_experts, layout), len(layout.hosts)
    own = torch.tensor(layout.hosts, device=ids.device).view(-1, 1, 1)
    counted = torch.stack([(hosts == own).sum(), (hosts >= 0).sum()])
    stays, kept, *to_hosts = torch.cat(
        [counted, reached_hosts(hosts, layout).sum(1).view(-1)]
    ).tolist()
    at_home = sum(
        to_hosts[rank * layout.num_hosts + host] for rank, host in enumerate(layout.hosts)
    )
    return stays / world, (kept - stays) / world, (sum(to_hosts) - at_home) / world


def forget_links() -> None:
    """Let the next call of every group measure its link anew. All ranks must do so between the same
    calls."""
    drop_resource(_LINK)


def host_link(rounds: P2PRounds) -> Link:
    """The slowest rank's link to other hosts, measured once a group: all ranks exchange longer and
    longer messages with their gateways. Collective over the group at the first call.

    Raises:
        PeerTimeoutError: a rank does not take part.
    """
    return group_resource(rounds.group, _LINK, lambda: _measure_link(rounds))


def _measure_link(rounds: P2PRounds) -> Link:
    layout, rank = HostLayout(tuple(rounds.domains)), rounds.rank
    here = layout.hosts[rank]
    targets = {layout.gateway(rank, host) for host in range(layout.num_hosts) if host != here}
    sources = {
        source
        for source, host in enumerate(layout.hosts)
        if host != here and layout.gateway(source, here) == rank
    }

    def slowest(size: int) -> float:
        """Seconds in which every rank has sent and received so many bytes for each gateway."""
        message, name = torch.empty(size, dtype=torch.uint8), "measuring the link"
        transfers: list[Transfer] = [
            (peer, [message] * (peer in targets), [torch.empty_like(message)] * (peer in sources))
            for peer in sorted(targets | sources)
        ]
        rounds.exchange(f"{name}, start", 0, [(p, s[:1], r[:1]) for p, s, r in transfers]).wait()
        begun = time.perf_counter()
        rounds.exchange(name, 0, transfers).wait()
        return max(_gathered(rounds, [time.perf_counter() - begun], name)[0])

    latency = min(slowest(1) for _ in range(_LATENCY_SAMPLES))
    for size in _PROBE_BYTES:
        seconds = slowest(size)
        if seconds >= _LONG_ENOUGH_S:
            break
    # The least of several: beside other work of the hosts single ones took up to 1.8 times as long
    # as the link needs. Measured: docs/tuning_notes.md#experts-over-several-hosts-on-cpus
    seconds = min(seconds, *(slowest(size) for _ in range(_RATE_SAMPLES - 1)))
    rate = size * max(len(targets), 1) / max(seconds - latency, 1e-9)
    streams = (layout.num_hosts - 1) * max(map(len, layout.members))
    return Link(rate, latency, streams=streams)


def expert_cost(rounds: P2PRounds, shape: ExpertShape, experts: int) -> ExpertCost:
    """What the experts of the slowest rank cost, measured once a group and shape while all ranks
    compute: they may share cores. Collective over the group at the first call."""

    def measure() -> ExpertCost:
        _gathered(rounds, [0.0], "measuring the experts, start")
        mine = _measure_experts(shape, experts)
        return ExpertCost(*map(max, _gathered(rounds, mine, "measuring the experts")))

    return group_resource(rounds.group, ("moe hierarchical cost", shape, experts), measure)


def _measure_experts(shape: ExpertShape, experts: int) -> ExpertCost:
    timed = min(experts, _TIMED_EXPERTS)
    hidden, fc1_width, ffn, dtype = shape
    fc1 = torch.full((timed, fc1_width, hidden), 0.01, dtype=dtype)
    fc2 = torch.full((timed, hidden, ffn), 0.01, dtype=dtype)

    def seconds(rows: int) -> float:
        """Of this thread's own time: what the core does for others meanwhile is not in it."""
        x, a = (torch.full((rows, width), 0.01, dtype=dtype) for width in (hidden, ffn))
        begun = time.thread_time()
        for expert in range(timed):
            torch.mm(x, fc1[expert].t())
            torch.mm(a, fc2[expert].t())
        return time.thread_time() - begun

    seconds(_FEW_ROWS)
    begun, computed = time.perf_counter(), time.thread_time()
    samples = [(seconds(_FEW_ROWS), seconds(_MANY_ROWS)) for _ in range(_SAMPLES)]
    few, many = (median(times) for times in zip(*samples, strict=True))
    # Ranks that share a core each get a part of it: a sample is too short to tell which.
    computed = max(time.thread_time() - computed, 1e-9)
    slower = max((time.perf_counter() - begun) / computed, 1.0)
    row_s = max(many - few, 0.0) / ((_MANY_ROWS - _FEW_ROWS) * timed)
    pass_s = max(few - _FEW_ROWS * timed * row_s, 0.0) * experts / timed
    return ExpertCost(row_s * slower, pass_s * slower, _PIECE_S * slower)


def _gathered(rounds: P2PRounds, mine: Sequence[float], name: str) -> list[list[float]]:
    """Figures of all ranks, by figure."""
    given = torch.tensor(mine, dtype=torch.float64)
    every = given.new_empty((rounds.world_size, len(mine)))

    def start() -> dist.Work | None:
        return dist.all_gather_into_tensor(every.view(-1), given, group=rounds.group, async_op=True)

    bounded_collective(rounds, name, start)
    found: list[list[float]] = every.t().tolist()
    return found
