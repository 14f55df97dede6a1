"""Run Megatron-LM's own unit tests with megatron_fluid's patches and without, and compare.

    python tools/run_megatron_unit_tests.py --megatron-lm PATH [--all] [--ranks 8] [--output FILE]

PATH is a checkout of Megatron-LM at the tag that belongs to the supported megatron-core
(core_v0.19.x). It is only run: its folder goes first on the path, so that its own megatron.core is
the one that is tested. On a machine without a GPU all runs have CPU mode (gloo), and "without"
means CPU mode alone.

Three ways: `without`, `with`, and `forced`, with a backend asked for by name (--backend): there a
test that passes without may fail only by a ConfigError. A session runs the files of one folder, so
that the start-up is paid once. A test that outlives --test-timeout counts as hung, and the session
goes on behind it. --output keeps what was found after each session, and a later call with the same
file goes on where that one ended.

The exit status is 0 if no test that passes without fails with, no forced one fails but by a
ConfigError, and every file whose MoE layers ran was overlapped in one of the ways or says which
setting forbids it. A test's outcome is its worst over all ranks.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "ALL",
    "FILES",
    "Found",
    "compare",
    "counts",
    "main",
    "problems",
    "read_outcomes",
    "read_results",
    "table",
]

ROOT = Path(__file__).resolve().parent.parent
TESTS = "tests/unit_tests"
FILES = tuple(
    f"transformer/moe/test_{name}.py"
    for name in (
        *("a2a_token_dispatcher", "shared_experts", "moe_layer", "routers", "sequential_mlp"),
    )
)
# Patterns of --all, a session for each folder.
ALL = (
    "transformer/moe/test_*.py",
    "transformer/test_*attention*.py",
    "transformer/test_transformer_block*.py",
    "transformer/test_transformer_layer.py",
    "a2a_overlap/test_*.py",
    "models/test_gpt_model.py",
    "models/test_hybrid_moe_model.py",
    "tensor_parallel/test_*.py",
    "distributed/test_*.py",
    "pipeline_parallel/test_*.py",
    "dist_checkpointing/models/test_moe_experts.py",
    "dist_checkpointing/test_optimizer.py",
)
WAYS = ("without", "with", "forced")
# From best to worst; a test is as good as its worst rank.
_ORDER = ("skipped", "passed", "failed", "hung")
# Megatron's conftest downloads data sets that none of these tests reads: this takes the place of
# the library it uses.
_NO_DOWNLOADS = "def get(*args, **kwargs):\n    raise RuntimeError('no downloads in this run')\n"
_MOST_RESUMES = 20  # of one session
_NEEDED = {"einops": "einops", "pytest_mock": "pytest-mock"}

type Found = dict[str, dict[str, Any]]  # test -> outcome, error, overlapped, moe_forwards


def read_results(folder: Path) -> Found:
    """What the pytest plug-in wrote, by test: the worst outcome over ranks ("hung" where a rank
    started it and never ended), that rank's error, and the most calls of any rank. A failing
    teardown fails the test."""
    found: Found = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        started: set[str] = set()
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            test = entry["test"]
            if entry["outcome"] == "started":
                started.add(test)
                continue
            started.discard(test)
            _take(found, test, entry["outcome"], entry)
        for test in started:
            _take(found, test, "hung", {"error": "did not end"})
    return found


def _take(found: Found, test: str, outcome: str, entry: Mapping[str, Any]) -> None:
    known = found.setdefault(test, {"outcome": _ORDER[0], "overlapped": 0, "moe_forwards": 0})
    if _ORDER.index(outcome) > _ORDER.index(known["outcome"]):
        known["outcome"] = outcome
        if "error" in entry:
            known["error"] = entry["error"]
    for key in ("overlapped", "moe_forwards"):
        known[key] = max(known[key], entry.get(key, 0))


def read_outcomes(folder: Path) -> dict[str, str]:
    """Test -> worst outcome over ranks."""
    return {test: entry["outcome"] for test, entry in read_results(folder).items()}


def compare(without: Mapping[str, str], with_: Mapping[str, str]) -> list[str]:
    """One line a test whose outcome is not the same in both; "missing" where it did not run to its
    end."""
    lines = []
    for test in sorted({*without, *with_}):
        before, after = without.get(test, "missing"), with_.get(test, "missing")
        if before != after:
            lines.append(f"{test}: {before} without, {after} with megatron_fluid")
    return lines


def counts(found: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Tests of a file by outcome, and its calls."""
    by_outcome = collections.Counter(entry["outcome"] for entry in found.values())
    return {name: by_outcome[name] for name in ("passed", "failed", "skipped", "hung")} | {
        key: sum(entry[key] for entry in found.values()) for key in ("overlapped", "moe_forwards")
    }


