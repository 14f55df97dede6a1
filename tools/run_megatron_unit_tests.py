"""Run Megatron-LM's own unit tests with megatron_fluid's patches and without, and compare.

    python tools/run_megatron_unit_tests.py --megatron-lm PATH

PATH is a checkout of Megatron-LM at the tag that belongs to the supported megatron-core
(core_v0.19.x). It is only run: its folder goes first on the path, so that its own megatron.core is
the one that is tested. On a machine without a GPU both runs have CPU mode (gloo), and "without"
means CPU mode alone. The exit status is 0 if every test has the same outcome both ways.

A test's outcome is its worst over all ranks. Ranks that a failed test leaves waiting for one
another are ended by the timeout; what then did not run counts as missing.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

__all__ = ["FILES", "compare", "main", "read_outcomes", "table"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "tests/unit_tests/transformer/moe"
FILES = (
    "test_a2a_token_dispatcher.py",
    "test_shared_experts.py",
    "test_moe_layer.py",
    "test_routers.py",
    "test_sequential_mlp.py",
)
# From best to worst; a test is as good as its worst rank.
_ORDER = ("skipped", "passed", "failed")
# Megatron's conftest downloads data sets that none of these tests reads: this takes the place of
# the library it uses.
_NO_DOWNLOADS = "def get(*args, **kwargs):\n    raise RuntimeError('no downloads in this run')\n"


def read_outcomes(folder: Path) -> dict[str, str]:
    """Test id -> worst outcome over ranks, from the files that the pytest plug-in wrote. A failing
    teardown fails the test."""
    outcomes: dict[str, str] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            known = outcomes.get(entry["test"], _ORDER[0])
            outcomes[entry["test"]] = max(known, entry["outcome"], key=_ORDER.index)
    return outcomes


def compare(without: Mapping[str, str], with_: Mapping[str, str]) -> list[str]:
    """One line a test whose outcome is not the same in both; "missing" where it did not run to its
    end."""
    lines = []
    for test in sorted({*without, *with_}):
        before, after = without.get(test, "missing"), with_.get(test, "missing")
        if before != after:
            lines.append(f"{test}: {before} without, {after} with megatron_fluid")
    return lines


def table(results: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]) -> str:
    """A row a file: passed / failed / skipped without and with."""
    rows = [("file", "without (pass/fail/skip)", "with (pass/fail/skip)", "same")]
    for name, (without, with_) in results.items():
        rows.append(
            (
                name,
                _counts(without),
                _counts(with_),
                "yes" if without and not compare(without, with_) else "NO",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _counts(outcomes: Mapping[str, str]) -> str:
    count = collections.Counter(outcomes.values())
    return f"{count['passed']}/{count['failed']}/{count['skipped']}"


def _environment(folder: Path, patched: bool) -> dict[str, str]:
    """The environment of one run: the package on the path (but not this folder's `tests`), and the
    choice of patches."""
    path = folder / "path"
    path.mkdir()
    (path / "megatron_fluid").symlink_to(ROOT / "megatron_fluid", target_is_directory=True)
    (path / "requests.py").write_text(_NO_DOWNLOADS)
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(path), environment.get("PYTHONPATH", "")])
    )
    environment["MEGATRON_FLUID_TEST_RESULTS"] = str(folder)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not patched:
        if torch.cuda.is_available():
            environment["MEGATRON_FLUID"] = "off"
        else:
            environment["MEGATRON_FLUID_PATCHES"] = "cpu"
    return environment


def _run(checkout: Path, file: str, patched: bool, options: argparse.Namespace) -> dict[str, str]:
    """Run one file on all ranks; its output goes to a log, whose end is shown if a rank failed."""
    with tempfile.TemporaryDirectory(prefix="megatron-unit-tests-") as temporary:
        folder = Path(temporary)
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={options.ranks}",
        ]
        command += [
            "-m",
            "pytest",
            "-p",
            "megatron_fluid.pytest_plugin",
            "-p",
            "no:cacheprovider",
            "-q",
        ]
        command += ["-W", "ignore", f"--timeout={options.test_timeout}", "--timeout-method=thread"]
        command += [*options.pytest_args, f"{FOLDER}/{file}"]
        log = folder / "log"
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=checkout,
                env=_environment(folder, patched),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                code = str(process.wait(options.file_timeout))
            except subprocess.TimeoutExpired:
                code = f"ended after {options.file_timeout} s"
            finally:
                _end(process)
        outcomes = read_outcomes(folder)
        name = "with" if patched else "without"
        seconds = time.monotonic() - started
        print(
            f"{file} {name}: {_counts(outcomes)} (pass/fail/skip) in {seconds:.0f} s, exit {code}",
            flush=True,
        )
        if code != "0" or options.verbose:
            print(
                "\n".join(log.read_text(errors="replace").splitlines()[-options.log_lines :]),
                flush=True,
            )
        return outcomes


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let torchrun end its ranks, which a plain kill would leave behind."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the table, and say whether both ways agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron-lm", type=Path, required=True, metavar="PATH", help="a Megatron-LM checkout"
    )
    parser.add_argument(
        "--ranks", type=int, default=8, help="processes (default: %(default)s, what the tests want)"
    )
    parser.add_argument(
        "--files", nargs="+", default=list(FILES), metavar="FILE", help=f"files in {FOLDER}"
    )
    parser.add_argument(
        "--test-timeout",
        type=int,
        default=600,
        metavar="S",
        help="for one test (default: %(default)s)",
    )
    parser.add_argument(
        "--file-timeout",
        type=int,
        default=3600,
        metavar="S",
        help="for one file (default: %(default)s)",
    )
    parser.add_argument(
        "--log-lines", type=int, default=40, help="lines of a failed run's log to show"
    )
    parser.add_argument("--verbose", action="store_true", help="show the end of every run's log")
    parser.add_argument(
        "pytest_args", nargs="*", default=[], help="further arguments for pytest, after --"
    )
    options = parser.parse_args(arguments)
    checkout = options.megatron_lm.resolve()
    if missing := [file for file in options.files if not (checkout / FOLDER / file).is_file()]:
        parser.error(
            f"--megatron-lm: {checkout} has no {FOLDER}/{missing[0]}; a checkout at tag "
            "core_v0.19.x is needed"
        )
    results = {}
    for file in options.files:
        results[file] = (_run(checkout, file, False, options), _run(checkout, file, True, options))
    print("\n" + table(results))
    differences = [line for without, with_ in results.values() for line in compare(without, with_)]
    empty = [file for file, (without, _) in results.items() if not without]
    for line in differences + [f"{file}: no test ran" for file in empty]:
        print(line)
    return 1 if differences or empty else 0


if __name__ == "__main__":
    sys.exit(main())
