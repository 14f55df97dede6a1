"""A symmetric buffer in two halves that calls use in turn, known by its addresses.

One call's signal proves that every rank is done with the half of the call before, so no call waits
for the readers of its own half. Whose turn it is is known to the host, so a call cannot be captured
into a CUDA graph.
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
from megatron_fluid.kernels.reduce_slots import reduce_slots

__all__ = ["PeerHalves", "PeerWait", "SlotSum", "refuse_capture"]

_UNIT = torch.bfloat16  # what the buffer is made of; calls of any dtype share it
_ALIGN = 512  # bytes: every half begins where wide accesses may


def refuse_capture(name: str, capturing: bool) -> None:
    """Raise FluidError if the backend of this name would be captured."""
    if capturing:
        raise FluidError(
            f"the {name} backend counts its calls on the host and cannot be captured into a CUDA "
            "graph"
        )


class PeerHalves:
    """Every rank's half of the buffer ``name``, by rank; all ranks ask for the same sizes in the
    same order."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace = workspace
        self.name = name
        self._half = 1
        self._flat = torch.empty(0, dtype=_UNIT)
        self._addresses: list[list[int]] = [[], []]
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}
        words = workspace.errors.words
        self._errors = (ctypes.c_int64 * words.numel()).from_address(words.data_ptr())

    def next(self, nbytes: int) -> list[int]:
        """Turn to the other half, of at least `nbytes`: its address in the memory of each rank.
        Collective where it must grow.

        Raises:
            PeerTimeoutError: an earlier kernel of this rank gave up waiting for a peer.
        """
        if any(self._errors):
            self.workspace.check_errors()
        self._half ^= 1
        if (
            2 * nbytes > self._flat.nbytes or not self._flat.nbytes
        ):  # a first call may be of no rows
            self._grow(nbytes)
        return self._addresses[self._half]

    def _grow(self, nbytes: int) -> None:
        self._views.clear()  # they would keep the old memory alive
        self._flat = torch.empty(0, dtype=_UNIT)
        half = max(1, -(-nbytes // _ALIGN)) * _ALIGN
        self._flat = flat = self.workspace.reserve(self.name, 2 * half // _UNIT.itemsize, _UNIT)
        bases = self.workspace.peer_addresses(self.name, _UNIT)
        self._addresses = [bases, [base + flat.nbytes // 2 for base in bases]]

    def mine(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's part of the half that `next` turned to, as a tensor of `shape`."""
        key = (self._half, dtype, tuple(shape))
        view = self._views.get(key)
        if view is None:
            start = self._half * (self._flat.numel() // 2)
            units = math.prod(shape) * dtype.itemsize // _UNIT.itemsize
            with torch.inference_mode(
                False
            ):  # made in inference, it could not be written in training
                view = self._views[key] = (
                    self._flat[start : start + units].view(dtype).view(tuple(shape))
                )
        return view


class PeerWait:
    """A bounded wait on the current stream until the word of every other rank in ``region`` has
    reached a value."""

    def __init__(self, workspace: Workspace, region: FlagRegion) -> None:
        words = (region.flags, workspace.errors.words, workspace.errors.abort)
        rest = (workspace.rank, region.operation, workspace.timeout_ns)
        self._arguments = words, rest
        self._launch = Launch(wait_for_peers_kernel, 1, {"W": workspace.world_size})

    def __call__(self, value: int) -> None:
        words, rest = self._arguments
        self._launch((1, 1), (*words, value, *rest))


class SlotSum:
    """The sum of all ranks' landing slots, once the word of every other rank in ``region`` says
    that its own is there."""

    def __init__(self, workspace: Workspace, region: FlagRegion) -> None:
        self._wait = PeerWait(workspace, region)

    def __call__(self, slots: Tensor, value: int, bias: Tensor | None) -> Tensor:
        """``[M / W, N]`` from slots ``[W, M / W, N]``, in fp32 in rank order, plus bias; waits on
        the current stream for `value`."""
        self._wait(value)
        return reduce_slots(slots, bias)
