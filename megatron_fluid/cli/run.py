"""`megatron-fluid run`: torchrun, with short errors and time to save.

It takes torchrun's own flags (`torchrun --help` lists them) and starts ranks as torchrun does. When
a rank fails, what that rank said is the last thing shown: torchrun's traceback and its table of
failures are left out. After Ctrl-C or SIGTERM the ranks have `--grace` seconds to save, where
torchrun gives them 30.
"""

import argparse
import functools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from megatron_fluid.cli.terminal import BriefParser, positive
from megatron_fluid.errors import first_line

__all__ = ["HELP", "run"]

HELP = "start a script on several ranks: torchrun, with short errors"

_GRACE_S = 600


def run(words: Sequence[str]) -> int:
    """Start the ranks; returns the exit status of the one that failed first, or 0; after a signal
    128 and its number, unless a rank failed at what it does then.

    Args:
        words: torchrun's flags and `--grace SECONDS`, the script and its flags. Without a
            rendezvous, several nodes, a master address or port, one host is meant (`--standalone`).
    """
    parser = _parser()
    wanted = _arguments(parser, words)
    from megatron_fluid.patches.arguments import check_flags

    check_flags(wanted.training_script_args, parser.prog)
    from torch.distributed import DistError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    left = _wait_for_ranks_after_a_signal(wanted.grace)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.run(wanted)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say anything itself
            name = signal.Signals(-failure.exitcode).name
            print(f"rank {rank} was ended by {name}", file=sys.stderr)
            return 128 - failure.exitcode
        return int(failure.exitcode)
    except SignalException as stop:
        expected = 0, -stop.sigval, 128 + stop.sigval
        failed = next((code for code in left if code not in expected), None)
        if failed is None:
            return 128 + int(stop.sigval)
        print(f"after the signal a rank ended with status {failed}", file=sys.stderr)
        return failed if failed > 0 else 128 - failed
    except (DistError, ImportError, RendezvousError) as error:  # also of a port that is taken
        at = wanted.rdzv_endpoint or f"{wanted.master_addr}:{wanted.master_port} (--master-addr)"
        parser.error(
            f"argument --rdzv-endpoint: found {at}, where --nnodes {wanted.nnodes} did not meet by "
            f"--rdzv-backend {wanted.rdzv_backend} ({first_line(error.__cause__ or error)}), "
            "allowed: a host that every node reaches, with a free port"
        )
    except (AssertionError, RuntimeError, ValueError) as error:  # of a flag
        parser.error(first_line(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    """torchrun's parser, which leaves the script's flags alone, with `--grace`. An error is one
    line, exit status 2."""
    from torch.distributed import run as torchrun

    brief = BriefParser(
        prog="megatron-fluid run",
        usage="megatron-fluid run [--grace SECONDS] [TORCHRUN'S FLAGS] SCRIPT [ITS FLAGS]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser = torchrun.get_args_parser()
    for each in (brief, parser):
        each.add_argument(
            "--grace",
            type=positive,
            default=_GRACE_S,
            metavar="SECONDS",
            help="how long ranks may go on after Ctrl-C or SIGTERM (default: %(default)s)",
        )
    parser.prog = brief.prog
    parser.error = brief.error  # type: ignore[method-assign]
    parser.format_help = brief.format_help  # type: ignore[method-assign] # torchrun's is long
    return parser


def _arguments(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, and check what torchrun would not say in one line."""
    from torch.distributed import run as torchrun

    if not words:
        parser.error("no script is named; usage: megatron-fluid run [FLAGS] SCRIPT [ITS FLAGS]")
    port = parser.get_default("master_port") or 29500  # which torchrun of 2.14 takes later
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=None)  # the port may be named as it is by default
    wanted = parser.parse_args(words)
    try:
        ranks = torchrun.determine_local_world_size(wanted.nproc_per_node)
    except ValueError as error:
        parser.error(f"argument --nproc-per-node: {error}")
    least, most = 0, 0
    with suppress(RuntimeError, ValueError):
        least, most = torchrun.parse_min_max_nnodes(wanted.nnodes)
    for name, fits, allowed in (
        ("nproc-per-node", ranks > 0, "1 or more"),
        ("nnodes", 0 < least <= most, "N or MIN:MAX, 1 or more"),
        ("max-restarts", wanted.max_restarts >= 0, "0 or more"),
        ("monitor-interval", wanted.monitor_interval > 0, "seconds, more than 0"),
    ):
        if not fits:
            found = getattr(wanted, name.replace("-", "_"))
            parser.error(f"argument --{name}: found {found!r}, allowed: {allowed}")
    script = wanted.training_script
    if not (wanted.module or wanted.no_python or os.path.exists(script)):
        parser.error(f"argument SCRIPT: found {script!r}, allowed: a file that exists")
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a warning
    several = wanted.nnodes != "1:1" or wanted.master_addr != "127.0.0.1"
    if not (wanted.rdzv_endpoint or several or wanted.master_port):
        wanted.standalone = True
    wanted.master_port = wanted.master_port or port
    return wanted


def _wait_for_ranks_after_a_signal(grace_s: int) -> list[int]:
    """Make torchrun wait for its ranks as long as they may need to save. Returns a list that then
    gets their exit codes."""
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException

    close, left = PContext.close, list[int]()

    @functools.wraps(close)
    def patient_close(
        self: Any, death_sig: signal.Signals | None = None, timeout: int = 30
    ) -> None:
        # Its agent closes in two cases: a rank failed, or the agent itself handles a signal.
        stopped = isinstance(sys.exception(), SignalException)
        close(self, death_sig, grace_s if stopped else timeout)
        if stopped:
            left.extend(rank.proc.returncode for rank in self.subprocess_handlers.values())

    PContext.close = patient_close  # type: ignore[method-assign]
    return left
