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


ITERATION = (
    "[2026] iteration {:8}/ 3 | elapsed time per iteration (ms): 100.0 | global batch size: 8 "
    "| lm loss: 2.5E+00 |\n"
)


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [io.StringIO(), Screen()])
def test_iterations_are_a_bar_on_a_terminal_and_lines_in_a_file(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stdout", terminal)
    output = run_output.RunOutput([])
    output.sequence_length = 64
    for iteration in (1, 2, 3):
        output.write(ITERATION.format(iteration))
    said = terminal.getvalue()
    if terminal.isatty():
        assert "3/3" in said and "loss 2.5000, 5,120 tokens/s" in said
        assert said.count("\n") == 1, "one line, which ends with the training"
    else:
        lines = said.splitlines()
        assert lines[0] == "iteration 1/3  loss 2.5000  5,120 tokens/s  0:00:00 left"
        assert len(lines) == 3
