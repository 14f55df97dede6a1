"""Check a machine, list what is patched in Megatron; start, plan, compare and profile trainings."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from megatron_fluid import __version__
from megatron_fluid.cli.terminal import BriefParser
from megatron_fluid.errors import ConfigError, FluidError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status is 0 when it succeeded, and 2 after an error of one line.

    Args:
        argv: the command line without the program's name, `sys.argv[1:]` by default.
    """
    parser = BriefParser(prog="megatron-fluid", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        from megatron_fluid.cli import compare, doctor, patches, plan, profile, run, warm  # torch

        for module in (doctor, compare, patches, plan, profile, warm):
            name = module.__name__.rpartition(".")[2]
            command = commands.add_parser(
                name, help=module.HELP, description=module.__doc__, formatter_class=raw
            )
            module.add_arguments(command)
            command.set_defaults(run=module.run)
        commands.add_parser("run", help=run.HELP, add_help=False)  # which parses torchrun's flags
        if words[:1] == ["run"]:
            return run.run(words[1:])
        args = parser.parse_args(words)
        warnings.simplefilter("ignore")  # Megatron warns about each missing optional package
        # torch, without a GPU
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        status = int(args.run(args))
        print(end="", flush=True)  # also where stdout is closed
        return status
    except BrokenPipeError:  # whoever reads, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed again at the end
        return 141  # 128 + SIGPIPE
    except ImportError as error:
        print(f"{error}: this command needs it (docs/install.md)", file=sys.stderr)
        return 2
    except (ConfigError, FluidError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
