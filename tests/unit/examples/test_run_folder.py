"""Which folders a run accepts before anything long begins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = str(Path(__file__).resolve().parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)

from run_folder import RunFolder  # noqa: E402


@pytest.mark.parametrize(
    ("flags", "save"), [("--load absent", "absent"), ("--load absent --save new", "new")]
)
def test_a_checkpoint_that_is_not_there_is_an_error_not_a_new_training(
    flags: str, save: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    with pytest.raises(ValueError, match="--load: found no checkpoint in absent"):
        RunFolder.choose({"load": "absent"}, "run", save, resume=False)
    assert not list(tmp_path.iterdir())


def test_a_job_that_is_started_again_and_again_begins_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--load=job", "--save=job"])
    assert RunFolder.choose({"load": "job"}, "run", "job", resume=False).resumed is None
