"""Tensor parallelism around the overlapped attention: the gather, scatter and sums that Megatron's
projections do by themselves.

Under sequence parallelism a rank holds s / T of the rows of its context-parallel part. They are
gathered before the projection of queries, keys and values, and the partial sums of the output
projection are reduce-scattered. Without it every rank has all rows, and the sums are all-reduced.

Legend: s a context-parallel rank's rows, T tensor-parallel ranks, b batch, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["TensorParallelism"]


@dataclass(frozen=True)
class TensorParallelism:
    """What surrounds one module's overlapped forward. Under sequence parallelism it is also the
    call's ``RowShards``, which gather and scatter inside the forward.

    Args:
        group: the tensor-parallel group.
        sequence_parallel: whether its ranks hold the rows in parts.
    """

    group: Any
    sequence_parallel: bool

    def gather(self, x: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.mappings import _gather_along_first_dim

        whole: Tensor = _gather_along_first_dim(x, self.group)
        return whole

    def scatter_sum(self, dx: Tensor) -> Tensor:
        from megatron.core.tensor_parallel.mappings import _reduce_scatter_along_first_dim

        mine: Tensor = _reduce_scatter_along_first_dim(dx, self.group)
        return mine

    @property
    def ranks(self) -> int:
        return int(self.group.size())

    @property
    def shards(self) -> TensorParallelism | None:
        """Who gathers rows inside the overlapped forward."""
        return self if self.ranks > 1 and self.sequence_parallel else None

    def rows(self, x: Tensor) -> int:
        """s, of the rows x that the module was given."""
        return x.shape[0] * (self.ranks if self.sequence_parallel else 1)

    def enter(self, x: Tensor) -> Tensor:
        """The rows; the gradient of all of them is summed over the group."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        if self.ranks == 1 or self.sequence_parallel:
            return x
        entered: Tensor = copy_to_tensor_model_parallel_region(x, group=self.group)
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """The sum over the group of partial sums y [s, b, H], or this rank's part of it."""
        from megatron.core.tensor_parallel import (
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        if self.ranks == 1:
            return y
        if self.sequence_parallel:
            left: Tensor = reduce_scatter_to_sequence_parallel_region(y, group=self.group)
        else:
            left = reduce_from_tensor_model_parallel_region(y, group=self.group)
        return left
