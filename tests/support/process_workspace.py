"""Symmetric memory of CPU processes in mapped files, so that interpreted kernels of several ranks
really wait for each other."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fluid.comm.workspace import Buffer, Workspace
from megatron_fluid.kernels import flags
from megatron_fluid.kernels.low_latency import signals

__all__ = ["ProcessWorkspace"]


class ProcessWorkspace(Workspace):
    """The workspace of one rank. Collective.

    Args:
        group: the ranks, whose collectives work on CPU tensors.
        folder: an empty one that all of them see.
    """

    def __init__(self, group: dist.ProcessGroup, folder: str) -> None:
        import triton.language as tl

        assert flags.INTERPRETED
        flags._POLLS = signals._POLLS = tl.constexpr(1 << 20)  # peers run meanwhile: wait for them
        super().__init__(group.rank(), group.size(), torch.device("cpu"), 60.0, watched=False)
        self._group, self._folder, self._files = group, Path(folder), 0
        self._open_arenas()
        self._after_growth()

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        self._files += 1
        mine = self._folder / f"{self._files}.{self.rank}"
        local = torch.from_file(str(mine), shared=True, size=numel, dtype=dtype)
        local.view(torch.int32).fill_(0x7FFF7FFF)  # NaN of every float type
        self._after_growth()
        peers = [
            local
            if r == self.rank
            else torch.from_file(str(mine.with_suffix(f".{r}")), True, numel, dtype=dtype)
            for r in range(self.world_size)
        ]
        return Buffer(local, peers, torch.tensor([p.data_ptr() for p in peers]), None)

    def _before_growth(self, name: str, nbytes: int) -> None:
        dist.barrier(self._group)

    def _after_growth(self) -> None:
        dist.barrier(self._group)
