"""The argument types and the one-line errors of the command line."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

__all__ = ["BriefParser", "install_command", "positive", "with_suggestions"]


class BriefParser(argparse.ArgumentParser):
    """A parser whose errors are one line on standard error, without the usage; exit status 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {with_suggestions(self, message)}", file=sys.stderr)
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


def with_suggestions(parser: argparse.ArgumentParser, message: str) -> str:
    """Return argparse's message with the nearest existing names.

    Args:
        parser: its flags, and those of its subcommands, are the existing names.
        message: what argparse says.
    """
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown != message:
        words = [word for word in unknown.split() if word.startswith("-")] or [unknown]
        flags = list(dict.fromkeys(_flags(parser)))
        return "; ".join(
            f"unknown flag {word}{_meant(word.split('=')[0], flags)}" for word in words
        )
    choice = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
    if choice is None:
        return message
    allowed = [word.strip(" '") for word in choice[3].split(",")]
    found = f"{choice[1]}: found {choice[2]!r}, allowed: {', '.join(allowed)}"
    return found + _meant(choice[2], allowed)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _flags(each)


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""
