"""Types of arguments that several subcommands take."""

import argparse

__all__ = ["positive"]


def positive(text: str) -> int:
    """A whole number of at least 1: argparse names the argument before what is said here."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, allowed: 1 or more")
    return number
