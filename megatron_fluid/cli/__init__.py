"""`megatron-fluid`: check a machine, list patches, start, plan and profile trainings."""

import logging
import sys
import warnings
from collections.abc import Sequence

from megatron_fluid import __version__
from megatron_fluid.cli import compare, doctor, patches, plan, profile, run, warm
from megatron_fluid.cli.arguments import BriefParser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 0 when it succeeded.

    Args:
        argv: the command line without the program's name, `sys.argv[1:]` by default.
    """
    parser = BriefParser(prog="megatron-fluid", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (doctor, compare, patches, plan, profile, run, warm):
        module.add_parser(commands)
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        return run.run(words[1:])
    args = parser.parse_args(words)
    warnings.simplefilter("ignore")  # Megatron warns about each missing optional package
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # torch, without a GPU
    return int(args.run(args))
