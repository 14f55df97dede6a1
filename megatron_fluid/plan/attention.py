"""Predicted times of self-attention under context parallelism by a2a: its projections overlapped
with the exchanges of heads and sequence, or around them ("exchanged").

Both attend by the same kernel and return its output by head groups. They differ in this: exchanged,
the rows of all heads are projected first, and laid out for the exchange by passes over memory.
Overlapped, one peer's heads are sent while the next one's are projected, which cuts a GEMM in
pieces, and the gradient of the output projection's weight is computed while gradients return. Under
tensor parallelism the linears' own gather and scatter are hidden only where the projections are
around the exchanges.

Legend: s a rank's rows of the sequence, B batch, H hidden, W context-parallel ranks, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fluid.plan.linears import linear_forms
from megatron_fluid.plan.machine import Link, Machine
from megatron_fluid.plan.model import Forecast, fastest, gemm_s, in_turn, pass_s

__all__ = [
    "EXCHANGED",
    "OVERLAPPED",
    "AttentionWork",
    "LatentWork",
    "attention_forms",
    "latent_forms",
]

EXCHANGED, OVERLAPPED = "exchanged", "overlapped"

# Rates of the attention kernel as shares of a GEMM's, and FLOPs of its backward as a multiple of
# the forward's. Measured: docs/tuning_notes.md#machine
_CORE, _CORE_BACKWARD, _BACKWARD_FLOPS = 0.75, 0.67, 2.5
_PASSES = 2  # over q, k and v, read and written, around an exchange without the projections
# Operations of the host in forward and backward: of a call, of each further head group, and of each
# peer that copy engines serve. Measured: docs/tuning_notes.md#machine
_HOST = {EXCHANGED: ((45, 26, 0), (102, 49, 0)), OVERLAPPED: ((33, 22, 3), (97, 49, 5))}


@dataclass(frozen=True)
class AttentionWork:
    """One call on one rank.

    Attributes:
        ranks: W. rows: s B, gathered over tensor-parallel ranks. hidden: H.
        qkv_columns, output_columns: of the two projections on this tensor-parallel rank, of all
            context-parallel ranks' heads.
        core_flops: of attention over the whole sequence by this rank's heads, forward.
        groups: head groups. by_copies: whether copy engines move heads (else one kernel's stores).
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


def attention_forms(machine: Machine, work: AttentionWork) -> dict[str, Forecast]:
    """Times of forward and backward together, of both forms.

    The link is that of peers' memory where there is one, else the group's all-to-all.
    """
    return {
        form: _forward(machine, work, form) + _backward(machine, work, form)
        for form in (EXCHANGED, OVERLAPPED)
    }


def _link(machine: Machine) -> Link:
    link = machine.copies or machine.collective
    assert link is not None, "a group of several ranks"
    return link


def _host_s(machine: Machine, work: AttentionWork, form: str, backward: bool) -> float:
    call, group, peer = _HOST[form][backward]
    peers = work.ranks - 1 if work.by_copies or machine.copies is None else 0
    return machine.operation_s * (call + group * (work.groups - 1) + peer * peers)


def _gemm(machine: Machine, work: AttentionWork, n: int, k: int) -> float:
    return gemm_s(machine, work.rows, n, k, work.itemsize)


def _sent(machine: Machine, work: AttentionWork, columns: int) -> float:
    """Bytes that a rank sends of rows of so many columns."""
    return work.rows * columns * work.itemsize * (work.ranks - 1) / work.ranks


def _gather(machine: Machine, work: AttentionWork, columns: int) -> float:
    """Of a gather or a scatter of rows over tensor-parallel ranks, by itself."""
    if work.shards == 1 or machine.collective is None:
        return 0.0
    nbytes = work.rows * columns * work.itemsize
    return machine.collective.seconds(nbytes * (work.shards - 1) / work.shards)


def _linear(machine: Machine, work: AttentionWork, operation: str, n: int, k: int) -> float:
    """Of a projection with its own gather or scatter, as the linear has it by itself."""
    if work.shards == 1:
        return _gemm(machine, work, n, k)
    forms = linear_forms(machine, operation, work.shards, work.rows, n, k, work.itemsize)
    return forms[fastest(forms, "collective")].device_s


def _projected(machine: Machine, work: AttentionWork, columns: int, depth: int) -> float:
    """Of a projection whose heads are sent as they are made."""
    link = _link(machine)
    if machine.copies is not None and not work.by_copies:
        sent = link.seconds(_sent(machine, work, columns))
        return _gemm(machine, work, columns, depth) + sent
    ranks = work.ranks
    piece = _gemm(machine, work, columns // ranks, depth)
    each = work.rows * columns // ranks * work.itemsize
    return in_turn(link, [piece] * ranks, [float(each)] * (ranks - 1) + [0.0])


def _attended(
    machine: Machine, work: AttentionWork, backward: bool, columns: int, rest_s: float = 0.0
) -> float:
    """Of attention by head groups, whose rows return meanwhile."""
    flops, share = work.core_flops, _CORE
    if backward:
        flops, share = flops * _BACKWARD_FLOPS, _CORE_BACKWARD
    seconds = machine.gemm_s + flops / machine.flops_per_s / share
    sent = _sent(machine, work, columns) / work.groups
    groups = work.groups
    return in_turn(_link(machine), [seconds / groups] * groups, [sent] * groups, rest_s)


def _forward(machine: Machine, work: AttentionWork, form: str) -> Forecast:
    qkv, output, hidden = work.qkv_columns, work.output_columns, work.hidden
    attended = _attended(machine, work, False, output)
    if form == OVERLAPPED:
        seconds = _gather(machine, work, hidden) + _projected(machine, work, qkv, hidden)
        seconds += attended + _gemm(machine, work, hidden, output)
        seconds += _gather(machine, work, hidden)
    else:
        link, laid_out = _link(machine), 2 * work.rows * qkv * work.itemsize
        seconds = _linear(machine, work, "gather", qkv, hidden)
        seconds += _PASSES * pass_s(machine, laid_out) + link.seconds(_sent(machine, work, qkv))
        seconds += attended + _linear(machine, work, "scatter", hidden, output)
    return Forecast(seconds, _host_s(machine, work, form, False))


def _backward(machine: Machine, work: AttentionWork, form: str) -> Forecast:
    qkv, output, hidden = work.qkv_columns, work.output_columns, work.hidden
    # Weight gradients: [columns, rows] x [rows, hidden].
    of_output = gemm_s(machine, hidden, output, work.rows, work.itemsize)
    of_qkv = gemm_s(machine, qkv, hidden, work.rows, work.itemsize)
    if form == OVERLAPPED:
        # The rows are gathered once more beside an exchange, for the weight's gradient.
        seconds = 3 * _gather(machine, work, hidden)
        seconds += _projected(machine, work, output, hidden)
        seconds += _attended(machine, work, True, qkv, rest_s=of_output)
        seconds += _gemm(machine, work, hidden, qkv)
    else:
        link, laid_out = _link(machine), 2 * work.rows * qkv * work.itemsize
        seconds = _linear(machine, work, "gather", output, hidden) + of_output
        seconds += link.seconds(_sent(machine, work, output))
        seconds += _attended(machine, work, True, qkv) + _PASSES * pass_s(machine, laid_out)
        seconds += _linear(machine, work, "scatter", hidden, qkv)
    return Forecast(seconds + of_qkv, _host_s(machine, work, form, True))


@dataclass(frozen=True)
class LatentWork:
    """The part of a call of latent attention in which its forms differ: from compressed rows to the
    heads of a rank.

    Attributes:
        ranks: W. rows: s B.
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
    """Forward and backward, without weight gradients, which are alike: heads of all rows are
    projected and exchanged, or compressed rows are gathered and projected to a rank's heads."""
    link, rows, size = _link(machine), work.rows, work.itemsize
    sent = rows * work.head_columns * size * (work.ranks - 1) / work.ranks
    laid_out = 2 * rows * work.head_columns * size
    exchanged = 2 * (link.seconds(sent) + _PASSES * pass_s(machine, laid_out))
    gathered = 2 * _PASSES * pass_s(machine, laid_out)
    host = 0.0
    for columns, depth in work.products:
        exchanged += gemm_s(machine, rows, columns, depth, size)
        exchanged += gemm_s(machine, rows, depth, columns, size)
        mine, every = columns // work.ranks, rows * work.ranks
        for operation, n, k in (("gather", mine, depth), ("scatter", depth, mine)):
            forms = linear_forms(machine, operation, work.ranks, every, n, k, size)
            taken = forms[fastest(forms, "collective")]
            gathered, host = gathered + taken.device_s, host + taken.host_s
    plain_host = (_HOST[OVERLAPPED][0][0] + _HOST[OVERLAPPED][1][0]) * machine.operation_s / 2
    return {EXCHANGED: Forecast(exchanged, plain_host), OVERLAPPED: Forecast(gathered, host)}
