"""The routing plan: which row goes to which expert of which rank, and the way back.

A row is one kept (token, choice) pair. Rows are sorted by expert, and experts lie on ranks in
order, so rows are also sorted by destination rank::

    top-2 of 3 tokens over 4 experts on 2 ranks           rows (token):  1 | 0 2 || 0 | 1 2
    ids = [[1, 2], [0, 3], [3, 1]]                        expert:        0 | 1 1 || 2 | 3 3

Legend: T tokens, K top-k, E experts, El experts of one rank, W ranks, N rows sent by this rank, R
rows received, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_fluid.backward.functions import once_differentiable
from megatron_fluid.comm.p2p_rounds import P2PRounds, bounded_collective
from megatron_fluid.errors import ConfigError

__all__ = [
    "ExactPlan",
    "Permutation",
    "count_choices",
    "local_experts",
    "permute",
    "permute_probs",
    "unpermute",
]


def local_experts(num_experts: int, world_size: int) -> int:
    """El, the number of experts of each rank. Raises ConfigError where it is not whole."""
    if num_experts < 1 or num_experts % world_size:
        allowed = f"a multiple of the {world_size} expert-parallel ranks"
        raise ConfigError.of("num_experts", num_experts, allowed)
    return num_experts // world_size


@dataclass(frozen=True)
class Permutation:
    """Where each row comes from and where each choice went. All int64, on the tokens' device.

    Attributes:
        num_tokens: T.
        row_token: the token of each row. [N]
        row_slot: the flat choice t * K + k of each row. [N]
        slot_row: the row of each choice; N or more where the choice was dropped. [T, K]
    """

    num_tokens: int
    row_token: Tensor
    row_slot: Tensor
    slot_row: Tensor

    @classmethod
    def of(cls, order: Tensor, num_rows: int, shape: torch.Size) -> Permutation:
        """From the flat choices [T * K] in the order of their experts, dropped ones last; `shape`
        is that of the ids, [T, K]."""
        slots = torch.arange(order.numel(), device=order.device)
        slot_row = torch.empty_like(order).scatter_(0, order, slots).view(shape)
        rows = order[:num_rows]
        return cls(shape[0], rows // max(shape[1], 1), rows, slot_row)

    @functools.cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        """The rows of kept choices, token by token, and where each token's begin, with the end.
        Forward and backward sum the same ones."""
        kept = self.slot_row < self.row_slot.numel()
        ends = kept.sum(1).cumsum(0)
        return self.slot_row[kept], torch.cat([ends.new_zeros(1), ends])

    def gather(self, tokens: Tensor) -> Tensor:
        """rows[n] = tokens[row_token[n]]: [T, ...] -> [N, ...]"""
        return tokens.index_select(0, self.row_token)

    def sum_choices(self, rows: Tensor) -> Tensor:
        """tokens[t] = sum over kept k of rows[slot_row[t, k]]: [N, H] -> [T, H], summed in fp32 or
        better."""
        num_rows, slots = rows.shape[0], self.slot_row
        if num_rows == 0:
            return rows.new_zeros((self.num_tokens, *rows.shape[1:]))
        wide = torch.promote_types(rows.dtype, torch.float32)
        if rows.device.type == "cpu" and rows.dim() == 2 and num_rows == self.row_slot.numel():
            # One pass over the rows, in the order of the choices.
            chosen, begins = self._bags
            bags = functional.embedding_bag(
                chosen, rows.to(wide), begins, mode="sum", include_last_offset=True
            )
            return bags.to(rows.dtype)
        flat = slots.reshape(-1).clamp(max=num_rows - 1)
        chosen = rows.index_select(0, flat).view(*slots.shape, *rows.shape[1:])
        if num_rows < slots.numel():  # some choices were dropped
            chosen.masked_fill_((slots >= num_rows).unsqueeze(-1), 0)
        return chosen.sum(1, dtype=wide).to(rows.dtype)


def count_choices(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The sort keys [T * K] of top-k choices, and the rows of each expert [E]: ids [T, K], -1 where
    dropped.

    Raises:
        ConfigError: ids is not [T, K].
    """
    if ids.dim() != 2 or ids.dtype.is_floating_point:
        found = f"{ids.dtype} {list(ids.shape)}"
        raise ConfigError.of("ids", found, "integers of shape [tokens, top-k]")
    choices = ids.reshape(-1).long()
    # Dropped choices count for an expert beyond the last, and so sort to the end.
    keys = torch.where(choices < 0, num_experts, choices)
    histogram = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return keys, histogram.scatter_add_(0, keys, torch.ones_like(keys))[:num_experts]


