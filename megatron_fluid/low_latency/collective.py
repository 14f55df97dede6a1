"""The fallback transport: an all-gather of packed tokens and an all-to-all of equal sums, over
NCCL, gloo or any backend.

Every token goes to every rank. No size is read on the host, so a CUDA graph can capture it where
the backend can be captured. Slots and sums have the order of the other transports.

Shapes: C token capacity of a source, D sources, P ranks of a source, W ranks, K top-k, L local
experts, R rows of an expert, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.waits import group_waits
from megatron_fluid.cuda.devices import synchronize
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.transport import (
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
)

__all__ = ["Collective"]


class Collective:
    """Dispatch and combine of one rank over a process group's collectives."""

    def __init__(
        self, layout: Layout, group: dist.ProcessGroup, device: torch.device, timeout_s: float
    ) -> None:
        self.layout = layout
        self.group = group
        self._waits = group_waits(group)
        self.rank = dist.get_rank(group)
        self.device = device
        self.timeout_s = timeout_s
        self.name = "nccl" if device.type == "cuda" else "gloo"
        self._share = -(-layout.max_num_tokens // layout.dp_size)
        # A packed token: row, scales, then expert ids and weights as 4-byte words, then whether the
        # token is present.
        self._row_bytes = layout.hidden_dim_bytes + layout.hidden_dim_scale_bytes
        self._meta_at = round_up(self._row_bytes, 16)
        self._width = self._meta_at + round_up(8 * layout.experts_per_token + 4, 16)
        bytes_of: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        self._send = torch.zeros(self._share, self._width, **bytes_of)
        self._received = torch.zeros(layout.world_size * self._share, self._width, **bytes_of)
        # Of the last dispatch: each entry's row, and its weights. Of a combine: what is in flight.
        # They stay where they are: the halves of a call may be in different CUDA graphs.
        entries = layout.max_rows * layout.experts_per_token
        self._entry_row = torch.zeros(entries, dtype=torch.int64, device=device)
        self._token_weights = torch.zeros(entries, device=device)
        width = layout.hidden_dim * (layout.experts_per_token if layout.batch_invariant else 1)
        self._partial = torch.zeros(
            layout.world_size, layout.max_num_tokens * width, dtype=layout.combine_dtype,
            device=device,
        )  # fmt: skip
        self._sums = torch.zeros_like(self._partial)
        synchronize(device)
        self._wait: Callable[[], None] | None = None
        self._failure: PeerTimeoutError | None = None

    def size(self) -> str:
        return ""

    def check_errors(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def close(self) -> None:
        """Does nothing: no memory is shared with other ranks."""

    # ---- dispatch
    def dispatch_send(self, q: DispatchSend) -> None:
        layout, x = self.layout, q.x
        part = self.rank % layout.dp_size
        mine = slice(part, x.shape[0], layout.dp_size)
        count = len(range(*mine.indices(x.shape[0])))
        send = self._send
        send.zero_()
        send[:count, : layout.hidden_dim_bytes] = x[mine].contiguous().view(torch.uint8)
        if q.x_scale is not None:
            to = send[:count, layout.hidden_dim_bytes : self._row_bytes]
            to.view(torch.float32).copy_(q.x_scale[mine])
        meta = send[:, self._meta_at :].view(torch.int32)
        k = layout.experts_per_token
        ids = q.indices[mine]
        if ids.dtype == torch.int64:  # compared before they lose their upper bits
            ids = torch.where((ids >= 0) & (ids < layout.num_experts), ids, -1).int()
        meta[:count, :k] = ids.view(torch.int32)
        if q.weights is not None:
            meta[:count, k : 2 * k] = q.weights[mine].contiguous().view(torch.int32)
        present = torch.arange(self._share, device=self.device) * layout.dp_size + part
        limit = torch.full((1,), x.shape[0], device=self.device)
        if q.bound_m is not None:
            limit = torch.minimum(limit, q.bound_m.to(torch.int64))
        meta[:, 2 * k] = (present < limit).int()
        self._start("dispatch", dist.all_gather_into_tensor, self._received, send)

    def dispatch_receive(self, q: DispatchReceive) -> None:
        self._finish()
        layout = self.layout
        share, k, local = self._share, layout.experts_per_token, layout.local_experts
        # [D, P, share] -> token i = position * P + part
        tokens = self._received.view(layout.num_sources, layout.dp_size, share, self._width)
        tokens = tokens.transpose(1, 2).reshape(layout.num_sources, -1, self._width)
        tokens = tokens[:, : layout.max_num_tokens].reshape(layout.max_rows, self._width)
        tokens = tokens.contiguous()
        meta = tokens[:, self._meta_at :].contiguous().view(torch.int32)
        table = torch.where(meta[:, 2 * k : 2 * k + 1] > 0, meta[:, :k], -1).to(torch.int64)
        # An expert that a token names twice receives it once: both entries share the first one's
        # row.
        first_same = (table[:, :, None] == table[:, None, :]).int().argmax(-1)
        repeated = first_same != torch.arange(k, device=table.device)
        ids = torch.where(repeated, -1, table).reshape(-1)
        first = self.rank * local
        here = (ids >= first) & (ids < first + local)
        expert = torch.where(here, ids - first, local)
        hits = torch.nn.functional.one_hot(expert, local + 1)
        slot = (hits.cumsum(0) - hits).gather(1, expert[:, None])[:, 0]
        counts = hits.sum(0)[:local]
        q.counts.copy_(counts)
        if q.packed:
            assert q.offsets is not None
            padded = -(-counts // q.alignment) * q.alignment
            ends = padded.cumsum(0)
            q.offsets.copy_(ends)
            row = torch.cat([ends - padded, ends[-1:]])[expert] + slot
        else:
            row = expert * layout.max_rows + slot
        entry_row = torch.where(here, row, -1)
        torch.gather(entry_row.view(-1, k), 1, first_same, out=self._entry_row.view(-1, k))
        self._token_weights.view(-1, k).view(torch.int32).copy_(meta[:, k : 2 * k])
        token = torch.arange(ids.numel(), device=ids.device) // k
        _write_rows(q.x, tokens[:, : layout.hidden_dim_bytes], entry_row, token, here)
        if q.scale is not None:
            scales = tokens[:, layout.hidden_dim_bytes : self._row_bytes]
            _write_rows(q.scale, scales, entry_row, token, here)

    # ---- combine
    def combine_send(self, q: CombineSend) -> None:
        layout, y = self.layout, q.expert_y
        k = layout.experts_per_token
        if layout.batch_invariant:
            rows, entry = y.reshape(-1, layout.hidden_dim), self._entry_row[:, None]
            self._send_back(torch.where(entry >= 0, rows[entry[:, 0].clamp(min=0)], 0.0))
            return
        floats: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        if q.weights is not None:
            padded = torch.zeros(layout.max_num_tokens, k, **floats)
            padded[: q.weights.shape[0]] = q.weights
            every = torch.empty(layout.world_size, *padded.shape, **floats)
            self._start("combine weights", dist.all_gather_into_tensor, every.view(-1, k), padded)
            self._finish()
            weights = every[:: layout.dp_size].reshape(-1)
        else:
            weights = self._token_weights
        rows = y.reshape(-1, layout.hidden_dim)
        total = torch.zeros(layout.max_rows, layout.hidden_dim, **floats)
        entry = self._entry_row.view(layout.max_rows, k)
        for column in range(k):
            row = entry[:, column]
            value = rows[row.clamp(min=0)].float() * weights.view(-1, k)[:, column : column + 1]
            total += torch.where((row >= 0)[:, None], value, 0.0)
        self._send_back(total.to(y.dtype))

    def _send_back(self, rows: Tensor) -> None:
        """Start to send each source the rows for its tokens: a sum of each token [D * C, H], or a
        row of each choice [D * C * K, H]."""
        layout = self.layout
        blocks = self._partial.view(layout.num_sources, layout.dp_size, -1)
        blocks.copy_(rows.view(layout.num_sources, 1, -1))
        self._start("combine", dist.all_to_all_single, self._sums, self._partial)

    def combine_receive(self, q: CombineReceive) -> None:
        self._finish()
        out, layout = q.out, self.layout
        tokens, ranks = out.shape[0], layout.world_size
        total = torch.zeros(out.shape, dtype=torch.float32, device=self.device)
        if layout.batch_invariant:
            assert q.weights is not None
            shape = ranks, layout.max_num_tokens, layout.experts_per_token, layout.hidden_dim
            rows, ids = self._sums.view(shape), q.indices.to(torch.int64)
            known = (ids >= 0) & (ids < layout.num_experts)
            rank = (ids * known) // layout.local_experts
            each = torch.arange(tokens, device=self.device)
            for k in range(layout.experts_per_token):
                row = rows[rank[:, k], each, k].float() * q.weights[:, k, None]
                total += torch.where(known[:, k, None], row, 0.0)
        else:
            sums = self._sums.view(ranks, layout.max_num_tokens, -1)[:, :tokens]
            for part in sums:
                total += part.float()
        if q.accumulate:
            total += out.float()
        result = total.to(out.dtype)
        if q.bound_m is not None:
            bound = q.bound_m.to(torch.int64)
            inside = torch.arange(out.shape[0], device=self.device) < bound
            result = torch.where(inside[:, None], result, out)
        out.copy_(result)

    # ---- waiting
    def _start(
        self, operation: str, collective: Callable[..., Any], out: Tensor, sent: Tensor
    ) -> None:
        with self._failures_kept():
            self._wait = self._waits.start(
                f"low_latency.{operation} over {self.name}",
                lambda: collective(out, sent, group=self.group, async_op=True),
                self.timeout_s,
            )

    def _finish(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            with self._failures_kept():
                wait()

    @contextlib.contextmanager
    def _failures_kept(self) -> Iterator[None]:
        """A failed wait fails every later call, too: ranks no longer know what others have sent."""
        try:
            yield
        except PeerTimeoutError as error:
            self._failure = error
            raise


def _write_rows(out: Tensor, rows: Tensor, entry_row: Tensor, token: Tensor, fits: Tensor) -> None:
    """Copy bytes `rows[token[j]]` to row `entry_row[j]` of `out` ([L, R, n] or [rows, n]) for every
    j that fits. Rows without an entry keep what they had."""
    target = out.contiguous().view(-1, out.shape[-1]).view(torch.uint8)
    # Entries that do not fit write to one row past the end, which is cut off.
    source = torch.full((len(target) + 1,), -1, dtype=torch.int64, device=rows.device)
    source = source.scatter_(0, torch.where(fits, entry_row, len(target)), token)[:-1, None]
    written = torch.where(source >= 0, rows[source[:, 0].clamp(min=0)], target)
    out.copy_(written.view(out.dtype).view(out.shape))
