"""Starting a Triton kernel with little work on the host.

Triton binds, types and hashes the arguments of every launch, which takes longer than many of the kernels here run. A
`Launch` does that once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = ["Launch"]


class Launch:
    """One specialisation of a kernel: its constexprs are fixed, it is compiled by its first launch and started
    directly after that.

    The caller vouches that later launches pass the same types, that integers which vary are marked do_not_specialize,
    and that tensors which are moved by wide accesses begin on 16-byte boundaries like the first ones.
    """

    def __init__(self, kernel: Any, num_warps: int, constants: Mapping[str, object]) -> None:
        self._kernel = kernel
        self._num_warps = num_warps
        self._constants = dict(constants)
        self._values = tuple(constants.values())
        self._compiled: Any = None

    def __call__(self, grid: tuple[int, int], arguments: Sequence[Tensor | int]) -> None:
        """Start grid[0] * grid[1] programs on the current stream; `arguments` are all but the constexprs, in order."""
        compiled = self._compiled
        if compiled is None:
            compiled = self._kernel[grid](*arguments, **self._constants, num_warps=self._num_warps)
            if not triton.knobs.runtime.interpret:
                self._compiled = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        addresses = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        compiled.run(
            *(grid[0], grid[1], 1, stream, compiled.function, compiled.packed_metadata, None, None, None),
            *addresses,
            *self._values,
        )
