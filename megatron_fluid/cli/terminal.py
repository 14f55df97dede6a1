"""Argument types, one-line errors, and tables that fit a terminal of 100 columns."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NoReturn

from megatron_fluid.errors import ConfigError

__all__ = [
    "WIDTH", "BriefParser", "install_command", "paragraph", "positive", "run_command",
    "wrapped_table", "writable_folder", "writing",
]  # fmt: skip

WIDTH = 100


class BriefParser(argparse.ArgumentParser):
    """A parser whose errors are one line on standard error, without the usage; exit status 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2)


def positive(text: str) -> int:
    """Parse a whole number of at least 1; argparse puts the argument's name before the error."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: 1 or more")
    return number


@contextmanager
def writing(setting: str, path: Path) -> Iterator[None]:
    """Raises ConfigError, which names `setting`, where `path` cannot be written."""
    try:
        yield
    except OSError as error:
        allowed = f"a path that can be written ({error.strerror})"
        raise ConfigError.of(setting, str(path), allowed) from error


def writable_folder(setting: str, folder: Path) -> None:
    """Make a folder. Raises ConfigError, which names `setting`, where 1 MiB cannot be written."""
    with writing(setting, folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))


def install_command(extra: str) -> str:
    """Return the pip command that installs what an extra of this package needs: no registry has the
    package, so a source tree that is not installed is named by its path."""
    try:
        needs = importlib.metadata.distribution("megatron-fluid").requires or []
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '{Path(__file__).parents[2]}[{extra}]'"
    of_extra = re.compile(rf"""extra == ['"]{extra}['"]""")
    names = (need.partition(";")[0].strip() for need in needs if of_extra.search(need))
    return f"pip install {shlex.join(names)}"


def run_command(
    command: Sequence[str], environment: Mapping[str, str], log: IO[str] | None = None
) -> int:
    """Run a command that the user gave, with its output in `log` if there is one; its exit status.
    Ctrl-C, which the terminal sends to the command as well, and SIGTERM and SIGHUP, which are
    passed on, are raised once the command has ended. A signal that ends the command gives 128 and
    its number, as in a shell.

    Raises:
        ConfigError: the command does not exist or is not executable.
    """
    errors = None if log is None else subprocess.STDOUT
    process: subprocess.Popen[bytes] | None = None
    asked: list[int] = []  # signals

    def stop(number: int, _: object) -> None:
        asked.append(number)
        if process is not None:  # else it is starting
            process.send_signal(number)
            raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup asks
            signal.signal(number, stop)
    try:
        try:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=errors)
        except OSError as error:
            raise ConfigError(f"COMMAND: cannot start {command[0]!r}: {error.strerror}") from error
        try:
            if asked:
                stop(asked[0], None)
            status = process.wait()
            return status if status >= 0 else 128 - status
        except (KeyboardInterrupt, SystemExit):
            while process.poll() is None:  # a launcher that is killed leaves its ranks behind
                with suppress(KeyboardInterrupt, SystemExit):  # a second signal
                    process.wait()
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wrapped_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose last column is wrapped so that no line is longer than WIDTH.

    Line breaks in the last column are kept.
    """
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    left = sum(widths) + 2 * len(widths)
    texts = []
    for number, (*cells, last) in enumerate(lines):
        start = "".join(cell.ljust(w) + "  " for cell, w in zip(cells, widths, strict=True))
        pieces = [piece for text in last.split("\n") for piece in _wrap(text, WIDTH - left)]
        texts += [(start if i == 0 else " " * left) + piece for i, piece in enumerate(pieces)]
        if number == 0:
            longest = max(min(len(line[-1]), WIDTH - left) for line in lines)
            texts.append("  ".join("-" * width for width in (*widths, longest)))
    return "\n".join(text.rstrip() for text in texts)


def paragraph(text: str, indent: str = "", first: str | None = None) -> str:
    """Wrap text to WIDTH; each line starts with `indent`, the first one with `first`."""
    begin = indent if first is None else first
    lines = _wrap(text, WIDTH - max(len(indent), len(begin)))
    return "\n".join((begin if i == 0 else indent) + line for i, line in enumerate(lines))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