def problems(files: Mapping[str, Mapping[str, Found]]) -> list[str]:
    """What must not be, one line each.

    Args:
        files: file -> way -> what was found.
    """
    lines = []
    for file, ways in files.items():
        without, with_, forced = (ways.get(way, {}) for way in WAYS)
        for test, entry in without.items():
            if entry["outcome"] != "passed":
                continue
            after = with_.get(test, {"outcome": "missing"})
            if with_ and after["outcome"] != "passed":
                lines.append(f"{test}: passed without, {after['outcome']} with megatron_fluid")
            after = forced.get(test, {"outcome": "passed" if not forced else "missing"})
            named = "ConfigError" in str(after.get("error"))
            if after["outcome"] != "passed" and not named:
                lines.append(f"{test}: passed without, {after['outcome']} with a backend forced")
        if with_ and forced:
            ran = max(counts(found)["moe_forwards"] for found in (with_, forced))
            ours = sum(counts(found)["overlapped"] for found in (with_, forced))
            refused = any("ConfigError" in str(entry.get("error")) for entry in forced.values())
            if ran and not ours and not refused:
                lines.append(
                    f"{file}: MoE layers ran and none was overlapped, and nothing says why"
                )
    return lines


def table(results: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]) -> str:
    """A row a file: passed / failed / skipped without and with."""
    rows = [("file", "without (pass/fail/skip)", "with (pass/fail/skip)", "same")]
    for name, (without, with_) in results.items():
        same = "yes" if without and not compare(without, with_) else "NO"
        rows.append((name, _counts(without), _counts(with_), same))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _counts(outcomes: Mapping[str, str]) -> str:
    count = collections.Counter(outcomes.values())
    return f"{count['passed']}/{count['failed'] + count['hung']}/{count['skipped']}"


def _environment(folder: Path, way: str, backend: str) -> dict[str, str]:
    """The environment of one session: the package on the path (but not this folder's `tests`), and
    the choice of patches."""
    path = folder / "path"
    if not path.exists():
        path.mkdir()
        (path / "megatron_fluid").symlink_to(ROOT / "megatron_fluid", target_is_directory=True)
        (path / "requests.py").write_text(_NO_DOWNLOADS)
    environment = dict(os.environ)
    inherited = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), inherited]))
    environment["MEGATRON_FLUID_TEST_RESULTS"] = str(folder)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if way == "forced":
        environment["MEGATRON_FLUID_MOE_BACKEND"] = backend
    elif way == "without" and torch.cuda.is_available():
        environment["MEGATRON_FLUID"] = "off"
    elif way == "without":
        environment["MEGATRON_FLUID_PATCHES"] = "cpu"
    return environment


def _session(
    checkout: Path, files: Sequence[str], way: str, options: argparse.Namespace
) -> tuple[Found, str]:
    """Run files on all ranks, and again from behind a test that hung. Returns what was found, and
    how the last attempt ended."""
    found: Found = {}
    deadline = time.monotonic() + options.session_timeout
    code = "no time left"
    for _ in range(_MOST_RESUMES):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        with tempfile.TemporaryDirectory(prefix="megatron-unit-tests-") as temporary:
            folder = Path(temporary)
            (folder / "done").write_text("\n".join(found))
            code = _attempt(checkout, files, way, folder, left, options)
            new = read_results(folder)
        found |= new
        if code == "0" or not new or not any(entry["outcome"] == "hung" for entry in new.values()):
            break
    return found, code


