"""Ranks that use every layer of this package over gloo, of which one stops at its k-th
communication call.

Two lives: layers are made, compute twice forward and backward, and `close_group` frees what they
share; then all of it again on the same group. A call is a word left in a store or taken from it, a
collective, the start of a P2P transfer, an allocation or a rendezvous of symmetric memory (in files
that the ranks map, tests/support/symmetric_files.py).
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fluid import MoELayer, SelfAttention, close_group
from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.low_latency import AllToAll
from tests.support.launch import RankOutcome, run_ranks_outcomes
from tests.support.symmetric_files import SymmetricFiles

__all__ = ["BOUND_S", "PHASES", "RANKS", "Life", "Stop", "draw", "run"]

RANKS, BOUND_S, LIMIT_S = 3, 6.0, 90.0
PHASES = tuple(
    f"{what}, life {life}" for life in (1, 2) for what in ("start", "iterations", "close")
)
_STORE = ("set", "get", "add", "compare_set", "multi_set", "multi_get")
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "broadcast", "broadcast_object_list", "barrier", "reduce_scatter"),
    *("reduce_scatter_tensor", "isend", "irecv", "batch_isend_irecv", "monitored_barrier"),
)


@dataclass(frozen=True)
class Stop:
    """A rank that stops.

    Attributes:
        rank: who.
        phase: of PHASES.
        at: where in the phase, as a share of its calls: 0 the first, just under 1 the last.
        frozen: stopped (SIGSTOP) in place of ended (os._exit).
    """

    rank: int
    phase: str
    at: float
    frozen: bool


def draw(seed: int) -> Stop:
    """A stop of that seed. Those of a run of seeds go through all phases."""
    chance = random.Random(seed)
    return Stop(
        chance.randrange(RANKS), PHASES[seed % len(PHASES)], chance.random(), chance.random() < 0.5
    )


@dataclass
class Life:
    """What became of one rank.

    Attributes:
        values: what it computed, in order.
        calls: communication calls by phase.
        error: its traceback, "" if it went through.
        seconds: from the moment of the stop to its end.
    """

    values: list[float]
    calls: dict[str, int]
    error: str
    ended_at: float


class _Calls:
    """Counts the communication calls of this process by phase, and stops it at one of them."""

    def __init__(self, stop: Stop | None, calls: dict[str, int], note: Path) -> None:
        self.by_phase = dict.fromkeys(PHASES, 0)
        self.phase, self._stop, self._note = "", stop, note
        self._at = 0 if stop is None else int(stop.at * calls[stop.phase])
        for name in _COLLECTIVES:
            setattr(dist, name, self.counted(getattr(dist, name)))
        for kind in (dist.TCPStore, dist.PrefixStore):
            for name in _STORE:
                setattr(kind, name, self.counted(getattr(kind, name)))

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._count(original.__name__)
            return original(*args, **kwargs)

        return counted

    def _count(self, name: str) -> None:
        if not self.phase:
            return
        number = self.by_phase[self.phase]
        self.by_phase[self.phase] += 1
        if self._stop is not None and self._stop.phase == self.phase and number == self._at:
            self.strike(f"call {number} ({name})")

    def strike(self, where: str) -> None:
        assert self._stop is not None
        self._note.write_text(f"{time.monotonic()} {self.phase}: {where}")
        if self._stop.frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        os._exit(0)

    def enter(self, phase: str) -> None:
        """Begin a phase; a stop that the phase before did not reach is now."""
        if self._stop is not None and self.phase == self._stop.phase:
            self.strike("its end")
        self.phase = phase


def run(stop: Stop | None, calls: list[dict[str, int]] | None, folder: Path) -> list[RankOutcome]:
    """Run all ranks; `value` of an outcome is a Life. `calls`: those of a run without a stop, of
    each rank. What ranks print is in folder/RANK.log, where the stop was in folder/stop."""
    folder.mkdir(parents=True, exist_ok=True)
    awaited = [r for r in range(RANKS) if stop is None or r != stop.rank]
    return run_ranks_outcomes(
        *(_rank, RANKS, stop, calls, str(folder)),
        timeout_s=LIMIT_S, grace_s=LIMIT_S, awaited=awaited,
    )  # fmt: skip


def _rank(
    rank: int, world: int, stop: Stop | None, calls: list[dict[str, int]] | None, folder: str
) -> Life:
    torch.set_num_threads(1)
    with open(Path(folder) / f"{rank}.log", "w") as output:
        os.dup2(output.fileno(), 2)
    set_config(FluidConfig(timeout_s=BOUND_S, moe_backend="auto"))
    mine = stop if stop is not None and stop.rank == rank else None
    counter = _Calls(mine, calls[rank] if calls else {}, Path(folder) / "stop")
    memory = SymmetricFiles(Path(folder) / "memory", counter.counted)
    values: list[float] = []
    error = ""
    try:
        groups = [dist.new_group(range(world)) for _ in (1, 2)]  # torch's own waits are not counted
        for life, group in enumerate(groups, 1):
            _live(rank, world, life, counter, values, group, memory)
        counter.enter("")
    except Exception:  # noqa: BLE001 (the test reads it)
        error = traceback.format_exc()
    counter.phase = ""
    return Life(values, counter.by_phase, error, time.monotonic())


def _live(
    rank: int, world: int, life: int, counter: _Calls, values: list[float],
    mapped: dist.ProcessGroup, memory: SymmetricFiles,
) -> None:  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    counter.enter(f"start, life {life}")
    torch.manual_seed(life)
    shape = {"hidden_size": 8, "ffn_hidden_size": 12, "num_experts": 3 * (life + 1), "top_k": 2}
    layer = MoELayer(shape, group, dtype=torch.float64)
    attention = SelfAttention(12, 3, group=group, dtype=torch.float64)
    tokens, hidden = 4, 16
    low = AllToAll.intranode(
        *(tokens, 3, 1, rank, world, 1, hidden, 2 * hidden, 0), timeout_s=BOUND_S
    )
    with memory.mapped():
        space = SymmetricWorkspace(mapped, BOUND_S)
    channel = agreement(mapped)
    counter.enter(f"iterations, life {life}")
    for rows in (16, 2000):  # the memory grows
        with memory.mapped():
            space.reserve("rows", rows, torch.float64).fill_(rank + life)
        channel.barrier("rows are written")
        views = [peer[:rows] for peer in space.peer_buffers("rows", torch.float64)]
        values.append(float(torch.stack(views).sum()))
        channel.barrier("rows are read")
    for _ in range(2):
        x = torch.randn(3 + rank, 8, dtype=torch.float64, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        assert x.grad is not None
        values.append(float(y.sum() + x.grad.sum()))
        s = torch.randn(4, 1, 12, dtype=torch.float64, requires_grad=True)
        z = attention(s)
        z.square().sum().backward()
        assert s.grad is not None
        values.append(float(z.sum() + s.grad.sum()))
        ids = torch.full((tokens, 1), (rank + 1) % world, dtype=torch.int32)
        counts = torch.zeros(1, dtype=torch.int32)
        out = torch.zeros(1, tokens * world, hidden, dtype=torch.bfloat16)
        rows = torch.randn(tokens, hidden).bfloat16()
        low.dispatch(counts, out, None, rows, None, ids, weights=torch.ones(tokens, 1))
        values.append(float(out.float().sum()))
    counter.enter(f"close, life {life}")
    space.close()
    close_group(mapped)
    close_group(group)
