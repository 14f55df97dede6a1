"""Options of the benchmarks that would not be followed are refused by name: argument, found,
allowed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch

from megatron_fluid.kernels.flags import INTERPRETED

__all__ = ["MODES", "chosen", "need_gpu_or_smoke", "refuse_ignored"]

MODES = ("forward", "train")
"""Modes of the suites of whole layers."""


def chosen(
    parser: argparse.ArgumentParser,
    option: str,
    text: str,
    known: Iterable[str],
    beginnings: bool = False,
) -> list[str]:
    """The names of a comma-separated list, or ``beginnings`` of names; one that is not known ends
    the program."""
    names, allowed = text.split(","), list(known)
    for name in names:
        begins = beginnings and name and any(a.startswith(name) for a in allowed)
        if name not in allowed and not begins:
            of = "beginnings of" if beginnings else "some of"
            parser.error(
                f"argument {option}: found {name!r}, allowed: {of} {', '.join(allowed)}, "
                "comma-separated"
            )
    return names


def refuse_ignored(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str], where: str
) -> None:
    """End the program if one of these was given: it would do nothing, as it belongs ``where``, such
    as "with --phases"."""
    given = [
        f"--{n}".replace("_", "-") for n in names if getattr(options, n) != parser.get_default(n)
    ]
    if given:
        parser.error(f"{', '.join(given)}: allowed {where} only")


def need_gpu_or_smoke(parser: argparse.ArgumentParser, suite: str, smoke: bool) -> None:
    """End the program where there is nothing to run its kernels on: no GPU, or with --smoke no
    interpreter."""
    if INTERPRETED if smoke else torch.cuda.is_available():
        return
    found = "--smoke without Triton's interpreter" if smoke else "no GPU"
    parser.error(
        f"found {found}; one tiny case runs without a GPU: TRITON_INTERPRET=1 NPROC=1 "
        f"benchmarks/launch.sh {suite} --smoke"
    )
