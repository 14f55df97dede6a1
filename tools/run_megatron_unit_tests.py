"""Run Megatron-LM's own unit tests with megatron_fluid's patches and without, and compare.

    python -m tools.run_megatron_unit_tests --megatron-lm PATH [--ranks 8] [--output FILE]

PATH is a checkout of Megatron-LM at the tag that belongs to the supported megatron-core
(core_v0.19.x). It is only run: its folder goes first on the path, so that its own megatron.core is
the one that is tested. On a machine without a GPU all runs have CPU mode (gloo), and "without"
means CPU mode alone; Transformer Engine is hidden there, since Megatron uses it where it finds it.

Three ways: `without`, `with`, and `forced`, with a backend asked for by name (--backend): there a
test that passes without may fail only by a ConfigError. Files whose tests call no MoE layer have
nothing to force, and are not run that way. A session runs the files of one folder (or
fewer: --session-bytes), and has a store and a temporary folder of its own. A test that
outlives --test-timeout counts as hung, and the session goes on behind it. A test that passes
without and not in another way runs once more, all ways, before it counts: a test that fails on some
ranks only leaves the others in a collective, which harms those behind it. --output keeps what was
found after each session, and a later call with the same file goes on where that one ended.

The exit status is 0 if no test that passes without fails with, no forced one fails but by a
ConfigError, and every file whose MoE layers ran was overlapped in one of the ways or says which
setting forbids it. A test's outcome is its worst over all ranks.
"""

from __future__ import annotations

import argparse
import ast
import collections
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import commit_id
from tools.megatron_test_sessions import TESTS, WAYS, Found, Sessions, by_file

__all__ = ["FILES", "Ways", "counts", "main", "nothing_passed", "problems", "wanted_ways"]

type Ways = Mapping[str, Found]  # way -> what was found

