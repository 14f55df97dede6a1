"""Argument types and one-line errors of the command line."""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from megatron_fluid.errors import ConfigError

__all__ = ["BriefParser", "install_command", "positive", "run_command"]


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


def install_command(extra: str) -> str:
    """Return the pip command that installs an extra of this package.

    A source tree that is not installed is named by its path: no registry has the package.
    """
    try:
        importlib.metadata.distribution("megatron-fluid")
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '{Path(__file__).parents[2]}[{extra}]'"
    return f"pip install 'megatron-fluid[{extra}]'"


def run_command(
    command: Sequence[str], environment: Mapping[str, str], log: IO[str] | None = None
) -> int:
    """Run a command that the user gave, with its output in `log` if there is one; its exit status.

    Raises:
        ConfigError: the command does not exist or is not executable.
    """
    errors = None if log is None else subprocess.STDOUT
    try:
        return subprocess.run(command, env=environment, stdout=log, stderr=errors).returncode
    except OSError as error:
        raise ConfigError(f"COMMAND: cannot start {command[0]!r}: {error.strerror}") from error
