"""What Megatron-LM's own unit tests gave, kept small, and its table in the documentation.

    python -m tools.megatron_test_table cpu.json gpu.json

Each file is the --output of one run of tools.run_megatron_unit_tests. Written is
benchmarks/results/megatron_unit_tests.json: how every file ended in every way, by counts; why files
passed nothing or were not run; every test that differs, and those that ran twice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import RESULTS
from tools.megatron_test_sessions import WAYS
from tools.run_megatron_unit_tests import Ways, counts, nothing_passed, problems, wanted_ways

__all__ = ["KEPT", "kept", "table"]

KEPT = RESULTS / "megatron_unit_tests.json"


def kept(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of one run's --output."""
    files: dict[str, dict[str, Any]] = found["files"]
    again = [
        {"test": test, "way": way, "first": entry["first"], "second": entry["outcome"]}
        for ways in files.values()
        for way, tests in ways.items()
        for test, entry in tests.items()
        if "first" in entry
    ]
    refused = {file: number for file, ways in files.items() if (number := _refused(ways))}
    lacking = {
        file: absent
        for file, ways in files.items()
        if (absent := [way for way in wanted_ways(ways) if way not in ways])
    }
    return {
        **{key: found[key] for key in ("commits", "ranks", "gpus", "cpus", "torch")},
        "files": {
            file: {
                way: {key: number for key, number in counts(tests).items() if number}
                for way, tests in sorted(ways.items())
            }
            for file, ways in sorted(files.items())
            if ways
        },
        "nothing_passed_without": nothing_passed(files),
        "not_run": lacking,
        "forced_refused_by_name": refused,
        "again": again,
        "differ": problems(files),
    }


def _refused(ways: Ways) -> int:
    """Tests that pass without, and with a backend forced end by an error that names the setting."""
    passing = {t for t, e in ways.get("without", {}).items() if e["outcome"] == "passed"}
    forced = ways.get("forced", {})
    return sum("ConfigError" in str(forced[test].get("error")) for test in passing & set(forced))


def table() -> str:
    """A row for each run: files and tests that passed without and with, and what differs."""
    heads = ("run", "files", "tests passed without", "of these with", "with a backend forced")
    heads = (*heads, "overlapped calls", "differ")
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for run in json.loads(KEPT.read_text()):
        files: dict[str, dict[str, dict[str, int]]] = run["files"]
        whole = {name: ways for name, ways in files.items() if {"without", "with"} <= set(ways)}
        passed = {
            way: sum(ways.get(way, {}).get("passed", 0) for ways in whole.values()) for way in WAYS
        }
        forced = [ways for ways in whole.values() if "forced" in ways]
        base = sum(ways["without"].get("passed", 0) for ways in forced)
        refused = sum(run["forced_refused_by_name"].values())
        ours = sum(ways["with"].get("overlapped", 0) for ways in whole.values())
        name = f"{run['ranks']} CPU ranks" if not run["gpus"] else f"{run['gpus']} GPU"
        cells = (
            f"{name}, {', '.join(str(commit)[:7] for commit in run['commits'])}",
            f"{len(whole)} of {len(set(files) | set(run['not_run']))}",
            passed["without"],
            passed["with"],
            f"{passed['forced']} of {base}, {refused} refused by name",
            ours,
            len(run["differ"]),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Write what is kept, and print the table and what differs."""
    runs = [kept(json.loads(Path(name).read_text())) for name in arguments]
    KEPT.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")
    print(table())
    for run in runs:
        print("\n".join(run["differ"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
