"""A mixture of experts whose experts are split over tensor-parallel ranks: the two products around
the activation, with gradients.

    rows = plan_rows(ids, num_experts, group)
    h = activation(all_gather_grouped_matmul(x, w1, rows))
    y = grouped_matmul_reduce_scatter(h, w2, rows, probs)

Every rank holds its own tokens and a slice of every expert, w1 ``[E, F1 / W, H]`` and w2 ``[E, H, F
/ W]``, as nn.Linear stores weights. The first gathers all tokens, copies them to their rows and
multiplies; the second multiplies, sums each token's rows by their probabilities and
reduce-scatters. Each is the other's backward. What moves and overlaps is the same as for plain
linears: where copy engines serve, blocks of rows are the tokens of one rank, and a block is
multiplied while the next arrives, or while the one before is sent.

Shapes: m tokens of a rank, M = W m, K choices, R = M K rows, E experts, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.functions import once_differentiable
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm import grouped_weight_grad
from megatron_fluid.tensor_parallel.choice import Backend, overlapped_backends
from megatron_fluid.tensor_parallel.collective import CollectiveBackend
from megatron_fluid.tensor_parallel.expert_gemm import GatherProduct, ScatterProduct, TokenRows

__all__ = ["RoutedRows", "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter", "plan_rows"]

# Cutting a grouped GEMM into blocks by rank costs little while each expert keeps this many rows in
# a block; with fewer, its weights are fetched again for little work. `benchmarks/launch.sh
# tp_experts` measures both sides.
_ROWS_OF_AN_EXPERT = 256


@dataclass(frozen=True)
class RoutedRows:
    """One routing of all ranks' tokens: their rows, and what moves them."""

    group: dist.ProcessGroup
    rows: TokenRows
    backend: Backend

    @property
    def tokens(self) -> int:
        """m."""
        return self.rows.blocks * self.rows.block_tokens // self.group.size()


def plan_rows(
    ids: Tensor, num_experts: int, group: dist.ProcessGroup, backend: str = "auto"
) -> RoutedRows:
    """Where every token's rows are. Collective.

    Args:
        ids: experts chosen for this rank's tokens, each in [0, E). [m, K] int, the same m on every
            rank
        backend: "copy_engine" (a block a rank, overlapped), "collective" (one block), or "auto":
            the former where it is to be had and every expert has rows enough.

    Raises:
        ConfigError: an unknown backend, or one that this group cannot have; ids of another shape.
        FluidError: "copy_engine" in a CUDA-graph capture.
    """
    if backend not in ("auto", "copy_engine", "collective"):
        raise ConfigError(f"backend: found {backend!r}, allowed: auto, copy_engine, collective")
    if ids.dim() != 2:
        raise ConfigError(f"ids: found shape {tuple(ids.shape)}, allowed: two dimensions, [m, K]")
    if backend == "auto" and ids.numel() < _ROWS_OF_AN_EXPERT * num_experts:
        backend = "collective"
    found = overlapped_backends(backend, group, ids)
    chosen = CollectiveBackend(group) if found is None else found.copy_engine
    assert chosen is not None
    blocks = 1 if found is None else group.size()
    rows = TokenRows.plan(_gathered(ids, group), num_experts, blocks)
    return RoutedRows(group, rows, chosen)


