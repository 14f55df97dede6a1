"""Some steps of a training as a page and a picture: `--fluid-profile-steps FIRST:LAST`.

Rank 0 traces these steps with torch's profiler, and writes into FOLDER/steps-FIRST-LAST the trace,
timeline.html and timeline.png. FOLDER is `--fluid-profile-dir`, else `profile` in the folder of
`--save`, else `profile` in that of `--tensorboard-dir`. Without the flag a step pays one look at
the configuration.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fluid.config import current_config, profile_range
from megatron_fluid.errors import ConfigError

__all__ = ["StepProfile", "check_profile", "profile_folder", "train_step"]

_FLAG = "--fluid-profile-steps"
_profiles: list["StepProfile"] = []  # the one of this process, from its first step on


def profile_folder(args: Any) -> Path:
    """Where the page of a run with these arguments is written.

    Raises:
        ConfigError: the arguments name no folder.
    """
    if (named := current_config().profile_dir) is not None:
        return Path(named)
    for name in ("save", "tensorboard_dir"):
        if getattr(args, name, None):
            return Path(getattr(args, name)) / "profile"
    raise ConfigError(
        f"{_FLAG}: found no folder for the page, needed: --fluid-profile-dir, --save or "
        "--tensorboard-dir"
    )


def check_profile(args: Any) -> None:
    """Refuse what cannot be profiled, before anything is built.

    Raises:
        ConfigError: steps that the run does not reach, no folder, or Megatron's own profiler.
    """
    steps = current_config().profile_steps
    if steps is None:
        return
    profile_folder(args)
    iterations = getattr(args, "train_iters", None)
    if iterations and profile_range(steps)[1] > iterations:
        allowed = f"steps of 1 to {iterations} (--train-iters)"
        raise ConfigError.of(_FLAG, steps, allowed)
    if getattr(args, "profile", False):
        raise ConfigError.of(_FLAG, "it with --profile", "one profiler at a time")


def train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `train_step`: rank 0 traces the steps that are asked for."""

    @functools.wraps(original)
    def fluid_train_step(*args: Any, **kwargs: Any) -> Any:
        steps = current_config().profile_steps
        if steps is None:
            return original(*args, **kwargs)
        from megatron.training import get_args

        settings = get_args()
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
        steps: "FIRST:LAST", counted as in Megatron's log, from 1, both included.
        folder: the page goes into a folder in this one.
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
        """Begin where `step` is the first; a resumed run may begin in the middle."""
        if not self._open or self._profiler is not None or not self.first <= step <= self.last:
            return
        import torch

        from megatron_fluid.profiling.timeline import STEP

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # kernels of the step before are not of this one
        self._profiler = torch.profiler.profile(
            activities=activities, record_shapes=True, acc_events=True
        )
        self._profiler.start()
        self._mark = torch.profiler.record_function(STEP)
        self._mark.__enter__()

    def after(self, step: int, settings: Any) -> None:
        """End where `step` is the last, and write."""
        if self._profiler is None:
            return
        self._traced.append(step)
        if step < self.last:
            return
        import torch

        from megatron_fluid.profiling.timeline import add_facts

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the steps' kernels lie within the mark
        self._mark.__exit__(None, None, None)
        add_facts(self._profiler, steps=len(self._traced), **_facts(settings, len(self._traced)))
        self._profiler.stop()
        profiler, self._profiler, self._mark, self._open = self._profiler, None, None, False
        self._write(profiler)

    def _write(self, profiler: Any) -> None:
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


def _facts(settings: Any, steps: int) -> dict[str, object]:
    """FLOPs of the model in `steps` steps on one rank, by Megatron's count, and their dtype."""
    import torch.distributed as dist
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.training import num_floating_point_operations

    flops = num_floating_point_operations(settings, get_current_global_batch_size())
    kind = settings.fp8 or str(settings.params_dtype).removeprefix("torch.")
    return {"flops": flops * steps / dist.get_world_size(), "dtype": kind}
