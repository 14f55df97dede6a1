"""Run a program on ranks as torchrun does, but forked from the server that has imported torch and
Megatron-Core and armed the patches. Flags that patches look for when they are armed are refused."""

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import megatron_fluid  # noqa: F401 (its patches are in place before ranks are forked)
from tests.support.fresh_program import exit_status
from tests.support.launch import HANG_S, run_ranks_outcomes

_TOO_LATE = {"--fluid-cpu", "--fluid-disable-patch", "--fluid-allow-unsupported-megatron"}


def run_program(
    script: Path, ranks: int, flags: Sequence[str], folder: Path, variables: Mapping[str, str],
    timeout_s: float = HANG_S,
) -> tuple[int, str]:  # fmt: skip
    """Run `script` in `folder` on gloo ranks, with `flags` on its command line and environment
    `variables` set before anything of ours is imported. Returns the first exit status that is not
    0, or 0, and what all ranks printed."""
    if late := _TOO_LATE.intersection(flag.partition("=")[0] for flag in flags):
        raise ValueError(f"the patches are armed before the flags are read: {', '.join(late)}")
    with tempfile.TemporaryDirectory(prefix="program-") as logs:
        log = Path(logs, "output.txt")
        log.touch()
        outcomes = run_ranks_outcomes(
            *(run_here, ranks, str(script), list(flags), str(folder), str(log)),
            backend="",
            timeout_s=timeout_s,
            env={"CUDA_VISIBLE_DEVICES": "", **variables},
        )
        output = log.read_text(errors="replace")
    codes = [outcome.value if outcome.ok else 1 for outcome in outcomes]
    told = "".join(f"rank {o.rank}: {o.error}\n{o.stacks}\n" for o in outcomes if not o.ok)
    return next((code for code in codes if code), 0), output + told


def run_here(
    rank: int, ranks: int, script: str, flags: Sequence[str], folder: str, log: str
) -> int:
    """The exit status of the program on this rank, which appends to `log` what it prints."""
    os.chdir(folder)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))  # as for `python script`
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    for text in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # not of a file
            text.reconfigure(line_buffering=True, write_through=False)  # lines do not mix
    return exit_status(lambda: runpy.run_path(script, run_name="__main__"))