@dataclass(frozen=True)
class ExactPlan:
    """Row counts of one exchange, known to the host, and the permutation if this package permutes
    the tokens. Made once a layer call, and replayed by backward and recomputation.

    Attributes:
        rank: this rank in the group.
        send_counts: rows from this rank to expert e of rank w. [W][El]
        recv_counts: rows from rank w to this rank's expert e. [W][El]
        permutation: None where the caller permutes (Megatron, and
            moe_multicard_p2p_overlap_forward).
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
            table = torch.tensor(self.recv_counts, dtype=torch.int32).cumsum(1, dtype=torch.int32)
            if device.type == "cuda":
                table = table.pin_memory().to(device, non_blocking=True)
            self._offsets[device] = table
        return table[source]

    @classmethod
    def from_counts(
        cls, tokens_per_expert: Tensor, rounds: P2PRounds, operation: str = "moe row counts"
    ) -> ExactPlan:
        """The plan of a caller that permutes its tokens itself. Collective over the group.

        Args:
            tokens_per_expert: rows of this rank for each expert, on the group's device. [E]
                integers
            operation: names the exchange of counts in errors.

        Raises:
            ConfigError: E is not a multiple of W.
            PeerTimeoutError: a rank does not take part.
        """
        return cls(rounds.rank, *_start_counts(tokens_per_expert, rounds, operation)())

    @classmethod
    def from_topk(
        cls, ids: Tensor, num_experts: int, rounds: P2PRounds, operation: str = "moe row counts"
    ) -> ExactPlan:
        """Plan the rows of top-k choices. Collective over the group; the only host read of device
        data in a layer.

        Args:
            ids: expert of each choice, -1 where it is dropped. [T, K] integers
            num_experts: E.

        Raises:
            ConfigError: ids is not [T, K], or E not a multiple of W.
            PeerTimeoutError: a rank does not take part.
        """
        keys, histogram = count_choices(ids, num_experts)
        read_counts = _start_counts(histogram, rounds, operation)
        order = torch.argsort(keys, stable=True)  # on the device while the counts travel
        send, recv = read_counts()
        permutation = Permutation.of(order, sum(map(sum, send)), ids.shape)
        return cls(rounds.rank, send, recv, permutation)

    @classmethod
    def from_routing_map(
        cls, routing_map: Tensor, top_k: int, rounds: P2PRounds, operation: str = "moe row counts"
    ) -> tuple[ExactPlan, Tensor]:
        """As from_topk, from Megatron's routing_map [T, E] bool, at most top_k true in a row.

        Returns:
            The plan, and ids [T, K] (experts in ascending order, then -1 where a token has fewer
            than K), with which ``probs.gather(1, ids.clamp(min=0))`` turns Megatron's probs [T, E]
            into [T, K].
        """
        num_experts = routing_map.shape[1]
        # Distinct keys: among equal ones topk may pick in any order, and with the order the sums of
        # combine would change.
        ranks = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
        keys = routing_map * ranks
        chosen = keys.topk(top_k, dim=1).values
        ids = torch.where(chosen > 0, num_experts - chosen, -1).long()
        return cls.from_topk(ids, num_experts, rounds, operation), ids


type _CountTable = tuple[tuple[int, ...], ...]  # [W][El]


def _start_counts(
    tokens_per_expert: Tensor, rounds: P2PRounds, operation: str
) -> Callable[[], tuple[_CountTable, _CountTable]]:
    """Start the exchange of row counts; the call that is returned reads (send_counts, recv_counts)
    on the host."""
    shape = (2, rounds.world_size, local_experts(tokens_per_expert.numel(), rounds.world_size))
    mine = tokens_per_expert.reshape(-1).to(torch.int64)
    theirs = torch.empty_like(mine)
    if rounds.world_size == 1:
        theirs.copy_(mine)
    else:

        def start() -> Any:
            return dist.all_to_all_single(theirs, mine, group=rounds.group, async_op=True)

        bounded_collective(rounds, operation, start)
    host = torch.stack([mine, theirs])
    event: torch.cuda.Event | None = None
    if host.is_cuda:
        pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        host, event = pinned.copy_(host, non_blocking=True), torch.cuda.Event()
        event.record()

    def read() -> tuple[_CountTable, _CountTable]:
        if event is not None:
            event.synchronize()  # the one early read; the monitor bounds it
        send, recv = (tuple(map(tuple, counts)) for counts in host.view(shape).tolist())
        return send, recv

    return read


class _Move(torch.autograd.Function):
    """Tokens to rows, or rows summed to tokens: each is the other's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, permutation: Permutation, to_rows: bool) -> Tensor:
        ctx.move = permutation, to_rows
        return permutation.gather(x) if to_rows else permutation.sum_choices(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        permutation, to_rows = ctx.move
        moved = permutation.sum_choices(grad) if to_rows else permutation.gather(grad)
        return moved, None, None


def _permutation(plan: ExactPlan) -> Permutation:
    if plan.permutation is None:
        raise ConfigError(
            "plan: found no permutation (made from counts alone), allowed: a plan from top-k ids"
        )
    return plan.permutation


def permute(tokens: Tensor, plan: ExactPlan) -> Tensor:
    """Tokens [T, H] -> rows [N, H] in the plan's order. Differentiable; the transpose of
    `unpermute`."""
    return _Move.apply(tokens, _permutation(plan), True)


def unpermute(rows: Tensor, plan: ExactPlan) -> Tensor:
    """Rows [N, H] -> tokens [T, H], each the sum of its rows (zero without any). Differentiable,
    fixed order of sums."""
    return _Move.apply(rows, _permutation(plan), False)


def permute_probs(probs: Tensor, plan: ExactPlan) -> Tensor:
    """Probabilities [T, K] -> [N] in the plan's order. Differentiable."""
    return probs.reshape(-1).index_select(0, _permutation(plan).row_slot)
