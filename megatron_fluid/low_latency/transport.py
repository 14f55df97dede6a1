"""What an AllToAll asks of a transport: one half of a dispatch or of a combine at a time.

`peer_memory` (NVLink), `nvshmem`, `collective` (NCCL, gloo) and `two_level` (two of them) implement
`Transport`. AllToAll has checked every tensor before a transport sees it. Shapes: see `all_to_all`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["CombineRequest", "DispatchRequest", "Transport"]


@dataclass(slots=True)
class DispatchRequest:
    """One half of a dispatch. With `send` it reads x, x_scale, indices, weights and bound_m, else
    it receives and writes the out_* tensors.

    Attributes:
        packed: out_x is [rows, H], one expert after another, each at a multiple of `alignment`
            rows. out_offsets, int32 [L], receives the row after each expert's last, padding
            counted.
    """

    out_counts: Tensor | None = None
    out_x: Tensor | None = None
    out_scale: Tensor | None = None
    out_offsets: Tensor | None = None
    x: Tensor | None = None
    x_scale: Tensor | None = None
    indices: Tensor | None = None
    weights: Tensor | None = None
    bound_m: Tensor | None = None
    send: bool = False
    packed: bool = False
    alignment: int = 1


@dataclass(slots=True)
class CombineRequest:
    """One half of a combine. With `send` it reads expert_y, else it receives: it reads indices and
    bound_m, and writes out.

    Attributes:
        accumulate: add to `out` instead of overwriting it.
        exchange: the dispatch carried no weights. Both halves read weights, and `send` reads
            bound_m too.
    """

    out: Tensor | None = None
    indices: Tensor | None = None
    weights: Tensor | None = None
    expert_y: Tensor | None = None
    bound_m: Tensor | None = None
    send: bool = False
    accumulate: bool = False
    exchange: bool = False


class Transport(Protocol):
    """Moves the rows of an AllToAll. Every method enqueues on the current stream and reads nothing
    from the device."""

    @property
    def name(self) -> str:
        """Its name in `AllToAll.transport`: nvlink, nvshmem, nccl, gloo, or two joined by +."""

    def dispatch(self, request: DispatchRequest) -> None:
        """Enqueue this half."""

    def combine(self, request: CombineRequest) -> None:
        """Enqueue this half."""

    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a wait of this rank has timed out: data that arrives later
        belongs to an earlier call. Reads host memory only."""

    def close(self) -> None:
        """Free the buffers. Collective where memory is shared with other ranks."""
