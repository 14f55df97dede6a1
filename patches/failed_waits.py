"""Errors of waits that timed out, raised before Megatron uses what they spoilt.

The optimizers need no patch: megatron_fluid.comm.failed_waits hooks `torch.optim.Optimizer.step`,
which all of Megatron's optimizers call. A captured step is the exception.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_fluid.comm.failed_waits import raise_if_failed
from megatron_fluid.patches.checkpoint_errors import full_disk_named

__all__ = ["finalize_model_grads", "graphed_step", "save_checkpoint"]


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
    """Wrap `save_checkpoint`: nothing is written once a wait has failed, and a disk that takes no
    more is an error by name."""

    @functools.wraps(original)
    def fluid_save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        raise_if_failed(synchronize=True)
        with full_disk_named():
            return original(*args, **kwargs)

    return fluid_save_checkpoint
