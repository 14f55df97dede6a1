"""Errors of waits that timed out, raised before Megatron uses what they spoilt; and Megatron's
training with its peers watched.

The optimizers need no patch: megatron_fluid.comm.failed_waits hooks `torch.optim.Optimizer.step`,
which all of Megatron's optimizers call. A captured step is the exception.
"""

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

from megatron_fluid.comm.failed_waits import raise_if_failed
from megatron_fluid.comm.peer_watch import watched_peers
from megatron_fluid.errors import FluidError

__all__ = ["finalize_model_grads", "graphed_step", "pretrain", "save_checkpoint"]

_PROBE_BYTES = 64 << 20


def pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `megatron.training.pretrain`: a collective that waits for a rank which is gone names
    it."""

    @functools.wraps(original)
    def fluid_pretrain(*args: Any, **kwargs: Any) -> Any:
        with watched_peers():
            return original(*args, **kwargs)

    return fluid_pretrain


def finalize_model_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `finalize_model_grads`: before gradients are reduced, a plain load.

    Nothing is synchronised here, which would leave the GPU idle while the reductions are enqueued.
    A wait that is still undecided is found before the optimizer steps.
    """

    @functools.wraps(original)
    def fluid_finalize_model_grads(*args: Any, **kwargs: Any) -> None:
        raise_if_failed()
        original(*args, **kwargs)

    return fluid_finalize_model_grads


def graphed_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `OptimizerCudaGraphWrapper.__call__`, whose replays run no hook of the optimizer."""

    @functools.wraps(original)
    def fluid_graphed_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise_if_failed(synchronize=True)
        return original(self, *args, **kwargs)

    return fluid_graphed_step


def save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `save_checkpoint`: nothing is written once a wait has failed, and a full disk is named.
    Megatron's error names neither the folder nor the reason, and none on the other ranks.

    The wrapper raises FluidError with the folder and the reason, if it takes no files on this rank.
    """

    @functools.wraps(original)
    def fluid_save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.checkpoint.api import CheckpointException

        raise_if_failed(synchronize=True)
        try:
            return original(*args, **kwargs)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            from megatron.training import get_args

            folder = getattr(get_args(), "save", None)
            if folder is None or (reason := _takes_no_files(folder)) is None:
                raise
            raise FluidError(
                f"--save {folder}: this rank's part of the checkpoint could not be written: "
                f"{reason}; checkpoints before it are untouched"
            ) from error

    return fluid_save_checkpoint


def _takes_no_files(folder: str) -> str | None:
    """Why a file of _PROBE_BYTES cannot be written to `folder`, or None."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free >> 20} MiB free)"
        return f"{error.strerror}{free}"
    return None