def _gathered(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    everyone = rows.new_empty((group.size() * rows.shape[0], rows.shape[1]))
    dist.all_gather_into_tensor(everyone, rows.contiguous(), group=group)
    return everyone


def all_gather_grouped_matmul(x: Tensor, weight: Tensor, routed: RoutedRows) -> Tensor:
    """All ranks' tokens, copied to their rows, times their experts' weights.

    Args:
        x: this rank's tokens. [m, H]
        weight: this rank's slice of every expert. [E, N, H]

    Returns:
        ``[R, N]``, rows as `TokenRows` has them.
    """
    _check(x, weight, routed, routed.tokens, "x")
    return _AllGatherGrouped.apply(x, weight, routed)


def grouped_matmul_reduce_scatter(
    h: Tensor, weight: Tensor, routed: RoutedRows, probs: Tensor | None = None
) -> Tensor:
    """Rows times their experts' weights, summed by token and over ranks; this rank's tokens.

    Args:
        h: rows as `all_gather_grouped_matmul` gives them. [R, N]
        weight: this rank's slice of every expert. [E, H, N]
        probs: weight of each choice of this rank's tokens; None: 1. [m, K]

    Returns:
        ``[m, H]``
    """
    _check(h, weight, routed, routed.rows.tokens.numel(), "h")
    wanted = (routed.tokens, routed.rows.choices)
    if probs is not None and probs.shape != wanted:
        found = tuple(probs.shape)
        raise ConfigError(f"probs: found shape {found}, allowed: {wanted}, [m, K] as the ids")
    return _GroupedReduceScatter.apply(h, weight, probs, routed)


def _check(a: Tensor, weight: Tensor, routed: RoutedRows, rows: int, name: str) -> None:
    dims = weight.dim(), a.dim()
    if dims != (3, 2) or a.shape[1] != weight.shape[2] or a.dtype != weight.dtype:
        found = f"{tuple(a.shape)} {a.dtype}, {tuple(weight.shape)} {weight.dtype}"
        raise ConfigError(f"{name}, weight: found {found}; allowed: [rows, K] and [E, N, K]")
    experts = routed.rows.ends.shape[1]
    if weight.shape[0] != experts or a.shape[0] != rows:
        found = f"{a.shape[0]} rows, {weight.shape[0]} experts"
        raise ConfigError(f"{name}, weight: found {found}; allowed: {rows}, {experts}")


class _AllGatherGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, routed: RoutedRows) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.routed = routed
        product = ScatterProduct(weight.transpose(1, 2), routed.rows)
        return routed.backend.gather_matmul(x, product, keep=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        routed, rows = ctx.routed, ctx.routed.rows
        need_x, need_weight = ctx.needs_input_grad[:2]
        dy = dy.contiguous()
        gathered = routed.backend.start_gather(x) if need_weight else None
        dw: list[Tensor] = []

        def weight_grad() -> None:
            if gathered is not None:
                # An expert's rows of all blocks in one product: a sum over blocks would pass over
                # all weights for each.
                whole = rows.expert_major()
                copied = gathered().index_select(0, whole.tokens)
                dw.append(grouped_weight_grad(whole.sort(dy), copied, whole.ends))

        dx = None
        if need_x:
            product = GatherProduct(weight, rows)
            dx = routed.backend.matmul_scatter(dy, product, overlapped=weight_grad)
        else:
            weight_grad()
        return dx, (dw[0] if need_weight else None), None


class _GroupedReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, probs: Tensor | None, routed: RoutedRows
    ) -> Tensor:
        everyone = None if probs is None else _gathered(probs, routed.group)
        ctx.save_for_backward(h, weight, everyone)
        ctx.routed = routed
        product = GatherProduct(weight.transpose(1, 2), routed.rows, everyone)
        return routed.backend.matmul_scatter(h, product)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, everyone = ctx.saved_tensors
        routed, rows = ctx.routed, ctx.routed.rows
        _, need_weight, need_probs = ctx.needs_input_grad[:3]
        # Rows of W.T dy, without the probabilities: times them it is dh, and times h, summed over
        # ranks, their gradient.
        product = ScatterProduct(weight, rows)
        unscaled, gathered = routed.backend.gather_matmul(dy.contiguous(), product)
        by_row = None if everyone is None else rows.by_row(everyone).to(h.dtype)[:, None]
        dh = unscaled if by_row is None else unscaled * by_row
        dprobs = None
        if need_probs:
            assert everyone is not None
            wide = torch.float64 if h.dtype == torch.float64 else torch.float32
            parts = rows.by_choice((unscaled.to(wide) * h.to(wide)).sum(1))
            dist.all_reduce(parts, group=routed.group)
            dprobs = parts.chunk(routed.group.size())[routed.group.rank()].to(everyone.dtype)
        dweight = None
        if need_weight:
            assert gathered is not None
            whole = rows.expert_major()
            copied = gathered.index_select(0, whole.tokens)
            if by_row is not None:
                copied *= whole.sort(by_row)
            dweight = grouped_weight_grad(copied, whole.sort(h), whole.ends)
        return dh, dweight, dprobs, None
