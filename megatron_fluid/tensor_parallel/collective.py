"""The plain form: a collective of NCCL or gloo and the GEMM, one after the other. Runs anywhere.

The overlapped forms are compared with it. It serves the shapes where nothing is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.groups import group_resource
from megatron_fluid.comm.waits import WaitName, group_waits
from megatron_fluid.config import current_config
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["CollectiveBackend", "collective_of"]

_Span = tuple[torch.cuda.Event, torch.cuda.Event, Callable[[], bool]]


class CollectiveBackend:
    """AllGather then GEMM, GEMM then ReduceScatter.

    On a GPU NCCL reduces, in C's dtype and its ring's order. Elsewhere, or with ``deterministic``
    in the configuration, the blocks are exchanged and summed in fp32 in rank order.
    """

    name = "collective"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._waits = group_waits(group)
        self.ranks = group.size()
        self.rank = group.rank()
        self._started = False  # whether NCCL has connected the ranks
        # To make two events and destroy them costs the host as much as half a collective.
        self._spans: list[_Span] = []  # that nothing waits for
        self._streams: dict[int, torch.cuda.Stream] = {}  # by their raw handles

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.ranks}, rank={self.rank})"

    def start_gather(self, a_shard: Tensor) -> Callable[[], Tensor]:
        shard, full = self._shard_and_whole(a_shard)
        wait = self._waits.start(
            "all-gather of a linear's rows",
            lambda: dist.all_gather_into_tensor(full, shard, group=self.group, async_op=True),
        )

        def finish() -> Tensor:
            wait()
            return full

        return finish

    def gather_matmul(
        self, a_shard: Tensor, gemm: Gemm, keep: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        shard, full = self._shard_and_whole(a_shard)
        self._in_stream("all-gather of a linear's rows", dist.all_gather_into_tensor, full, shard)
        return gemm(full), full if keep else None

    def _shard_and_whole(self, a_shard: Tensor) -> tuple[Tensor, Tensor]:
        shard = a_shard.contiguous()
        return shard, shard.new_empty((self.ranks * shard.shape[0], shard.shape[1]))

    def matmul_scatter(
        self, a: Tensor, gemm: Gemm, overlapped: Callable[[], None] | None = None
    ) -> Tensor:
        c = gemm.without_bias()(a)
        rows = c.shape[0] // self.ranks
        reduces = c.is_cuda and not current_config().deterministic
        out = c.new_empty((rows, c.shape[1])) if reduces else torch.empty_like(c)
        collective = dist.reduce_scatter_tensor if reduces else dist.all_to_all_single
        name = "reduce-scatter of a linear's rows"
        if overlapped is None:
            self._in_stream(name, collective, out, c)
        else:
            launch = functools.partial(collective, out, c, group=self.group, async_op=True)
            wait = self._waits.start(name, launch)
            overlapped()
            wait()
        if not reduces:
            parts = out.view(self.ranks, rows, c.shape[1])
            wide = torch.promote_types(c.dtype, torch.float32)
            out = parts[0].to(wide)
            for part in parts[1:]:  # in the order of the ranks
                out = out + part.to(wide)
        return (out if gemm.bias is None else out + gemm.bias).to(c.dtype)

    def _in_stream(
        self, name: str, collective: Callable[..., Any], out: Tensor, sent: Tensor
    ) -> None:
        """Run a collective that nothing overlaps. After the first one NCCL works on the current
        stream: to change to its own and back costs the host more than a small collective takes."""
        waits = self._waits
        by_nccl = sent.is_cuda and waits.device.type == "cuda"
        if not (by_nccl and self._started):
            launch = functools.partial(collective, out, sent, group=self.group, async_op=True)
            waits.collective(name, launch)
            self._started |= by_nccl
            return
        if waits.channel.alone or torch.cuda.is_current_stream_capturing():
            collective(out, sent, group=self.group)
            return
        stream = self._current_stream(sent.device)
        try:
            span = self._spans.pop()
        except IndexError:
            span = self._new_span()
        started, done, finished = span
        started.record(stream)
        collective(out, sent, group=self.group)
        done.record(stream)
        waits.watch(WaitName(name), started.query, finished, waits.timeout_s, stream)

    def _new_span(self) -> _Span:
        """Events for the start and the end of a collective, and whether it has ended: from then on
        another one may take them."""
        started, done = torch.cuda.Event(), torch.cuda.Event()

        def finished() -> bool:
            if over := done.query():
                self._spans.append(span)
            return over

        span = started, done, finished
        return span

    def _current_stream(self, device: torch.device) -> torch.cuda.Stream:
        raw = torch._C._cuda_getCurrentRawStream(device.index)
        stream = self._streams.get(raw)
        if stream is None:
            stream = self._streams[raw] = torch.cuda.current_stream(device)
        return stream


def collective_of(group: dist.ProcessGroup) -> CollectiveBackend:
    """Return the backend of a group, one object for each life of it. Not collective."""
    return group_resource(group, "tensor parallel collective", lambda: CollectiveBackend(group))
