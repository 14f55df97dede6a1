"""The transport without any overlap: one all-to-all each way, all experts between them. The
baseline that the rounds are compared with.

Legend: N rows of this rank sorted by (destination rank, expert), R rows received, El local experts,
W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.experts import merge_rows, split_rows
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport

__all__ = ["AllToAllTransport"]


class AllToAllTransport(TokenTransport):
    """Moves the tokens of one call by all-to-alls. All sources' rows are one segment."""

    permutes = True

    def __init__(self, plan: ExactPlan, rounds: P2PRounds, name: str) -> None:
        self.plan, self.rounds, self.name = plan, rounds, name

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """As RoundsTransport."""
        return self.plan.enter(self.name, x, probs)

    def leave(self, y: Tensor) -> Tensor:
        return self.plan.leave(y)

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
        plan = transport.plan
        self.groups = [
            RowGroups.of_counts(counts, plan.recv_offsets(source, x.device))
            for source, counts in enumerate(plan.recv_counts)
        ]

    def _move(self, rows: Tensor, what: str, back: bool = False) -> Tensor:
        """All-to-all along the first dimension: rows by destination -> rows by source."""
        transport, rounds = self.transport, self.transport.rounds
        if rounds.world_size == 1:
            return rows.clone(memory_format=torch.contiguous_format)
        splits = [transport.plan.send_rows, transport.plan.recv_rows]
        send, receive = splits[::-1] if back else splits
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        # The collective reads memory in order, and a gradient may be permuted.
        rows = rows.contiguous()

        def launch() -> dist.Work | None:
            return dist.all_to_all_single(
                out, rows, receive, send, group=rounds.group, async_op=True
            )

        rounds.collective(f"{transport.name} {self.direction}{what}", launch)
        return out

    def segments(self) -> Iterator[Segment]:
        rows = self._move(self.x, "dispatch")
        probs = rows[:, 0] if self.probs is None else self._move(self.probs, "probs")
        counts = self.transport.plan.recv_rows
        pairs = list(zip(rows.split(counts), probs.split(counts), strict=True))
        rows, probs, groups = merge_rows(pairs, self.groups)
        yield Segment(rows, groups, None if self.probs is None else probs)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        for tensor, what in ((rows, "combine"), (row_grad, "probs back")):
            if tensor is not None:
                by_source = torch.cat(split_rows(tensor, self.groups))
                self.results.append(self._move(by_source, what, back=True))
