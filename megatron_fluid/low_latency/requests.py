"""One dispatch or combine as a transport sees it: tensors checked by AllToAll, and which halves to
run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["CombineRequest", "DispatchRequest", "Transport"]


@dataclass(slots=True)
class DispatchRequest:
    """One half of a dispatch. What `send` needs: x, x_scale, indices, weights, bound_m. What
    `receive` needs: the out_* tensors.

    packed: out_x is [rows, H], experts one after another, each beginning at a multiple of
    `alignment` rows; out_offsets int32 [L] takes the row after each expert's last (padding
    counted).
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
    receive: bool = False
    packed: bool = False
    alignment: int = 1
    quantize: bool = False


@dataclass(slots=True)
class CombineRequest:
    """One half of a combine. What `send` needs: expert_y, and weights and bound_m where the weights
    did not come with the dispatch (`exchange`). What `receive` needs: out, indices, bound_m, and
    weights with `exchange`.
    """

    out: Tensor | None = None
    indices: Tensor | None = None
    weights: Tensor | None = None
    expert_y: Tensor | None = None
    bound_m: Tensor | None = None
    send: bool = False
    receive: bool = False
    accumulate: bool = False
    exchange: bool = False


class Transport(Protocol):
    """Moves bytes for AllToAll, a half at a time. Everything is enqueued on the current stream."""

    @property
    def name(self) -> str: ...

    def dispatch(self, request: DispatchRequest) -> None: ...

    def combine(self, request: CombineRequest) -> None: ...

    def check_errors(self) -> None: ...

    def close(self) -> None: ...
