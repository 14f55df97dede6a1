"""A symmetric double buffer: calls use its two buffers in turn.

Every rank signals in each call. The signal of one call proves that the rank has finished the call
before, so no call waits for the readers of the buffer that it writes. The host knows whose turn it
is, so a CUDA graph cannot capture a call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import FlagRegion, Workspace
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import FluidError
from megatron_fluid.kernels.flags import wait_for_peers_kernel

__all__ = ["DoubleBuffer", "PeerWait", "refuse_capture"]

_UNIT = torch.bfloat16  # dtype of the allocation, which calls of any dtype share
_ALIGN = 512  # bytes; allows the widest accesses in both buffers


def refuse_capture(name: str, capturing: bool) -> None:
    """Raise FluidError if `capturing`, for the backend of this name."""
    if capturing:
        reason = "counts its calls on the host and cannot be captured into a CUDA graph"
        raise FluidError(f"the {name} backend {reason}")


class DoubleBuffer:
    """The buffer ``name`` of every rank. All ranks ask for the same sizes in the same order."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace = workspace
        self.name = name
        self._turn = 1
        self._flat = torch.empty(0, dtype=_UNIT)
        self._addresses: list[list[int]] = [[], []]
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}
        words = workspace.errors.words
        self._errors = (ctypes.c_int64 * words.numel()).from_address(words.data_ptr())

    def next(self, nbytes: int) -> list[int]:
        """Switch to the other buffer, of at least `nbytes`: its address in the memory of each rank.
        Collective where the buffer must grow.

        Raises:
            PeerTimeoutError: an earlier wait of this rank for a peer timed out.
        """
        if any(self._errors):
            self.workspace.check_errors()
        self._turn ^= 1
        held = self._flat.nbytes
        if 2 * nbytes > held or not held:  # a first call may have no rows
            self._grow(nbytes)
        return self._addresses[self._turn]

    def _grow(self, nbytes: int) -> None:
        self._views.clear()  # they would keep the old memory alive
        self._flat = torch.empty(0, dtype=_UNIT)
        each = max(1, -(-nbytes // _ALIGN)) * _ALIGN
        self._flat = flat = self.workspace.reserve(self.name, 2 * each // _UNIT.itemsize, _UNIT)
        bases = self.workspace.peer_addresses(self.name, _UNIT)
        self._addresses = [bases, [base + flat.nbytes // 2 for base in bases]]

    def local(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's memory of the buffer that `next` switched to, as a tensor of `shape`."""
        key = (self._turn, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            start = self._turn * (self._flat.numel() // 2)
            units = math.prod(shape) * dtype.itemsize // _UNIT.itemsize
            with torch.inference_mode(False):  # training could not write an inference tensor
                part = self._flat[start : start + units]
                view = self._views[key] = part.view(dtype).view(tuple(shape))
        return view


class PeerWait:
    """A bounded wait on the current stream until every other rank's word in ``region`` has reached
    a value."""

    def __init__(self, workspace: Workspace, region: FlagRegion) -> None:
        words = (region.flags, workspace.errors.words, workspace.errors.abort)
        rest = (workspace.rank, region.operation, workspace.timeout_ns)
        self._arguments = words, rest
        self._launch = Launch(wait_for_peers_kernel, 1, {"W": workspace.world_size})
        self._nothing = workspace.errors.abort.data_ptr()

    def __call__(self, value: int, awaited: Tensor | None = None) -> None:
        """awaited: what the peers write; filled with NaN if one does not come."""
        words, rest = self._arguments
        if awaited is None:
            self._launch((1, 1), (*words, value, self._nothing, 0, *rest))
        else:
            marked = (awaited.data_ptr(), awaited.nbytes // 4)
            self._launch((1, 1), (*words, value, *marked, *rest))
