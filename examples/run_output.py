"""What a training run shows: a short log on the terminal, Megatron's full one in a file, and one
final line for an error.

The terminal gets a progress bar with loss and tokens/s, or where the output is a file one line an
interval with these and the time that is left; and what this script itself says. Everything that
Megatron prints and logs goes to ``log.txt`` in the run folder; ``--fluid-verbose`` shows it on the
terminal too. Standard error is left alone.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megatron_fluid.patches.engine.switches import asked

__all__ = ["RunOutput", "short_parser"]

# how long a rank waits for the first one to show an error that both may have met
_FIRST_RANK_S = 8.0
_OURS = ("megatron_fluid", "text", "run")
_ITERATION = re.compile(
    r"iteration +(\d+)/ *(\d+) \|.*?elapsed time per iteration \(ms\): ([\d.]+)"
    r".*?global batch size: +(\d+) \|(?:.*?lm loss: ([-\d.E+naif]+))?"
)
_HELD_OUT = re.compile(
    r"validation loss at (.+?)(?: on (\w+) set)? \| lm loss value: ([-\d.E+naif]+)"
)
_SAVED = re.compile(r"successfully saved checkpoint from iteration +(\d+) to (.+?)(?: \[ t .*)?$")
_LOADED = re.compile(r"successfully loaded checkpoint from (.+?) \[ t .*at iteration +(\d+)")
_DRAWN = re.compile(r"megatron_fluid: (steps? [\d to]+), rank 0: (.+\.html)$")


class RunOutput:
    """The output of one rank, made before Megatron is imported: that prints and logs already."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.verbose = asked("verbose", argv=argv)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            if not (found := os.environ.get(name, "0")).isdecimal():
                allowed = "a whole number, as megatron-fluid run and torchrun set it"
                sys.exit(f"pretrain_gpt_moe.py: error: {name}: found {found!r}, allowed: {allowed}")
        port = os.environ.get("MASTER_PORT", "0")
        if not port.isdecimal() or int(port) > 65535:
            allowed = "a whole number up to 65535"
            sys.exit(f"pretrain_gpt_moe.py: error: MASTER_PORT: found {port!r}, allowed: {allowed}")
        self.rank = int(os.environ.get("RANK", "0"))
        self.sequence_length: int | None = None
        self._terminal: TextIO = sys.stdout
        self._file: TextIO | None = None
        self._folder: Path | None = None
        self._early: list[str] = []
        self._tail: deque[str] = deque(maxlen=5)
        self._line = ""
        self._on_terminal = self._terminal.isatty()
        self._bar: Any = None

    def start(self) -> None:
        """Take over ``sys.stdout``; without ``--fluid-verbose`` also logging and warnings."""
        sys.stdout = self  # type: ignore[assignment]
        if self.verbose:
            return
        logging.basicConfig(
            handlers=[logging.StreamHandler(self)],  # type: ignore[arg-type]
            format="%(levelname)s:%(name)s:%(message)s",
        )
        logging.captureWarnings(True)
        loud = logging.StreamHandler(sys.stderr)
        loud.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        loud.addFilter(_worth_showing)
        logging.getLogger().addHandler(loud)

    def open(self, folder: Path) -> None:
        """From here on the full log goes to ``folder``."""
        self._folder = folder
        early, self._early = self._early, []
        for line in early:
            self._keep(line)

    @property
    def path(self) -> Path | None:
        """This rank's full log."""
        name = "log.txt" if self.rank == 0 else f"log-{self.rank}.txt"
        return None if self._folder is None else self._folder / name

    def say(self, text: str) -> None:
        """Show ``text`` on the terminal, of rank 0 alone, and keep it in the log."""
        if self.rank == 0:
            self._keep(text + "\n")
            self._show(text)

    def close(self) -> None:
        """Give ``sys.stdout`` back."""
        if sys.stdout is self:
            sys.stdout = self._terminal
        if self._file is not None:
            self._file.flush()

    def fail(self, error: BaseException, by_user: bool) -> NoReturn:
        """Show ``error`` and end this process: one line where it is the user's, else after its
        traceback.

        A rank that is not the first waits a moment. If all ranks meet the same error, the launcher
        ends them when the first one leaves, and the error is shown once.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the launcher may end this rank at once
        if self.rank:
            time.sleep(_FIRST_RANK_S + 0.5 * int(os.environ.get("LOCAL_RANK", "0")))
        self.close()
        if not by_user or self.verbose:
            traceback.print_exception(error)
        what = _message(error) or _asserted(error)
        kind = "" if by_user and str(error) else f"{type(error).__name__}: "
        where = f" of rank {self.rank}" if self.rank else ""
        hint = f" (full log: {self.path})" if not by_user and self.path is not None else ""
        print(f"error{where}: {kind}{what}{hint}", file=sys.stderr, flush=True)
        sys.stderr.flush()
        raise SystemExit(2 if by_user else 1)

    def last_lines(self) -> str:
        """The end of the full log."""
        return "".join(self._tail).rstrip()

    # A text stream, as far as print() and logging need one.

    def write(self, text: str) -> int:
        """Keep whole lines, and show those that belong on the terminal."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._keep(line + "\n")
            shown = line if self.verbose else self._short(line)
            if shown is not None:
                self._show(shown)
        return len(text)

    def flush(self) -> None:
        """Push what was written to the file."""
        if self._file is not None:
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    def _show(self, text: str) -> None:
        # The bar may be another rank's; it is drawn again at its next step.
        clear = "\r\x1b[K" if self._on_terminal else ""
        self._terminal.write(f"{clear}{text}\n")
        self._terminal.flush()

    def _keep(self, text: str) -> None:
        self._tail.append(text)
        if self._folder is None:
            self._early.append(text)
            return
        if self._file is None:
            assert self.path is not None
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (for the whole run)
        self._file.write(text)

    def _short(self, line: str) -> str | None:
        """The short form of a line of Megatron's, None where it is for the file alone."""
        if found := _ITERATION.search(line):
            done, total, batch = (int(found[index]) for index in (1, 2, 4))
            seconds = float(found[3]) / 1000
            parts = [f"iteration {done:>{len(str(total))}}/{total}"]
            if found[5]:
                parts.append(f"loss {float(found[5]):.4f}")
            if self.sequence_length and seconds:
                parts.append(f"{batch * self.sequence_length / seconds:,.0f} tokens/s")
            if self._on_terminal:
                self._advance(done, total, ", ".join(parts[1:]))
                return None
            left = timedelta(seconds=round(seconds * (total - done)))
            return "  ".join([*parts, f"{left} left"])
        if found := _HELD_OUT.search(line):
            return f"{found[2] or 'validation'} loss {float(found[3]):.4f} at {found[1]}"
        if found := _SAVED.search(line):
            return f"saved {found[2]} at iteration {found[1]}"
        if found := _LOADED.search(line):
            return f"loaded {found[1]} at iteration {found[2]}"
        if found := _DRAWN.search(line):
            return f"{found[1]} drawn: {found[2]}"
        return line.strip() if "Unable to load" in line else None  # says which flag to give

    def _advance(self, done: int, total: int, facts: str) -> None:
        """Move the progress bar to an iteration that is done."""
        from tqdm import tqdm

        if self._bar is None:
            columns = shutil.get_terminal_size().columns  # 80 where the terminal does not say
            self._bar = tqdm(total=total, initial=done - 1, file=self._terminal, ncols=columns)
        self._bar.set_postfix_str(facts, refresh=False)
        self._bar.n = done
        self._bar.refresh()
        if done == total:
            self._bar.close()