def _attempt(
    checkout: Path, files: Sequence[str], way: str, folder: Path, limit_s: float,
    options: argparse.Namespace,
) -> str:  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={options.ranks}", "-m", "pytest"]
    command += [
        "-p",
        "megatron_fluid.pytest_plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        "-W",
        "ignore",
    ]
    command += [f"--timeout={options.test_timeout}", "--timeout-method=thread"]
    command += [*options.pytest_args, *(f"{TESTS}/{file}" for file in files)]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=checkout, env=_environment(folder, way, options.backend),
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = str(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            code = f"ended after {limit_s:.0f} s"
        finally:
            _end(process)
    if options.verbose or not read_results(folder):
        print("\n".join(log.read_text(errors="replace").splitlines()[-options.log_lines :]))
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks, first by asking."""
    for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
    process.poll()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through `finally`, so that no rank is left behind


def _by_file(found: Found) -> dict[str, Found]:
    files: dict[str, Found] = {}
    for test, entry in found.items():
        files.setdefault(test.partition("::")[0].removeprefix(f"{TESTS}/"), {})[test] = entry
    return files


def _sessions(files: Iterable[str]) -> dict[str, list[str]]:
    """Files by folder."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(str(Path(file).parent), []).append(file)
    return folders


def _write(output: Path, state: dict[str, Any], files: Sequence[str]) -> None:
    kept = {file: ways for file, ways in state["files"].items() if ways}
    found = {file: {way: counts(ways[way]) for way in ways} for file, ways in kept.items()}
    state["counts"] = found
    state["not_run"] = {
        file: [way for way in WAYS if way not in kept.get(file, {})]
        for file in files
        if any(way not in kept.get(file, {}) for way in WAYS)
    }
    state["problems"] = problems(kept)
    output.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megatron-lm", type=Path, required=True, metavar="PATH", help="a Megatron-LM checkout")
    add("--ranks", type=int, default=8, help="processes (default: %(default)s, as the tests want)")
    add("--all", action="store_true", help="all files that touch what is patched")
    add("--files", nargs="+", metavar="FILE", help=f"files in {TESTS}, in place of a few")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all three")
    add("--backend", default="rounds", help="of the forced way (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="JSON with what was found; goes on from it")
    add("--test-timeout", type=int, default=600, metavar="S", help="for one test")
    add("--session-timeout", type=int, default=3600, metavar="S", help="for one folder, one way")
    add("--log-lines", type=int, default=40, help="lines of a failed session's log to show")
    add("--verbose", action="store_true", help="show the end of every session's log")
    add("pytest_args", nargs="*", default=[], help="further arguments for pytest, after --")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and say what must not be."""
    parser = _parser()
    options = parser.parse_args(arguments)
    checkout = options.megatron_lm.resolve()
    if absent := [name for name, module in _NEEDED.items() if not importlib.util.find_spec(name)]:
        parser.error(f"Megatron's tests need {', '.join(_NEEDED[name] for name in absent)}")
    folder = checkout / TESTS
    if options.all:
        found = [str(path.relative_to(folder)) for name in ALL for path in folder.glob(name)]
        files = sorted(set(found))
    else:
        files = options.files or list(FILES)
    missing = [file for file in files if not (folder / file).is_file()]
    if missing or not files:
        named = missing[0] if missing else ALL[0]
        parser.error(
            f"--megatron-lm: {checkout} has no {TESTS}/{named}; a checkout at tag core_v0.19.x is "
            "needed"
        )
    signal.signal(signal.SIGTERM, _leave)
    state: dict[str, Any] = {"files": {}}
    if options.output is not None and options.output.exists():
        state = json.loads(options.output.read_text())
    state |= {"ranks": options.ranks, "gpus": torch.cuda.device_count(), "torch": torch.__version__}
    for name, members in _sessions(files).items():
        for way in options.ways:
            todo = [file for file in members if way not in state["files"].get(file, {})]
            if not todo:
                continue
            began = time.monotonic()
            results, code = _session(checkout, todo, way, options)
            for file, tests in _by_file(results).items():
                if file in todo:
                    state["files"].setdefault(file, {})[way] = tests
            if not code.isdigit():  # these files are not whole
                state.setdefault("cut_short", {})[f"{name} {way}"] = code
            said = counts(results)
            seconds = time.monotonic() - began
            print(f"{name} {way}: {said} in {seconds:.0f} s, exit {code}", flush=True)
            if options.output is not None:
                _write(options.output, state, files)
    ways = {file: state["files"].get(file, {}) for file in files}
    outcomes = {
        file: tuple(
            {test: entry["outcome"] for test, entry in found.get(way, {}).items()}
            for way in ("without", "with")
        )
        for file, found in ways.items()
    }
    print("\n" + table(outcomes))  # type: ignore[arg-type]
    lines = problems(ways)
    lines += [f"{session}: {code}" for session, code in state.get("cut_short", {}).items()]
    lines += [f"{file}: no test ran {way}" for file in files for way in options.ways
              if not ways[file].get(way)]  # fmt: skip
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
