"""Rows to their experts and back, one peer a round. Dispatch and combine are each other's
transpose.

Forward: dispatch_round moves tokens out, combine_round moves the experts' results back. Backward:
dispatch_round moves the gradients of the results out, combine_round moves the gradients of the
tokens back.

Legend: N rows of this rank, sorted by destination rank; W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound
from megatron_fluid.moe.rounds.plan import ExactPlan

__all__ = ["Arrival", "chunk_bounds", "combine_round", "dispatch_round"]


@dataclass
class Arrival:
    """What one peer sends in a round: readable after `pending.wait()`.

    Attributes:
        peer: the source, as rank of the group.
        tensors: one for each tensor given to dispatch_round, with the peer's rows only.
    """

    peer: int
    pending: PendingRound
    tensors: list[Tensor]


def dispatch_round(
    rounds: P2PRounds, plan: ExactPlan, operation: str, round_index: int, rows: Sequence[Tensor]
) -> Arrival | None:
    """Start sending a round's partner its rows, and receiving the ones it has for this rank's
    experts.

    Args:
        rounds, plan: the group's rounds and this call's counts.
        operation, round_index: as for P2PRounds.start.
        rows: contiguous tensors of this rank's rows, which travel together. each [N, ...]

    Returns:
        The arrival, or None in a bye.
    """
    peer = rounds.partners[round_index]
    if peer is None:
        rounds.start(operation, round_index, [], [])
        return None
    received = [tensor.new_empty((plan.recv_rows[peer], *tensor.shape[1:])) for tensor in rows]
    part = plan.send_slice(peer)
    pending = rounds.start(operation, round_index, [tensor[part] for tensor in rows], received)
    return Arrival(peer, pending, received)


def combine_round(
    rounds: P2PRounds,
    plan: ExactPlan,
    operation: str,
    round_index: int,
    results: Sequence[Tensor],
    out: Sequence[Tensor],
    chunk: tuple[int, int] = (0, 1),
) -> PendingRound:
    """Start sending back what was made of a peer's rows, and receiving what it made of this rank's.

    Args:
        results: this chunk of the results for the partner's rows; empty in a bye. each [rows of the
            chunk, ...]
        out: where this rank's rows come back, in their own order. each [N, ...]
        chunk: (index, number of chunks) of the partner's rows that travel now.
    """
    peer = rounds.partners[round_index]
    if peer is None:
        return rounds.start(operation, round_index, [], [])
    part = plan.send_slice(peer)
    begin, end = chunk_bounds(part.stop - part.start, *chunk)
    back = [tensor[part.start + begin : part.start + end] for tensor in out]
    return rounds.start(operation, round_index, results, back)


def chunk_bounds(num_rows: int, index: int, num_chunks: int) -> tuple[int, int]:
    """Begin and end of one of `num_chunks` nearly equal chunks; sender and receiver cut alike."""
    return index * num_rows // num_chunks, (index + 1) * num_rows // num_chunks
