"""Figures of a training for TensorBoard and Weights & Biases, where Megatron writes to them.

At each --tensorboard-log-interval, from the rank that Megatron lets write: megatron_fluid/
iteration-ms (the median since the last one, from the beginning of an iteration to that of the
next), tokens-per-s, tflops-per-gpu and mfu by Megatron's count of operations, and graph-overflows,
the iterations of --fluid-graph so far that lacked room. Rank 0 adds hidden-share at the last of
--fluid-profile-steps.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any

from megatron_fluid.config import current_config

__all__ = ["OVERFLOWS", "StepLog", "write_scalars"]

_PREFIX = "megatron_fluid/"
OVERFLOWS: list[str] = []
"""The stages of the iterations that ran again because their CUDA graph lacked room."""


class StepLog:
    """The times of iterations since figures were last written."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._seconds: list[float] = []

    def begin(self, settings: Any) -> None:
        """An iteration begins.

        Args:
            settings: Megatron's arguments; curr_iteration counts those that are done, and only
                Megatron's own training loop sets it.
        """
        done = getattr(settings, "curr_iteration", None)
        if done is None:
            return
        now = time.perf_counter()
        if self._began is not None:
            self._seconds.append(now - self._began)
        self._began = now
        if not self._seconds or done % settings.tensorboard_log_interval:
            return
        seconds, self._seconds = statistics.median(self._seconds), []
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        if get_tensorboard_writer() is not None or get_wandb_writer() is not None:
            write_scalars(_figures(settings, seconds), done)


def write_scalars(figures: dict[str, float], iteration: int, folder: str | None = None) -> None:
    """Write figures by name.

    Args:
        folder: of TensorBoard, for a rank to which Megatron gives no writer.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    named = {_PREFIX + name: value for name, value in figures.items()}
    writer, board = get_tensorboard_writer(), get_wandb_writer()
    own = None
    if writer is None and folder is not None:
        with contextlib.suppress(ModuleNotFoundError):  # Megatron warns that it is not installed
            from torch.utils.tensorboard import SummaryWriter

            writer = own = SummaryWriter(log_dir=folder)
    if writer is not None:
        for name, value in named.items():
            writer.add_scalar(name, value, iteration)
    if board is not None:
        board.log(named, iteration)
    if own is not None:
        own.close()


def _figures(settings: Any, seconds: float) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.training import num_floating_point_operations

    from megatron_fluid.profiling.timeline import PEAK_TFLOPS

    batch, world = get_current_global_batch_size(), dist.get_world_size()
    tflops = num_floating_point_operations(settings, batch) / seconds / world / 1e12
    figures = {
        "iteration-ms": 1e3 * seconds,
        "tokens-per-s": batch * settings.seq_length / seconds,
        "tflops-per-gpu": tflops,
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    peak = next((peak for part, peak in PEAK_TFLOPS if part in device), None)
    if peak is not None:  # of bf16, which fp8 trainings are compared with, too
        figures["mfu"] = tflops / peak
    if current_config().graph:
        figures["graph-overflows"] = float(len(OVERFLOWS))
    return figures
