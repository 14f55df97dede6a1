"""The plain all-to-all of rows: one collective, not overlapped; the baseline of the round-robin
P2P exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_fluid.comm.p2p_rounds import P2PRounds, bounded_collective
from megatron_fluid.errors import ConfigError

__all__ = ["all_to_all_rows", "exchange_rows"]


def exchange_rows(
    rows: Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    rounds: P2PRounds,
    operation: str,
) -> Tensor:
    """All-to-all along the first dimension, without autograd.

    Args:
        rows: [sum(send_rows), ...], destination-major.
        send_rows, recv_rows: rows to and from every rank of the group. [W]
        rounds: the group's rounds, with the group and its timeout.
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


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_rows: Sequence[int],
        recv_rows: Sequence[int],
        rounds: P2PRounds,
        operation: str,
    ) -> Tensor:
        ctx.arguments = (recv_rows, send_rows, rounds, f"{operation} backward")
        return exchange_rows(rows, send_rows, recv_rows, rounds, operation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        return exchange_rows(grad_rows, *ctx.arguments), None, None, None, None


def all_to_all_rows(
    rows: Tensor,
    send_rows: Sequence[int],
    recv_rows: Sequence[int],
    rounds: P2PRounds,
    operation: str = "all-to-all",
) -> Tensor:
    """As `exchange_rows`, differentiable."""
    return _AllToAllRows.apply(rows, send_rows, recv_rows, rounds, operation)
