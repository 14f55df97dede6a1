"""The result file of a benchmark suite: one JSON document with the environment it was measured in.

Schema::

    {"suite", "date", "commit", "gpu", "gpus", "torch", "cuda", "nccl", "triton", "megatron_core",
     "transformer_engine", "command",
     "rows": [{"case", "mode", "variant", "median_ms", "p10_ms", "p90_ms", "iters", "config"}]}

``gpu`` is the device's name, or the processor's where none is used; ``gpus`` the number of ranks
measured. A version is null where the package is absent. ``cublas``, in files and in rows whose own
differs, is the version of cuBLASLt that the process calls. ``commit`` is FLUID_COMMIT from the
environment if set, else ``git rev-parse HEAD`` with ``-dirty`` where the tree differs from it
(results files themselves do not count), else null.

This module needs torch only to name versions and devices; it imports nothing of megatron_fluid.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_code import fingerprint

__all__ = [
    "NO_SUITES",
    "RESULTS",
    "Row",
    "commit_id",
    "cublas_version",
    "environment",
    "read_results",
    "result_path",
    "rows_before",
    "validate",
    "write_results",
]

RESULTS = Path(__file__).resolve().parents[1] / "results"
NO_SUITES = ("gpu_tests.json", "megatron_unit_tests.json")
"""Files in RESULTS that no suite has written."""
_ENVIRONMENT_KEYS = (
    "commit",
    "gpu",
    "gpus",
    "torch",
    "cuda",
    "nccl",
    "triton",
    "megatron_core",
    "transformer_engine",
    "command",
)


@dataclass(frozen=True)
class Row:
    """One measurement: a case in a mode (forward, train, dispatch, ...) by a variant (fluid, nccl,
    floor, ...)."""

    case: str
    mode: str
    variant: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    iters: int
    config: Mapping[str, Any] = field(default_factory=dict)


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit_id() -> str | None:
    """The commit the measured code stands at, or None outside a repository."""
    named = os.environ.get("FLUID_COMMIT")
    if named:
        return named
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return commit if changed == "" else f"{commit}-dirty"


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cublas_version() -> str | None:
    """Of the cuBLASLt whose functions this process calls, as "13.1.0"; None without one. One that
    LD_PRELOAD names is called in place of torch's, which is loaded all the same."""
    with contextlib.suppress(AttributeError):
        return _dotted(ctypes.CDLL(None).cublasLtGetVersion())
    try:
        loaded = Path("/proc/self/maps").read_text().split()
    except OSError:
        return None
    path = next((word for word in loaded if "/libcublasLt.so" in word), None)
    if path is None:
        return None
    return _dotted(ctypes.CDLL(path).cublasLtGetVersion())


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def environment(gpus: int, command: str | None = None) -> dict[str, Any]:
    """The document's head for a run on ``gpus`` ranks; the command is this process's own unless
    given."""
    import torch

    on_gpu = torch.cuda.is_available()
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version()) if on_gpu else None
    return {
        "commit": commit_id(),
        "gpu": torch.cuda.get_device_name()
        if on_gpu
        else (platform.processor() or platform.machine()),
        "gpus": gpus,
        "host_cpu": _host_cpu(),
        "host_cpus": os.cpu_count(),
        "host_load": os.getloadavg()[0],  # runnable threads, the suite's own among them
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "nccl": nccl,
        "cublas": cublas_version() if on_gpu else None,
        "triton": _version("triton"),
        "megatron_core": _version("megatron-core"),
        "transformer_engine": _version("transformer-engine", "transformer_engine_torch"),
        "command": command if command is not None else default_command(gpus),
    }


