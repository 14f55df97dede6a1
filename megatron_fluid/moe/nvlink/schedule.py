"""Which overlaps the NVLink path uses.

stream: dispatch in chunks. A push over NVLink needs few SMs; the others plan and move arrived
tokens into expert order meanwhile.

sent_rows: the GEMM before a combine (fc2 in the forward, the dgrad of fc1 in the backward) writes
each tile of its result straight into the memory of the ranks that own the tokens. It sends a row
for each (token, expert), where the sums of a rank's experts are fewer; but those are made by a pass
of their own after the last tile. It takes no SM and no second stream. The combine buffer then holds
top_k rows for each token, and not one for each rank.

Other overlaps hid no more than they cost. Measured: docs/tuning_notes.md#moe
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_fluid.plan.machine import REFERENCE, Machine

__all__ = ["NO_OVERLAP", "Schedule", "choose_schedule"]


@dataclass(frozen=True)
class Schedule:
    """Which overlaps one layer shape uses, as in the module's docstring."""

    stream: bool = False
    sent_rows: bool = False


NO_OVERLAP = Schedule()

# Measured: docs/tuning_notes.md#moe
_STREAMED_BYTES = 30e6
_WIRE, _GROUPED = 0.9, 0.8  # of the rates of a copy engine and of one large GEMM
_SENT_BYTES_PER_SECOND = 1e13  # by how much longer a GEMM takes that sends


def choose_schedule(
    max_tokens: int,
    hidden: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    ranks: int,
    sends: bool,
    machine: Machine = REFERENCE["h200"],
) -> Schedule:
    """Return the schedule of a layer with 16-bit rows and a gated activation.

    Dispatch is streamed where a rank sends enough bytes and the wire is busy for twice the time of
    moving tokens into expert order. GEMMs send their rows where forward and backward are predicted
    to be faster so: the longer of GEMM and wire, then a sum over top_k rows; against the GEMM, then
    sums that are read and sent, then a sum over ranks. Where matrices lie apart, a kernel after the
    GEMMs sends the rows.

    Args:
        sends: whether the GPU's grouped GEMMs can send (kernels/grouped_gemm: sends_rows).
        machine: figures of the prediction.
    """
    wire_rate = _WIRE * machine.wire_bytes_per_s
    flops_rate = _GROUPED * machine.flops_per_s
    memory_rate = machine.bytes_per_s
    local = num_experts // ranks
    chosen = min(top_k, num_experts)
    # Share of the tokens that any one rank gets.
    share = 1.0 - math.comb(num_experts - local, chosen) / math.comb(num_experts, chosen)
    row = max_tokens * hidden * 2  # bytes of one row for each token
    rows = row * top_k
    sums = row * (ranks - 1) * share
    moved = rows + row + sums  # written in expert order; read here and on arrival
    stream = sums >= _STREAMED_BYTES and sums * memory_rate >= 2.0 * moved * wire_rate
    first = sent = 0.0
    for depth in (ffn, 2 * ffn):
        weights = local * depth * hidden * 2
        flops = 2.0 * max_tokens * top_k * hidden * depth
        gemm = max(flops / flops_rate, weights / memory_rate)
        first += gemm + max(sums / wire_rate, rows / memory_rate)
        first += (sums + 2 * row) / memory_rate
        wire = rows * (ranks - 1) / ranks / wire_rate
        sent += max(gemm + rows / _SENT_BYTES_PER_SECOND, wire)
        sent += (rows + row) / memory_rate
    return Schedule(stream=stream, sent_rows=sends and ranks > 1 and sent < first)
