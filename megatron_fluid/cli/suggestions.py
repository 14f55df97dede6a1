"""A command line's errors in one line, with the names that were perhaps meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

__all__ = ["BriefParser", "with_suggestions"]


class BriefParser(argparse.ArgumentParser):
    """A parser whose errors are one line on standard error, without the usage; exit status 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {with_suggestions(self, message)}", file=sys.stderr)
        raise SystemExit(2)


def with_suggestions(parser: argparse.ArgumentParser, message: str) -> str:
    """argparse's message, with the nearest names that exist.

    Args:
        parser: knows the flags, also those of its subcommands.
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
