"""Run Megatron-LM's own unit tests with megatron_fluid's patches and without, and compare.

    python -m tools.run_megatron_unit_tests --megatron-lm PATH [--all] [--ranks 8] [--output FILE]

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
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import commit_id
from tools.megatron_test_sessions import TESTS, WAYS, Found, Sessions, by_file, read_results

__all__ = [
    "ALL",
    "FILES",
    "Found",
    "compare",
    "counts",
    "holds_tests",
    "main",
    "nothing_passed",
    "problems",
    "read_outcomes",
    "read_results",
    "table",
    "wanted_ways",
]

type Files = Mapping[str, Mapping[str, Found]]  # file -> way -> what was found

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
_NEEDED = {"einops": "einops", "pytest_mock": "pytest-mock"}


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


def problems(files: Files) -> list[str]:
    """What must not be, one line each."""
    lines = []
    for file, ways in files.items():
        for test, way, outcome in _worse(ways):
            how = "megatron_fluid" if way == "with" else "a backend forced"
            lines.append(f"{test}: passed without, {outcome} with {how}")
        with_, forced = ways.get("with", {}), ways.get("forced", {})
        if with_ and forced:
            ran = max(counts(found)["moe_forwards"] for found in (with_, forced))
            ours = sum(counts(found)["overlapped"] for found in (with_, forced))
            refused = any(_names_setting(entry) for entry in forced.values())
            if ran and not ours and not refused:
                lines.append(
                    f"{file}: MoE layers ran and none was overlapped, and nothing says why"
                )
    return lines


def _worse(ways: Mapping[str, Found]) -> Iterator[tuple[str, str, str]]:
    """Tests that pass without and not in another way that ran: name, way, outcome."""
    for test, entry in ways.get("without", {}).items():
        for way in ("with", "forced"):
            after = ways.get(way, {}).get(test, {"outcome": "missing"})
            fine = after["outcome"] == "passed" or (way == "forced" and _names_setting(after))
            if entry["outcome"] == "passed" and ways.get(way) and not fine:
                yield test, way, after["outcome"]


def _names_setting(entry: Mapping[str, Any]) -> bool:
    return "ConfigError" in str(entry.get("error"))


def nothing_passed(files: Files) -> dict[str, str]:
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


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # through `finally`, so that no rank is left behind


def _sessions(folder: Path, files: Sequence[str], most_bytes: int) -> list[list[str]]:
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


def wanted_ways(found: Mapping[str, Found]) -> tuple[str, ...]:
    """The ways in which a file is to run, as far as is known."""
    number = counts(found.get("with", {}))
    called = "with" not in found or number["moe_forwards"] or number["overlapped"]
    return WAYS if called else WAYS[:2]


class _State:
    """What was found so far, and the file that keeps it."""

    def __init__(self, options: argparse.Namespace, files: Sequence[str]) -> None:
        self.files = files
        self.output: Path | None = options.output
        self.kept: dict[str, Any] = {"files": {}}
        if self.output is not None and self.output.exists():
            self.kept = json.loads(self.output.read_text())
        commits = [*self.kept.get("commits", ()), commit_id()]
        self.kept["commits"] = list(dict.fromkeys(commits))
        self.kept |= {"ranks": options.ranks, "cpus": len(os.sched_getaffinity(0))}
        self.kept |= {"gpus": torch.cuda.device_count(), "torch": torch.__version__}

    def todo(self, files: Sequence[str], way: str) -> list[str]:
        known = {file: self.kept["files"].get(file, {}) for file in files}
        return [
            file for file in files if way in wanted_ways(known[file]) and way not in known[file]
        ]

    def take(self, files: Sequence[str], way: str, found: Found, code: str) -> None:
        cut = self.kept.setdefault("cut_short", {})
        cut.pop(name := f"{' '.join(files)} {way}", None)
        for file, tests in by_file(found).items():
            if file in files:
                self.kept["files"].setdefault(file, {})[way] = tests
        if not code.isdigit():  # these files are not whole
            cut[name] = code
        self.write()

    def take_again(self, file: str, way: str, found: Found) -> None:
        """A test's second run counts; its first outcome stays beside it."""
        tests = self.kept["files"][file].setdefault(way, {})
        for test, entry in found.items():
            first = tests.get(test, {"outcome": "missing"})
            tests[test] = entry | {"first": first["outcome"]}
        self.write()

    def write(self) -> None:
        kept = {file: ways for file, ways in self.kept["files"].items() if ways}
        self.kept["counts"] = {
            file: {way: counts(ways[way]) for way in ways} for file, ways in kept.items()
        }
        self.kept["not_run"] = {
            file: absent
            for file in self.files
            if (
                absent := [
                    way for way in wanted_ways(kept.get(file, {})) if way not in kept.get(file, {})
                ]
            )
        }
        self.kept["nothing_passed_without"] = nothing_passed(kept)
        self.kept["problems"] = problems(kept)
        if self.output is not None:
            self.output.write_text(json.dumps(self.kept, indent=1, sort_keys=True) + "\n")


