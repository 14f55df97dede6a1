"""Whole layers and whole iterations in CUDA graphs on one expert-parallel rank, and iterations on
several, through Megatron's own training loop: the losses have the bits of those without a graph,
whether the experts' gradients are zeroed or written by the first microbatch, and whatever the
routing does."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import GPUS

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"
    ),
]
STEPS = 12  # three of them before the capture
UNEVEN = "uneven in replays"
_UNFUSED = ["--no-gradient-accumulation-fusion"]
MODEL = [
    *("--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "4"),
    *("--ffn-hidden-size", "384", "--moe-ffn-hidden-size", "384", "--num-experts", "16"),
    *("--moe-router-topk", "4", "--moe-router-load-balancing-type", "none"),
    *("--seq-length", "256", "--max-position-embeddings", "256", "--vocab-size", "2048"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", str(STEPS)),
    *("--tokenizer-type", "NullTokenizer", "--mock-data", "--split", "1,1,1"),
    *("--no-create-attention-mask-in-dataloader", "--eval-iters", "0", "--log-interval", "1"),
    *("--eval-interval", "1000000", "--seed", "1234", "--lr", "1e-3", "--swiglu", "--bf16"),
    *("--lr-decay-style", "constant", "--moe-token-dispatcher-type", "alltoall"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--moe-grouped-gemm"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--te-rng-tracker"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--use-distributed-optimizer"),
    *("--disable-gloo-process-groups", "--no-check-for-nan-in-loss-and-grad"),
    *("--logging-level", "20"),
    *("--fluid-moe-backend", "local"),
]
# What Megatron says afterwards.
CAPTURED = ("Time spent in CUDA Graphs capture", "> built ", "CUDA graph capture done")
_WHOLE = ["--cuda-graph-impl", "full_iteration"]
_OVERLAPPED = ["--overlap-grad-reduce", "--overlap-param-gather"]
GRAPHS: dict[str, list[str]] = {
    "none": [],
    "layers of Transformer Engine": ["--cuda-graph-impl", "transformer_engine"],
    "layers of Megatron's own": ["--cuda-graph-impl", "local"],
    "an iteration": _WHOLE,
    "an iteration, overlapped": [*_WHOLE, *_OVERLAPPED],
}
# Of several expert-parallel ranks.
RANKS = 4 if GPUS >= 4 else min(GPUS, 2)
_SEVERAL = [
    *("--fluid-moe-backend", "nvlink", "--expert-model-parallel-size", str(RANKS)),
    *("--global-batch-size", str(4 * RANKS)),
    # Jobs side by side measure different figures of the machine, and may choose other schedules.
    *("--fluid-machine", "reference"),
]
_FP8 = ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
EAGER_AND_GRAPHED = {
    "unfused weight gradients": _UNFUSED,
    "overlapped reductions and gathers": _OVERLAPPED,
    "fp8": _FP8,
    "dropout and auxiliary loss": [
        *("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--moe-aux-loss-coeff", "1e-2"),
        *("--moe-router-load-balancing-type", "aux_loss"),
    ],
    UNEVEN: [
        *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
        *("--hidden-dropout", "0.1", "--eval-iters", "2", "--eval-interval", "4"),
    ],
}
SEVERAL: dict[str, list[str]] = {
    **{f"none, {name}": [*_SEVERAL, *flags] for name, flags in EAGER_AND_GRAPHED.items()},
    **{
        f"graph, {name}": [*_SEVERAL, *flags, "--fluid-graph"]
        for name, flags in EAGER_AND_GRAPHED.items()
    },
}


def _start(
    folder: Path, flags: list[str], ranks: int = 1, program: str = "benchmarks.cases.pretrain_rank"
) -> tuple[subprocess.Popen[bytes], Path, Path]:
    folder.mkdir()
    result, log = folder / "result.json", folder / "log.txt"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PRETRAIN_RESULT": str(result),
        "PRETRAIN_PLAIN": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # where a job that is aborted hangs
    }
    if ranks == 1:
        one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        environment["CUDA_VISIBLE_DEVICES"] = one
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", program]
    command += [*MODEL, *flags]
    with log.open("wb") as words:
        process = subprocess.Popen(
            [*command, "--data-cache-path", str(folder)],
            cwd=folder,
            env=environment,
            stdout=words,
            stderr=subprocess.STDOUT,
        )
    return process, result, log


def _children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def _abort(process: subprocess.Popen[bytes]) -> int:
    """End a job whose ranks say in its log where they are."""
    for rank in _children(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGABRT)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        for one in (*_children(process.pid), process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
    return -1


def _train(folder: Path, kinds: dict[str, list[str]], ranks: int) -> dict[str, dict[str, Any]]:
    """What each job reports; all run side by side."""
    programs = {True: "tests.support.uneven_routing", False: "benchmarks.cases.pretrain_rank"}
    jobs = {
        name: _start(folder / name.replace(" ", "_"), flags, ranks, programs[UNEVEN in name])
        for name, flags in kinds.items()
    }
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + 240
    for name, (process, result, log) in jobs.items():
        try:
            code = process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            code = _abort(process)
        text = log.read_text(errors="replace")
        captured = any(words in text for words in CAPTURED)
        if code == 0 and result.is_file():
            found[name] = {**json.loads(result.read_text()), "captured": captured, "text": text}
        else:
            found[name] = {"error": text[-6000:], "text": text, "captured": captured}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    jobs = {name: [*_UNFUSED, *flags] for name, flags in GRAPHS.items()}
    return _train(tmp_path_factory.mktemp("graphs"), jobs, 1)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if RANKS < 2:
        pytest.skip(f"needs two GPUs, found {GPUS}")
    return _train(tmp_path_factory.mktemp("several"), SEVERAL, RANKS)


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EAGER_AND_GRAPHED)
def test_an_iteration_of_several_expert_parallel_ranks_has_the_bits_of_an_eager_one(
    several: dict[str, dict[str, Any]], name: str
) -> None:
    eager, graphed = several[f"none, {name}"], several[f"graph, {name}"]
    for run in (eager, graphed):
        assert "error" not in run, run["error"]
        assert any("2 on (nvlink" in words for words in run["overlap"]), run["overlap"]
    assert graphed["captured"] and not eager["captured"]
    assert len(eager["losses"]) == STEPS and eager["losses"][-1] < eager["losses"][0]
    assert graphed["losses"] == eager["losses"]
    assert _logged(graphed["text"]) == _logged(eager["text"])


def _logged(text: str) -> list[str]:
    """What each iteration's line says of losses and norms, and each evaluation."""
    lines = [line for line in text.splitlines() if "iteration" in line and " | " in line]
    found = re.findall(r"(?:loss|norm)[^|]*: [^|]*", "\n".join(lines))
    assert len(found) > 2 * STEPS
    return [words.strip() for words in found]


@pytest.mark.timeout(300)
def test_iterations_that_lack_room_run_again(several: dict[str, dict[str, Any]]) -> None:
    """Every token goes to one rank, in replays: the bits of all losses are those of eager runs."""
    run = several[f"graph, {UNEVEN}"]
    assert "error" not in run, run["error"]
    again = run["text"].count("training: a rank received more expert rows")
    assert again >= 2, "fewer iterations than turns of the routing ran again"
    captures = run["text"].count("Capture CUDA graph for training")
    assert captures == RANKS * (1 + again), "a graph was not captured anew, or more than once"
