"""Cost model: GEMMs, memory passes, pipelined sends; and of them the tensor-parallel linears.

A GPU spreads the tiles of a GEMM over its SMs in waves, and the last wave of a small GEMM is seldom
full: that is what a GEMM loses that is cut in pieces. Times are in seconds.

Legend: [m, k] x [k, n] is the GEMM of one rank, W ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_fluid.plan.machine import Link, Machine

__all__ = [
    "Forecast",
    "fastest",
    "fastest_linear",
    "gemm_s",
    "linear_forms",
    "pass_s",
    "pipelined_s",
]

_TILE_M, _TILE_N = 128, 256  # of cuBLAS's kernels on Hopper
_MARGIN = 0.99  # another form is taken if it needs less than this share of the plain form's time

# Host operations of a call of each backend of a linear, and for each rank; the fused GEMM as a
# multiple of the GEMM alone: wider tiles lose less of a wave, and those of a scatter store to
# peers. Measured: docs/tuning_notes.md#machine
_LINEAR_HOST = {"collective": (5, 0), "copy_engine": (5, 4), "fused": (6, 3)}
_FUSED = {"gather": 0.97, "scatter": 1.1}


@dataclass(frozen=True)
class Forecast:
    """Predicted time of one form on the device and on the host, which run side by side."""

    device_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        """Time of one call in a model that makes nothing but such calls."""
        return max(self.device_s, self.host_s)


def fastest(forms: Mapping[str, Forecast], plain: str) -> str:
    """Return the form of least time; `plain` unless another is faster by more than noise."""
    best = min(forms, key=lambda name: (forms[name].seconds, name))
    return best if forms[best].seconds < _MARGIN * forms[plain].seconds else plain


def gemm_s(machine: Machine, m: int, n: int, k: int, itemsize: int = 2) -> float:
    """Time of a GEMM by itself."""
    if not m or not n or not k:
        return 0.0
    if not machine.units:
        return machine.gemm_s + 2.0 * m * n * k / machine.flops_per_s
    waves = math.ceil(math.ceil(m / _TILE_M) * math.ceil(n / _TILE_N) / machine.units)
    flops = waves * machine.units * 2.0 * _TILE_M * _TILE_N * k
    moved = itemsize * (m * k + n * k + m * n)
    return machine.gemm_s + max(flops / machine.flops_per_s, moved / machine.bytes_per_s)


def pass_s(machine: Machine, nbytes: float) -> float:
    """Time of a kernel that reads and writes so many bytes in all."""
    return machine.gemm_s + nbytes / machine.bytes_per_s if nbytes else 0.0


def pipelined_s(
    link: Link, computed: Sequence[float], sent: Sequence[float], rest_s: float = 0.0
) -> float:
    """Time until pieces are computed one after the other, each sent when it is computed, and all
    have arrived.

    Args:
        computed: seconds of each piece.
        sent: bytes of each piece; 0 for one that stays.
        rest_s: computation that follows and waits for no piece.
    """
    now = free = moving = 0.0
    for seconds, nbytes in zip(computed, sent, strict=True):
        now += seconds
        if nbytes:
            took = link.seconds(nbytes)
            free = max(free, now) + took
            moving += took
    behind = min(moving, max(0.0, now + rest_s - computed[0]))
    return max(now + rest_s, free) + (1.0 - link.hidden) * behind


def linear_forms(
    machine: Machine, operation: str, ranks: int, m: int, n: int, k: int, itemsize: int = 2
) -> dict[str, Forecast]:
    """Return forward times of a tensor-parallel linear by backend (megatron_fluid.tensor_parallel):
    "collective", and where peers' memory is reached "copy_engine" and "fused".

    Args:
        operation: "gather" (AllGather-GEMM) or "scatter" (GEMM-ReduceScatter).
        ranks: W.
    """
    copies, whole = machine.copies, gemm_s(machine, m, n, k, itemsize)
    block = m // ranks * (k if operation == "gather" else n) * itemsize  # bytes of one rank
    moved = machine.collective.seconds(block * (ranks - 1))
    device = {"collective": whole + moved}
    if copies is not None:
        wire = copies.seconds(block * (ranks - 1))
        piece = gemm_s(machine, m // ranks, n, k, itemsize)
        if operation == "gather":
            # The rank's own rows first, the others as they arrive.
            arrival, now = copies.latency_s + pass_s(machine, 2 * block), piece
            for _ in range(ranks - 1):
                arrival += copies.seconds(block)
                now = max(now, arrival) + piece
            moving = copies.seconds(block) * (ranks - 1)
            device["copy_engine"] = now + (1 - copies.hidden) * min(now, moving) / 2
            sums = 0.0
        else:
            sent = [float(block)] * (ranks - 1) + [0.0]
            sums = pass_s(machine, block * (ranks + 1))
            sending = pipelined_s(copies, [piece] * ranks, sent)
            device["copy_engine"] = sending + copies.latency_s + sums
        fused = max(_FUSED[operation] * whole, wire) + copies.latency_s + sums
        device["fused"] = fused + (1 - copies.hidden) * min(whole, wire) / 2
    found = {}
    for name, seconds in device.items():
        call, rank = _LINEAR_HOST[name]
        found[name] = Forecast(seconds, (call + rank * ranks) * machine.operation_s)
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
    """Return the backend of least predicted time for a GEMM of `shape` (m, n, k), among those that
    can serve it."""
    forms = linear_forms(machine, operation, ranks, *shape, itemsize)
    if not can_fuse:
        forms.pop("fused", None)
    return fastest(forms, "collective")