def _worth_showing(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or (
        record.levelno >= logging.WARNING and record.name.startswith("megatron_fluid")
    )


def _message(error: BaseException) -> str:
    """The message of an error, and of the first rank's at a checkpoint, where torch's is a text of
    tracebacks, or the cause of one that names a peer."""
    for found in (error, error.__cause__):
        for rank, (failure, _) in getattr(found, "failures", {}).items():
            first = next(iter(str(failure).splitlines()), "")
            met = f"rank {rank}: {type(failure).__name__}: {first}"
            return met if found is error else f"{error}; {met}"
    return str(error)


def _asserted(error: BaseException) -> str:
    """The source line of an error without a message."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


# --------------------------------------------------------------------------------------------------
# the command line


def short_parser(parser: argparse.ArgumentParser, output: RunOutput) -> None:
    """Let Megatron's parser, which knows a thousand flags, speak briefly, and once for all ranks.

    An error is one line; ``--help`` shows the groups of this script first, ``--help-fluid`` shows
    them alone.
    """
    parser.usage = "torchrun --nproc-per-node N examples/pretrain_gpt_moe.py [FLAG ...]"
    full = parser.print_help

    def error(message: str) -> NoReturn:
        if found := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            near = difflib.get_close_matches(found[1], parser._option_string_actions, 1, 0.8)
            message += "".join(f"; did you mean {flag}?" for flag in near)
        output.fail(ValueError(message), by_user=True)

    def print_help(file: TextIO | None = None, only_ours: bool = False) -> None:
        output.close()
        if output.rank:
            return
        groups = parser._action_groups
        ours = [group for title in _OURS for group in groups if group.title == title]
        others = [group for group in groups if group not in ours]
        parser._action_groups = ours if only_ours else [*ours, *others]
        full(file)
        parser._action_groups = groups

    class HelpFluid(argparse.Action):
        def __call__(self, *_: Any) -> None:
            print_help(only_ours=True)
            parser.exit()

    parser.error = error  # type: ignore[method-assign]
    parser.print_help = print_help  # type: ignore[method-assign]
    group = next(group for group in parser._action_groups if group.title == "run")
    group.add_argument(
        "--help-fluid", action=HelpFluid, nargs=0, help="Show the flags of these groups alone."
    )
