"""One rank of the main job over slow links: a whole training through Megatron's own loop, whose
links get another rate every few steps. `benchmarks.suites.slow_wire` starts it in a network
namespace, with Megatron's flags after its own.

WIRE_PLAN (JSON) says the case, the variant, the ratios, the steps of each, and the rates; without
rates they follow from the first steps, which run on links without a limit.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import pretrain_rank
from benchmarks.cases.slow_wire import CASES, Parent, label, link_row, pin, rate_for, sent_bytes
from benchmarks.harness.results import Row
from benchmarks.harness.timing import quantile

__all__ = ["WARM_UP", "main", "steps_in_all"]

WARM_UP = 2
"""Steps before the first that counts; of each rate one more is left out."""


def steps_in_all(ratios: int, steps: int) -> int:
    """Training steps of a process: links without a limit, then each ratio."""
    return WARM_UP + (1 + ratios) * (steps + 1)


class _Watch(pretrain_rank.Watch):
    """Asks for the next rate before the first step of each, and times the others."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__()
        self.plan, self.count = plan, 0
        self.ratios: list[float] = [0.0, *plan["ratios"]]
        self.rates: list[float | None] = list(plan.get("rates") or [])
        self.by_ratio: dict[float, list[float]] = {ratio: [] for ratio in self.ratios}
        self.bytes: dict[float, int] = {}
        self.parent: Parent | None = None

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.parent is None:
                self.parent = Parent()
                self.parent.set_rate(None)
                pin()
            index, within = divmod(max(self.count - WARM_UP, 0), self.plan["steps"] + 1)
            ratio = self.ratios[index]
            if within == 0 and index:
                self.parent.set_rate(self._rate(index))
            dist.barrier()
            before, begun = sent_bytes(), time.perf_counter()
            done = step(*args, **kwargs)
            dist.barrier()
            took = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if self.count >= WARM_UP and within:
                self.by_ratio[ratio].append(1e3 * float(took))
                self.bytes[ratio] = sent_bytes() - before
            self.losses += [float(value) for name, value in done[0].items() if name == "lm loss"]
            self.count += 1
            return done

        return timed

    def _rate(self, index: int) -> float | None:
        """The same on every rank."""
        if len(self.rates) < index:
            compute = statistics.median(self.by_ratio[0.0])
            most = torch.tensor(float(self.bytes[0.0]))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            self.rates = [rate_for(ratio, compute, float(most)) for ratio in self.ratios[1:]]
        return self.rates[index - 1]

    def rows(self) -> list[Row]:
        name = self.plan["case"]
        case, rows = CASES[name], []
        for index, (ratio, kept) in enumerate(self.by_ratio.items()):
            if not kept:
                continue
            low, median, high = (quantile(kept, q) for q in (0.1, 0.5, 0.9))
            variant = self.plan["variant"]
            row = Row(label(name, ratio), "train", variant, median, low, high, len(kept))
            more = {
                "rate_bits_per_s": self.rates[index - 1] if index else None,
                "wire_bytes": self.bytes[ratio],
                "losses": self.losses,
            }
            rows.append(link_row(case, row, ratio, {}, {}, **more))
        return rows


def main() -> None:
    """Train, and hand over the rows."""
    watch = _Watch(json.loads(os.environ["WIRE_PLAN"]))
    torch.set_num_threads(1)
    pretrain_rank.Watch = lambda traced=None: watch  # type: ignore[assignment, misc]
    pretrain_rank.main()
    if dist.is_initialized():
        dist.destroy_process_group()
    assert watch.parent is not None
    report = Path(os.environ["PRETRAIN_RESULT"])
    overlap = json.loads(report.read_text())["overlap"] if report.is_file() else []
    watch.parent.rows(
        [replace(row, config={**row.config, "overlap": overlap}) for row in watch.rows()]
    )


if __name__ == "__main__":
    main()
