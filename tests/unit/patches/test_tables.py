"""What rank 0 prints when training starts, and the tables of the README."""

from typing import Any

import pytest
import torch

from megatron_fluid.patches import overlap_decision
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.engine.patch import Patch, Row
from megatron_fluid.patches.moe.limits import LIMITS
from megatron_fluid.patches.startup_report import (
    limits_table,
    markdown_table,
    startup_table,
    text_table,
)

ROWS = [
    Row("Megatron", "moe-layer", "m:MoELayer.forward", "applied", "overlapped", 24),
    Row("CPU mode", "cpu-stream", "torch:cuda.Stream", "not needed", "only on a CPU"),
    Row("CPU mode", "cpu-event", "torch:cuda.Event", "not needed", "only on a CPU"),
]


def test_columns_are_aligned() -> None:
    assert text_table(("a", "long"), [("wide cell", "x")]).splitlines() == [
        "a          long",
        "---------  ----",
        "wide cell  x",
    ]


def test_a_group_takes_one_line_unless_something_of_it_was_turned_off() -> None:
    applied = Row(
        "CPU mode", "cpu-barrier", "torch.distributed:barrier", "applied", "gloo refuses device_ids"
    )
    short = startup_table([*ROWS, applied], [])
    assert "CPU mode   2 not needed, 1 applied" in short
    assert "cpu-stream" not in short
    mixed = startup_table(
        [
            *ROWS[:2],
            Row("CPU mode", "cpu-event", "torch:cuda.Event", "off", "turned off by the user"),
        ],
        [],
    )
    assert "cpu-stream" in mixed
    assert "turned off by the user" in mixed
    assert "24" in short.splitlines()[3]


def test_features_are_counted_by_reason() -> None:
    text = startup_table(
        ROWS,
        [("overlapped MoE layer", True, "rounds", 3), ("overlapped MoE layer", False, "fp8", 1)],
    )
    on, off = text.splitlines()[-2:]
    assert on.split() == ["overlapped", "MoE", "layer", "on", "3", "rounds"]
    assert off.split() == ["overlapped", "MoE", "layer", "off", "1", "fp8"]


@pytest.fixture
def fresh_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap_decision, "_features", {})
    startup._print_once.cache_clear()


@pytest.mark.usefixtures("fresh_startup")
def test_the_table_is_printed_once_after_the_model_is_built(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = torch.nn.Identity(), torch.nn.Identity()

    def build(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        report = overlap_decision.FeatureReport("overlapped MoE layer")
        for layer in layers:
            report.note(layer, True, "rounds")
        print("built")
        return args, kwargs

    wrapped = startup.setup_model_and_optimizer(build)
    assert wrapped(1, cfg_container=2) == ((1,), {"cfg_container": 2})
    wrapped()
    out = capsys.readouterr().out
    assert out.startswith("built\nmegatron_fluid\n")
    assert out.count("dataset-helpers") == 1
    assert "on     2        rounds" in out


@pytest.mark.usefixtures("fresh_startup")
def test_other_ranks_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    startup.setup_model_and_optimizer(lambda: None)()
    assert capsys.readouterr().out == ""


def test_the_readmes_tables_name_everything() -> None:
    table = markdown_table(
        [
            Patch("one", "m:f", str, "why one"),
            Patch("two", "m:g", str, "why two", group="Other", condition="here"),
        ]
    )
    assert "| one | `m:f` | why one |" in table
    assert "<details><summary>Other: 1 patches, here</summary>" in table
    assert all(f"`{limit.setting}`" in limits_table(LIMITS) for limit in LIMITS)
