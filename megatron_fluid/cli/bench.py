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

# A short name -> the suite, and what it is given before the user's own options, on a GPU and
# without one.
_SHORT = {"tp": ("tp_overlap", ("--sweep", "layers"), ("--sweep", "tiny"))}

# Where launch.sh looks for programs, below benchmarks/.
_FOLDERS = ("", "suites", "harness", "report", "tune")
# Programs that are no suites: launch.sh starts one process of them.
_ONE_PROCESS = (
    "cold_start",
    "host_time",
    "losses",
    "pictures",
    "pretrain",
    "run_all",
    "slow_wire",
    "timeline",
    "tp_table",
    "wire_plan",
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "bench", help="list the benchmark suites, or run one", description=__doc__
    )
    parser.add_argument("suite", nargs="?", help="the suite to run; without it they are listed")
    ranks = "processes to start; by default one a GPU, or 2 on a CPU"
    parser.add_argument("--ranks", type=positive, metavar="N", help=ranks)
    options = "after the suite's name: passed on to it"
    parser.add_argument("options", nargs=argparse.REMAINDER, help=options)
    parser.set_defaults(run=run)


def find_suites(folder: Path | None = None) -> dict[str, str]:
    """Return name -> first line of its docstring, of every program below `benchmarks/`: the suites
    and those of `_ONE_PROCESS`.

    Raises:
        ConfigError: there is no such folder, as in an installed package.
    """
    root = folder or _folder()
    suites = {}
    paths = [path for folder in _FOLDERS for path in (root / folder).glob("*.py")]
    for path in sorted(paths, key=lambda path: path.stem):
        tree = ast.parse(path.read_text())
        tests = [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)]
        if any(test.startswith("__name__ ==") for test in tests):
            suites[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return suites


def run(args: argparse.Namespace) -> int:
    """List the suites, or run one by benchmarks/launch.sh, and hand on its exit status."""
    try:
        suites = find_suites()
        args.suite, args.options = _resolve(args.suite, args.options)
        if args.suite is not None and args.suite not in suites:
            allowed = ", ".join(suites) or "none: benchmarks/ holds no suite"
            raise ConfigError.of("suite", args.suite, allowed)
        if args.suite in _ONE_PROCESS and args.ranks is not None:
            raise ConfigError.of("--ranks", args.ranks, f"none, as {args.suite} is one process")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if args.suite is None:
        for name, summary in suites.items():
            print(f"{name:<24} {summary}{' (one process)' if name in _ONE_PROCESS else ''}")
        for short, (name, on_gpu, _) in _SHORT.items():
            if name in suites:
                print(f"{short:<24} short for {name} {' '.join(on_gpu)}")
        return 0
    environment = {**os.environ, "PYTHON": sys.executable}
    if args.ranks is not None:
        environment["NPROC"] = str(args.ranks)
    command = ["bash", str(_folder() / "launch.sh"), args.suite, *args.options]
    return subprocess.run(command, env=environment).returncode


def _resolve(suite: str | None, options: list[str]) -> tuple[str | None, list[str]]:
    """Return suite and options, a short name replaced by what it stands for."""
    if suite not in _SHORT:
        return suite, options
    import torch

    name, on_gpu, on_cpu = _SHORT[suite]
    if torch.cuda.is_available():
        return name, [*on_gpu, *options]
    instead = f"{' '.join(on_cpu)} instead of {' '.join(on_gpu)}"
    print(f"no GPU: {instead}, whose sizes are for GPUs", file=sys.stderr)
    return name, [*on_cpu, *options]


def _folder() -> Path:
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        if (root / "benchmarks" / "launch.sh").is_file() and (root / "megatron_fluid").is_dir():
            return root / "benchmarks"
    where = "they come with the source tree, not with the installed package"
    raise ConfigError(f"benchmarks: {where}; run this in a checkout")
