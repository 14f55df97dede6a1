"""`megatron-fluid bench`: list the benchmark suites of the source tree, or run one of them on this
machine's GPUs.

`megatron-fluid bench tp` measures the tensor-parallel linears of real models and recommends a
backend for each.
"""

import argparse
import ast
import os
import subprocess
import sys
from pathlib import Path

from megatron_fluid.cli.arguments import positive
from megatron_fluid.errors import ConfigError

__all__ = ["add_parser", "find_suites", "run"]

# Where launch.sh looks for programs, below benchmarks/.
_FOLDERS = ("", "suites", "harness", "report", "tune")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "bench", help="list the benchmark suites, or run one", description=__doc__
    )
    parser.add_argument("suite", nargs="?", help="the suite to run; without it they are listed")
    ranks = "ranks of the suite; by default one a GPU, or 2 on a CPU"
    parser.add_argument("--ranks", type=positive, metavar="N", help=ranks)
    options = "after the suite's name: passed on to it"
    parser.add_argument("options", nargs=argparse.REMAINDER, help=options)
    parser.set_defaults(run=run)


def find_suites(folder: Path | None = None) -> dict[str, str]:
    """Return name -> first line of the docstring, of every program below `benchmarks/`.

    Raises:
        ConfigError: there is no such folder, as in an installed package.
    """
    root = folder or _folder()
    suites = {}
    paths = [path for folder in _FOLDERS for path in (root / folder).glob("*.py")]
    for path in sorted(paths, key=lambda path: path.stem):
        text = path.read_text()
        if '\nif __name__ == "__main__":' in text:
            suites[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return suites


def run(args: argparse.Namespace) -> int:
    """List the suites, or run one by benchmarks/launch.sh and return its exit status."""
    suite, options = args.suite, args.options
    try:
        suites = find_suites()
        if suite == "tp":
            suite, options = "tp_overlap", [*_tp_sweep(), *options]
        if suite is not None and suite not in suites:
            raise ConfigError.of("suite", suite, ", ".join(suites))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if suite is None:
        for name, summary in suites.items():
            print(f"{name:<24} {summary}")
        print(f"{'tp':<24} short for tp_overlap --sweep layers")
        return 0
    environment = {**os.environ, "PYTHON": sys.executable}
    if args.ranks is not None:
        environment["NPROC"] = str(args.ranks)
    command = ["bash", str(_folder() / "launch.sh"), suite, *options]
    return subprocess.run(command, env=environment).returncode


def _tp_sweep() -> list[str]:
    import torch

    if torch.cuda.is_available():
        return ["--sweep", "layers"]
    print("no GPU: --sweep tiny instead of --sweep layers, whose sizes need one", file=sys.stderr)
    return ["--sweep", "tiny"]


def _folder() -> Path:
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / "benchmarks" / "launch.sh").is_file() and (root / "megatron_fluid").is_dir():
            return root / "benchmarks"
    where = "they come with the source tree, not with the installed package"
    raise ConfigError(f"benchmarks: {where}; run this in a checkout")
