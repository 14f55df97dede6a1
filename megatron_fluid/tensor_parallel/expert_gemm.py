"""Products with the weights of experts that are split over tensor-parallel ranks: every rank holds
a slice of every expert.

`TokenRows` says which rows a token has in the expert-major matrices between the two products: rows
are sorted by block of tokens, then by expert, then by token. With one block a rank, the rows of a
rank's tokens are together: a block can be multiplied when its tokens have arrived, and sent when
its results are there. With one block, every expert's rows are together: fewer and larger GEMMs,
nothing to overlap.

`ScatterProduct` copies tokens to their rows and multiplies; `GatherProduct` multiplies rows and
sums a token's rows. Both are a `Product` that the backends use as they use a plain GEMM.

Shapes: W ranks, M tokens of all ranks, K choices a token, E experts, B blocks, R = M K rows, H
hidden, N columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.kernels.grouped_gemm import grouped_matmul

__all__ = ["ExpertMajor", "GatherProduct", "ScatterProduct", "TokenRows"]


def _ends(values: Tensor, count: int) -> Tensor:
    """How many of each line's sorted ``values`` [B, n] are at most 0, 1, ... count - 1, int32."""
    numbers = torch.arange(count, device=values.device, dtype=values.dtype)
    every = numbers.expand(values.shape[0], -1).contiguous()
    return torch.searchsorted(values.contiguous(), every, right=True, out_int32=True)


