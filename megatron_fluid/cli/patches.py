"""`megatron-fluid patches`: apply every patch to the installed Megatron, and print the result."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from megatron_fluid import patches
from megatron_fluid.cli.terminal import WIDTH, install_command, paragraph
from megatron_fluid.errors import PatchError
from megatron_fluid.patches.engine.patch import Row

__all__ = ["HELP", "add_arguments", "run"]

HELP = "what is patched in Megatron, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the subcommand takes."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per patch")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if MEGATRON_FLUID_STRICT is set and a patch does not fit."""
    problem = ""
    if patches.megatron_installed():
        try:
            patches.apply_all()
        except PatchError as error:
            problem = str(error)
    rows = patches.report()
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(_text(rows))
        if not patches.megatron_installed():
            print(
                "\nmegatron-core is not installed; there is nothing to patch "
                f"({install_command('megatron')})"
            )
    if problem:
        print(f"\n{problem}", file=sys.stderr)
    return 1 if problem else 0


def _text(rows: Sequence[Row]) -> str:
    """Each patch with its state, its target and its reason, in at most WIDTH columns."""
    width = max(len(row.patch) for row in rows)
    lines = ["megatron_fluid patches", f"{'patch'.ljust(width)}  state", "-" * WIDTH]
    for row in rows:
        count = "" if row.instances is None else f", {row.instances} objects"
        lines.append(f"{row.patch.ljust(width)}  {row.state}{count}")
        target = row.target
        if len(target) > WIDTH - 4:
            target = target.replace(":", ":\n    ", 1)
        lines += [f"    {target}", paragraph(row.reason, "    ")]
    return "\n".join(lines)
