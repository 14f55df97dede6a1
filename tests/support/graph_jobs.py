"""Trainings of a small mixture of experts by Megatron's own loop on GPUs, for comparing CUDA graphs
with eager runs: each a job of its own (tests/support/graph_rank.py), several of them at a time."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
STEPS = 12  # three of them before the capture
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
    *("--logging-level", "20", "--fluid-moe-backend", "local"),
]
# What Megatron says afterwards.
_CAPTURED = ("Time spent in CUDA Graphs capture", "> built ", "CUDA graph capture done")
_HELD: list[socket.socket] = []  # the ports that free_port gave


@dataclass(frozen=True)
class Job:
    """A training: `flags` beside MODEL, of which Megatron takes the last, and `options` for
    tests/support/graph_rank.py."""

    flags: list[str]
    options: Mapping[str, Any] = field(default_factory=dict)

    def command(self, folder: Path) -> list[str]:
        """The module and its arguments."""
        place = ["--data-cache-path", str(folder)]
        return ["-m", "tests.support.graph_rank", *MODEL, *self.flags, *place]

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables of its processes."""
        # Megatron insists on it with context parallelism before Blackwell.
        one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        return {
            **os.environ,
            **(one_queue if "--context-parallel-size" in self.flags else {}),
            "PYTHONPATH": path,
            "PRETRAIN_RESULT": str(folder / "result.json"),
            "PRETRAIN_PLAIN": "0",
            "GRAPH_RANK": json.dumps(self.options),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # where a job that is aborted hangs
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        }


def _start(folder: Path, job: Job, ranks: int, hosts: int) -> list[subprocess.Popen[bytes]]:
    """torchrun of each host; NCCL takes ranks of different ones as such, though all are here."""
    folder.mkdir()
    started, port = [], free_port()
    for host in range(hosts):
        environment = job.environment(folder)
        if ranks == 1:
            one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            environment["CUDA_VISIBLE_DEVICES"] = one
        command = [sys.executable, "-m", "torch.distributed.run"]
        if hosts == 1:
            command += ["--standalone"]
        else:
            environment |= {"NCCL_HOSTID": f"host-{host}", "NCCL_SOCKET_IFNAME": "lo"}
            command += ["--nnodes", str(hosts), "--node-rank", str(host)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["--nproc-per-node", str(ranks // hosts), *job.command(folder)]
        started.append(_process(command, folder / "log.txt", environment))
    return started


def _process(command: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that adds to `log`, in its folder."""
    with log.open("ab") as words:
        return subprocess.Popen(
            command, cwd=log.parent, env=env, stdout=words, stderr=subprocess.STDOUT
        )


def free_port() -> int:
    """A port for one listener; it stays bound here, so that nobody else is given it meanwhile."""
    _HELD.append(held := socket.socket())
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])


def start_alone(folder: Path, job: Job, ranks: int) -> tuple[list[subprocess.Popen[bytes]], Any]:
    """A job whose ranks nobody ends when one of them is lost; their outputs are `log-RANK.txt`.
    Returns the ranks and the store that they meet at, which ends with its last reference."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(ranks):
        environment = {
            **job.environment(folder),
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
            **{"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"},
            **{"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        command = [sys.executable, *job.command(folder)]
        started.append(_process(command, folder / f"log-{rank}.txt", environment))
    return started, store


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


def train(
    folder: Path, jobs: Mapping[str, Job], ranks: int, limit_s: float = 240.0, hosts: int = 1
) -> dict[str, dict[str, Any]]:
    """What each job reports; all run side by side. Beside the report of
    benchmarks/cases/pretrain_rank.py "captured" is whether a graph was, "text" all output, and
    "error" its end where the job failed. With several `hosts`, each has the same GPUs."""
    started = {
        name: _start(folder / name.replace(" ", "_"), job, ranks, hosts)
        for name, job in jobs.items()
    }
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + limit_s
    for name, processes in started.items():
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(max(end - time.monotonic(), 0)))
            except subprocess.TimeoutExpired:
                codes.append(_abort(process))
        place = folder / name.replace(" ", "_")
        text, result = (place / "log.txt").read_text(errors="replace"), place / "result.json"
        found[name] = {"captured": any(words in text for words in _CAPTURED), "text": text}
        if not any(codes) and result.is_file():
            found[name] |= json.loads(result.read_text())
        else:
            found[name]["error"] = text[-6000:]
    return found


def logged(text: str) -> list[str]:
    """What each iteration's line says of losses and norms, and each evaluation."""
    lines = [line for line in text.splitlines() if "iteration" in line and " | " in line]
    found = re.findall(r"(?:loss|exact norm|norm)[^|]*: [^|]*", "\n".join(lines))
    return [words.strip() for words in found]
