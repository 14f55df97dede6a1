"""Symmetric memory of ranks that are processes without a GPU: each buffer is a file that all map,
so that interpreted kernels of several ranks really wait for each other. `rendezvous` waits for all
ranks without a bound, as torch's does on GPUs."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm import symmetric


class _Torch:
    """torch, as the module of symmetric memory sees it: with a GPU whose memory is the host's."""

    cuda = SimpleNamespace(
        is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 1,
        can_device_access_peer=lambda device, peer: True, synchronize=lambda device: None,
    )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: str, index: int) -> torch.device:
        return torch.device("cpu")


class SymmetricFiles:
    """Symmetric memory in `folder`, which ranks share; `counted` wraps what stands for torch."""

    def __init__(
        self,
        folder: Path,
        counted: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._numbers = folder, itertools.count()
        self._numbered: dict[int, int] = {}
        self._empty, self._rendezvous = counted(self.empty), counted(self.rendezvous)

    @contextlib.contextmanager
    def mapped(self) -> Iterator[None]:
        """Inside, groups of all ranks of the job have symmetric memory."""
        from torch.distributed import _symmetric_memory as torchs

        with (
            mock.patch.object(symmetric, "torch", _Torch()),
            mock.patch.object(torchs, "empty", self._empty),
            mock.patch.object(torchs, "rendezvous", self._rendezvous),
        ):
            yield

    def _map(self, number: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        name = str(self._folder / f"{number}-{rank}")
        return torch.from_file(name, shared=True, size=numel, dtype=dtype)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        number = next(self._numbers)
        local = self._map(number, dist.get_rank(), numel, dtype)
        local.view(torch.int32).fill_(0x7FFF7FFF)  # NaN of every float type
        self._numbered[local.data_ptr()] = number
        return local

    def rendezvous(self, local: Tensor, group: dist.ProcessGroup) -> SimpleNamespace:
        number = self._numbered[local.data_ptr()]
        (self._folder / f"{number}-{group.rank()}-here").touch()
        while not all((self._folder / f"{number}-{r}-here").exists() for r in range(group.size())):
            time.sleep(0.001)

        def get_buffer(rank: int, shape: tuple[int], dtype: torch.dtype) -> Tensor:
            return self._map(number, rank, shape[0], dtype)

        return SimpleNamespace(get_buffer=get_buffer)


@contextlib.contextmanager
def nvlink_over_files(folder: str) -> Iterator[None]:
    """Inside, layers of CPU ranks that interpret kernels exchange over NVLink's path."""
    import triton.language as tl

    from megatron_fluid.kernels import flags
    from megatron_fluid.kernels.low_latency import signals
    from megatron_fluid.moe import choose

    assert flags.INTERPRETED
    polls = tl.constexpr(1 << 20)  # peers run meanwhile: wait for them
    with (
        SymmetricFiles(Path(folder)).mapped(),
        mock.patch.object(flags, "_POLLS", polls),
        mock.patch.object(signals, "_POLLS", polls),
        mock.patch.dict(choose.TRANSPORTS, nvlink=lambda case: None),
    ):
        yield
