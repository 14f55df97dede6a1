"""One dispatch or combine as a transport sees it: tensors checked by AllToAll, and which halves to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = ["CombineRequest", "DispatchRequest", "Transport"]


@dataclass(slots=True)
class DispatchRequest:
    """What `send` needs: x, x_scale, indices, weights, bound_m. What `receive` needs: the out_* tensors.

    packed: out_x is [rows, H], experts one after another, each beginning at a multiple of `alignment` rows; out_offsets
    int32 [L] takes the row after each expert's last (padding counted).
    """

    out_counts: Tensor | None
    out_x: Tensor | None
    out_scale: Tensor | None
    out_offsets: Tensor | None
    x: Tensor | None
    x_scale: Tensor | None
    indices: Tensor | None
    weights: Tensor | None
    bound_m: Tensor | None
    send: bool
    receive: bool
    packed: bool
    alignment: int
    quantize: bool


@dataclass(slots=True)
class CombineRequest:
    """What `send` needs: expert_y, and weights where they did not come with the dispatch (`exchange`). What `receive`
    needs: out, indices, bound_m.
    """

    out: Tensor | None
    indices: Tensor | None
    weights: Tensor | None
    expert_y: Tensor | None
    bound_m: Tensor | None
    send: bool
    receive: bool
    accumulate: bool
    exchange: bool


class Transport(Protocol):
    """Moves bytes for AllToAll. Everything is enqueued on the current stream."""

    @property
    def name(self) -> str: ...

    def dispatch(self, request: DispatchRequest) -> None: ...

    def combine(self, request: CombineRequest) -> None: ...

    def check_errors(self) -> None: ...

    def close(self) -> None: ...