def _run_all(state: _State, sessions: Sessions, options: argparse.Namespace, folder: Path) -> None:
    """Run what the state lacks, then once more what is worse with the package than without."""
    end = sessions.until
    sessions.until -= options.again_share * (end - time.monotonic())
    with ThreadPoolExecutor(options.jobs) as pool:
        running: dict[Future[_Ended], tuple[list[str], str]] = {}

        def begin(group: Sequence[str], way: str) -> None:
            todo = state.todo(group, way) if way in options.ways else []
            if todo:
                running[pool.submit(_timed, sessions, todo, way)] = (todo, way)

        def ended() -> Iterator[tuple[list[str], str, Found, str]]:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    (found, code, seconds), (tests, way) = future.result(), running.pop(future)
                    name = tests[0].partition("::")[0] if len(tests) == 1 else _folder_of(tests)
                    print(f"{name} {way}: {_short(found)} in {seconds:.0f} s, {code}", flush=True)
                    yield tests, way, found, code

        try:
            for group in _sessions(folder, state.files, options.session_bytes):
                for way in WAYS[:2]:
                    begin(group, way)
                # Else it follows the way "with", which says whether there is anything to force.
                if "with" not in options.ways or not state.todo(group, "with"):
                    begin(group, "forced")
            for group, way, found, code in ended():
                state.take(group, way, found, code)
                if way == "with":
                    begin(group, "forced")
            sessions.until = end
            print("again, what is worse with than without:", flush=True)
            for file, ways in state.kept["files"].items():
                worse = [test.removeprefix(f"{TESTS}/") for test, _, _ in _worse(ways)]
                for way in options.ways if worse and file in state.files else ():
                    tests = list(dict.fromkeys(worse))
                    running[pool.submit(_timed, sessions, tests, way)] = (tests, way)
            for tests, way, found, _ in ended():
                state.take_again(tests[0].partition("::")[0], way, found)
        except BaseException:  # a request to end too: no rank is left behind
            pool.shutdown(wait=False, cancel_futures=True)
            sessions.end()
            raise


type _Ended = tuple[Found, str, float]


def _folder_of(tests: Sequence[str]) -> str:
    return f"{len(tests)} of {Path(tests[0].partition('::')[0]).parent}"


def _timed(sessions: Sessions, tests: Sequence[str], way: str) -> _Ended:
    began = time.monotonic()
    found, code = sessions.run(tests, way)
    return found, code, time.monotonic() - began


def _short(found: Found) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts(found).items() if number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--megatron-lm", type=Path, required=True, metavar="PATH", help="a Megatron-LM checkout")
    add("--ranks", type=int, default=8, help="processes (default: %(default)s, as the tests want)")
    add("--jobs", type=int, default=1, help="sessions at a time (default: %(default)s)")
    add("--session-bytes", type=int, default=1 << 30, metavar="N", help="of a session's files")
    add("--all", action="store_true", help="all files that touch what is patched")
    add("--files", nargs="+", metavar="FILE", help=f"files in {TESTS}, in place of a few")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all three")
    add("--backend", default="rounds", help="of the forced way (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="JSON with what was found; goes on from it")
    add("--test-timeout", type=int, default=600, metavar="S", help="for one test")
    add("--session-timeout", type=int, default=3600, metavar="S", help="for one session")
    add("--time", type=float, default=86400, metavar="S", help="for all of it")
    add("--again-share", type=float, default=0.15, metavar="X", help="of --time, for second runs")
    add("--log-lines", type=int, default=40, help="lines of a failed session's log to show")
    add("--verbose", action="store_true", help="show the end of every session's log")
    add("pytest_args", nargs="*", default=[], help="further arguments for pytest, after --")
    return parser


def holds_tests(source: str) -> bool:
    """Whether a test file defines any test: of one of Megatron's all is within a string."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef
    return any(
        isinstance(node, kinds) and node.name.startswith("test")
        for node in ast.walk(ast.parse(source))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and say what must not be."""
    parser = _parser()
    options = parser.parse_args(arguments)
    checkout = options.megatron_lm.resolve()
    if absent := [name for name, module in _NEEDED.items() if not importlib.util.find_spec(name)]:
        parser.error(f"Megatron's tests need {', '.join(_NEEDED[name] for name in absent)}")
    folder = checkout / TESTS
    if options.all:
        found = [path for name in ALL for path in sorted(folder.glob(name))]
        files = [str(path) for path in found if holds_tests(path.read_text("utf-8"))]
        files = list(dict.fromkeys(str(Path(path).relative_to(folder)) for path in files))
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
    sessions = Sessions(
        checkout, options.ranks, options.backend, options.test_timeout, options.session_timeout,
        time.monotonic() + options.time, options.pytest_args, options.log_lines, options.verbose,
    )  # fmt: skip
    state = _State(options, files)
    _run_all(state, sessions, options, folder)
    ways = {file: state.kept["files"].get(file, {}) for file in files}
    outcomes = {
        file: tuple(
            {test: entry["outcome"] for test, entry in found.get(way, {}).items()}
            for way in ("without", "with")
        )
        for file, found in ways.items()
    }
    print("\n" + table(outcomes))  # type: ignore[arg-type]
    lines = problems(ways)
    lines += [f"{session}: {code}" for session, code in state.kept.get("cut_short", {}).items()]
    lines += [f"{file}: no test ran {way}" for file in files for way in wanted_ways(ways[file])
              if way in options.ways and not ways[file].get(way)]  # fmt: skip
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
