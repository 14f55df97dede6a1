"""The landing zones, flags and copy stream of one process group's head exchanges, shared by all its
layers.

A zone may be written again once every rank has read it. ``HeadBuffers`` knows when that is from the
order of launches alone, which is the same on every rank: a rank that passes a barrier knows that
all work is done that its peers enqueued before theirs. In training the exchanges alternate and no
barrier is ever added.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.comm.workspace import Workspace
from megatron_fluid.config import current_config
from megatron_fluid.cuda.copy_engine import CudaDriver, Driver, SimulatedDriver
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.flags import barrier_kernel

__all__ = ["MOVERS", "HeadBuffers", "shared_head_buffers"]

MOVERS = ("auto", "push", "engine")


class HeadBuffers:
    """Landing zones, flags and the copy stream of one process group, shared by all its layers on
    one stream order.

    Args:
        workspace: symmetric memory of the group.
        mover: "push", "engine", or "auto", see the module.
    """

    def __init__(self, workspace: Workspace, mover: str = "auto") -> None:
        if mover not in MOVERS:
            raise ConfigError.of("mover", mover, ", ".join(MOVERS))
        self.workspace, self.mover = workspace, mover
        self.rank, self.world = workspace.rank, workspace.world_size
        on_gpu = workspace.device.type == "cuda"
        self.side = torch.cuda.Stream(workspace.device, priority=-1) if on_gpu else None
        self.driver: Driver = CudaDriver(workspace.device) if on_gpu else SimulatedDriver()
        self._forked = self.driver.event()
        self._barriers: dict[str, Launch] = {}  # by zone
        self._uses = 0
        self._under_way: dict[str, int] = {}  # zones being written, and the use that writes them
        self._unproved: dict[
            str, int
        ] = {}  # zones that a peer may still be reading, and the use that it reads
        self.extra_barriers = 0
        self._growths = -1
        self._places: dict[tuple[str, torch.dtype], list[int]] = {}  # of zones, until buffers move

    def claim(self, zone: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """This rank's memory of a zone [numel], which all ranks may write from here on, and the
        number of this use.

        Raises:
            FluidError: inside a CUDA-graph capture: the zone must grow, or holds what was begun
                before the capture.
        """
        self.workspace.check_errors()
        local = self.workspace.reserve(f"attention {zone}", numel, dtype)
        if zone in self._unproved or zone in self._under_way:
            # Or a recomputation has stopped before it took what was on its way: on every rank, as
            # all run one program.
            self._join_side(zone)
            self.meet(zone)
            self._unproved.clear()
            self.extra_barriers += 1
        self._uses += 1
        self._under_way[zone] = self._uses
        return local[:numel], self._uses

    def _join_side(self, zone: str) -> None:
        """Order the current stream after the copy stream."""
        if self.side is None:
            return
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.stream(self.side):
                forked = torch.cuda.is_current_stream_capturing()
            if not forked:  # a graph cannot wait for work that is not in it
                raise FluidError(
                    f"attention {zone}: an exchange from before this CUDA-graph capture was not "
                    "finished; "
                    "run one whole forward and backward before capturing"
                )
        torch.cuda.current_stream().wait_stream(self.side)

    def expect(self, zone: str, use: int) -> None:
        """Raise FluidError unless the zone still holds what this use wrote."""
        if self._under_way.get(zone) != use:
            raise FluidError(
                f"attention {zone}: another exchange has begun before the arrival of this one was "
                "taken"
            )

    def addresses(self, zone: str, dtype: torch.dtype) -> Tensor:
        return self.workspace.peer_pointers(f"attention {zone}", dtype)

    def places(self, zone: str, dtype: torch.dtype) -> list[int]:
        """The address of every rank's memory of a zone, for the copy engines."""
        if self._growths != self.workspace.growths:
            self._places.clear()
            self._growths = self.workspace.growths
        found = self._places.get((zone, dtype))
        if found is None:
            found = self._places[zone, dtype] = self.workspace.peer_addresses(
                f"attention {zone}", dtype
            )
        return found

    def meet(self, zone: str, stream: torch.cuda.Stream | None = None) -> dict[str, int]:
        """Barrier on `stream`, None for the current one: every rank's writes into the zone have
        arrived. Gives the uses it proves read."""
        proved = dict(self._unproved)
        self._barrier(zone, stream)
        return proved

    def _barrier(self, zone: str, stream: torch.cuda.Stream | None) -> None:
        self.workspace.check_open()  # its memory would be gone
        launch = self._barriers.get(zone)
        if launch is None:
            region, errors = self.workspace.flags(f"attention {zone}"), self.workspace.errors
            words = (region.flags, region.addresses, region.counter, errors.words, errors.abort)
            fixed = (*words, self.rank, region.operation, 0, self.workspace.timeout_ns)
            launch = self._barriers[zone] = Launch(
                barrier_kernel, 1, {"W": self.world, "SLOT": 0}, fixed
            )
        launch((1, 1), (), stream)

    def read(self, zone: str, proved: Mapping[str, int]) -> None:
        """This rank has enqueued its reading of a zone, after a barrier that proved uses of other
        zones read."""
        self._unproved = {z: use for z, use in self._unproved.items() if proved.get(z) != use}
        self._unproved[zone] = self._under_way.pop(zone)

    def fork(self) -> int:
        """The copy stream, as the driver knows it; what it is given from here on comes after what
        the current stream holds now."""
        if self.side is None:
            return 0
        stream = self.side.cuda_stream
        self.driver.record(self._forked, self.driver.current())
        self.driver.wait(self._forked, stream)
        return stream


def shared_head_buffers(group: dist.ProcessGroup) -> HeadBuffers:
    """Return the buffers of `group`, made once for all layers that use it. Collective the first
    time.

    Raises:
        ConfigError: the ranks cannot map each other's memory; the message says why.
    """
    return group_resource(
        group,
        "attention buffers",
        lambda: HeadBuffers(SymmetricWorkspace(group, current_config().timeout_s)),
        close=lambda domain: domain.workspace.close(),
    )
