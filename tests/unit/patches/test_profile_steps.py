"""Which steps `--fluid-profile-steps` traces, where the page goes, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fluid import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches import profile_steps
from megatron_fluid.patches.profile_steps import StepProfile, check_profile, profile_folder
from megatron_fluid.patches.step_log import write_scalars


def asked(steps: str = "2:3", folder: str | None = None, **given: Any) -> SimpleNamespace:
    """A run's arguments, with these settings in force."""
    set_config(FluidConfig(profile_steps=steps, profile_dir=folder))
    defaults = {"save": None, "tensorboard_dir": None, "train_iters": 4, "profile": False}
    return SimpleNamespace(**{**defaults, **given})


def test_the_page_lies_in_the_folder_of_the_run() -> None:
    both = {"save": "runs/a", "tensorboard_dir": "runs/board"}
    assert profile_folder(asked(folder="mine", **both)) == Path("mine")
    assert profile_folder(asked(**both)) == Path("runs/a/profile")
    assert profile_folder(asked(tensorboard_dir="runs/board")) == Path("runs/board/profile")


@pytest.mark.parametrize(("steps", "given", "why"), [
    ("2:3", {}, "give --fluid-profile-dir, --save or --tensorboard-dir"),
    ("2:5", {"save": "a"}, "found '2:5', allowed: steps of 1 to 4"),
    ("2:3", {"save": "a", "profile": True}, "and --profile are mutually exclusive"),
    ("2:3", {"folder": "/proc/p"}, "found '/proc/p', allowed: a folder that can be written"),
])  # fmt: skip
def test_what_cannot_be_profiled_is_refused_at_the_start(
    steps: str, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--fluid-profile-steps.*{why}"):
        check_profile(asked(steps, **given))


def test_without_the_flag_nothing_is_needed_and_a_step_is_megatrons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_config(FluidConfig())
    check_profile(SimpleNamespace())
    monkeypatch.setattr(profile_steps, "StepProfile", None)
    step: Callable[..., Any] = profile_steps.train_step(lambda *args, **kwargs: (args, kwargs))
    assert step(1, iteration=2) == ((1,), {"iteration": 2})


def test_pages_that_cannot_be_written_end_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile_steps, "_facts", lambda settings, steps: {})
    profile = StepProfile("2:2", Path("/proc/p"))
    profile.before(2)
    profile.after(2, None)
    assert "could not be written to /proc/p/steps-2-2 (No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("ran", "active", "traces"), [
    pytest.param([1, 2, 3, 4, 5], True, [[2, 3]], id="all"),
    pytest.param([3, 4], True, [[3]], id="a resumed run"),
    pytest.param([4, 5], True, [], id="resumed behind them"),
    pytest.param([1, 2, 3], False, [], id="another rank"),
])  # fmt: skip
def test_the_steps_between_are_traced_once_and_by_one_rank(
    ran: list[int], active: bool, traces: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[list[int]] = []
    monkeypatch.setattr(profile_steps, "_facts", lambda settings, steps: {})
    monkeypatch.setattr(StepProfile, "_write", lambda self, _: written.append(list(self._traced)))
    profile = StepProfile("2:3", Path(), active)
    for step in ran:
        profile.before(step)
        profile.after(step, None)
    assert written == traces


def test_without_tensorboard_a_profiled_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As Megatron's own loop does, with a warning."""
    pytest.importorskip("megatron.training")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    write_scalars({"hidden-share": 0.5}, 3, str(tmp_path))
    assert not list(tmp_path.iterdir())
