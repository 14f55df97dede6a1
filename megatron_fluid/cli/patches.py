"""`megatron-fluid patches`: apply every patch to the Megatron that is installed, and print what
came of it."""

import argparse
import dataclasses
import json
import sys

from megatron_fluid import patches
from megatron_fluid.errors import PatchError
from megatron_fluid.patches.startup_report import markdown_table, patch_table

__all__ = ["add_parser", "run"]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "patches", help="what is patched in Megatron, and why", description=__doc__
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a patch")
    form.add_argument(
        "--markdown", action="store_true", help="the README's table; needs no Megatron"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if a patch does not fit."""
    if args.markdown:
        print(markdown_table(patches.PATCHES))
        return 0
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
        print(patch_table(rows))
        if not patches.megatron_installed():
            print(
                "\nmegatron-core is not installed: there is nothing to patch. "
                "(pip install 'megatron-fluid[megatron]')"
            )
    if problem:
        print(f"\n{problem}", file=sys.stderr)
    return 1 if problem else 0