@dataclass(frozen=True)
class TokenRows:
    """Where the tokens' rows are.

    Attributes:
        tokens: token of each row, counted within its block. [B, R / B]
        rows: row of each choice, counted within its block. [B, M / B, K]
        ends: end of each expert's rows within the block, int32. [B, E]

    Example, one block, K 2, ids [[1, 0], [1, 2]]: tokens [[0, 0, 1, 1]], rows [[[1, 0], [2, 3]]],
    ends [[1, 3, 4]].
    """

    tokens: Tensor
    rows: Tensor
    ends: Tensor

    @staticmethod
    def plan(ids: Tensor, num_experts: int, blocks: int) -> TokenRows:
        """From the experts ``[M, K]`` chosen for all ranks' tokens, each in [0, E). Reads nothing
        on the host."""
        m, k = ids.shape
        by_block = ids.reshape(blocks, -1)
        experts, order = torch.sort(by_block, dim=1, stable=True)
        place = torch.arange(order.shape[1], device=ids.device).expand_as(order)
        rows = torch.empty_like(order).scatter_(1, order, place)
        ends = _ends(experts, num_experts)
        return TokenRows(order // k, rows.view(blocks, m // blocks, k), ends)

    @property
    def blocks(self) -> int:
        return self.tokens.shape[0]

    @property
    def choices(self) -> int:
        """K."""
        return self.rows.shape[2]

    @property
    def block_tokens(self) -> int:
        """Tokens of one block."""
        return self.rows.shape[1]

    def expert_major(self) -> ExpertMajor:
        """All blocks' rows together. With one block they are so already."""
        blocks, count = self.tokens.shape
        first = torch.arange(blocks, device=self.tokens.device)[:, None] * self.block_tokens
        tokens = (self.tokens + first).flatten()
        if blocks == 1:
            return ExpertMajor(None, tokens, self.ends[0])
        expert = _ends(self.ends, count)
        order = torch.argsort(expert.flatten(), stable=True)
        return ExpertMajor(order, tokens[order], self.ends.sum(0, dtype=torch.int32))

    def by_row(self, per_choice: Tensor) -> Tensor:
        """A number per choice ``[M, K]``, by row. [R]"""
        flat = per_choice.reshape(self.blocks, -1)
        return torch.empty_like(flat).scatter_(1, self.rows.flatten(1), flat).flatten()

    def by_choice(self, per_row: Tensor) -> Tensor:
        """A number per row ``[R]``, by choice. [M, K]"""
        found = per_row.view(self.blocks, -1).gather(1, self.rows.flatten(1))
        return found.view(-1, self.choices)


@dataclass(frozen=True)
class ExpertMajor:
    """The rows of all blocks, sorted by expert, and by block and token within.

    Attributes:
        order: which row is the next, None where they are in order. [R]
        tokens: token of each. [R]
        ends: end of each expert's rows, int32. [E]
    """

    order: Tensor | None
    tokens: Tensor
    ends: Tensor

    def sort(self, rows: Tensor) -> Tensor:
        """Rows ``[R, ...]`` as the blocks have them, in this order."""
        return rows if self.order is None else rows.index_select(0, self.order)


class _GroupedProduct:
    """What both directions share: ``weight`` [E, K, N], rows of A by block."""

    bias = None

    def __init__(self, weight: Tensor, rows: TokenRows, height: int) -> None:
        self.weight = weight
        self.rows = rows
        self._height = height  # rows of A in one block

    @property
    def n(self) -> int:
        return self.weight.shape[2]

    def dtype_for(self, a: Tensor) -> torch.dtype:
        return a.dtype

    def without_bias(self) -> Any:
        return self

    def out_rows(self, rows: int) -> int:
        raise NotImplementedError

    def _block(self, a: Tensor, number: int, out: Tensor | None = None) -> Tensor:
        """C of one block, in `out` if given."""
        raise NotImplementedError

    def into(self, a: Tensor) -> Callable[[Tensor, Tensor, int], None]:
        """A function that fills the C of a whole block."""

        def fill(block: Tensor, out: Tensor, first: int) -> None:
            self._block(block, first // self._height if self._height else 0, out)

        return fill

    def __call__(self, a: Tensor) -> Tensor:
        """C of all blocks."""
        blocks = [self._block(block, number) for number, block in enumerate(a.split(self._height))]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


class ScatterProduct(_GroupedProduct):
    """Tokens ``[M, K]`` copied to their rows and multiplied by ``[E, K, N]``: ``[R, N]``."""

    def __init__(self, weight: Tensor, rows: TokenRows) -> None:
        super().__init__(weight, rows, rows.block_tokens)

    def out_rows(self, rows: int) -> int:
        return rows * self.rows.choices

    def _block(self, a: Tensor, number: int, out: Tensor | None = None) -> Tensor:
        copied = a.index_select(0, self.rows.tokens[number])
        c = grouped_matmul(copied, self.weight, self.rows.ends[number])
        return c if out is None else out.copy_(c)


class GatherProduct(_GroupedProduct):
    """Rows ``[R, K]`` multiplied by ``[E, K, N]`` and a token's rows summed in fp32 in the order of
    its choices: ``[M, N]``.

    Args:
        probs: weight of each choice ``[M, K]``; None: 1.
    """

    def __init__(self, weight: Tensor, rows: TokenRows, probs: Tensor | None = None) -> None:
        super().__init__(weight, rows, rows.block_tokens * rows.choices)
        self.probs = probs

    def out_rows(self, rows: int) -> int:
        return rows // self.rows.choices

    def _block(self, a: Tensor, number: int, out: Tensor | None = None) -> Tensor:
        z = grouped_matmul(a, self.weight, self.rows.ends[number])
        rows, count = self.rows.rows[number], self.rows.block_tokens
        probs = None if self.probs is None else self.probs[number * count : (number + 1) * count]
        if out is None:
            out = a.new_empty((count, self.n))
        if a.is_cuda:
            from megatron_fluid.kernels.sum_rows import sum_rows

            sum_rows(z, rows, None if probs is None else probs.float().contiguous(), out)
            return out
        wide = torch.float64 if a.dtype == torch.float64 else torch.float32
        total = torch.zeros(out.shape, dtype=wide, device=a.device)
        for choice in range(self.rows.choices):
            part = z.index_select(0, rows[:, choice]).to(wide)
            total += part if probs is None else part * probs[:, choice, None].to(wide)
        return out.copy_(total)
