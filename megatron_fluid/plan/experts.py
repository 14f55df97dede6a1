"""Predicted times of the experts of an MoE layer over expert-parallel ranks: Megatron's all-to-all
dispatcher and grouped GEMMs ("megatron"), and this package's exchange and experts ("overlapped").

Megatron's sends a row for each (token, expert) and permutes before and after. Ours sends a token
once to each rank, and the rows of a GEMM's result or their sums back.

Legend: T tokens of a rank, K top-k, H hidden, F ffn, E experts, W ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_fluid.plan.machine import Machine
from megatron_fluid.plan.model import Forecast, pass_s

__all__ = ["MEGATRON", "OVERLAPPED", "ExpertWork", "expert_forms"]

MEGATRON, OVERLAPPED = "megatron", "overlapped"

# Measured: docs/tuning_notes.md#machine
_GROUPED = 0.85  # of the rate of one large GEMM
# Operations of the host in forward and backward together, of a call and of each local expert.
_HOST = {MEGATRON: (490, 11), OVERLAPPED: (135, 0)}
_PERMUTES = 4  # passes over a rank's rows, read and written, of Megatron's dispatcher, each way
_MOVES = 2  # of ours: into the experts' order, and sums


@dataclass(frozen=True)
class ExpertWork:
    """One call on one rank: T, H, F, K, E, W; itemsize: bytes of a value; gated: fc1 has two
    halves."""

    tokens: int
    hidden: int
    ffn: int
    top_k: int
    experts: int
    ranks: int
    itemsize: int = 2
    gated: bool = True


def expert_forms(machine: Machine, work: ExpertWork) -> dict[str, Forecast]:
    """Times of forward and backward together, of both forms, for even routing."""
    rows, chosen = work.tokens * work.top_k, min(work.top_k, work.experts)
    local, row = work.experts // work.ranks, work.hidden * work.itemsize
    weights = (3 if work.gated else 2) * work.hidden * work.ffn
    flops = 2.0 * rows * weights
    read = local * weights * work.itemsize
    products = max(flops / machine.flops_per_s / _GROUPED, read / machine.bytes_per_s)
    computed = 3 * products + 3 * pass_s(machine, 3 * rows * work.ffn * work.itemsize)
    share = 1.0 - math.comb(work.experts - local, chosen) / math.comb(work.experts, chosen)
    peers = work.ranks - 1
    each = rows * row * peers / work.ranks  # bytes of a row for each (token, expert)
    once = work.tokens * row * peers * share  # of a row for each (token, rank)
    plain = computed + 2 * _PERMUTES * pass_s(machine, 2 * rows * row)
    ours = computed + 2 * _MOVES * pass_s(machine, 2 * rows * row)
    if machine.collective is not None and peers:
        plain += 4 * machine.collective.seconds(each)
    link = machine.copies or machine.collective
    if link is not None and peers:
        # Combines hide behind the GEMMs before them where rows are sent as they are made.
        hidden = min(2 * link.hidden * link.seconds(each), 2 * products)
        ours += 2 * link.seconds(once) + min(
            2 * link.seconds(once), 2 * link.seconds(each) - hidden
        )

    def host(form: str) -> float:
        call, expert = _HOST[form]
        return machine.operation_s * (call + expert * local)

    return {MEGATRON: Forecast(plain, host(MEGATRON)), OVERLAPPED: Forecast(ours, host(OVERLAPPED))}
