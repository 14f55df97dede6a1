"""Predicted times of a tensor-parallel linear: AllGather-GEMM ("gather") and GEMM-ReduceScatter
("scatter"), by each backend of megatron_fluid.tensor_parallel.

Legend: [m, k] x [k, n] is the GEMM of one rank, W ranks.
"""

from __future__ import annotations

import functools

from megatron_fluid.plan.machine import Machine
from megatron_fluid.plan.model import Forecast, fastest, gemm_s, in_turn, pass_s

__all__ = ["fastest_linear", "linear_forms"]

# Operations of the host, of the call and of each rank. Measured: docs/tuning_notes.md#machine
_HOST = {"collective": (5, 0), "copy_engine": (5, 4), "fused": (6, 3)}
# The fused GEMM as a multiple of the GEMM alone: wider tiles lose less of a wave, and those of a
# scatter store to peers.
_FUSED = {"gather": 0.97, "scatter": 1.1}


def linear_forms(
    machine: Machine, operation: str, ranks: int, m: int, n: int, k: int, itemsize: int = 2
) -> dict[str, Forecast]:
    """Forward times by backend: "collective", and where peers' memory is reached "copy_engine" and
    "fused".

    Args:
        operation: "gather" or "scatter".
        ranks: W.
    """
    whole, link = gemm_s(machine, m, n, k, itemsize), machine.collective
    if link is None:
        return {"collective": Forecast(whole, machine.operation_s)}
    block = m // ranks * (k if operation == "gather" else n) * itemsize  # bytes of one rank
    host = {name: (a + b * ranks) * machine.operation_s for name, (a, b) in _HOST.items()}
    found = {"collective": Forecast(whole + link.seconds(block * (ranks - 1)), host["collective"])}
    copies = machine.copies
    if copies is None:
        return found
    sums = pass_s(machine, block * (ranks + 1)) if operation == "scatter" else 0.0
    rows = m // ranks
    if operation == "gather":
        # Own rows first, the others as they arrive.
        piece = gemm_s(machine, rows, n, k, itemsize)
        first = copies.latency_s + pass_s(machine, 2 * block)
        arrival, now = first, piece
        for _ in range(ranks - 1):
            arrival += copies.seconds(block)
            now = max(now, arrival) + piece
        copied = now + (1 - copies.hidden) * min(now, copies.seconds(block) * (ranks - 1)) / 2
    else:
        piece = gemm_s(machine, rows, n, k, itemsize)
        sent = [float(block)] * (ranks - 1) + [0.0]
        copied = in_turn(copies, [piece] * ranks, sent) + copies.latency_s + sums
    found["copy_engine"] = Forecast(copied, host["copy_engine"])
    wire = copies.seconds(block * (ranks - 1))
    fused = max(_FUSED[operation] * whole, wire) + copies.latency_s + sums
    fused += (1 - copies.hidden) * min(whole, wire) / 2
    found["fused"] = Forecast(fused, host["fused"])
    return found


@functools.lru_cache(maxsize=4096)  # the host time of every call counts for small GEMMs
def fastest_linear(
    machine: Machine,
    operation: str,
    ranks: int,
    shape: tuple[int, int, int],
    itemsize: int,
    can_fuse: bool,
) -> str:
    """The backend of least predicted time for a GEMM of `shape` (m, n, k), among those that can
    serve it."""
    forms = linear_forms(machine, operation, ranks, *shape, itemsize)
    if not can_fuse:
        forms.pop("fused", None)
    return fastest(forms, "collective")
