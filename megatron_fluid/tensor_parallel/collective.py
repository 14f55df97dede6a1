"""The plain form: a collective of NCCL or gloo, then the GEMM, or the GEMM, then the collective.
Runs anywhere.

It is also what the overlapped forms are compared with, and what serves the shapes where nothing
beats it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.config import current_config
from megatron_fluid.tensor_parallel.gemm import FP8_DTYPES, Product

__all__ = ["CollectiveBackend"]


class CollectiveBackend:
    """AllGather then GEMM, GEMM then ReduceScatter.

    The reduction: NCCL's own on a GPU (in C's dtype, its ring's order); elsewhere, or where the
    configuration says ``deterministic``, the pieces are exchanged and summed in fp32 in rank order.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        """Begin gathering ``[m, K]`` shards into ``[W m, K]``; the returned function, to be called
        before the backend's next gather, waits and gives it, maybe lent as in `gather_matmul`."""
        shard = a_shard.contiguous()
        full = shard.new_empty((self.ranks * shard.shape[0], shard.shape[1]))
        work = dist.all_gather_into_tensor(
            _bytes(full), _bytes(shard), group=self.group, async_op=True
        )

        def finish() -> Tensor:
            work.wait()
            return full

        return finish

    def gather_matmul(
        self, a_shard: Tensor, gemm: Product, keep: bool = True, lend: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """C ``[W m, N]`` of all shards' rows, and with ``keep`` the gathered A ``[W m, K]``; with
        ``lend`` it may be the backend's own memory, valid for work enqueued before the backend's
        next gather."""
        full = self.start_gather(a_shard)()
        return gemm(full), full if keep else None

    def matmul_scatter(
        self, a: Tensor, gemm: Product, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """This rank's rows ``[M / W, N]`` of the sum over ranks of A B; ``beside`` runs while the
        reduction is in flight."""
        c = gemm.without_bias()(a)
        rows = c.shape[0] // self.ranks
        if c.device.type == "cuda" and not current_config().deterministic:
            out = c.new_empty((rows, c.shape[1]))
            work = dist.reduce_scatter_tensor(out, c, group=self.group, async_op=True)
            if beside is not None:
                beside()
            work.wait()
            return out if gemm.bias is None else (out + gemm.bias).to(c.dtype)
        landing = torch.empty_like(c)
        work = dist.all_to_all_single(landing, c, group=self.group, async_op=True)
        if beside is not None:
            beside()
        work.wait()
        total = landing.view(self.ranks, rows, c.shape[1])
        summed = total.double().sum(0) if c.dtype == torch.float64 else _fixed_order_sum(total)
        return (summed if gemm.bias is None else summed + gemm.bias).to(c.dtype)


def _fixed_order_sum(parts: Tensor) -> Tensor:
    """fp32 sum over the first dimension, rank 0 first."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def _bytes(t: Tensor) -> Tensor:
    """fp8 has no collectives of its own: move it as bytes."""
    return t.view(torch.uint8) if t.dtype in FP8_DTYPES else t
