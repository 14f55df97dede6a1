"""`megatron-fluid compare`: train the first steps of a command without this package, with it, and
without it again, and write one page that says what changed.

megatron-fluid compare torchrun --nproc-per-node 8 pretrain_gpt.py FLAGS

Data, seed and flags are the command's own. Losses and gradient norms are laid over each other, and
the difference that the package makes stands beside the difference of the two runs without it. The
runs write no checkpoint (--save is left out), and every step is logged. Under --load they end at
the next iteration that --steps divides.

The numbers agree, and the exit status is 0, if the losses with and without the package differ by at
most --tolerance in relation to the loss, on average over all steps, or by at most three times as
much as those of the two runs without it. They never agree where a run lacks a step or a loss is not
a finite number. Status 1: they do not. Status 2: the command line is wrong. A run that fails ends
the comparison with its own status.
"""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_fluid.cli.terminal import positive, run_command, writable_folder, writing
from megatron_fluid.errors import ConfigError
from megatron_fluid.profiling.compare_page import Comparison, Step, write_page

__all__ = ["HELP", "add_arguments", "prepare", "read_log", "run"]

HELP = "train some steps of a command with and without this package, and compare them"

_VALUE = r"\s*:?\s*(-?(?:\d+\.?\d*(?:E[-+]?\d+)?|nan|inf))(?=\s*\|)"
_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*\d+ \|")
_FIELDS = {
    "ms": re.compile(r"elapsed time per iteration \(ms\)" + _VALUE, re.I),
    "loss": re.compile(r"\blm loss" + _VALUE, re.I),
    "grad_norm": re.compile(r"\bgrad norm" + _VALUE, re.I),
}
# Of a step that the loss scale made Megatron skip: its loss was finite, and may not be logged.
_SKIPPED = re.compile(r"skipped iterations:\s*[1-9].*\bnan iterations:\s*0\b")
_MEMORY = re.compile(r"\[Rank 0\].*max allocated:?\s*(\d+\.?\d*)")
_IMPORTS = re.compile(r"^\s*(?:import|from) megatron_fluid\b", re.M)
_NO_GPU = (
    "no GPU: ranks share this machine's memory, which leaves no wire to hide. Losses can be "
    "compared; times say nothing of GPUs"
)
_LEFT_OUT = (
    "--save", "--save-interval", "--tensorboard-dir", "--exit-interval", "--log-interval",
    # which write into the folder of one of these, or the working folder
    "--fluid-profile-steps", "--wandb-project", "--profile", "--use-pytorch-profiler",
)  # fmt: skip
# What this package prints, maybe behind torchrun's "[default0]:".
_OURS = re.compile(r"(?:\[\w+\]:)?megatron_fluid(?:: | \d|$)")
# The start-up table, one row a feature; its first column is the widest.
_TABLE = re.compile(
    r"^feature +state.*\n-+ .*\n(?:\S.* (?:on|off|no effect) .*\n(?: {20}.*\n)*)*", re.M
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the subcommand takes."""
    add = parser.add_argument
    add("--steps", type=positive, default=20, help="steps of each run (default: %(default)s)")
    warm_up = "first steps that no time is taken of (default: %(default)s)"
    add("--warm-up", type=int, default=5, metavar="STEPS", help=warm_up)
    tolerance = "relative difference of losses that is allowed (default: %(default)s)"
    add("--tolerance", type=float, default=0.005, help=tolerance)
    folder = "folder of the page, its picture and the runs' logs (default: compare)"
    add("--output", type=Path, default=Path("compare"), help=folder)
    program = "a Megatron training command"
    add("program", nargs=argparse.REMAINDER, metavar="COMMAND", help=program)


def run(args: argparse.Namespace) -> int:
    """Train three times, write the page, and say what it says.

    Returns:
        0 if the numbers agree, 1 if not, or the status of a run that failed.

    Raises:
        ConfigError: the command line is wrong, or the command is no training.
    """
    if args.steps < 2:
        raise ConfigError.of("--steps", args.steps, "2 or more")
    if not 0 <= args.warm_up <= args.steps - 2:
        allowed = f"0 to {args.steps - 2}, two less than --steps"
        raise ConfigError.of("--warm-up", args.warm_up, allowed)
    if not args.tolerance >= 0:
        raise ConfigError.of("--tolerance", args.tolerance, "0 or more")
    words = args.program[1:] if args.program[:1] == ["--"] else args.program
    commands = {on: prepare(words, args.steps, on) for on in (False, True)}
    writable_folder("--output", args.output)
    caution = "" if torch.cuda.is_available() else _NO_GPU
    if caution:
        print(caution)
    runs: list[_Log] = []
    for name, active in (("off", False), ("on", True), ("off again", False)):
        log = args.output / f"{name.replace(' ', '_')}.log"
        print(f"{name} ({len(runs) + 1} of 3): log in {log}", flush=True)
        started = time.monotonic()
        with log.open("w") as file:
            status = run_command(commands[active], _environment(active), file)
        runs.append(read_log(log.read_text(errors="replace")))
        steps = runs[-1].steps
        if len(runs) == 1:  # of something else than a training no line has a loss
            steps = [step for step in steps if not math.isnan(step.loss)]
        found = len(steps)
        print(f"  {found} steps, {time.monotonic() - started:.0f} s", flush=True)
        if status:
            writable_folder("--output", args.output)  # a full disk cuts logs short
            print("\n".join(log.read_text(errors="replace").splitlines()[-15:]))
            print(f"the run {name!r} ended with status {status}", file=sys.stderr)
            return status
        if found < args.warm_up + 2:
            why = "it must be a Megatron training with steps left"
            if found:
                why = "raise --train-iters or --steps (a run that loads ends at a multiple of it), "
                why += "or lower --warm-up"
            raise ConfigError(
                f"COMMAND: found {found} lines 'iteration N/M | ... lm loss: ...' in {log}, at "
                f"least {args.warm_up + 2} are needed: {why}"
            )
    off, fluid, again = runs
    if not fluid.messages:
        caution += f"\nno sign of this package in {args.output / 'on.log'}, such as its start-up "
        caution += "report: check that the script imports it, and that rank 0 is on this host"
    comparison = Comparison(
        off=off.steps, on=fluid.steps, again=again.steps, warm_up=args.warm_up,
        tolerance=args.tolerance, memory_mib=(off.memory_mib, fluid.memory_mib),
        started=fluid.messages, command=commands[True], caution=caution.strip(),
    )  # fmt: skip
    print("\n".join(comparison.lines()))
    with writing("--output", args.output):
        pages = write_page(comparison, args.output)
    for path in pages:
        print(f"page: {path}")
    return int(not comparison.agrees)


@dataclass
class _Log:
    """What a run has logged: its steps, the most memory that rank 0 reported, in MiB, and what this
    package said."""

    steps: list[Step] = field(default_factory=list)
    memory_mib: float | None = None
    messages: list[str] = field(default_factory=list)


def read_log(text: str) -> _Log:
    """Read the lines that Megatron's training loop writes for each iteration.

    A line without a loss is a step whose loss is NaN. A last line that does not end was cut.
    """
    log = _Log()
    for line in text.split("\n")[:-1]:
        if at := _ITERATION.search(line):
            values = {
                name: float(found[1]) if (found := pattern.search(line)) else None
                for name, pattern in _FIELDS.items()
            }
            ms, loss, grad_norm = (values[name] for name in ("ms", "loss", "grad_norm"))
            if loss is None and not _SKIPPED.search(line):
                loss = math.nan  # which Megatron leaves out
            if ms is not None and loss is not None:
                log.steps.append(Step(int(at[1]), ms, loss, grad_norm))
        elif memory := _MEMORY.search(line):
            log.memory_mib = max(log.memory_mib or 0.0, float(memory[1]))
        elif _OURS.match(line):
            log.messages.append(line.rstrip())
    if table := _TABLE.search(text):
        log.messages += table[0].splitlines()
    return log


def prepare(words: Sequence[str], steps: int, on: bool) -> list[str]:
    """Return the command that trains `steps` steps, with the package imported before its script.

    Args:
        words: a launcher with its flags, a Python script and Megatron's flags.
        on: False leaves out this package's own flags, which Megatron does not know.

    Raises:
        ConfigError: no script is named.
    """
    from megatron_fluid.patches.arguments import check_flags

    check_flags(words, "megatron-fluid compare")
    scripts = [i for i, word in enumerate(words) if word.endswith(".py") and Path(word).is_file()]
    if not scripts:
        found = " ".join(words) or "nothing"
        raise ConfigError(f"COMMAND: found {found!r}, which names no file SCRIPT.py that exists")
    start = list(words[: scripts[0]]) or [sys.executable]
    flags = list(words[scripts[0] + 1 :])
    script = words[scripts[0]]
    text = Path(script).read_text(errors="replace")
    if "megatron_fluid.run" not in start and not _IMPORTS.search(text):
        start = [*start, "-m", "megatron_fluid.run"]
    ours = () if on else ("--fluid-", "--no-fluid-")
    flags = list(_without(flags, ours))
    return [*start, script, *flags, "--exit-interval", str(steps), "--log-interval", "1"]


def _without(flags: Sequence[str], ours: tuple[str, ...]) -> list[str]:
    """`flags` without those of _LEFT_OUT, and without those that begin as `ours` say, each with its
    values."""
    kept, dropping = [], False
    for word in flags:
        if word.startswith("--"):
            name = word.split("=")[0]
            dropping = name in _LEFT_OUT or name.startswith(ours)
        if not dropping:
            kept.append(word)
    return kept


def _environment(on: bool) -> Mapping[str, str]:
    """Of a run. Without a GPU, "off" leaves CPU mode, without which Megatron does not start."""
    environment = {**os.environ, "MEGATRON_FLUID": "on", "MEGATRON_FLUID_VERBOSE": "1"}
    environment["PYTHONUNBUFFERED"] = "1"
    environment.pop("MEGATRON_FLUID_PROFILE_STEPS", None)  # as the flag is left out
    if on:
        return environment
    if torch.cuda.is_available():
        return {**environment, "MEGATRON_FLUID": "off"}
    from megatron_fluid import patches
    from megatron_fluid.patches.cpu import mode

    kept = {patch.name for patch in patches.PATCHES if patch.group == mode.GROUP}
    kept.add("dataset-helpers")  # Megatron's wheel lacks a file that it compiles
    others = ",".join(patch.name for patch in patches.PATCHES if patch.name not in kept)
    switches = {"MEGATRON_FLUID_CPU": "1", "MEGATRON_FLUID_DISABLE_PATCH": others}
    return {**environment, **switches}