def _host_cpu() -> str:
    """The model of this machine's CPUs, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def default_command(ranks: int) -> str:
    """Return the command line that repeats this process from the repository's root.

    A program of benchmarks/ is started by launch.sh; another script by torchrun, or python where it
    was started so. Where another cuBLAS than torch's was preloaded, $CUBLAS stands for its folder.
    """
    root = Path(__file__).resolve().parents[2]
    script, words = Path(sys.argv[0]), _without_places(sys.argv[1:])
    if script.is_absolute() and script.is_relative_to(root):
        script = script.relative_to(root)
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    processes = str(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if script.parts[0] == "benchmarks":
        prefix = f"NPROC={processes} " if launched else ""
        if "libcublasLt.so" in os.environ.get("LD_PRELOAD", ""):
            prefix += 'LD_PRELOAD="$CUBLAS/libcublasLt.so.13 $CUBLAS/libcublas.so.13" '
        return prefix + shlex.join(["benchmarks/launch.sh", script.stem, *words])
    starter = ["torchrun", "--nproc_per_node", processes] if launched else ["python"]
    return shlex.join([*starter, str(script), *words])


def _without_places(words: list[str]) -> list[str]:
    """Arguments less those that say where figures and traces were put, which is nobody else's
    business."""
    places = ("--output", "--profile-folder", "--logs")
    kept: list[str] = []
    skipping = False
    for word in words:
        if word.partition("=")[0] in places:
            skipping = word in places
        elif skipping and not word.startswith("-"):
            skipping = False
        else:
            skipping = False
            kept.append(word)
    return kept


def validate(document: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key and the row, unless ``document`` follows the schema."""
    missing = [key for key in ("suite", "date", *_ENVIRONMENT_KEYS, "rows") if key not in document]
    if missing:
        raise ValueError(f"result document lacks {', '.join(missing)}")
    if not document["rows"]:
        raise ValueError(f"result document of suite {document['suite']!r} has no rows")
    for index, row in enumerate(document["rows"]):
        absent = [key for key in Row.__dataclass_fields__ if key not in row]
        if absent:
            raise ValueError(f"row {index} lacks {', '.join(absent)}")
        for key in ("median_ms", "p10_ms", "p90_ms"):
            if not (
                isinstance(row[key], (int, float)) and math.isfinite(row[key]) and row[key] >= 0
            ):
                raise ValueError(
                    f"row {index} ({row['case']}, {row['mode']}, {row['variant']}): {key} is "
                    f"{row[key]!r}"
                )
        if not row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]:
            raise ValueError(f"row {index}: p10 <= median <= p90 does not hold")


def result_path(suite: str, gpus: int) -> Path:
    """Where a suite's file of so many ranks belongs: benchmarks/results/<suite>.json of 4,
    <suite>-2gpu.json of 2."""
    return RESULTS / (f"{suite}.json" if gpus == 4 else f"{suite}-{gpus}gpu.json")


def write_results(
    suite: str,
    rows: Iterable[Row],
    gpus: int,
    path: Path | str | None = None,
    command: str | None = None,
) -> Path:
    """Write a suite's rows (from one rank only) to ``path``, by default result_path's; returns
    it."""
    target = Path(path) if path is not None else result_path(suite, gpus)
    measured = [asdict(row) for row in rows]
    document = {
        "suite": suite,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **environment(gpus, command),
        "code": fingerprint(suite, measured),
        "rows": measured,
    }
    validate(document)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + ".part")
    scratch.write_text(json.dumps(document, indent=1) + "\n")
    scratch.replace(target)
    return target


def rows_before(suite: str, gpus: int, path: Path | str) -> tuple[list[Row], str]:
    """Return the rows of a results file, and the command that gave them, for a run that adds to it.

    Raises:
        ValueError: the file is of another suite, other code, another machine or other libraries.
    """
    document, now = read_results(path), {"suite": suite, **environment(gpus)}
    if (now["commit"] or "-dirty").endswith("-dirty"):
        raise ValueError(f"commit: found {now['commit']}, allowed: that of a tree without changes")
    for key in ("suite", *_ENVIRONMENT_KEYS[:-1]):
        if document[key] != now[key]:
            raise ValueError(f"{key} of {path}: found {document[key]}, allowed: {now[key]}")
    return [Row(**row) for row in document["rows"]], document["command"]


def read_results(path: Path | str) -> dict[str, Any]:
    """Read and validate a result file."""
    document: dict[str, Any] = json.loads(Path(path).read_text())
    validate(document)
    return document
