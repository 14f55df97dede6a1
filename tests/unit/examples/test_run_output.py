"""What the terminal shows of a run's log."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

import run_output  # noqa: E402


def test_the_page_of_profiled_steps_is_named_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    output = run_output.RunOutput([])
    output.write("megatron_fluid: steps 2 to 3, rank 0: my runs/profile/steps-2-3/timeline.html\n")
    output.write("megatron_fluid: step 7, rank 0: a/timeline.html\n")
    output.write("megatron_fluid: step 7, rank 0: a/timeline.png\nmodel chunk 0\n")
    assert terminal.getvalue().splitlines() == [
        "steps 2 to 3 drawn: my runs/profile/steps-2-3/timeline.html",
        "step 7 drawn: a/timeline.html",
    ]
