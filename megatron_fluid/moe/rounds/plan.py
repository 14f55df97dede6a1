"""The routing plan of an exchange between ranks whose row counts the host knows.

Legend: T tokens, K top-k, E experts, El experts of one rank, W ranks, N rows sent by this rank, R
rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.permute import (
    Permutation,
    count_choices,
    local_experts,
    rows_of_tokens,
    sum_of_rows,
)

__all__ = ["ExactPlan"]


@dataclass(frozen=True)
class ExactPlan:
    """Row counts of one exchange, known to the host, and the permutation if this package permutes
    the tokens. Made once a layer call, and replayed by backward and recomputation.

    Attributes:
        rank: this rank in the group.
        send_counts: rows from this rank to expert e of rank w. [W][El]
        recv_counts: rows from rank w to this rank's expert e. [W][El]
        permutation: None where the caller permutes (moe_multicard_p2p_overlap_forward).
    """

    rank: int
    send_counts: tuple[tuple[int, ...], ...]
    recv_counts: tuple[tuple[int, ...], ...]
    permutation: Permutation | None = None
    _offsets: dict[torch.device, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        shapes = {len(row) for row in (*self.send_counts, *self.recv_counts)}
        if len(self.send_counts) != len(self.recv_counts) or len(shapes) != 1:
            must = "plan: send_counts and recv_counts must both be [ranks][local experts]"
            raise ConfigError(must)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError.of("plan: rank", self.rank, f"0 to {self.world_size - 1}")
        if self.send_counts[self.rank] != self.recv_counts[self.rank]:
            raise ConfigError(
                f"plan: rank {self.rank} sends {self.send_counts[self.rank]} rows to its own "
                f"experts, but receives {self.recv_counts[self.rank]} from itself"
            )

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.send_counts)

    @property
    def num_local_experts(self) -> int:
        """El."""
        return len(self.send_counts[0])

    @property
    def send_rows(self) -> list[int]:
        """Rows to each rank. [W]"""
        return [sum(counts) for counts in self.send_counts]

    @property
    def recv_rows(self) -> list[int]:
        """Rows from each rank. [W]"""
        return [sum(counts) for counts in self.recv_counts]

    @property
    def num_rows(self) -> int:
        """N, the rows that this rank sends (its own included)."""
        return sum(self.send_rows)

    def send_slice(self, peer: int) -> slice:
        """This rank's rows for `peer`."""
        rows = self.send_rows
        begin = sum(rows[:peer])
        return slice(begin, begin + rows[peer])

    def recv_offsets(self, source: int, device: torch.device) -> Tensor:
        """End of each local expert's rows among those from `source`, on the device. [El] int32

        All sources' offsets are copied there once, without making the host wait.
        """
        table = self._offsets.get(device)
        if table is None:
            table = torch.tensor(self.recv_counts, dtype=torch.int32, device="cpu").cumsum(
                1, dtype=torch.int32
            )
            if device.type == "cuda":
                table = table.pin_memory().to(device, non_blocking=True)
            self._offsets[device] = table
        return table[source]

    def enter(self, name: str, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Rows [N, H] sorted by (destination rank, expert), and their probabilities [N], of tokens
        [T, H] and [T, K]; without a permutation these are rows already. Differentiable.

        Raises:
            ConfigError: a shape is another than the plan's.
        """
        count, shape, what = self.num_rows, [self.num_rows], "row"
        if self.permutation is not None:
            shape, what = list(self.permutation.slot_row.shape), "choice"
            count = shape[0]
        if x.shape[0] != count:
            allowed = f"[{count}, hidden] as the plan says"
            raise ConfigError.of(f"{name}: tokens", list(x.shape), allowed)
        if probs is not None and list(probs.shape) != shape:
            allowed = f"{shape}, one for each {what}"
            raise ConfigError.of(f"{name}: probs", list(probs.shape), allowed)
        if self.permutation is None:
            return x.contiguous(), None if probs is None else probs.contiguous()
        x = rows_of_tokens(x, self.permutation)
        return x, None if probs is None else self.permutation.gather_choices(probs)

    def leave(self, y: Tensor) -> Tensor:
        """Rows [N, H] that came back -> tokens [T, H], as `enter` took them. Differentiable."""
        return y if self.permutation is None else sum_of_rows(y, self.permutation)

    @classmethod
    def from_topk(
        cls, ids: Tensor, num_experts: int, rounds: P2PRounds, operation: str = "moe row counts",
        in_order: bool = False,
    ) -> ExactPlan:  # fmt: skip
        """Plan the rows of top-k choices. Collective over the group; the only host read of device
        data in a layer.

        Args:
            ids: expert of each choice, -1 where it is dropped. [T, K] integers
            num_experts: E.
            operation: names the exchange of counts in errors.
            in_order: as in Permutation.

        Raises:
            ConfigError: ids is not [T, K], or E not a multiple of W.
            PeerTimeoutError: a rank does not take part.
        """
        keys, histogram = count_choices(ids, num_experts)
        read_counts = _start_counts(histogram, rounds, operation)
        # On the device while the counts travel; the dropped ones are cut off afterwards.
        sorted_choices = Permutation.of(keys, ids.shape, in_order)
        send, recv = read_counts()
        return cls(rounds.rank, send, recv, sorted_choices.first(sum(map(sum, send))))


type _CountTable = tuple[tuple[int, ...], ...]  # [W][El]


def _start_counts(
    tokens_per_expert: Tensor, rounds: P2PRounds, operation: str
) -> Callable[[], tuple[_CountTable, _CountTable]]:
    """Start the exchange of row counts [E]; the call that is returned reads (send_counts,
    recv_counts) on the host."""
    shape = (2, rounds.world_size, local_experts(tokens_per_expert.numel(), rounds.world_size))
    mine = tokens_per_expert
    theirs = torch.empty_like(mine)
    if rounds.world_size == 1:
        theirs.copy_(mine)
    else:

        def start() -> Any:
            return dist.all_to_all_single(theirs, mine, group=rounds.group, async_op=True)

        rounds.collective(operation, start)
    host = torch.stack([mine, theirs])
    event: torch.cuda.Event | None = None
    if host.is_cuda:
        pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True)
        host, event = pinned.copy_(host, non_blocking=True), torch.cuda.Event()
        event.record()

    def read() -> tuple[_CountTable, _CountTable]:
        if event is not None:
            event.synchronize()  # the one early read; the monitor bounds it
        send, recv = (tuple(map(tuple, counts)) for counts in host.view(shape).tolist())
        return send, recv

    return read
