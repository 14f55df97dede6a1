"""The launcher itself: tracebacks, dead ranks, timeouts, and nothing left behind."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.launch import RankError, run_ranks, run_ranks_outcomes


def _one_rank_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("only on rank one")
    dist.barrier()


def _one_rank_dies(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def _one_rank_hangs_here(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(3600)  # longer than a test may take


def test_a_traceback_names_the_rank_and_comes_first() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_one_rank_raises, 3)
    text = str(caught.value)
    assert "KeyError: 'only on rank one'" in text
    assert text.index("--- rank ") == text.index("--- rank 1 ---")
    assert not caught.value.outcomes[1].ok


def test_a_rank_that_dies_without_a_word_is_reported() -> None:
    outcomes = run_ranks_outcomes(_one_rank_dies, 2)
    assert outcomes[0].exitcode == 7
    assert "exit code 7" in (outcomes[0].error or "")
    assert not outcomes[1].ok


def test_after_the_timeout_the_stacks_are_shown_and_the_rank_is_gone() -> None:
    with pytest.raises(RankError, match="_one_rank_hangs_here") as caught:
        run_ranks(_one_rank_hangs_here, 2, timeout_s=15.0)
    hung = caught.value.outcomes[0]
    assert "_one_rank_hangs_here" in hung.stacks
    assert hung.exitcode == -9


def _leaves_a_child(rank: int, world_size: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def test_children_of_a_rank_end_with_it() -> None:
    for pid in run_ranks(_leaves_a_child, 2):
        deadline = time.monotonic() + 10.0
        with contextlib.suppress(OSError):  # it is gone
            while " Z " not in Path(f"/proc/{pid}/stat").read_text():
                assert time.monotonic() < deadline, f"the child {pid} still runs"
                time.sleep(0.05)
