"""What an AllToAll asks of a transport: one half of a dispatch or of a combine at a time.

`peer_memory` (NVLink), `nvshmem`, `collective` (NCCL, gloo) and `two_level` (two of them) implement
`Transport`. AllToAll has checked every tensor before a transport sees it. A request's `half` names
the method that takes it. Shapes: see `all_to_all`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["Again", "CombineReceive", "CombineSend", "DispatchReceive", "DispatchSend", "Transport"]

# Of a half that was started: makes, if called at once, what starts it again with other tensors of
# the same forms, the first fields of a request. None where every start needs a request.
type Again = Callable[[], Callable[[Sequence[Tensor | None]], None]] | None


@dataclass(slots=True)
class DispatchSend:
    """What the send half of a dispatch reads."""

    half = "dispatch_send"
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

    half = "dispatch_receive"
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

    half = "combine_send"
    expert_y: Tensor
    weights: Tensor | None = None
    bound_m: Tensor | None = None


@dataclass(slots=True)
class CombineReceive:
    """The receive half of a combine: it writes `out`, or adds to it with `accumulate`, and reads
    the others."""

    half = "combine_receive"
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

    def dispatch_send(self, q: DispatchSend) -> Again: ...

    def dispatch_receive(self, q: DispatchReceive) -> Again: ...

    def combine_send(self, q: CombineSend) -> Again: ...

    def combine_receive(self, q: CombineReceive) -> Again: ...

    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a wait of this rank has timed out: data that arrives later
        belongs to an earlier call. Reads host memory only."""

    def close(self) -> None:
        """Free the buffers. Collective where memory is shared with other ranks."""
