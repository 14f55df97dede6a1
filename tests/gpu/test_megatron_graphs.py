"""Whole layers and whole iterations in CUDA graphs on one expert-parallel rank, and iterations on
several, through Megatron's own training loop: losses and norms have the bits of those without a
graph, whatever the routing does, and also from a checkpoint on. MEGATRON_FLUID_TEST_ITERATIONS=500
makes the training on real text longer (its limit is an hour).
"""

import functools
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.graph_jobs import STEPS, Job, logged, start_alone, train
from tests.support.machine import GPUS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
]
_UNFUSED = ["--no-gradient-accumulation-fusion"]
_WHOLE = ["--cuda-graph-impl", "full_iteration"]
_OVERLAPPED = ["--overlap-grad-reduce", "--overlap-param-gather"]
GRAPHS: dict[str, list[str]] = {
    "none": [], "layers of Transformer Engine": ["--cuda-graph-impl", "transformer_engine"],
    "layers of Megatron's own": ["--cuda-graph-impl", "local"], "an iteration": _WHOLE,
    "an iteration, overlapped": [*_WHOLE, *_OVERLAPPED],
}  # fmt: skip
# Of several expert-parallel ranks.
RANKS = 4 if GPUS >= 4 else min(GPUS, 2)
needs_two = pytest.mark.skipif(RANKS < 2, reason=f"needs two GPUs, found {GPUS}")
_SEVERAL = [
    *("--fluid-moe-backend", "nvlink", "--expert-model-parallel-size", str(RANKS)),
    *("--global-batch-size", str(4 * RANKS)),
    # Jobs side by side measure different figures of the machine, and may choose other schedules.
    *("--fluid-machine", "reference"),
]
_FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
_AUX_LOSS = ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "1e-2"]
_DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
_BIAS = ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]
UNEVEN = "uneven in replays"
SWITCHES = {
    "unfused weight gradients": Job(_UNFUSED),
    "overlapped reductions and gathers": Job(_OVERLAPPED),
    "fp8": Job(_FP8),
    "dropout and auxiliary loss": Job([*_DROPOUT, *_AUX_LOSS]),
    # The second turn is before an evaluation, after which the next iteration is captured.
    UNEVEN: Job(
        [*_BIAS, *_OVERLAPPED, "--hidden-dropout", "0.1"]
        + ["--eval-iters", "2", "--eval-interval", "4"],
        {"turns": [6, 8]},
    ),
}
LAYOUTS = {
    "multi-token prediction and a shared expert": Job(
        ["--mtp-num-layers", "1", "--moe-shared-expert-intermediate-size", "384", *_AUX_LOSS]
    ),
    # In a graph attention is Megatron's, which adds up in another order: take it in both.
    "context parallelism": Job(
        ["--context-parallel-size", "2", "--cp-comm-type", "a2a", "--fluid-cp-backend", "megatron"]
        + _AUX_LOSS
    ),
}
# Two expert-parallel ranks, twice. Two GPUs serve as two hosts of two ranks each.
REPLICAS = {
    "replicas of experts": Job(
        ["--expert-model-parallel-size", "2", "--global-batch-size", "16", *_BIAS, *_OVERLAPPED],
        {"turns": [6, 8]},
    )
}
GROUPS = {"switches": SWITCHES, "layouts": LAYOUTS, "replicas": REPLICAS}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    jobs = {name: Job([*_UNFUSED, *flags]) for name, flags in GRAPHS.items()}
    return train(tmp_path_factory.mktemp("graphs"), jobs, 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in GRAPHS if "none" not in name])
