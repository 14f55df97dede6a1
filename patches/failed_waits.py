"""Errors of waits that timed out, raised before Megatron uses what they spoilt; and Megatron's
training with its peers watched.

The optimizers need no patch: megatron_fluid.comm.failed_waits hooks `torch.optim.Optimizer.step`,
which all of Megatron's optimizers call. A captured step is the exception.
"""

import functools
from collections.abc import Callable
from typing import Any

from megatron_fluid.comm.failed_waits import check_for_failed_waits
from megatron_fluid.comm.peer_watch import watched_peers

__all__ = ["finalize_model_grads", "graphed_step", "pretrain", "save_checkpoint"]


def pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `megatron.training.pretrain`: a collective that waits for a rank which is gone names
    it."""

    @functools.wraps(original)
    def fluid_pretrain(*args: Any, **kwargs: Any) -> Any:
        with watched_peers():
            return original(*args, **kwargs)

    return fluid_pretrain


def _checked_before(original: Callable[..., Any], synchronize: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def fluid_checked(*args: Any, **kwargs: Any) -> Any:
        check_for_failed_waits(synchronize)
        return original(*args, **kwargs)

    return fluid_checked


# Before gradients are reduced, a plain load: a synchronisation would leave the GPU
# idle while the reductions are enqueued. A wait that is still undecided is found before the
# optimizer steps.
finalize_model_grads = functools.partial(_checked_before, synchronize=False)
# `OptimizerCudaGraphWrapper.__call__`, whose replays run no hook of the optimizer.
graphed_step = functools.partial(_checked_before, synchronize=True)
# Nothing is written once a wait has failed.
save_checkpoint = functools.partial(_checked_before, synchronize=True)
