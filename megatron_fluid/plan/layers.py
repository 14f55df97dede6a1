"""Predicted times of a layer's parts in forward and backward together, by form.

Attention under context parallelism by a2a: "exchanged" projects the rows of all heads and lays them
out around the exchange of heads and sequence. "overlapped" sends one peer's heads while the next
one's are projected, which cuts a GEMM in pieces, and computes the weight gradient of the output
projection while gradients return. Both attend by the same kernel and return its output by head
groups. Under tensor parallelism the linears' own gather and scatter are hidden only in "exchanged".

Latent attention: the heads of all rows are projected and exchanged, or compressed rows are gathered
and projected to a rank's heads ("overlapped").

Experts over expert-parallel ranks: "megatron" sends a row for each (token, expert) and permutes
before and after; "overlapped" sends a token once to each rank, and the rows of a GEMM's result, or
their sums, back.

Legend: s a rank's rows of the sequence, B batch, H hidden, W ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_fluid.plan.machine import Machine
from megatron_fluid.plan.model import Forecast, fastest, gemm_s, linear_forms, pass_s, pipelined_s

__all__ = [
    "EXCHANGED",
    "MEGATRON",
    "OVERLAPPED",
    "AttentionWork",
    "ExpertWork",
    "LatentWork",
    "attention_forms",
    "expert_forms",
    "latent_forms",
]

EXCHANGED, OVERLAPPED, MEGATRON = "exchanged", "overlapped", "megatron"

# Measured: docs/tuning_notes.md#machine
# Rates of the attention kernel as shares of a GEMM's, and FLOPs of its backward over its forward's.
_CORE, _CORE_BACKWARD, _BACKWARD_FLOPS = 0.75, 0.67, 2.5
_PASSES = 2  # over q, k and v, around an exchange that is not overlapped with the projections
# Host operations of forward and backward: of a call, of each further head group, and of each peer
# that copy engines serve.
_ATTENTION_HOST = {EXCHANGED: (147, 75, 0), OVERLAPPED: (130, 71, 8)}
_LATENT_HOST = 65
_GROUPED = 0.85  # rate of grouped GEMMs as a share of a large GEMM's
# Of a call of the experts, and of each local expert.
_EXPERT_HOST = {MEGATRON: (490, 11), OVERLAPPED: (135, 0)}
# Passes over a rank's rows each way: permutes of Megatron's dispatcher; into the experts' order,
# and sums.
_EXPERT_PASSES = {MEGATRON: 4, OVERLAPPED: 2}


@dataclass(frozen=True)
class AttentionWork:
    """One call on one rank.

    Attributes:
        ranks: W, context-parallel. rows: s B, gathered over tensor-parallel ranks. hidden: H.
        qkv_columns, output_columns: of the two projections on this tensor-parallel rank, for the
            heads of all context-parallel ranks.
        core_flops: of attention over the whole sequence by this rank's heads, forward.
        groups: head groups.
        by_copies: copy engines move heads, and not the stores of one kernel.
        itemsize: bytes of a value.
        shards: tensor-parallel ranks that hold the rows in parts; 1: nothing is gathered.
    """

    ranks: int
    rows: int
    hidden: int
    qkv_columns: int
    output_columns: int
    core_flops: float
    groups: int = 1
    by_copies: bool = False
    itemsize: int = 2
    shards: int = 1


class _Attention:
    """Times of the steps of one call."""

    def __init__(self, machine: Machine, work: AttentionWork) -> None:
        self.machine, self.work = machine, work
        self.link = machine.copies or machine.collective
        self.row = work.rows * work.itemsize  # bytes of a column

    def gemm(self, n: int, k: int) -> float:
        return gemm_s(self.machine, self.work.rows, n, k, self.work.itemsize)

    def weight_gradient(self, n: int, k: int) -> float:
        return gemm_s(self.machine, n, k, self.work.rows, self.work.itemsize)

    def sent(self, columns: int) -> float:
        """Bytes that a rank sends of so many columns."""
        return self.row * columns * (self.work.ranks - 1) / self.work.ranks

    def gather(self) -> float:
        """A gather or a scatter of hidden rows over tensor-parallel ranks, by itself."""
        shards = self.work.shards
        return self.machine.collective.seconds(self.row * self.work.hidden * (shards - 1) / shards)

    def linear(self, operation: str, n: int, k: int) -> float:
        """A projection with its own gather or scatter over tensor-parallel ranks."""
        work = self.work
        if work.shards == 1:
            return self.gemm(n, k)
        forms = linear_forms(self.machine, operation, work.shards, work.rows, n, k, work.itemsize)
        return forms[fastest(forms, "collective")].device_s

    def exchange(self, columns: int) -> float:
        return self.link.seconds(self.sent(columns))

    def laid_out(self) -> float:
        return _PASSES * pass_s(self.machine, 2 * self.row * self.work.qkv_columns)

    def projected(self, columns: int, depth: int) -> float:
        """A projection whose heads are sent as they are made."""
        ranks = self.work.ranks
        if self.machine.copies is not None and not self.work.by_copies:
            return self.gemm(columns, depth) + self.exchange(columns)
        each = float(self.row * (columns // ranks))
        pieces = [self.gemm(columns // ranks, depth)] * ranks
        return pipelined_s(self.link, pieces, [each] * (ranks - 1) + [0.0])

    def attended(self, backward: bool, columns: int, rest_s: float = 0.0) -> float:
        """Attention by head groups, whose rows return meanwhile."""
        flops, share, groups = self.work.core_flops, _CORE, self.work.groups
        if backward:
            flops, share = flops * _BACKWARD_FLOPS, _CORE_BACKWARD
        seconds = self.machine.gemm_s + flops / self.machine.flops_per_s / share
        pieces, sent = [seconds / groups] * groups, [self.sent(columns) / groups] * groups
        return pipelined_s(self.link, pieces, sent, rest_s)

    def exchanged(self) -> float:
        hidden, qkv, output = self.work.hidden, self.work.qkv_columns, self.work.output_columns
        forward = self.linear("gather", qkv, hidden) + self.laid_out() + self.exchange(qkv)
        forward += self.attended(False, output) + self.linear("scatter", hidden, output)
        backward = self.linear("gather", output, hidden) + self.exchange(output)
        backward += self.weight_gradient(hidden, output) + self.attended(True, qkv)
        return forward + backward + self.laid_out() + self.linear("scatter", hidden, qkv)

    def overlapped(self) -> float:
        hidden, qkv, output = self.work.hidden, self.work.qkv_columns, self.work.output_columns
        forward = self.projected(qkv, hidden) + self.attended(False, output)
        forward += self.gemm(hidden, output)
        behind = self.weight_gradient(hidden, output)
        backward = self.projected(output, hidden) + self.attended(True, qkv, behind)
        # Rows are gathered twice each way, and once more for the weight gradient.
        return forward + backward + self.gemm(hidden, qkv) + 5 * self.gather()


def attention_forms(machine: Machine, work: AttentionWork) -> dict[str, Forecast]:
    """Return the times of both forms of attention. Heads move through peers' memory where there is
    such a link, else by the group's all-to-all."""
    call = _Attention(machine, work)
    peers = work.ranks - 1 if work.by_copies or machine.copies is None else 0
    of_qkv = call.weight_gradient(work.qkv_columns, work.hidden)
    found = {}
    for form, seconds in ((EXCHANGED, call.exchanged()), (OVERLAPPED, call.overlapped())):
        once, group, peer = _ATTENTION_HOST[form]
        operations = once + group * (work.groups - 1) + peer * peers
        found[form] = Forecast(seconds + of_qkv, operations * machine.operation_s)
    return found


