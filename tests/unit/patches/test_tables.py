"""What rank 0 prints when training starts, and the tables of the README."""

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches import overlap_decision
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.engine.patch import Patch, Row
from megatron_fluid.patches.moe.limits import EXPERT_LIMITS, PARTS
from megatron_fluid.patches.startup_report import (
    limits_table,
    markdown_table,
    parts_table,
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
    monkeypatch.setattr(startup, "_calls", itertools.count())


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


def test_features_of_ranks_are_merged_and_those_of_some_ranks_named() -> None:
    moe, attention = "overlapped MoE layer", "overlapped attention"
    rows = startup.merged_features(
        {
            0: [(attention, True, "rounds", 2)],
            1: [(attention, True, "rounds", 2), (moe, True, "rounds", 1)],
            2: [(attention, True, "rounds", 3), (moe, False, "fp8", 1)],
            3: [(attention, True, "rounds", 2), (moe, False, "fp8", 1)],
        }
    )
    assert rows == [
        (attention, True, "rounds", "2-3"),
        (moe, True, "rounds (rank 1)", 1),
        (moe, False, "fp8 (ranks 2-3)", 1),
    ]


def test_one_loud_line_where_no_moe_layer_is_overlapped() -> None:
    moe = "overlapped MoE layer"
    off: list[startup.Feature] = [(moe, False, "fp8 (ranks 2-3)", 2)]
    text = startup._nothing_overlapped(off, {"cuda_graph_impl", "delay_wgrad_compute"})
    assert "WARNING: NO MoE layer is overlapped" in text
    assert "--cuda-graph-impl none, no --delay-wgrad-compute" in text
    assert startup._nothing_overlapped([*off, (moe, True, "rounds", 1)], ()) == ""
    assert startup._nothing_overlapped([(moe, False, "moe_backend='megatron'", 1)], ()) == ""
    assert startup._nothing_overlapped([], ()) == ""


def test_settings_without_effect_stand_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(
        tensor_model_parallel_size=2,
        sequence_parallel=False,
        context_parallel_size=2,
        cp_comm_type=["p2p"],
        num_experts=None,
        add_bias_linear=False,
        fp8=None,
    )
    given = FluidConfig(
        tp_overlap="on", cp_backend="rounds", dx_chunks=2, defer_weight_grads=True, timeout_s=5.0
    )
    monkeypatch.setitem(
        sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args)
    )
    monkeypatch.setattr("megatron_fluid.config._current", given)
    monkeypatch.setenv("MEGATRON_FLUID_CPU", "0")
    rows = {name: reason for name, _, reason, _ in startup.ineffective_settings()}
    assert set(rows) == {
        "--fluid-tp-overlap on",
        "--fluid-cp-backend rounds",
        "--fluid-dx-chunks 2",
        "--fluid-defer-weight-grads",
    }
    assert "--sequence-parallel" in rows["--fluid-tp-overlap on"]
    assert "found p2p" in rows["--fluid-cp-backend rounds"]
    assert "no effect" in startup_table(ROWS, startup.ineffective_settings())
    args.sequence_parallel, args.cp_comm_type, args.num_experts = True, ["a2a"], 8
    assert startup.ineffective_settings() == []
    moe, attention = "overlapped MoE layer", ("overlapped attention", True, "nvlink 2", 1)
    over_nvlink: list[startup.Feature] = [(moe, True, "nvlink", 2), (moe, False, "fp8", 1)]
    assert startup.ineffective_settings(over_nvlink) == [
        ("--fluid-dx-chunks 2", None, "rounds alone read it, found nvlink", "")
    ]
    assert startup.ineffective_settings([*over_nvlink, attention]) == []
    rows = {name: reason for name, _, reason, _ in startup.ineffective_settings(over_nvlink[1:])}
    nothing = "nothing that reads it is overlapped"
    assert rows == {"--fluid-dx-chunks 2": nothing, "--fluid-defer-weight-grads": nothing}


