"""The page of `megatron-fluid compare`, and what it says of losses."""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_fluid.profiling.compare_page import Comparison, Step, write_page

_PLAIN = {1: 3.0, 2: 2.0, 3: 1.0}


def steps(losses: dict[int, float]) -> list[Step]:
    return [Step(iteration, 1.0, loss, None) for iteration, loss in losses.items()]


def comparison(off: dict[int, float], on: dict[int, float], again: dict[int, float]) -> Comparison:
    return Comparison(
        off=steps(off), on=steps(on), again=steps(again), warm_up=0, tolerance=0.005,
        memory_mib=(None, None), started=[], command=["train"],
    )  # fmt: skip


def test_noise_of_the_runs_without_the_package_widens_what_agrees(tmp_path: Path) -> None:
    def noisy(again: float) -> Comparison:
        return comparison({1: 1.0, 2: 1.0}, {1: 1.02, 2: 1.02}, {1: again, 2: again})

    assert not noisy(1.0).agrees
    assert noisy(1.01).agrees
    careful = dataclasses.replace(noisy(1.0), caution="no GPU: times say nothing")
    page = write_page(careful, tmp_path)[0].read_text()
    assert page.startswith("<!doctype html>") and careful.caution in page


@pytest.mark.parametrize(("changed", "at", "loss", "lost"), [
    (["on"], 1, math.nan, "with the package"),
    (["on"], 3, None, "with the package"),
    (["again"], 3, math.inf, "without the package again"),
    (["off"], 2, None, "without the package"),
    (["off", "on", "again"], 2, math.nan, "without the package"),
])  # fmt: skip
def test_a_loss_that_is_missing_or_no_number_never_agrees(
    changed: Sequence[str], at: int, loss: float | None, lost: str
) -> None:
    broken = {**_PLAIN, at: loss} if loss else {i: _PLAIN[i] for i in _PLAIN if i != at}
    runs = {name: broken if name in changed else _PLAIN for name in ("off", "on", "again")}
    compared = comparison(**runs)
    assert not compared.agrees
    assert f"losses DIFFER: {lost} iteration {at} has no finite loss" in compared.lines()


@pytest.mark.filterwarnings("error")
def test_a_page_has_a_row_of_each_iteration_whatever_its_losses_are(tmp_path: Path) -> None:
    compared = comparison(
        off={1: 3.0, 2: math.nan, 4: 1.0},
        on={1: math.nan, 2: math.nan, 3: 1.5, 5: 0.5},
        again={1: 3.0, 2: math.nan, 3: math.inf, 4: 1.0, 5: 0.5},
    )
    page = write_page(compared, tmp_path)[0].read_text()
    assert page.count("<svg") == 4
    assert dict(re.findall(r"<tr><td>(\d+)<td>(.*?)</tr>", page)) == {
        "1": "3<td>nan<td>3<td>1.0<td>1.0<td>1.0",
        "2": "nan<td>nan<td>nan<td>1.0<td>1.0<td>1.0",
        "3": "-<td>1.5<td>inf<td>-<td>1.0<td>1.0",
        "4": "1<td>-<td>1<td>1.0<td>-<td>1.0",
        "5": "-<td>0.5<td>0.5<td>-<td>1.0<td>1.0",
    }


def test_losses_are_paired_by_iteration() -> None:
    assert comparison(_PLAIN, {2: _PLAIN[2], 3: _PLAIN[3], 4: 9.0}, _PLAIN).made == 0.0


def test_nothing_is_said_only_where_no_step_differs() -> None:
    (same,) = [line for line in comparison(_PLAIN, _PLAIN, _PLAIN).lines() if "losses" in line]
    assert "with and without the package they differ by nothing that the log shows" in same
    on = {**_PLAIN, 1: 3.0 * (1 + 1.5e-7)}
    (apart,) = [line for line in comparison(_PLAIN, on, _PLAIN).lines() if "losses" in line]
    assert "they differ by 5e-08, two runs without it by nothing" in apart
