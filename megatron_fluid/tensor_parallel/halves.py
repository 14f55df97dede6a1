"""A symmetric buffer in two halves that calls use in turn, known by its addresses.

One call's signal proves that every rank is done with the half of the call before, so no call waits for the readers of its own half.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fluid.comm.symmetric import Workspace

__all__ = ["PeerHalves"]

_ALIGN = 256  # elements: every half begins where wide accesses may


class PeerHalves:
    """Every rank's half of the buffer ``name``, by rank; all ranks ask for the same sizes in the same order."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.workspace = workspace
        self.name = name
        self._half = 1
        self._addresses: dict[tuple[int, torch.dtype], tuple[int, list[int]]] = {}
        self._views: dict[tuple[int, torch.dtype, tuple[int, ...]], tuple[int, Tensor]] = {}
        words = workspace.errors.words
        self._errors = (ctypes.c_int64 * words.numel()).from_address(words.data_ptr())

    def next(self, numel: int, dtype: torch.dtype) -> list[int]:
        """Turn to the other half, of at least `numel` elements: its address in the memory of each rank. Collective where it must grow.

        Raises:
            PeerTimeoutError: an earlier kernel of this rank gave up waiting for a peer.
        """
        if any(self._errors):
            self.workspace.check_errors()
        self._half ^= 1
        flat = self.workspace.reserve(self.name, 2 * -(-numel // _ALIGN) * _ALIGN, dtype)
        # The buffer only grows, and has a new address then.
        known = self._addresses.get((self._half, dtype))
        if known is None or known[0] != flat.data_ptr():
            offset = self._half * (flat.numel() // 2) * dtype.itemsize
            bases = [
                self.workspace.peer_view(self.name, rank, (flat.numel(),), dtype).data_ptr()
                for rank in range(self.workspace.world_size)
            ]
            known = self._addresses[self._half, dtype] = flat.data_ptr(), [base + offset for base in bases]
        return known[1]

    def mine(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """This rank's part of the half that `next` turned to, as a tensor of `shape`."""
        flat = self.workspace.reserve(self.name, 2 * math.prod(shape), dtype)
        key = (self._half, dtype, tuple(shape))
        known = self._views.get(key)
        if known is None or known[0] != flat.data_ptr():
            # Views of a buffer that has grown since would keep its old memory alive.
            for old in [k for k, (address, _) in self._views.items() if k[1] == dtype and address != flat.data_ptr()]:
                del self._views[old]
            half = flat[self._half * (flat.numel() // 2) :][: math.prod(shape)].view(tuple(shape))
            known = self._views[key] = flat.data_ptr(), half
        return known[1]
