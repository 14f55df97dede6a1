"""A rank stops at a communication call: all others end, name it, and none computes wrong numbers.

Six drawn stops always; `MEGATRON_FLUID_TEST_DRAWS=60` draws as many, FIRST:LAST takes those seeds.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.launch import RankOutcome
from tests.support.stopped_call import RANKS, Life, Stop, draw, run

pytest.importorskip("triton")

pytestmark = [
    *(pytest.mark.world, pytest.mark.slow),
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks"),
]

_DRAWS = os.environ.get("MEGATRON_FLUID_TEST_DRAWS", "")
if ":" in _DRAWS:
    SEEDS = range(*map(int, _DRAWS.split(":")))
else:
    SEEDS = range(max(6, int(_DRAWS or 0)))


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


def test_a_name_is_found_in_what_ranks_say() -> None:
    said = "PeerTimeoutError: rank 0: no answer from peer 12 within 5 s in moe dispatch"
    assert names(said, 12)
    assert not names(said, 1)
    assert names("no answer from ranks 1, 2", 2)
    assert isinstance(draw(3), Stop) and RANKS > 2
