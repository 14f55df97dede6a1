"""Seconds of the parts that forms of a layer are made of: GEMMs, passes over memory, and pieces
that are sent while the next are computed.

A GPU deals the tiles of a GEMM out to its SMs in waves, and the last wave of a small GEMM is seldom
full: that is what a GEMM loses that is cut in pieces.

Legend: a GEMM multiplies [m, k] by [k, n].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_fluid.plan.machine import Link, Machine

__all__ = ["Forecast", "fastest", "gemm_s", "in_turn", "pass_s", "tiles"]

_TILE_M, _TILE_N = 128, 256  # of cuBLAS's kernels on Hopper
_MARGIN = 0.99  # of the plain form's time: what another must take less than


@dataclass(frozen=True)
class Forecast:
    """Of one form: seconds of the device and of the host. They run side by side."""

    device_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        """What a model of nothing but such calls would take for one."""
        return max(self.device_s, self.host_s)

    def __add__(self, other: Forecast) -> Forecast:
        return Forecast(self.device_s + other.device_s, self.host_s + other.host_s)


def fastest(forms: Mapping[str, Forecast], plain: str) -> str:
    """The form of least time; `plain` unless another is faster by more than noise."""
    best = min(forms, key=lambda name: (forms[name].seconds, name))
    return best if forms[best].seconds < _MARGIN * forms[plain].seconds else plain


def tiles(m: int, n: int) -> int:
    """Of the result of a GEMM."""
    return math.ceil(m / _TILE_M) * math.ceil(n / _TILE_N)


def gemm_s(machine: Machine, m: int, n: int, k: int, itemsize: int = 2) -> float:
    """Of a GEMM by itself."""
    if not m or not n or not k:
        return 0.0
    if not machine.units:
        return machine.gemm_s + 2.0 * m * n * k / machine.flops_per_s
    waves = math.ceil(tiles(m, n) / machine.units)
    flops = waves * machine.units * 2.0 * _TILE_M * _TILE_N * k
    moved = itemsize * (m * k + n * k + m * n)
    return machine.gemm_s + max(flops / machine.flops_per_s, moved / machine.bytes_per_s)


def pass_s(machine: Machine, nbytes: float) -> float:
    """Of a kernel that reads and writes so many bytes."""
    return machine.gemm_s + nbytes / machine.bytes_per_s if nbytes else 0.0


def in_turn(
    link: Link, computed: Sequence[float], sent: Sequence[float], rest_s: float = 0.0
) -> float:
    """Seconds until pieces are computed one after the other, each sent when it is, and all have
    arrived.

    Args:
        computed: seconds of each piece.
        sent: bytes of each; 0 for one that stays.
        rest_s: computation that follows and waits for none of them.
    """
    now = free = 0.0
    moving = 0.0
    for seconds, nbytes in zip(computed, sent, strict=True):
        now += seconds
        if nbytes:
            took = link.seconds(nbytes)
            free = max(free, now) + took
            moving += took
    behind = min(moving, max(0.0, now + rest_s - computed[0]))
    return max(now + rest_s, free) + (1.0 - link.hidden) * behind