# Patterns of files that touch what is patched.
FILES = (
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
_NEEDED = {"einops": "einops", "pytest_mock": "pytest-mock"}


def counts(found: Found) -> dict[str, int]:
    """Tests of a file by outcome, and its calls."""
    by_outcome = collections.Counter(entry["outcome"] for entry in found.values())
    return {name: by_outcome[name] for name in ("passed", "failed", "skipped", "hung")} | {
        key: sum(entry[key] for entry in found.values()) for key in ("overlapped", "moe_forwards")
    }


def problems(files: Mapping[str, Ways]) -> list[str]:
    """What must not be, one line each."""
    lines = []
    for file, ways in files.items():
        for test, way, outcome in _worse(ways):
            how = "megatron_fluid" if way == "with" else "a backend forced"
            lines.append(f"{test}: passed without, {outcome} with {how}")
        with_, forced = ways.get("with", {}), ways.get("forced", {})
        if with_ and forced:
            ran = max(counts(found)["moe_forwards"] for found in (with_, forced))
            overlapped = sum(counts(found)["overlapped"] for found in (with_, forced))
            if ran and not overlapped and not any(map(_names_setting, forced.values())):
                lines.append(
                    f"{file}: MoE layers ran and none was overlapped, and nothing says why"
                )
    return lines


def _worse(ways: Ways) -> Iterator[tuple[str, str, str]]:
    """Tests that pass without and not in another way that ran: name, way, outcome."""
    for test, entry in ways.get("without", {}).items():
        for way in ("with", "forced"):
            after = ways.get(way, {}).get(test, {"outcome": "missing"})
            fine = after["outcome"] == "passed" or (way == "forced" and _names_setting(after))
            if entry["outcome"] == "passed" and ways.get(way) and not fine:
                yield test, way, after["outcome"]


def _names_setting(entry: Mapping[str, Any]) -> bool:
    return "ConfigError" in str(entry.get("error"))


def nothing_passed(files: Mapping[str, Ways]) -> dict[str, str]:
    """Files of which no test passes without this package, with their commonest reason."""
    reasons = {}
    for file, ways in files.items():
        without = ways.get("without", {})
        if without and not counts(without)["passed"]:
            said = collections.Counter(
                f"{entry['outcome']}: {entry.get('error', 'no reason given')}"
                for entry in without.values()
            )
            reason, number = said.most_common(1)[0]
            reasons[file] = f"{reason} ({number} of {len(without)} tests)"
    return reasons


def wanted_ways(ways: Ways) -> tuple[str, ...]:
    """The ways in which a file is to run, as far as is known."""
    number = counts(ways.get("with", {}))
    called = "with" not in ways or number["moe_forwards"] or number["overlapped"]
    return WAYS if called else WAYS[:2]


class _Record:
    """What was found so far, and the file that keeps it. Several threads may add to it."""

    def __init__(self, output: Path | None, files: Sequence[str], ranks: int) -> None:
        self._output, self._lock = output, threading.Lock()
        kept: dict[str, Any] = {}
        if output is not None and output.exists():
            kept = json.loads(output.read_text())
        self.files: dict[str, dict[str, Found]] = {file: {} for file in files}
        self.files |= kept.get("files", {})
        self.cut_short: dict[str, str] = kept.get("cut_short", {})
        self._head = {
            "commits": list(dict.fromkeys([*kept.get("commits", ()), commit_id()])),
            "ranks": ranks, "cpus": len(os.sched_getaffinity(0)),
            "gpus": torch.cuda.device_count(), "torch": torch.__version__,
        }  # fmt: skip

    def todo(self, files: Sequence[str], way: str) -> list[str]:
        return [f for f in files if way in wanted_ways(self.files[f]) and way not in self.files[f]]

    def take(self, tests: Sequence[str], way: str, found: Found, code: str, again: bool) -> None:
        """Keep what a session found. Of a test that ran again the second run counts, and its first
        outcome stays beside it."""
        with self._lock:
            name = f"{' '.join(tests)} {way}"
            self.cut_short.pop(name, None)
            for file, entries in by_file(found).items():
                if file not in self.files:  # of a plug-in or a folder's conftest.py
                    continue
                known = self.files[file].setdefault(way, {})
                for test, entry in entries.items() if again else ():
                    entry["first"] = known.get(test, {"outcome": "missing"})["outcome"]
                known |= entries
            if not code.isdigit() and not again:  # these files are not whole
                self.cut_short[name] = code
            if self._output is not None:
                kept = {**self._head, "files": self.files, "cut_short": self.cut_short}
                self._output.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _groups(folder: Path, files: Sequence[str], most_bytes: int) -> list[list[str]]:
    """Files of one folder by session, in order: as many as have `most_bytes` together, at least
    one."""
    groups: list[list[str]] = []
    room = 0
    for file in files:
        size = (folder / file).stat().st_size
        if not groups or Path(groups[-1][0]).parent != Path(file).parent or size > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(file)
        room -= size
    return groups


def _run_all(
    record: _Record,
    sessions: Sessions,
    groups: Sequence[Sequence[str]],
    options: argparse.Namespace,
) -> None:
    """Run what the record lacks, then once more what is worse with the package than without."""
    end = time.monotonic() + options.time

    def run(tests: Sequence[str], way: str, until: float, again: bool = False) -> None:
        began = time.monotonic()
        found, code = sessions.run(tests, way, until)
        record.take(tests, way, found, code, again)
        name = tests[0].partition("::")[0]
        if len(tests) > 1:
            name = f"{len(tests)} of {Path(name).parent}"
        said = ", ".join(f"{number} {key}" for key, number in counts(found).items() if number)
        print(f"{name} {way}: {said} in {time.monotonic() - began:.0f} s, {code}", flush=True)

    def first(group: Sequence[str]) -> None:
        for way in options.ways:  # "with" before "forced": it says whether there is MoE to force
            if todo := record.todo(group, way):
                run(todo, way, end - options.again_share * options.time)

    def again(file: str) -> None:
        worse = dict.fromkeys(test for test, _, _ in _worse(record.files[file]))
        worse = dict.fromkeys(test.removeprefix(f"{TESTS}/") for test in worse)
        for way in options.ways if worse else ():
            run(list(worse), way, end, again=True)

    pool = ThreadPoolExecutor(options.jobs)
    try:
        list(pool.map(first, groups))
        print("again, what is worse with than without:", flush=True)
        list(pool.map(again, [file for group in groups for file in group]))
    finally:  # also after a request to end: no rank is left behind
        sessions.end()
        pool.shutdown(cancel_futures=True)


def _holds_tests(source: str) -> bool:
    """Whether a test file defines any test: of one of Megatron's all is within a string."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return any(
        isinstance(node, kinds) and node.name.startswith("test")
        for node in ast.walk(ast.parse(source))
    )


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through `finally`, so that no rank is left behind


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and say what must not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megatron-lm", type=Path, required=True, metavar="PATH", help="a Megatron-LM checkout")
    add("--ranks", type=int, default=8, help="processes (default: %(default)s, as the tests want)")
    add("--jobs", type=int, default=1, help="sessions at a time (default: %(default)s)")
    add("--session-bytes", type=int, default=1 << 30, metavar="N", help="of a session's files")
    add("--files", nargs="+", default=FILES, metavar="FILE",
        help=f"names or patterns in {TESTS} (default: all that touch what is patched)")  # fmt: skip
    add("--ways", nargs="+", choices=WAYS, default=WAYS, help="default: all three")
    add("--backend", default="rounds", help="of the forced way (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="JSON with what was found; goes on from it")
    add("--test-timeout", type=int, default=600, metavar="S", help="for one test")
    add("--time", type=float, default=86400, metavar="S", help="for all of it")
    add("--again-share", type=float, default=0.15, metavar="X", help="of --time, for second runs")
    options = parser.parse_args(arguments)
    options.ways = [way for way in WAYS if way in options.ways]
    checkout = options.megatron_lm.resolve()
    if absent := [name for name in _NEEDED if not importlib.util.find_spec(name)]:
        parser.error(f"Megatron's tests need {', '.join(_NEEDED[name] for name in absent)}")
    folder = checkout / TESTS
    found = {pattern: sorted(folder.glob(pattern)) for pattern in options.files}
    if missing := [pattern for pattern, paths in found.items() if not paths]:
        parser.error(
            f"--megatron-lm: {checkout} has no {TESTS}/{missing[0]}; give a checkout of "
            "Megatron-LM at tag core_v0.19.x"
        )
    paths = dict.fromkeys(path for of_pattern in found.values() for path in of_pattern)
    files = [str(p.relative_to(folder)) for p in paths if _holds_tests(p.read_text("utf-8"))]
    signal.signal(signal.SIGTERM, _leave)
    sessions = Sessions(checkout, options.ranks, options.backend, options.test_timeout)
    record = _Record(options.output, files, options.ranks)
    _run_all(record, sessions, _groups(folder, files, options.session_bytes), options)
    ways = {file: record.files[file] for file in files}
    lines = problems(ways)
    lines += [f"{session}: {code}" for session, code in record.cut_short.items()]
    lines += [f"{file}: no test ran {way}" for file in files for way in wanted_ways(ways[file])
              if way in options.ways and not ways[file].get(way)]  # fmt: skip
    print("\n".join(lines) or f"{len(files)} files: nothing differs")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
