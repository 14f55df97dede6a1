"""Permute tokens into rows sorted by expert, and sum rows back into tokens, with torch's index
operations.

A row is one kept (token, choice) pair. Consecutive experts lie on the same or on consecutive ranks,
so rows sorted by expert are also sorted by destination rank::

    top-2 of 3 tokens over 4 experts on 2 ranks           rows (token):  1 | 0 2 || 0 | 1 2
    ids = [[1, 2], [0, 3], [3, 1]]                        expert:        0 | 1 1 || 2 | 3 3

Legend: T tokens, K top-k, E experts, N rows, H hidden.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_fluid.backward.autograd import once_differentiable
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.room import refuse_capture

__all__ = [
    "Permutation",
    "check_ids",
    "count_choices",
    "local_experts",
    "rows_of_tokens",
    "sum_of_rows",
]


def local_experts(num_experts: int, world_size: int) -> int:
    """Return El, the number of experts per rank. Raises ConfigError if it is not an integer."""
    if num_experts < 1 or num_experts % world_size:
        allowed = f"a multiple of the {world_size} expert-parallel ranks"
        raise ConfigError.of("num_experts", num_experts, allowed)
    return num_experts // world_size


def check_ids(ids: Tensor) -> None:
    """Check the choices of a call whose row counts the host reads.

    Raises:
        ConfigError: ids are not integers [T, K].
        FluidError: a CUDA graph is being captured.
    """
    refuse_capture()
    if ids.dim() != 2 or ids.dtype.is_floating_point:
        found = f"{ids.dtype} {list(ids.shape)}"
        raise ConfigError.of("ids", found, "integers of shape [tokens, top-k]")


def count_choices(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the sort keys [T * K] of ids [T, K], where -1 means dropped, and the number of rows of
    each expert [E].

    Raises:
        ConfigError: ids is not [T, K].
    """
    check_ids(ids)
    choices = ids.reshape(-1).long()
    # Dropped choices get the key of an expert beyond the last, so that they sort to the end.
    keys = torch.where(choices < 0, num_experts, choices)
    histogram = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return keys, histogram.scatter_add_(0, keys, torch.ones_like(keys))[:num_experts]


@dataclass(frozen=True)
class Permutation:
    """Where each row comes from and where each choice went. All int64, on the tokens' device.

    Attributes:
        num_tokens: T.
        row_token: the token of each row. [N]
        row_slot: the flat choice t * K + k of each row. [N]
        slot_row: the row of each choice; N or more where the choice was dropped. [T, K]
        in_order: sums add a token's rows one by one, in the order of its choices. On a GPU torch's
            reduction, which has another order, takes less time.
    """

    num_tokens: int
    row_token: Tensor
    row_slot: Tensor
    slot_row: Tensor
    in_order: bool = False

    @classmethod
    def of(cls, keys: Tensor, shape: torch.Size, in_order: bool = False) -> Permutation:
        """Sort all choices by their keys [T * K]. shape: of ids, [T, K]"""
        order = keys.argsort(stable=True)
        slots = torch.arange(order.numel(), device=order.device)
        slot_row = torch.empty_like(order).scatter_(0, order, slots).view(shape)
        return cls(shape[0], order // max(shape[1], 1), order, slot_row, in_order)

    def first(self, num_rows: int) -> Permutation:
        """Keep the first num_rows rows, and drop the choices of all later rows."""
        rows = slice(num_rows)
        return replace(self, row_token=self.row_token[rows], row_slot=self.row_slot[rows])

    @functools.cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        """Rows of kept choices, token by token, and the offset of each token's first one [T + 1].
        Cached, because forward and backward use the same."""
        kept = self.slot_row < self.row_slot.numel()
        ends = kept.sum(1).cumsum(0)
        return self.slot_row[kept], torch.cat([ends.new_zeros(1), ends])

    def gather(self, tokens: Tensor) -> Tensor:
        """rows[n] = tokens[row_token[n]]: [T, ...] -> [N, ...]"""
        return tokens.index_select(0, self.row_token)

    def gather_choices(self, choices: Tensor) -> Tensor:
        """The value (such as the probability) of each row: [T, K] -> [N]. Differentiable."""
        return choices.reshape(-1).index_select(0, self.row_slot)

    def spread_choices(self, rows: Tensor) -> Tensor:
        """The transpose of gather_choices, zero for dropped choices: [N] or longer -> [T, K]"""
        choices = rows.new_zeros(self.slot_row.shape)
        choices.view(-1).index_copy_(0, self.row_slot, rows[: self.row_slot.numel()])
        return choices

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
        if self.in_order:
            total = rows.new_zeros((self.num_tokens, *rows.shape[1:]), dtype=wide)
            for slot in slots.unbind(1):
                chosen = rows.index_select(0, slot.clamp(max=num_rows - 1))
                total += chosen.masked_fill_((slot >= num_rows).unsqueeze(-1), 0)
            return total.to(rows.dtype)
        flat = slots.reshape(-1).clamp(max=num_rows - 1)
        chosen = rows.index_select(0, flat).view(*slots.shape, *rows.shape[1:])
        if num_rows < slots.numel():  # some choices were dropped
            chosen.masked_fill_((slots >= num_rows).unsqueeze(-1), 0)
        return chosen.sum(1, dtype=wide).to(rows.dtype)


class _Move(torch.autograd.Function):
    """Gather tokens into rows, or sum rows into tokens. Each is the other's transpose."""

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


def rows_of_tokens(tokens: Tensor, permutation: Permutation) -> Tensor:
    """Tokens [T, H] -> rows [N, H]. Differentiable; the transpose of `sum_of_rows`."""
    return _Move.apply(tokens, permutation, True)


def sum_of_rows(rows: Tensor, permutation: Permutation) -> Tensor:
    """Rows [N, H] -> tokens [T, H], each the sum of its rows (zero without any). Differentiable;
    the order of summation is fixed."""
    return _Move.apply(rows, permutation, False)
