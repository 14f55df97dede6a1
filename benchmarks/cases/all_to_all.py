"""Cases and clock of the all-to-all benchmark.

Shapes: m tokens of a rank, E experts, K top-k, H hidden.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from benchmarks.harness.results import Row
from benchmarks.harness.timing import quantile
from megatron_fluid.low_latency import AllToAll

__all__ = ["SHAPES", "TOKENS", "Call", "Case", "Clock", "row_of"]

SHAPES = {"r1": (256, 8, 7168), "v2-lite": (64, 6, 2048)}
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
_IN_A_ROW = 20
_TURNS = 5  # of the variants that are launched one by one

Call = Callable[[], object]


class Case:
    """Tensors of one case on this rank."""

    def __init__(
        self,
        name: str,
        capacity: int | None,
        rank: int,
        world: int,
        device: torch.device,
        transport: str = "auto",
    ) -> None:
        shape, _, tokens = name.rpartition("-")
        self.name, self.tokens, self.transport = name, int(tokens), transport
        self.experts, self.k, self.hidden = SHAPES[shape]
        self.capacity = capacity or self.tokens
        generator = torch.Generator(device=device).manual_seed(17 + rank)
        m, local = self.tokens, self.experts // world
        self.rows = self.capacity * world
        self.x = torch.randn(m, self.hidden, device=device, generator=generator).to(
            torch.float8_e4m3fn
        )
        self.scale = torch.rand(m, self.hidden // 128, device=device, generator=generator)
        ids = (
            torch.rand(m, self.experts, device=device, generator=generator).topk(self.k, -1).indices
        )
        self.ids = ids.to(torch.int32).contiguous().view(torch.uint32)
        self.weights = torch.rand(m, self.k, device=device, generator=generator)
        self.counts = torch.zeros(local, dtype=torch.int32, device=device)
        empty = torch.zeros(local, self.rows, self.hidden, dtype=torch.uint8, device=device)
        self.out_x = empty.view(torch.float8_e4m3fn)
        self.out_scale = torch.zeros(local, self.rows, self.hidden // 128, device=device)
        self.y = torch.randn(
            local, self.rows, self.hidden, device=device, generator=generator, dtype=torch.bfloat16
        )
        self.out = torch.empty(m, self.hidden, dtype=torch.bfloat16, device=device)

    def open_packed(self, rank: int, world: int) -> tuple[AllToAll, dict[str, Call]]:
        """An exchange of bf16 rows, packed, and its two operations."""
        ata = AllToAll.intranode(
            self.capacity,
            self.experts,
            self.k,
            rank,
            world,
            1,
            self.hidden,
            2 * self.hidden,
            0,
            timeout_s=5.0,
            transport=self.transport,
        )
        rows = torch.zeros(
            ata.packed_rows(), self.hidden, dtype=torch.bfloat16, device=self.x.device
        )
        x, offsets = self.x.to(torch.bfloat16), torch.zeros_like(self.counts)

        def dispatch() -> None:
            ata.dispatch(
                self.counts,
                rows,
                None,
                x,
                None,
                self.ids,
                weights=self.weights,
                out_expert_offsets=offsets,
            )

        return ata, {
            "dispatch": dispatch,
            "combine": lambda: ata.combine(self.out, self.ids, None, rows),
        }

    def open(self, rank: int, world: int) -> AllToAll:
        return AllToAll.intranode(
            self.capacity,
            self.experts,
            self.k,
            rank,
            world,
            1,
            self.hidden,
            self.hidden,
            self.hidden // 32,
            timeout_s=5.0,
            transport=self.transport,
        )

    def calls(self, ata: AllToAll, early: bool) -> dict[str, Call]:
        """The halves, with the weights at dispatch (`early`) or at combine."""
        at_dispatch, at_combine = (self.weights, None) if early else (None, self.weights)
        sent = (self.x, self.scale, self.ids)
        received = (self.counts, self.out_x, self.out_scale)
        return {
            "dispatch": lambda: ata.dispatch(*received, *sent, weights=at_dispatch),
            "dispatch_send": lambda: ata.dispatch(
                None, None, None, *sent, do_recv=False, weights=at_dispatch
            ),
            "dispatch_receive": lambda: ata.dispatch(*received, None, None, None, do_send=False),
            "combine": lambda: ata.combine(self.out, self.ids, at_combine, self.y),
            "combine_send": lambda: ata.combine(None, None, at_combine, self.y, do_recv=False),
            "combine_receive": lambda: ata.combine(
                self.out, self.ids, at_combine, None, do_send=False
            ),
        }


def _slowest(samples: Sequence[float], device: torch.device) -> list[float]:
    table = torch.tensor(list(samples), dtype=torch.float32, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return [float(v) for v in table.tolist()]


def row_of(
    case: str, mode: str, variant: str, samples: Sequence[float], config: dict[str, object]
) -> Row:
    """samples: microseconds."""
    mean = sum(samples) / len(samples)
    deviation = math.sqrt(sum((s - mean) ** 2 for s in samples) / len(samples))
    ordered = list(samples)
    config = {**config, "mean_us": round(mean, 2), "deviation_us": round(deviation, 2)}
    p10, median, p90 = (quantile(ordered, q) / 1e3 for q in (0.1, 0.5, 0.9))
    return Row(case, mode, variant, median, p10, p90, len(ordered), config)


class Clock:
    """Samples in microseconds, of the slowest rank. Without a GPU: no graphs, the processor's
    clock."""

    def __init__(self, device: torch.device, iters: int) -> None:
        self.device, self.iters, self.on_gpu = device, iters, device.type == "cuda"

    def meet(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    def captured(self, calls: Sequence[Call]) -> list[float]:
        """Rounds of `calls` captured in one graph: time of one round."""
        for call in calls:
            call()
        self.meet()
        if not self.on_gpu:
            return [sum(sample) for sample in zip(*self.eager(calls), strict=True)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_IN_A_ROW):
                for call in calls:
                    call()
        self.meet()
        samples = []
        for turn in range(self.iters + 3):
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1, device=self.device))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 3:
                samples.append(start.elapsed_time(end) * 1e3 / _IN_A_ROW)
        return _slowest(samples, self.device)

    def eager(self, pieces: Sequence[Call], rounds: int = 0) -> list[list[float]]:
        """Samples of each piece, run one after another, ten rounds for each iteration unless
        `rounds` says how many."""
        for _ in range(10 if self.on_gpu else 1):
            for piece in pieces:
                piece()
        self.meet()
        rounds = rounds or self.iters * (10 if self.on_gpu else 1)
        table = self._events(pieces, rounds) if self.on_gpu else self._seconds(pieces, rounds)
        return [_slowest(column, self.device) for column in zip(*table, strict=True)]

    def in_a_row(self, call: Call, rounds: int) -> list[float]:
        """Samples of one call, each the mean of as many in a row as `captured` has: an event takes
        the host up to 15 us (archive/all_to_all_host-2gpu.json), as much as a call."""
        count = _IN_A_ROW if self.on_gpu else 1

        def calls() -> None:
            for _ in range(count):
                call()

        return [sample / count for sample in self.eager([calls], rounds)[0]]

    def in_turns(
        self, variants: Mapping[str, Mapping[str, Call]]
    ) -> dict[tuple[str, str], list[float]]:
        """Samples of the modes of each variant, by (variant, mode): in turns, since what a host
        takes for a call changes within seconds."""
        names, found = list(variants), dict[tuple[str, str], list[float]]()
        for turn in range(_TURNS):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                for mode, call in variants[name].items():
                    samples = self.in_a_row(call, max(1, self.iters // _TURNS))
                    found.setdefault((name, mode), []).extend(samples)
        return found

    @staticmethod
    def _events(pieces: Sequence[Call], rounds: int) -> list[list[float]]:
        events = []
        for _ in range(rounds):
            row = [torch.cuda.Event(enable_timing=True) for _ in range(len(pieces) + 1)]
            row[0].record()
            for piece, event in zip(pieces, row[1:], strict=True):
                piece()
                event.record()
            events.append(row)
        torch.cuda.synchronize()
        return [[a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(row)] for row in events]

    @staticmethod
    def _seconds(pieces: Sequence[Call], rounds: int) -> list[list[float]]:
        table = []
        for _ in range(rounds):
            marks = [time.perf_counter()]
            for piece in pieces:
                piece()
                marks.append(time.perf_counter())
            table.append([(b - a) * 1e6 for a, b in itertools.pairwise(marks)])
        return table
