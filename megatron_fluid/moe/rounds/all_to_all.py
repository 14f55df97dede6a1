"""The transport without any overlap: one all-to-all each way, all experts between them. The
baseline that the rounds are compared with.

Legend: N rows of this rank sorted by (destination rank, expert), R rows received, El local experts,
W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds, bounded_collective
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["AllToAllTransport", "exchange_rows"]


def exchange_rows(
    rows: Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    rounds: P2PRounds,
    operation: str,
) -> Tensor:
    """All-to-all along the first dimension, over the group of `rounds` and with its timeout.

    Args:
        rows: [sum(send_rows), ...], destination-major.
        send_rows, recv_rows: rows to and from every rank of the group. [W]
        operation: names the exchange in errors.

    Returns:
        [sum(recv_rows), ...], source-major.

    Raises:
        ConfigError: rows does not have sum(send_rows) rows.
        PeerTimeoutError: a peer did not answer (on a CPU; on a GPU the monitor reports it).
    """
    if rows.shape[0] != sum(send_rows):
        allowed = f"{sum(send_rows)}, the sum of the send counts"
        raise ConfigError.of(f"{operation}: rows", rows.shape[0], allowed)
    if rounds.world_size == 1:
        return rows.clone(memory_format=torch.contiguous_format)
    out = rows.new_empty((sum(recv_rows), *rows.shape[1:]))
    # The collective reads memory in order: a permuted gradient would be sent in the wrong order.
    rows = rows.contiguous()
    counts = list(recv_rows), list(send_rows)

    def launch() -> dist.Work | None:
        return dist.all_to_all_single(out, rows, *counts, group=rounds.group, async_op=True)

    bounded_collective(rounds, operation, launch)
    return out


class AllToAllTransport(TokenTransport):
    """Moves the permuted rows of one call by all-to-alls. All sources' rows are one segment."""

    def __init__(self, plan: ExactPlan, rounds: P2PRounds, name: str) -> None:
        self.plan, self.rounds, self.name = plan, rounds, name

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _AllToAllExchange:
        return _AllToAllExchange(self, x, probs, "")

    def backward(self, grad: Tensor, keep: bool) -> _AllToAllExchange:
        return _AllToAllExchange(self, grad, None, "grad ")


class _AllToAllExchange(Exchange):
    def __init__(
        self, transport: AllToAllTransport, x: Tensor, probs: Tensor | None, direction: str
    ) -> None:
        self.transport, self.x, self.probs, self.direction = transport, x, probs, direction
        self.results: list[Tensor] = []

    def _move(self, rows: Tensor, what: str, back: bool = False) -> Tensor:
        transport = self.transport
        splits = [transport.plan.send_rows, transport.plan.recv_rows]
        name = f"{transport.name} {self.direction}{what}"
        send, receive = splits[::-1] if back else splits
        return exchange_rows(rows, send, receive, transport.rounds, name)

    def segments(self) -> Iterator[Segment]:
        plan = self.transport.plan
        rows = _reorder(self._move(self.x, "dispatch"), plan, to_experts=True)
        probs = None
        if self.probs is not None:
            probs = _reorder(self._move(self.probs, "probs"), plan, to_experts=True)
        sources = range(plan.world_size)
        offsets = torch.stack([plan.recv_offsets(source, rows.device) for source in sources])
        totals = [sum(column) for column in zip(*plan.recv_counts, strict=True)]
        yield Segment(rows, RowGroups.of_counts(totals, offsets.sum(0, dtype=torch.int32)), probs)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        plan = self.transport.plan
        self.results = [self._move(_reorder(rows, plan, False), "combine", back=True)]
        if row_grad is not None:
            grads = _reorder(row_grad, plan, False)
            self.results.append(self._move(grads, "probs back", back=True))


def _reorder(rows: Tensor, plan: ExactPlan, to_experts: bool) -> Tensor:
    """Received rows [R, ...] from the order (source, expert) to (expert, source), or back."""
    sources, local = range(plan.world_size), range(plan.num_local_experts)
    order = [(s, e) for s in sources for e in local]
    experts_first = [(s, e) for e in local for s in sources]
    before, after = (order, experts_first) if to_experts else (experts_first, order)
    blocks = rows.split([plan.recv_counts[s][e] for s, e in before])
    found = dict(zip(before, blocks, strict=True))
    return torch.cat([found[key] for key in after])
