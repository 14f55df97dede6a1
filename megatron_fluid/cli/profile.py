"""`megatron-fluid profile`: write a trace for Perfetto, and say what share of its communication was
hidden behind computation.

megatron-fluid profile                    forward and backward of one MoE layer, on all GPUs or on
                                          2 CPU ranks
megatron-fluid profile torchrun ...       some steps of a Megatron training, by Megatron's own
                                          profiler
megatron-fluid profile --trace FILE       read an existing trace
megatron-fluid profile --compare          the MoE layer with a plain all-to-all and with this
                                          package, drawn as OUTPUT/timeline.html and timeline.png
                                          (docs/debugging.md)
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_fluid.cli.arguments import positive
from megatron_fluid.errors import ConfigError
from megatron_fluid.profiling.draw import draw
from megatron_fluid.profiling.timeline import Timeline, read_timeline
from megatron_fluid.profiling.traces import read_document

__all__ = ["add_parser", "megatron_flags", "run"]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    what = "trace a training command, or one MoE layer, and say how much communication was hidden"
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser("profile", help=what, description=__doc__, formatter_class=raw)
    add = parser.add_argument
    output = "folder for traces and pictures (default: profile)"
    add("--output", type=Path, default=Path("profile"), help=output)
    trace = "read this trace and run nothing; may be repeated"
    add("--trace", type=Path, action="append", default=[], help=trace)
    ranks = "ranks of the MoE layer (default: one per GPU, or 2 on a CPU)"
    add("--ranks", type=positive, help=ranks)
    baseline = "profile the MoE layer with a plain all-to-all"
    add("--baseline", action="store_true", help=baseline)
    compare = "profile the MoE layer both ways, and draw them on one page and one picture"
    add("--compare", action="store_true", help=compare)
    steps = "steps of the training to profile (default: 4 6)"
    add("--steps", type=int, nargs=2, default=(4, 6), metavar=("FIRST", "END"), help=steps)
    program = "a Megatron training command"
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help=program)
    parser.set_defaults(run=run)


def megatron_flags(output: Path, steps: Sequence[int]) -> list[str]:
    """Return Megatron's flags that write a trace of rank 0 to OUTPUT/torch_profile."""
    flags = "--profile --use-pytorch-profiler --profile-ranks 0"
    flags += f" --profile-step-start {steps[0]} --profile-step-end {steps[1]}"
    return [*flags.split(), "--tensorboard-dir", str(output / "tensorboard")]


def run(args: argparse.Namespace) -> int:
    """Trace and summarise.

    Returns:
        0, the traced program's exit status, or 2 for a wrong command line or a missing trace.
    """
    try:
        first, end = args.steps
        if not 0 <= first < end:
            allowed = "FIRST of 0 or more, and END larger than FIRST"
            raise ConfigError.of("--steps", f"{first} {end}", allowed)
        if args.compare and (args.baseline or args.program or args.trace):
            other = "--baseline" if args.baseline else "--trace" if args.trace else "COMMAND"
            raise ConfigError(f"--compare and {other} are mutually exclusive")
        if args.compare:
            return _compare(args)
        traces: list[Path] = args.trace
        if not traces:
            status, traces = _trace(args)
            if status:
                return status
        for path in traces:
            _say(path, path.name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _say(path: Path, title: str) -> Timeline:
    print(f"trace for https://ui.perfetto.dev: {path}")
    timeline = read_timeline(read_document(path), title)
    print("\n".join(timeline.lines()), flush=True)
    return timeline


def _compare(args: argparse.Namespace) -> int:
    """Trace the layer with a plain all-to-all and with this package, and draw both."""
    timelines, folder = [], args.output
    for name, title in (("baseline", "plain all-to-all"), ("fluid", "megatron_fluid")):
        args.baseline, args.output = name == "baseline", folder / name
        status, traces = _trace(args)
        if status:
            return status
        timelines.append(_say(traces[0], title))
    for path in draw(timelines, folder, "One MoE layer, forward and backward"):
        print(f"picture: {path}")
    return 0


def _trace(args: argparse.Namespace) -> tuple[int, list[Path]]:
    output = args.output.resolve()
    started = time.time()
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if program:
        command = [*program, *megatron_flags(output, args.steps)]
        environment = dict(os.environ)
    else:
        import torch

        ranks = args.ranks or torch.cuda.device_count() or 2
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}"
        layer = ["-m", "megatron_fluid.cli.profile_layer", str(output)]
        command = [sys.executable, *launcher.split(), *layer]
        command += ["--baseline"] if args.baseline else []
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        status = subprocess.run(command, env=environment).returncode
    except OSError as error:  # it does not exist, or is not executable
        raise ConfigError(f"COMMAND: cannot start {command[0]!r}: {error.strerror}") from error
    # Skip traces of earlier runs; the clocks of file systems are coarse.
    written = output.rglob("*.json.gz")
    traces = sorted(path for path in written if path.stat().st_mtime >= started - 2)
    if status == 0 and not traces:
        raise ConfigError(
            f"{output}: the program succeeded but wrote no trace; "
            f"COMMAND must be a Megatron training of more than {args.steps[1]} iterations"
        )
    return status, traces
