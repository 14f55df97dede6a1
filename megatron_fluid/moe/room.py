"""How many expert rows a captured call of a layer has room for.

A CUDA graph cannot size activations by the rows that arrive, and an eager call can. So each layer
notes the most rows that this rank received in one eager call. A captured call has room for them and
a margin. Layers and ranks differ in it, as their routing does.

A call that receives more leaves the surplus rows out and records that in `NvlinkBuffers.overflow`.
Who replays the graph looks there, and runs such an iteration again: patches/iteration_graph.py, on
plain torch the training loop.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_fluid.cuda.devices import capturing
from megatron_fluid.errors import FluidError

if TYPE_CHECKING:
    from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers

__all__ = ["ROOMS", "LayerRoom", "Rooms", "graph_room", "refuse_capture"]

_MARGIN = 0.125
_LEAST = 128


class LayerRoom:
    """The rows of one layer on this rank.

    Attributes:
        most: the most that one eager call received.
    """

    def __init__(self) -> None:
        self.most = 0
        ROOMS.layers.add(self)

    def saw(self, rows: int) -> None:
        """An eager call received so many."""
        if rows > self.most:
            self.most = rows

    def capacity(self, buffers: NvlinkBuffers) -> int | None:
        """The rows that a call over `buffers` has room for now; None: as many as arrive."""
        if not ROOMS.bounded:
            return None
        ROOMS.buffers.add(buffers)
        rows = math.ceil(self.most * (1 + ROOMS.margin))
        return min(max(rows, _LEAST), buffers.most_rows)


class Rooms:
    """The rooms of all layers of this process.

    Attributes:
        bounded: whether calls have room for a bounded number of rows now, as captured ones must.
        margin: room beyond the most rows that were seen, as a share of them.
        layers: the rooms.
        buffers: those that bounded calls used.
    """

    def __init__(self) -> None:
        self.bounded = False
        self.margin = _MARGIN
        self.layers: weakref.WeakSet[LayerRoom] = weakref.WeakSet()
        self.buffers: weakref.WeakSet[NvlinkBuffers] = weakref.WeakSet()

    def grow(self) -> None:
        """Double the margin, and forget what was left out so far. The device has to be idle."""
        self.margin *= 2
        for buffers in self.buffers:
            buffers.overflow.zero_()


ROOMS = Rooms()


@contextlib.contextmanager
def graph_room() -> Iterator[None]:
    """Around the capture of a CUDA graph, and around one call before it that builds its kernels:
    layers read nothing on the host. A layer with `MoEConfig.graph` has room for the most rows that
    one of its calls outside received on this rank, and 12.5% more.
    """
    ROOMS.bounded = True
    try:
        yield
    finally:
        ROOMS.bounded = False


def refuse_capture() -> None:
    """Before a call whose row counts the host reads.

    Raises:
        FluidError: a CUDA graph is being captured, in which the counts would never arrive.
    """
    if capturing():
        raise FluidError(
            "the host reads how many rows arrive, which the capture of a CUDA graph forbids: "
            "capture a MoELayer of one rank or over NVLink, with MoEConfig(graph=True) inside "
            "graph_room()"
        )
