"""How the NVLink path hides moving behind computing, and where.

Dispatch can be streamed: a push over NVLink needs few SMs, so the others plan and move arrived
tokens into expert order meanwhile.

Combine can be left to the GEMM before it (fc2 in the forward, fc1's gradient of its input in the
backward): each tile of its result is written straight into the memory of the ranks whose tokens its
rows belong to, and travels while other tiles are multiplied. A row for each (token, expert) crosses
the wire then, where the sums of a rank's experts would be fewer; but those are made by a pass of
their own, after the last tile, and all of their way is waited for. It takes no SM and no second
stream; expert rows of results are not kept, but the memory into which they are sent holds top_k
rows for each token in place of one for each rank.

Not here, since on two H200s, and the first three and the fifth of them on four, they hid no more
than they cost: dispatch by blocks of experts and combine by pieces of columns beside GEMMs that
leave SMs free, combine in one launch of pushers and adders, sums that copy engines send beside the
next GEMM, dX's combine beside weight gradients, and tokens moved into expert order by the warps
that do not multiply of the GEMM that reads them. A persistent GEMM that lacks a few SMs is as much
slower as they help, and a GPU that computes and moves at once, at its limit of power, runs at a
lower clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CANDIDATES", "NO_OVERLAP", "Schedule", "choose_schedule"]


@dataclass(frozen=True)
class Schedule:
    """What one layer shape overlaps. stream: dispatch in chunks, a few SMs pushing while the others
    plan and move what has arrived into expert order. sent_rows: the GEMMs before a combine send
    their rows as they make them.
    """

    stream: bool = False
    sent_rows: bool = False


NO_OVERLAP = Schedule()

# What benchmarks/suites/moe_layer.py --schedules measures, by name.
CANDIDATES: dict[str, Schedule] = {
    "whole": NO_OVERLAP,
    "stream": Schedule(stream=True),
    "sent": Schedule(sent_rows=True),
    "stream_sent": Schedule(stream=True, sent_rows=True),
}

_STREAMED_BYTES = 30e6
# As H200s reach them with rows of tokens and grouped GEMMs; the last says by how much a GEMM takes
# longer that sends.
_WIRE_BYTES_PER_SECOND, _MEMORY_BYTES_PER_SECOND, _FLOPS, _SENT_BYTES_PER_SECOND = (
    350e9,
    3.5e12,
    600e12,
    1e13,
)


def choose_schedule(
    max_tokens: int, hidden: int, ffn: int, top_k: int, num_experts: int, ranks: int, sends: bool
) -> Schedule:  # one place for every shape
    """The schedule of the shape of a layer with 16-bit rows and a gated activation.

    sends: whether the GPU's GEMMs can send (kernels/grouped_gemm.py: sends_rows).

    Dispatch is streamed where a rank sends enough for it and the wire is busy for twice as long as
    moving tokens into expert order takes: that begins when the host knows the rows, and by fewer
    programs, which leave the push room. The bound is a choice between two GPUs, where one takes as
    long as the other, and four, where at commit c868ad2 it took 1 to 3% less in qwen3-235b and
    olmoe, and 4 to 5% more in deepseek-v3 and mixtral, in a run whose variants did not stand behind
    the hottest equally often.

    Rows are sent by the GEMMs, if those can (matrices that lie apart are no stack: their rows are
    sent by a kernel after the GEMMs, which is slower than sums first), where that is estimated to
    take less time, forward and backward together: whichever is longer of the GEMM and the wire,
    then a sum over top_k rows; against the GEMM, then sums that are read and sent, then a sum over
    ranks. On two GPUs, where little is won, at commit 286adee forwards took 1 to 3% less so, and
    training from 1% less to 2% more; with more GPUs the estimate has not been measured.
    """
    local = num_experts // ranks
    chosen = min(top_k, num_experts)
    share = 1.0 - math.comb(num_experts - local, chosen) / math.comb(
        num_experts, chosen
    )  # of the tokens that any one rank gets
    row = max_tokens * hidden * 2  # bytes of one row for each token
    rows = row * top_k
    sums = row * (ranks - 1) * share
    moved = rows + row + sums  # written for the experts, read of what is here and what lands
    stream = (
        sums >= _STREAMED_BYTES
        and sums * _MEMORY_BYTES_PER_SECOND >= 2.0 * moved * _WIRE_BYTES_PER_SECOND
    )
    first = sent = 0.0
    for depth in (ffn, 2 * ffn):
        weights = local * depth * hidden * 2
        gemm = max(
            2.0 * max_tokens * top_k * hidden * depth / _FLOPS, weights / _MEMORY_BYTES_PER_SECOND
        )
        first += gemm + max(sums / _WIRE_BYTES_PER_SECOND, rows / _MEMORY_BYTES_PER_SECOND)
        first += (sums + 2 * row) / _MEMORY_BYTES_PER_SECOND
        sent += max(
            gemm + rows / _SENT_BYTES_PER_SECOND,
            rows * (ranks - 1) / ranks / _WIRE_BYTES_PER_SECOND,
        )
        sent += (rows + row) / _MEMORY_BYTES_PER_SECOND
    return Schedule(stream=stream, sent_rows=sends and ranks > 1 and sent < first)
