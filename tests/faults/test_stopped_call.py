"""A rank stops at a communication call: all others end, name it, and none computes wrong numbers.

Ranks use every layer over gloo in two lives of a group: each makes layers, computes twice forward
and backward, and ends with `close_group`. A call is a word left in a store or taken from it, a
collective, the start of a P2P transfer, or an allocation or rendezvous of symmetric memory (files).
One rank stops at its k-th: six draws, `MEGATRON_FLUID_TEST_DRAWS=60` or FIRST:LAST takes others.
"""

import functools
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import MoELayer, SelfAttention, close_group
from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.config import FluidConfig, current_config, set_config
from megatron_fluid.low_latency import AllToAll
from tests.support.launch import HANG_S, RankOutcome, run_ranks_outcomes, world_group
from tests.support.symmetric_files import SymmetricFiles

pytest.importorskip("triton")

pytestmark = [
    *(pytest.mark.world, pytest.mark.slow),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks"),
]

_DRAWS = os.environ.get("MEGATRON_FLUID_TEST_DRAWS", "")
if ":" in _DRAWS:
    SEEDS = range(*map(int, _DRAWS.split(":")))
else:
    SEEDS = range(max(6, int(_DRAWS or 0)))


RANKS, BOUND_S = 3, 10.0  # the bound where a rank stops
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
    """Where a rank stops."""

    rank: int
    phase: str  # of PHASES
    at: float  # share of the phase's calls: 0 the first, just under 1 the last
    frozen: bool  # by SIGSTOP, else ended by os._exit


def draw(seed: int) -> Stop:
    """A stop of that seed. Those of a run of seeds go through all phases."""
    chance = random.Random(seed)
    return Stop(
        chance.randrange(RANKS), PHASES[seed % len(PHASES)], chance.random(), chance.random() < 0.5
    )


@dataclass
class Life:
    """What became of one rank."""

    values: list[float]  # that it computed, in order
    calls: dict[str, int]  # for communication, by phase
    error: str  # its traceback, "" if it went through
    ended_at: float  # of the monotonic clock


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
        grace_s=HANG_S, awaited=awaited,
    )  # fmt: skip


def _rank(
    rank: int, world: int, stop: Stop | None, calls: list[dict[str, int]] | None, folder: str
) -> Life:
    torch.set_num_threads(1)
    with open(Path(folder) / f"{rank}.log", "w") as output:
        os.dup2(output.fileno(), 2)
    set_config(FluidConfig(timeout_s=BOUND_S if stop else HANG_S, moe_backend="auto"))
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
    group = world_group()
    counter.enter(f"start, life {life}")
    torch.manual_seed(life)
    shape = {"hidden_size": 8, "ffn_hidden_size": 12, "num_experts": 3 * (life + 1), "top_k": 2}
    layer = MoELayer(shape, group, dtype=torch.float64)
    attention = SelfAttention(12, 3, group=group, dtype=torch.float64)
    tokens, hidden = 4, 16
    low = AllToAll.intranode(*(tokens, 3, 1, rank, world, 1, hidden, 2 * hidden, 0))
    with memory.mapped():
        space = SymmetricWorkspace(mapped, current_config().timeout_s)
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Life]:
    """What every rank does when none stops."""
    outcomes = run(None, None, tmp_path_factory.mktemp("whole"))
    for outcome in outcomes:
        assert outcome.ok and not outcome.value.error, outcome.value or outcome.error
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module")
def stopped(
    whole: list[Life], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, tuple[Path, Future[list[RankOutcome]]]]]:
    """What becomes of all ranks, and the folder of what they say, by seed: three worlds at a time,
    as ranks that wait for a lost one are idle."""
    calls = [life.calls for life in whole]
    with ThreadPoolExecutor(3) as pool:
        folders = {seed: tmp_path_factory.mktemp(f"seed{seed}") for seed in SEEDS}
        yield {
            seed: (folder, pool.submit(run, draw(seed), calls, folder))
            for seed, folder in folders.items()
        }


def names(text: str, rank: int) -> bool:
    return re.search(rf"\b(peers?|ranks?) ([\d, and]*\b)?{rank}\b", text) is not None


def end_of(outcome: RankOutcome, log: str) -> tuple[list[float], str, float]:
    """What a survivor had computed, its last words ("" if it went through), when it ended."""
    if outcome.ok:
        life = outcome.value
        return life.values, life.error and life.error.strip().splitlines()[-1], life.ended_at
    return [], f"{outcome.error}\n{log}", outcome.failed_at or time.monotonic()


@pytest.mark.parametrize("seed", SEEDS)
def test_all_others_name_a_rank_that_stops(
    seed: int, whole: list[Life], stopped: dict[int, tuple[Path, Future[list[RankOutcome]]]]
) -> None:
    stop, (folder, future) = draw(seed), stopped[seed]
    outcomes = future.result()
    when, _, where = (folder / "stop").read_text().partition(" ")
    print(f"{stop}\nstopped in {where}")
    for outcome in outcomes:
        if outcome.rank == stop.rank:
            continue
        log = (folder / f"{outcome.rank}.log").read_text(errors="replace")
        assert outcome.finished, f"rank {outcome.rank} did not end\n{outcome.stacks}\n{log}"
        values, said, ended_at = end_of(outcome, log)
        print(f"rank {outcome.rank}: {ended_at - float(when):.1f} s: {said[:300]}")
        expected = whole[outcome.rank].values
        assert values == expected[: len(values)]
        if said or len(values) < len(expected):
            assert names(said, stop.rank), f"{said}\n{log}"