@pytest.mark.parametrize(
    ("fp8", "whose", "why"),
    [
        (None, "ours", "it needs --fp8-format e4m3"),
        ("e4m3", "megatron", "--fluid-moe-fp8 is megatron"),
        ("e4m3", "ours", None),
    ],
)
def test_the_precision_of_weight_gradients_says_where_nothing_reads_it(
    monkeypatch: pytest.MonkeyPatch, fp8: str | None, whose: str, why: str | None
) -> None:
    args = SimpleNamespace(
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        context_parallel_size=1,
        cp_comm_type=None,
        num_experts=8,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        fp8=fp8,
    )
    given = FluidConfig(moe_fp8=whose, moe_fp8_weight_grads="bf16")
    monkeypatch.setitem(
        sys.modules, "megatron.training.global_vars", SimpleNamespace(_GLOBAL_ARGS=args)
    )
    monkeypatch.setattr("megatron_fluid.config._current", given)
    monkeypatch.setenv("MEGATRON_FLUID_CPU", "0")
    rows = {name: reason for name, _, reason, _ in startup.ineffective_settings()}
    assert rows.get("--fluid-moe-fp8-weight-grads bf16") == why


NVLINK, ROUNDS = "nvlink, 2 expert-parallel ranks", "rounds, 2 expert-parallel ranks"
ATTENTION = ("overlapped attention", True, "nvlink 2", 1)


@pytest.mark.parametrize(
    ("experts", "biases", "rows", "why"),
    [
        (None, False, [], "the model has no MoE layer"),
        (8, True, [(True, NVLINK)], "experts with biases take as many rows as arrive"),
        (8, False, [(True, ROUNDS)], f"over symmetric memory alone read it, found {ROUNDS}"),
        (8, False, [(False, "fp4=True: no")], "over symmetric memory alone read it, found none"),
        *(
            (8, False, [(True, f"{NVLINK}; {rest}")], "fused layers over symmetric memory alone")
            for rest in ("Megatron's experts: fp4", "phase by phase: moe_latent_size=8")
        ),
        (8, False, [(True, NVLINK)], None),
        (8, False, [(True, f"{NVLINK} (rank 1)"), (True, ROUNDS)], None),
        (8, False, [(True, "nvlink where all GPUs reach each other's memory, 2 ranks")], None),
        (8, False, [], None),  # nothing is known yet
    ],
)
def test_room_for_rows_says_where_nothing_reads_it(
    monkeypatch: pytest.MonkeyPatch,
    experts: int | None,
    biases: bool,
    rows: list[tuple[bool, str]],
    why: str | None,
) -> None:
    args = SimpleNamespace(
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        context_parallel_size=2,
        cp_comm_type=["a2a"],
        num_experts=experts,
        add_bias_linear=biases,
        params_dtype=torch.bfloat16,
        fp8=None,
    )
    module = SimpleNamespace(_GLOBAL_ARGS=args)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr("megatron_fluid.config._current", FluidConfig(moe_capacity_factor=1.5))
    monkeypatch.setenv("MEGATRON_FLUID_CPU", "0")
    features: list[startup.Feature] = [("overlapped MoE layer", *row, 1) for row in rows]
    told = {name: text for name, _, text, _ in startup.ineffective_settings([*features, ATTENTION])}
    found = told.get("--fluid-moe-capacity-factor 1.5")
    assert found is why is None or why in str(found)


def test_the_readmes_tables_name_everything() -> None:
    table = markdown_table(
        [
            Patch("one", "m:f", str, "why one"),
            Patch("two", "m:g", str, "why two", group="Other", condition="here"),
        ]
    )
    assert "| one | `m:f` | why one |" in table
    assert "<details><summary>Other: 1 patches, here</summary>" in table
    assert all(f"`{limit.setting}`" in limits_table(EXPERT_LIMITS) for limit in EXPERT_LIMITS)
    table = parts_table(PARTS).splitlines()
    for exchange, experts, limits in PARTS:
        for limit in limits:
            row = f"| `{limit.setting}` | {exchange} | {experts} |"
            assert any(line.startswith(row) for line in table)