@dataclass(frozen=True)
class LatentWork:
    """The part of a call of latent attention in which its forms differ: from compressed rows to the
    heads of a rank.

    Attributes:
        ranks: W, context-parallel. rows: s B.
        products: (columns of all heads, depth) of each projection up.
        head_columns: of queries, keys and values of all heads, as they are exchanged.
        itemsize: bytes of a value.
    """

    ranks: int
    rows: int
    products: tuple[tuple[int, int], ...]
    head_columns: int
    itemsize: int = 2


def latent_forms(machine: Machine, work: LatentWork) -> dict[str, Forecast]:
    """Return the times of both forms of latent attention, without the weight gradients, which are
    the same."""
    link, rows, size = machine.copies or machine.collective, work.rows, work.itemsize
    sent = rows * work.head_columns * size * (work.ranks - 1) / work.ranks
    laid_out = 2 * _PASSES * pass_s(machine, 2 * rows * work.head_columns * size)
    exchanged, gathered, host = 2 * link.seconds(sent) + laid_out, laid_out, 0.0
    for columns, depth in work.products:
        exchanged += gemm_s(machine, rows, columns, depth, size)
        exchanged += gemm_s(machine, rows, depth, columns, size)
        mine, every = columns // work.ranks, rows * work.ranks
        for operation, n, k in (("gather", mine, depth), ("scatter", depth, mine)):
            forms = linear_forms(machine, operation, work.ranks, every, n, k, size)
            taken = forms[fastest(forms, "collective")]
            gathered, host = gathered + taken.device_s, host + taken.host_s
    return {
        EXCHANGED: Forecast(exchanged, _LATENT_HOST * machine.operation_s),
        OVERLAPPED: Forecast(gathered, host),
    }


@dataclass(frozen=True)
class ExpertWork:
    """One call of gated experts on one rank: its tokens, the sizes of the layer, and the
    expert-parallel ranks."""

    tokens: int
    hidden: int
    ffn: int
    top_k: int
    experts: int
    ranks: int
    itemsize: int = 2


def expert_forms(machine: Machine, work: ExpertWork) -> dict[str, Forecast]:
    """Return the times of both forms of the experts, for even routing."""
    rows, chosen = work.tokens * work.top_k, min(work.top_k, work.experts)
    local, row, peers = work.experts // work.ranks, work.hidden * work.itemsize, work.ranks - 1
    weights = 3 * work.hidden * work.ffn
    flops, read = 2.0 * rows * weights, local * weights * work.itemsize
    products = max(flops / machine.flops_per_s / _GROUPED, read / machine.bytes_per_s)
    computed = 3 * products + 3 * pass_s(machine, 3 * rows * work.ffn * work.itemsize)
    share = 1.0 - math.comb(work.experts - local, chosen) / math.comb(work.experts, chosen)
    each = rows * row * peers / work.ranks  # bytes of a row for each (token, expert)
    once = work.tokens * row * peers * share  # of a row for each (token, rank)
    link = machine.copies or machine.collective
    # Combines pass behind the GEMMs before them where rows are sent as they are made.
    hidden = min(2 * link.hidden * link.seconds(each), 2 * products)
    combined = min(2 * link.seconds(once), 2 * link.seconds(each) - hidden)
    moved = {
        MEGATRON: 4 * machine.collective.seconds(each),
        OVERLAPPED: 2 * link.seconds(once) + combined,
    }
    found = {}
    for form, (call, expert) in _EXPERT_HOST.items():
        passes = 2 * _EXPERT_PASSES[form] * pass_s(machine, 2 * rows * row)
        host = machine.operation_s * (call + expert * local)
        found[form] = Forecast(computed + passes + moved[form], host)
    return found
