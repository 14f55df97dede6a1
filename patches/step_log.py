"""Figures of a training for TensorBoard and Weights & Biases, where Megatron writes to them.

At each --tensorboard-log-interval, from the rank that Megatron lets write: megatron_fluid/
iteration-ms (the median since the last one, from the beginning of an iteration to that of the
next), tokens-per-s, tflops-per-gpu and mfu by Megatron's count of operations, graph-overflows, the
iterations of --fluid-graph so far that lacked room, and of the last iteration
tokens-per-expert-max-over-mean: the tokens of the largest expert over those of the mean one, by the
layer where that is highest, and layer-mean-tokens-per-expert-max-over-mean, the mean over layers.
Rank 0 adds hidden-share at the last of --fluid-profile-steps.
"""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from typing import TYPE_CHECKING, Any

from megatron_fluid.config import current_config

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OVERFLOWS", "TOKEN_COUNTS", "StepLog", "TokenCounts", "write_scalars"]

_PREFIX = "megatron_fluid/"
OVERFLOWS: list[str] = []
"""The stages of the iterations that ran again because their CUDA graph lacked room."""


class TokenCounts:
    """How often this rank's tokens chose each expert, in the MoE layers of this rank that move
    tokens by this package, summed over the microbatches of an iteration.

    They are counted on the device, in memory that also the replays of a CUDA graph add to, and only
    in iterations whose figures are written. The host reads them when it writes. They are not summed
    over ranks: a rank's tokens of an iteration are a large enough sample.

    Attributes:
        recording: whether calls are counted now. False on ranks that write no figures.
    """

    def __init__(self) -> None:
        self.recording = False
        self._counts: weakref.WeakKeyDictionary[object, Tensor] = weakref.WeakKeyDictionary()

    def begin(self, recording: bool) -> None:
        """An iteration begins, which is counted or not."""
        self.recording = recording
        for counts in self.tensors() if recording else ():
            counts.zero_()

    def add(self, layer: object, ids: Tensor, num_experts: int) -> None:
        """Count one call. The host does not wait.

        Args:
            layer: identifies the layer; the counts are kept as long as it is.
            ids: expert of each choice, -1 where dropped. Integers [T, K]
        """
        import torch

        if not torch.is_grad_enabled():  # an evaluation, or a forward that is recomputed
            return
        if (counts := self._counts.get(layer)) is None:
            counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
            self._counts[layer] = counts
        chosen = ids.reshape(-1).long().remainder(num_experts + 1)  # dropped: the last
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))

    def tensors(self) -> list[Tensor]:
        """The counts of each layer, the last of them that of dropped choices. [E + 1]"""
        return list(self._counts.values())

    def figures(self) -> dict[str, float]:
        """The largest count over the mean one. Waits for the device."""
        layers = [counts[:-1].tolist() for counts in self.tensors() if self.recording]
        ratios = [max(counts) / statistics.fmean(counts) for counts in layers if any(counts)]
        if not ratios:
            return {}
        name = "tokens-per-expert-max-over-mean"
        return {name: max(ratios), f"layer-mean-{name}": statistics.fmean(ratios)}


TOKEN_COUNTS = TokenCounts()


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
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        writes = get_tensorboard_writer() is not None or get_wandb_writer() is not None
        interval = settings.tensorboard_log_interval
        if self._seconds and done % interval == 0:
            seconds, self._seconds = statistics.median(self._seconds), []
            if writes:
                write_scalars(_figures(settings, seconds) | TOKEN_COUNTS.figures(), done)
        # What a graph captures is replayed in all iterations, so it has to count in all.
        captured = getattr(settings, "cuda_graph_impl", "none") != "none"
        TOKEN_COUNTS.begin(writes and (captured or (done + 1) % interval == 0))


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
