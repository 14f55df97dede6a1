"""Draw some steps of a training as a page and a picture: `--fluid-profile-steps FIRST:LAST`.

Rank 0 traces these steps with torch's profiler and writes the trace, timeline.html and timeline.png
into FOLDER/steps-FIRST-LAST. FOLDER is `--fluid-profile-dir`, else `profile` in `--save`, else
`profile` in `--tensorboard-dir`.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fluid.config import current_config, profile_range
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.step_log import StepLog, write_scalars

__all__ = ["StepProfile", "check_profile", "profile_folder", "train_step"]

_FLAG = "--fluid-profile-steps"
_profiles: list["StepProfile"] = []  # at most one, made in the first step
_step_log = StepLog()


def profile_folder(args: Any) -> Path:
    """Return the folder for the pages of a run with these arguments.

    Raises:
        ConfigError: the arguments name no folder.
    """
    if (named := current_config().profile_dir) is not None:
        return Path(named)
    for name in ("save", "tensorboard_dir"):
        if getattr(args, name, None):
            return Path(getattr(args, name)) / "profile"
    raise ConfigError(f"{_FLAG}: give --fluid-profile-dir, --save or --tensorboard-dir as well")


def check_profile(args: Any) -> None:
    """Check the settings of the profile before anything is built.

    Raises:
        ConfigError: the run does not reach the steps, there is no folder, rank 0 cannot create it,
            or --profile is given.
    """
    steps = current_config().profile_steps
    if steps is None:
        return
    folder = profile_folder(args)
    iterations = getattr(args, "train_iters", None)
    if iterations and profile_range(steps)[1] > iterations:
        allowed = f"steps of 1 to {iterations} (--train-iters)"
        raise ConfigError.of(_FLAG, steps, allowed)
    if getattr(args, "profile", False):
        raise ConfigError(f"{_FLAG} and --profile are mutually exclusive")
    if os.environ.get("RANK", "0") == "0":  # the rank that writes
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            setting, allowed = f"{_FLAG}, the folder of its pages", "a folder that can be written"
            raise ConfigError.of(setting, str(folder), f"{allowed} ({error.strerror})") from error


def train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `train_step` so that rank 0 traces the chosen steps, and figures of all are logged."""

    @functools.wraps(original)
    def fluid_train_step(*args: Any, **kwargs: Any) -> Any:
        settings = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
        if settings is not None:
            _step_log.begin(settings)
        steps = current_config().profile_steps
        if steps is None or settings is None:
            return original(*args, **kwargs)
        if not _profiles:
            import torch.distributed as dist

            _profiles.append(StepProfile(steps, profile_folder(settings), dist.get_rank() == 0))
        profile, step = _profiles[0], settings.curr_iteration + 1
        profile.before(step)
        done = original(*args, **kwargs)
        profile.after(step, settings)
        return done

    return fluid_train_step


class StepProfile:
    """The trace of some steps of a run.

    Args:
        steps: "FIRST:LAST", both included, counted from 1 as in Megatron's log.
        folder: where the folder of the page is created.
        active: whether this rank traces.
    """

    def __init__(self, steps: str, folder: Path, active: bool = True) -> None:
        self.first, self.last = profile_range(steps)
        self.folder = folder / f"steps-{self.first}-{self.last}"
        self._open = active
        self._profiler: Any = None
        self._mark: Any = None
        self._traced: list[int] = []

    def before(self, step: int) -> None:
        """Start the profiler at the first step; a resumed run may start in the middle."""
        if not self._open or self._profiler is not None or not self.first <= step <= self.last:
            return
        import torch

        from megatron_fluid.profiling.timeline import STEP

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # keep kernels of the previous step out of the trace
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, acc_events=True
        )
        self._profiler.start()
        self._mark = torch.profiler.record_function(STEP)
        self._mark.__enter__()

    def after(self, step: int, settings: Any) -> None:
        """Stop the profiler after the last step, and write."""
        if self._profiler is None:
            return
        self._traced.append(step)
        if step < self.last:
            return
        import torch

        from megatron_fluid.profiling.timeline import add_facts

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # all kernels of the steps are within the mark
        self._mark.__exit__(None, None, None)
        add_facts(self._profiler, steps=len(self._traced), **_facts(settings, len(self._traced)))
        self._profiler.stop()
        profiler, self._profiler, self._mark, self._open = self._profiler, None, None, False
        try:
            hidden = self._write(profiler)
        except OSError as error:
            why = f"its pages could not be written to {self.folder} ({error.strerror or error})"
            print(f"megatron_fluid: {_FLAG}: {why}; training goes on", file=sys.stderr, flush=True)
            return
        if hidden is not None and getattr(settings, "tensorboard_dir", None):
            write_scalars({"hidden-share": hidden}, step, settings.tensorboard_dir)

    def _write(self, profiler: Any) -> float | None:
        """Draw the steps; returns the share of the communication that was hidden."""
        from megatron_fluid.profiling.draw import draw
        from megatron_fluid.profiling.timeline import read_timeline
        from megatron_fluid.profiling.traces import read_document

        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / "trace.json.gz"
        profiler.export_chrome_trace(str(trace))
        first, last = self._traced[0], self._traced[-1]
        title = f"step {first}" if first == last else f"steps {first} to {last}"
        title += ", rank 0"
        timeline = read_timeline(read_document(trace), title)
        for path in draw([timeline], self.folder, "Training with megatron_fluid"):
            print(f"megatron_fluid: {title}: {path}", flush=True)
        share = dict(timeline.figures)["hidden share"]
        return float(share.rstrip("%")) / 100 if "%" in share else None


def _facts(settings: Any, steps: int) -> dict[str, object]:
    """Return the model's FLOPs in `steps` steps on one rank, by Megatron's count, and the dtype."""
    import torch.distributed as dist
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.training import num_floating_point_operations

    flops = num_floating_point_operations(settings, get_current_global_batch_size())
    kind = settings.fp8 or str(settings.params_dtype).removeprefix("torch.")
    return {"flops": flops * steps / dist.get_world_size(), "dtype": kind}
