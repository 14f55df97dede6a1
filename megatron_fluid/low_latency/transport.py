"""What an AllToAll asks of a transport: one half of a dispatch or of a combine at a time.

`peer_memory` (NVLink), `nvshmem`, `collective` (NCCL, gloo) and `two_level` (two of them) implement
`Transport`. AllToAll has checked every tensor before a transport sees it. Shapes: see `all_to_all`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["CombineReceive", "CombineSend", "DispatchReceive", "DispatchSend", "Transport"]


@dataclass(slots=True)
class DispatchSend:
    """What the send half of a dispatch reads."""

    x: Tensor
    indices: Tensor
    weights: Tensor | None = None
    x_scale: Tensor | None = None
    bound_m: Tensor | None = None


@dataclass(slots=True)
class DispatchReceive:
    """What the receive half of a dispatch writes.

    Attributes:
        x: [L, R, H], or packed [rows, H]: one expert after another, each at a multiple of
            `alignment` rows. Packed, `offsets`, int32 [L], receives the row after each expert's
            last, padding counted.
    """

    counts: Tensor
    x: Tensor
    scale: Tensor | None = None
    offsets: Tensor | None = None
    alignment: int = 1

    @property
    def packed(self) -> bool:
        return self.x.dim() == 2


@dataclass(slots=True)
class CombineSend:
    """What the send half of a combine reads. Weights: fp32 [m, K], if the dispatch had none."""

    expert_y: Tensor
    weights: Tensor | None = None
    bound_m: Tensor | None = None


@dataclass(slots=True)
class CombineReceive:
    """The receive half of a combine: it writes `out`, or adds to it with `accumulate`, and reads
    the others."""

    out: Tensor
    indices: Tensor
    weights: Tensor | None = None
    bound_m: Tensor | None = None
    accumulate: bool = False


class Transport(Protocol):
    """Moves the rows of an AllToAll. Every method enqueues on the current stream and reads nothing
    from the device."""

    rank: int

    @property
    def name(self) -> str:
        """Its name in `AllToAll.transport`: nvlink, nvshmem, nccl, gloo, or two joined by +."""

    def size(self) -> str:
        """Its symmetric memory or its domains, for a report: ", 2.0 MiB"; "" if it has neither."""

    def dispatch_send(self, q: DispatchSend) -> None: ...

    def dispatch_receive(self, q: DispatchReceive) -> None: ...

    def combine_send(self, q: CombineSend) -> None: ...

    def combine_receive(self, q: CombineReceive) -> None: ...

    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a wait of this rank has timed out: data that arrives later
        belongs to an earlier call. Reads host memory only."""

    def close(self) -> None:
        """Free the buffers. Collective where memory is shared with other ranks."""
