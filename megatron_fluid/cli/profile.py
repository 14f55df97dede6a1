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

CPU ranks share their memory, which leaves no communication to hide. So without GPUs, --compare
lets ranks be hosts that a slow wire joins: the loopback of a network namespace, limited by tc.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_fluid.cli.terminal import positive, run_command, writable_folder, writing
from megatron_fluid.errors import ConfigError
from megatron_fluid.profiling.draw import draw
from megatron_fluid.profiling.timeline import Timeline, read_timeline
from megatron_fluid.profiling.traces import chosen_events, read_document

__all__ = ["HELP", "add_arguments", "run"]

HELP = "trace a training command, or one MoE layer, and say how much communication was hidden"

_LAYER_TRACE = "moe_layer.json.gz"  # profile_layer.py writes it
_TRACE = "trace for https://ui.perfetto.dev: {}"
# Both directions together. The layer computes for about as long as its tokens take over this wire.
_WIRE_MBIT = 300
_WIRE = (
    "ip link set lo up && tc qdisc add dev lo root tbf burst 128kb limit 32mb "
    f'rate {_WIRE_MBIT}mbit && exec "$@"'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the subcommand takes."""
    add = parser.add_argument
    output = "folder for traces and pictures (default: profile)"
    add("--output", type=Path, default=Path("profile"), help=output)
    trace = "read this trace and run nothing; may be repeated"
    add("--trace", type=Path, action="append", default=[], help=trace)
    ranks = "ranks of the MoE layer (default: one per GPU, or 2 on a CPU)"
    add("--ranks", type=positive, help=ranks)
    compare = "draw the MoE layer with a plain all-to-all and with this package, on one page"
    add("--compare", action="store_true", help=compare)
    steps = "steps of the training to trace, END not included (default: 4 6)"
    add("--steps", type=int, nargs=2, default=(4, 6), metavar=("FIRST", "END"), help=steps)
    program = "a Megatron training command"
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help=program)


def run(args: argparse.Namespace) -> int:
    """Trace and summarise.

    Returns:
        0, or the traced program's exit status.

    Raises:
        ConfigError: a wrong command line, or no trace.
    """
    first, end = args.steps
    if not 0 <= first < end:
        allowed = "FIRST of 0 or more, and END larger than FIRST"
        raise ConfigError.of("--steps", f"{first} {end}", allowed)
    if args.program[:1] == ["--"]:
        args.program = args.program[1:]
    if sum(map(bool, (args.compare, args.trace, args.program))) > 1:
        raise ConfigError("--compare, --trace and COMMAND are mutually exclusive")
    if not args.trace:
        writable_folder("--output", args.output)  # which ranks cannot refuse in one line
    if args.compare:
        return _compare(args)
    status, traces = 0, args.trace
    if args.program:
        status, traces = _trace_training(args)
    elif not traces:
        status, traces = _trace_layer(args.output, args.ranks), [args.output / _LAYER_TRACE]
    if status:
        return status
    for path in traces:
        timeline = _timeline(path, path.name)
        print("\n".join((_TRACE.format(path), *timeline.lines())), flush=True)
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Trace the layer with a plain all-to-all and with this package, and draw both."""
    wire: list[str] = []
    place = ""
    if not torch.cuda.is_available():
        wire = _slow_wire()
        if wire:
            print(f"no GPU: each rank plays a host; a wire of {_WIRE_MBIT} Mbit/s joins them")
            place = f", ranks play hosts that a wire of {_WIRE_MBIT} Mbit/s joins, without GPUs"
        else:
            place = ", ranks on CPU cores of one machine, without GPUs or a wire"
            print(
                "no GPU: the ranks share this machine's memory, which leaves no wire to hide. "
                "Linux with network namespaces, ip and tc (iproute2) would play two hosts"
            )
    timelines = {}
    for name, title in (("baseline", "plain all-to-all"), ("fluid", "megatron_fluid")):
        if status := _trace_layer(args.output / name, args.ranks, wire, name == "baseline"):
            return status
        trace = args.output / name / _LAYER_TRACE
        timelines[trace] = _timeline(trace, title)
    print(verdict := _verdict(*timelines.values()))
    for timeline in timelines.values():
        print("\n".join(timeline.lines()), flush=True)
    heading = f"{verdict} (one MoE layer, forward and backward{place})"
    with writing("--output", args.output):
        pictures = draw([*timelines.values()], args.output, heading)
    for path in pictures:
        print(f"picture: {path}")
    for path in timelines:
        print(_TRACE.format(path))
    return 0


def _timeline(path: Path, title: str) -> Timeline:
    """The timeline of a trace. Raises ConfigError: it is damaged, or of another program."""
    document = read_document(path)
    kinds = sorted({str(event.get("cat", "none")) for event in document["traceEvents"]})[:6]
    found = f"{len(document['traceEvents'])} events of the categories {', '.join(kinds) or 'none'}"
    try:
        if chosen_events(document["traceEvents"]):
            return read_timeline(document, title)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        found += f", one of which cannot be read ({type(error).__name__}: {error})"
    allowed = "torch.profiler's kernel, gpu_memcpy, gpu_memset, cpu_op and user_annotation"
    raise ConfigError.of(f"trace {path}", found, allowed)


def _verdict(plain: Timeline, fluid: Timeline) -> str:
    """How the two steps compare, in one line."""
    times = plain.length / max(fluid.length, 1e-9)
    hidden = next(value for label, value in fluid.figures if label == "hidden share")
    lengths = f"{plain.length / 1e3:.0f} -> {fluid.length / 1e3:.0f} ms a step"
    what = f"{hidden} of the communication hidden" if "%" in hidden else hidden
    if times < 1.05:
        return f"no gain: {lengths}, {what}"
    return f"{times:.1f} times as fast: {lengths}, {what}"


def _slow_wire() -> list[str]:
    """What to write before a command so that its ranks talk over a slow wire: a network namespace
    of its own, which needs root or user namespaces. Empty where this machine has neither."""
    for namespaces in ("-rn", "-n"):
        words = ["unshare", namespaces, "sh", "-c", _WIRE, "sh"]
        try:
            if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
                return words
        except OSError:
            return []
    return []


def _trace_training(args: argparse.Namespace) -> tuple[int, list[Path]]:
    """Trace steps of rank 0 of the command by Megatron's own profiler; the status and the traces,
    which lie in OUTPUT/torch_profile."""
    output, (first, end) = args.output.resolve(), args.steps
    flags = "--profile --use-pytorch-profiler --profile-ranks 0"
    flags += f" --profile-step-start {first} --profile-step-end {end}"
    command = [*args.program, *flags.split(), "--tensorboard-dir", str(output / "tensorboard")]
    started = time.time()
    status = run_command(command, os.environ)
    # Skip traces of earlier runs; the clocks of file systems are coarse.
    written = output.rglob("*.json.gz")
    traces = sorted(path for path in written if path.stat().st_mtime >= started - 2)
    if status == 0 and not traces:
        raise ConfigError(
            f"{output}: the program succeeded but wrote no trace; "
            f"COMMAND must be a Megatron training of more than {end} iterations"
        )
    return status, traces


def _trace_layer(
    output: Path, ranks: int | None, wire: Sequence[str] = (), baseline: bool = False
) -> int:
    """Trace the MoE layer on ranks that the words of `wire` start; returns the exit status."""
    ranks = ranks or torch.cuda.device_count() or 2
    launcher = f"-m megatron_fluid.cli run --nproc_per_node {ranks}"
    layer = ["-m", "megatron_fluid.cli.profile_layer", str(output.resolve())]
    command = [*wire, sys.executable, *launcher.split(), *layer]
    command += ["--baseline"] if baseline else []
    command += ["--hosts"] if wire else []
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if wire:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    output.mkdir(exist_ok=True)
    with (output / "moe_layer.log").open("w+", errors="replace") as file:
        if status := run_command(command, environment, file):
            file.seek(0)
            print("".join(file.readlines()[-15:]), end="", file=sys.stderr)
    return status