def test_captured_layers_have_the_bits_of_eager_ones(
    trained: dict[str, dict[str, Any]], name: str
) -> None:
    eager, graphed = trained["none"], trained[name]
    assert "error" not in eager, eager["error"]
    assert "error" not in graphed, graphed["error"]
    assert any("2 on (local" in words for words in graphed["overlap"]), graphed["overlap"]
    assert graphed["captured"] and not eager["captured"]
    assert len(eager["losses"]) == STEPS and eager["losses"][-1] < eager["losses"][0]
    assert graphed["losses"] == eager["losses"]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`several(group)`: what the jobs of a group report, eager and as graphs."""

    @functools.cache
    def found(group: str) -> dict[str, dict[str, Any]]:
        jobs = {}
        for name, job in GROUPS[group].items():
            jobs[f"none, {name}"] = Job([*_SEVERAL, *job.flags], job.options)
            jobs[f"graph, {name}"] = _graphed(job)
        hosts = 2 if _ranks(group) > RANKS else 1
        return train(tmp_path_factory.mktemp(group), jobs, _ranks(group), hosts=hosts)

    return found


def _ranks(group: str) -> int:
    return 4 if group == "replicas" else RANKS


def _graphed(job: Job) -> Job:
    return Job([*_SEVERAL, *job.flags, "--fluid-graph"], job.options)


@needs_two
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, jobs in GROUPS.items() for name in jobs]
)
def test_an_iteration_of_several_expert_parallel_ranks_has_the_bits_of_an_eager_one(
    several: Any, group: str, name: str
) -> None:
    eager, graphed = several(group)[f"none, {name}"], several(group)[f"graph, {name}"]
    _require_equal(eager, graphed, STEPS)


def _require_equal(eager: dict[str, Any], graphed: dict[str, Any], steps: int) -> None:
    for run in (eager, graphed):
        assert "error" not in run, run["error"]
        assert any(re.search(r"\b[23] on \(nvlink", words) for words in run["overlap"]), run
    assert graphed["captured"] and not eager["captured"]
    assert len(eager["losses"]) == steps and eager["losses"][-1] < eager["losses"][0]
    assert graphed["losses"] == eager["losses"]
    words = logged(eager["text"])
    assert len(words) > 3 * steps
    assert logged(graphed["text"]) == words


@needs_two
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group, jobs in GROUPS.items() for name in jobs if jobs[name].options],
)
def test_iterations_that_lack_room_run_again(several: Any, group: str, name: str) -> None:
    """Every token goes to one rank, in replays: the bits of all losses are those of eager runs."""
    _require_two_repeats(several(group)[f"graph, {name}"], _ranks(group))


def _require_two_repeats(run: dict[str, Any], ranks: int = RANKS) -> None:
    assert "error" not in run, run["error"]
    again = run["text"].count("training: a rank received more expert rows")
    assert again >= 2, "fewer iterations than turns of the routing ran again"
    captures = run["text"].count("Capture CUDA graph for training")
    assert 2 * ranks <= captures <= ranks * (1 + again), "none was captured again, or too many"


@needs_two
@pytest.mark.timeout(300)
def test_a_checkpoint_of_a_graph_resumes_in_a_graph(tmp_path: Path) -> None:
    """With the bits of the run that went on: generators, expert biases and optimizer come back."""
    half, saved = STEPS // 2, tmp_path / "saved"
    flags = [*_AUX_LOSS, *_BIAS, *_DROPOUT, *_OVERLAPPED, "--save", str(saved)]
    flags += ["--save-interval", str(half), "--ckpt-format", "torch_dist"]
    whole = train(tmp_path, {"whole": _graphed(Job(flags))}, RANKS, 140.0)["whole"]
    assert "error" not in whole, whole["error"]
    shutil.rmtree(saved / f"iter_{STEPS:07d}")
    (saved / "latest_checkpointed_iteration.txt").write_text(str(half))
    again = _graphed(Job([*flags, "--load", str(saved)]))
    resumed = train(tmp_path, {"resumed": again}, RANKS, 140.0)["resumed"]
    assert "error" not in resumed, resumed["error"]
    assert whole["captured"] and resumed["captured"]
    assert resumed["losses"] == whole["losses"][half:]
    norms = [[w for w in logged(run["text"]) if "exact" in w] for run in (whole, resumed)]
    assert len(norms[0]) == STEPS and norms[1] == norms[0][half:]


@needs_two
@pytest.mark.timeout(3600)
def test_real_text_with_an_auxiliary_loss_has_the_bits_of_an_eager_run(tmp_path: Path) -> None:
    """One job after the other, each with all GPUs; two iterations lack room."""
    steps = int(os.environ.get("MEGATRON_FLUID_TEST_ITERATIONS", STEPS))
    turns = {"turns": [steps // 2, 3 * steps // 4], "text": str(tmp_path / "tokens")}
    flags = [*_AUX_LOSS, *_BIAS, "--train-iters", str(steps)]
    jobs = {"none": Job([*_SEVERAL, *flags], turns), "graph": _graphed(Job(flags, turns))}
    found: dict[str, dict[str, Any]] = {}
    for name, job in jobs.items():
        found |= train(tmp_path, {name: job}, RANKS, 100.0 + steps / 2)
    _require_equal(found["none"], found["graph"], steps)
    _require_two_repeats(found["graph"])


BOUND_S = 20.0


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks of a job, the last of which dies in the third replay."""
    flags = [*_AUX_LOSS, *_OVERLAPPED, "--global-batch-size", str(16 * RANKS)]
    flags += ["--fluid-timeout", str(BOUND_S), "--fluid-end-on-timeout"]
    ranks, store = start_alone(tmp_path, _graphed(Job(flags, {"dies": 3})), RANKS)
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.wait()
    del store


@needs_two
@pytest.mark.timeout(300)
def test_a_rank_that_dies_in_a_replay_is_named_by_the_others_in_time(
    alone: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    def log(rank: int) -> str:
        return (tmp_path / f"log-{rank}.txt").read_text(errors="replace")

    lost = RANKS - 1
    assert alone[lost].wait(200) == -signal.SIGKILL, log(lost)[-6000:]
    end = time.monotonic() + 2 * BOUND_S
    for rank, process in enumerate(alone[:lost]):
        try:
            code = process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # it says where it stands
            process.wait(30)
            pytest.fail(f"rank {rank} did not end in time:\n{log(rank)[-6000:]}")
        assert code != 0
        named = rf"rank {rank}: no answer from (peer|.*rank) {lost}\b"
        # Before the stacks of all threads, which faulthandler writes.
        words = log(rank).partition("Fatal Python error")[0]
        assert re.search(named, words), words[-6000:]
