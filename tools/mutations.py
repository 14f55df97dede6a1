"""Break the package on purpose, one way at a time, and see which tests notice.

    python -m tools.mutations                     # every mutation of tools/mutations.toml
    python -m tools.mutations --only router       # those whose names hold a word
    python -m tools.mutations --tests tests/unit  # the same tests for each, in place of its own

Each mutation is an exact text of one file, what takes its place, what that breaks, and the tests
that are expected to fail. It is applied in a copy of the tree, never in place. A text that is not
in its file exactly once is an error, by the mutation's name: the list follows the code.

Exit status: 0 all were caught, 1 some were not, 2 some could not be tried.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIST", "ROOT", "Mutation", "MutationError", "main", "mutations", "mutated", "try_one"]

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutations.toml"
_COPIED = ("megatron_fluid", "patches", "tests", "tools", "benchmarks", "examples")
_PRELOADED = (
    *("pytest", "hypothesis", "torch.distributed", "torch._dynamo", "torch.profiler"),
    *("triton", "triton.language", "wrapt", "numpy"),
)
_CAUGHT, _PASSED = 1, 0  # exit statuses of pytest: tests failed, all passed


class MutationError(Exception):
    """A mutation that cannot be tried; the text begins with its name."""


@dataclass(frozen=True)
class Mutation:
    """One way to break the package.

    Attributes:
        name: unique in the list.
        file: relative to the root of the tree.
        old, new: an exact text that the file has once, and what takes its place.
        breaks: what a user would see.
        tests: arguments of pytest: a file, with -k where that is quicker.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: str


def mutations(path: Path = LIST) -> list[Mutation]:
    """Read the list.

    Raises:
        MutationError: two of one name.
    """
    found = [Mutation(**entry) for entry in tomllib.loads(path.read_text())["mutation"]]
    (name, count), *_ = collections.Counter(m.name for m in found).most_common(1)
    if count > 1:
        raise MutationError(f"{name}: this name is in the list twice")
    return found


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """Return the text of the mutation's file with the mutation in it.

    Raises:
        MutationError: no such file, or the text is not in it exactly once.
    """
    path = root / mutation.file
    if not path.is_file():
        raise MutationError(f"{mutation.name}: there is no file {mutation.file}")
    text = path.read_text()
    if (count := text.count(mutation.old)) != 1:
        raise MutationError(
            f"{mutation.name}: {mutation.file} has its text {count} times, needed: once"
        )
    return text.replace(mutation.old, mutation.new)


def _copy(root: Path, target: Path) -> None:
    """Copy the folders that tests need, and the files beside them."""
    for name in _COPIED:
        shutil.copytree(
            root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    for path in root.iterdir():
        if path.is_file():
            shutil.copy2(path, target)


def _preload() -> None:
    """Import what takes long and is not the package's, once for all runs of pytest."""
    torch = importlib.import_module("torch")
    if not torch.cuda.device_count():  # asks the driver, and makes no context
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in _PRELOADED:
        importlib.import_module(name)


def _run(tree: Path, tests: str, timeout_s: float) -> int:
    """Run pytest in a tree, in a fork of this process; its exit status. A run that hangs or
    crashes has noticed, too."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            _child(tree, tests)
        finally:
            os._exit(3)  # reached only where pytest could not be started
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return _CAUGHT if code < 0 else code
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return _CAUGHT


def _child(tree: Path, tests: str) -> None:
    """Take the tree's modules in place of this one's, and run pytest; does not return."""
    os.setsid()
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(tree), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in list(sys.modules):
        if name.partition(".")[0] in (*_COPIED, "conftest"):
            del sys.modules[name]
    command = ["-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    os._exit(int(importlib.import_module("pytest").main(command)))


def try_one(mutation: Mutation, tree: Path, tests: str = "", timeout_s: float = 600.0) -> bool:
    """Apply a mutation in `tree`, run its tests (or `tests`), restore the file; whether they
    failed.

    Raises:
        MutationError: its text is not found once, or pytest ran no test.
    """
    changed, path = mutated(mutation, tree), tree / mutation.file
    before = path.read_text()
    path.write_text(changed)
    try:
        status = _run(tree, tests or mutation.tests, timeout_s)
    finally:
        path.write_text(before)
    if status not in (_CAUGHT, _PASSED):
        raise MutationError(f"{mutation.name}: pytest ended with status {status}")
    return status == _CAUGHT


def main(argv: Sequence[str] | None = None) -> int:
    """Try mutations; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="words in names")
    parser.add_argument("--tests", default="", help="arguments of pytest for every mutation")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a run of tests")
    args = parser.parse_args(argv)
    chosen = [m for m in mutations() if any(word in m.name for word in args.only)]
    missed, errors = [], []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder)
        _copy(ROOT, tree)
        _preload()
        for number, mutation in enumerate(chosen, 1):
            begin = time.monotonic()
            try:
                caught = try_one(mutation, tree, args.tests, args.timeout)
            except MutationError as error:
                errors.append(str(error))
                print(f"{number}/{len(chosen)} ERROR {error}", flush=True)
                continue
            if not caught:
                missed.append(mutation.name)
            said = "caught" if caught else "NOT CAUGHT"
            took = time.monotonic() - begin
            print(f"{number}/{len(chosen)} {said} {mutation.name} ({took:.0f} s)", flush=True)
    print(f"{len(chosen)} mutations: {len(missed)} not caught, {len(errors)} errors")
    print("\n".join([f"not caught: {name}" for name in missed] + errors))
    return 2 if errors else 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
