"""The suite of losses: what a row says of runs, and which options are refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.suites import losses


def test_a_row_holds_every_loss_and_the_mean_of_the_last_tenth() -> None:
    runs = [
        {
            "train": {str(i): 5.0 - 0.1 * i - seed for i in range(1, 21)},
            "held_out": {"0": 9.0, "20": 3.5},
            "step_ms": 10.0 + seed,
        }
        for seed in (0, 1)
    ]
    row = losses._row("small", "fluid", runs, {"seeds": 2})
    assert (row.case, row.variant, row.median_ms, row.iters) == ("small", "fluid", 10.5, 2)
    assert row.config["final"] == pytest.approx([3.05, 2.05])
    assert row.config["held_out"] == [3.5, 3.5] and len(row.config["losses"][1]) == 20


def test_a_run_that_fails_is_named_and_the_others_count(
    monkeypatch: Any, tmp_path: Any, capsys: Any
) -> None:
    def run(model: str, variant: str, seed: int, *rest: object) -> Any:
        if variant == "fluid":
            raise RuntimeError("out of luck")
        return {"train": {"1": 4.0, "2": 3.0}, "held_out": {"2": 3.5}, "step_ms": 1.0}

    monkeypatch.setattr(losses, "_run", run)
    monkeypatch.setattr(losses, "draw_later", lambda *given: None)
    target = tmp_path / "losses.json"
    assert losses.main(["--smoke", "--output", str(target)]) == 1
    assert "fluid, seed 2: out of luck" in capsys.readouterr().out
    assert "megatron" in target.read_text()
