"""Argument types and one-line errors of the command line."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import NoReturn

__all__ = ["BriefParser", "install_command", "positive"]


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
