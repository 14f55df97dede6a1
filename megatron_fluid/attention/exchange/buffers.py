"""The receive buffers, flags and copy stream of one process group's head exchanges, shared by all
its layers.

A receive buffer may be written again once every rank has read it. ``HeadBuffers`` knows when that
is from the order of launches alone, which is the same on every rank: when a rank passes a barrier,
all work that its peers enqueued before theirs is done. In training the exchanges alternate, and
each exchange's barrier proves the reads of the one before; no barrier is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.groups import group_resource, wait_timeout_s
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.cuda.devices import current_stream
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.flags import barrier_kernel

__all__ = ["TRANSPORTS", "HeadBuffers", "Transfer", "shared_head_buffers"]

TRANSPORTS = ("auto", "sm_push", "copy_engine")


class HeadBuffers:
    """Receive buffers, flags and the copy stream of one process group, on one stream order.

    Args:
        workspace: symmetric memory of the group.
        transport: "sm_push", "copy_engine" or "auto", see ``exchange.symmetric``.
        driver: of the workspace's device; made where it is None.
    """

    def __init__(
        self, workspace: Workspace, transport: str = "auto", driver: CudaDriver | None = None
    ) -> None:
        if transport not in TRANSPORTS:
            raise ConfigError.of("transport", transport, ", ".join(TRANSPORTS))
        self.workspace, self.transport = workspace, transport
        self.rank, self.world = workspace.rank, workspace.world_size
        on_gpu = workspace.device.type == "cuda"
        self.side = torch.cuda.Stream(workspace.device, priority=-1) if on_gpu else None
        self.driver = CudaDriver(workspace.device) if driver is None else driver
        self._forked = self.driver.event()
        self._barriers: dict[str, Launch] = {}  # by receive buffer
        self._uses = 0
        self._written: dict[str, int] = {}  # buffers being written, and the use that writes them
        self._unread: dict[str, int] = {}  # buffers a peer may still read, and the use it reads
        self.extra_barriers = 0

    def transfer(self, name: str, numel: int, dtype: torch.dtype) -> Transfer:
        """Claim a receive buffer [numel], which all ranks may write from here on, for one exchange.

        Raises:
            FluidError: inside a CUDA-graph capture: the buffer must grow, or an exchange from
                before the capture is still in it.
        """
        self.workspace.check_errors()
        local = self.workspace.reserve(f"attention {name}", numel, dtype)
        if name in self._unread or name in self._written:
            # Still written: a recomputation stopped before it took what was in flight. All ranks
            # run one program, so it did on every rank.
            self._join_side(name)
            self.barrier(name)
            self._unread.clear()
            self.extra_barriers += 1
        self._uses += 1
        self._written[name] = self._uses
        return Transfer(self, name, local[:numel], self._uses)

    def _join_side(self, name: str) -> None:
        """Order the current stream after the copy stream."""
        if self.side is None:
            return
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(self.side):
                forked = torch.cuda.is_current_stream_capturing()
            if not forked:  # a graph cannot wait for work that is not in it
                raise FluidError(
                    f"attention {name}: an exchange from before this CUDA-graph capture was not "
                    "finished; run one whole forward and backward before capturing"
                )
        torch.cuda.current_stream().wait_stream(self.side)

    def expect(self, name: str, use: int) -> None:
        """Raise FluidError unless the buffer still holds what this use wrote."""
        if self._written.get(name) != use:
            late = "another exchange has begun before the arrival of this one was taken"
            raise FluidError(f"attention {name}: {late}")

    def pointers(self, name: str, dtype: torch.dtype) -> Tensor:
        """The addresses of every rank's buffer, on the device, for kernels."""
        return self.workspace.peer_pointers(f"attention {name}", dtype)

    def addresses(self, name: str, dtype: torch.dtype) -> list[int]:
        """The addresses of every rank's buffer, on the host, for the copy engine."""
        peers = self.workspace.peer_buffers(f"attention {name}", dtype)
        return [peer.data_ptr() for peer in peers]

    def barrier(
        self, name: str, stream: torch.cuda.Stream | None = None, received: Tensor | None = None
    ) -> dict[str, int]:
        """Block `stream` (None: the current one) until every rank has written its share of the
        buffer. Returns the uses of buffers whose reads this barrier proves complete. `received`,
        what this rank reads of the buffer, is filled with NaN if a rank does not come."""
        self.workspace.check_open()  # its memory would be gone
        launch = self._barriers.get(name)
        if launch is None:
            region, errors = self.workspace.flags(f"attention {name}"), self.workspace.errors
            words = (region.flags, region.addresses, region.counter, errors.words, errors.abort)
            fixed = (*words, self.rank, region.operation, 0, self.workspace.timeout_ns)
            constants = {"W": self.world, "SLOT": 0, "MARK": True}
            launch = Launch(barrier_kernel, 1, constants, fixed)
            self._barriers[name] = launch
        if received is None:  # any address: no word is marked
            launch((1, 1), (self.workspace.errors.abort.data_ptr(), 0), stream)
        else:
            launch((1, 1), (received.data_ptr(), received.nbytes // 4), stream)
        return dict(self._unread)

    def mark_read(self, name: str, proven: Mapping[str, int]) -> None:
        """Record that this rank has enqueued its read of a buffer, after a barrier that proved
        ``proven`` read."""
        self._unread = {n: use for n, use in self._unread.items() if proven.get(n) != use}
        self._unread[name] = self._written.pop(name)

    def fork(self) -> int:
        """Order the copy stream after the current one, and return its handle (0 on a CPU)."""
        if self.side is None:
            return 0
        stream = self.side.cuda_stream
        self.driver.record(self._forked, self.driver.current())
        self.driver.wait(self._forked, stream)
        return stream


@dataclass
class Transfer:
    """One use of a receive buffer, in flight.

    Attributes:
        copied: whether the copy stream writes it; it is ordered after that by ``event`` (None on a
            CPU), and ``held`` is what it still reads.
    """

    buffers: HeadBuffers
    name: str
    received: Tensor
    use: int
    copied: bool = False
    event: torch.cuda.Event | None = None
    proven: dict[str, int] = field(default_factory=dict)
    held: list[Tensor] = field(default_factory=list)

    def pending(self) -> list[Transfer]:
        """What is in flight, for work that may overlap with it."""
        return [self] if self.copied else []

    def done(self) -> bool:
        """Return whether the copies have finished. Never blocks."""
        return self.event is None or self.event.query()

    def close_copies(self) -> None:
        """Enqueue the barrier on the copy stream, after its copies. The current stream does not
        wait."""
        side = self.buffers.side
        self.proven = self.buffers.barrier(self.name, side, self.received)
        self.copied, self.event = True, None if side is None else side.record_event()

    def wait(self) -> None:
        """Order the current stream after every rank's writes into the receive buffer."""
        self.buffers.expect(self.name, self.use)
        if not self.copied:
            self.proven = self.buffers.barrier(self.name, None, self.received)
        elif self.event is not None:
            self.event.wait(current_stream())
        self.held.clear()

    def mark_read(self) -> None:
        self.buffers.mark_read(self.name, self.proven)


def shared_head_buffers(group: dist.ProcessGroup) -> HeadBuffers:
    """Return the buffers of `group`, made once for all its layers. Collective the first time.

    Raises:
        ConfigError: the ranks cannot map each other's memory; the message says why.
    """
    return group_resource(
        group,
        "attention buffers",
        lambda: HeadBuffers(SymmetricWorkspace(group, wait_timeout_s(group))),
        close=lambda buffers: buffers.workspace.close(),
    )
