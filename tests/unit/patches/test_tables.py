"""What rank 0 prints when training starts."""

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.engine.patch import Row
from megatron_fluid.patches.startup_report import startup_lines, startup_table, unused_settings

MOE, ATTENTION = "overlapped MoE layer", "overlapped attention"
ROWS = [
    Row("Megatron", "moe-layer", "m:MoELayer.forward", "applied", "overlapped", 24),
    Row("CPU mode", "cpu-stream", "torch:cuda.Stream", "not needed", "only on a CPU"),
    Row("CPU mode", "cpu-event", "torch:cuda.Event", "not needed", "only on a CPU"),
]


def test_patches_of_cpu_mode_are_in_the_verbose_table_where_they_were_turned_off() -> None:
    short = startup_table(ROWS, [])
    assert "cpu-stream" not in short and "24" in short.splitlines()[3]
    event = Row("CPU mode", "cpu-event", "torch:cuda.Event", "off", "turned off by the user")
    mixed = startup_table([*ROWS[:2], event], [])
    assert "cpu-stream" not in mixed and "cpu-event" in mixed and event.reason in mixed


@pytest.mark.parametrize("verbose", [False, True])
def test_the_report_is_printed_once_after_the_model_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verbose: bool
) -> None:
    monkeypatch.setattr(recorded, "_features", {})
    monkeypatch.setattr(startup, "_calls", itertools.count())
    monkeypatch.setenv("MEGATRON_FLUID_VERBOSE", str(int(verbose)))
    layers = torch.nn.Identity(), torch.nn.Identity()

    def build(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        report = recorded.FeatureReport(MOE)
        for layer in layers:
            report.note(layer, True, "rounds")
        report.note(build, False, "fp8")
        print("built")
        return args, kwargs

    wrapped = startup.setup_model_and_optimizer(build)
    assert wrapped(1, cfg_container=2) == ((1,), {"cfg_container": 2})
    wrapped()
    out = capsys.readouterr().out
    assert out.count("built") == 2
    if verbose:
        assert out.startswith("built\nmegatron_fluid\n") and out.count("dataset-helpers") == 1
        assert out.splitlines()[-3:-1] == [  # before the second model is built
            "overlapped MoE layer  on     2        rounds",
            "overlapped MoE layer  off    1        fp8",
        ]
    else:
        _, versions, on, off, _ = out.splitlines()
        assert versions.startswith("megatron_fluid ") and "--fluid-verbose" in versions
        assert on == "  on:  MoE layer (2): rounds" and off.startswith("  off: ")


def test_three_lines_say_what_is_on_what_is_off_and_which_flag_changes_it() -> None:
    features: list[startup.Feature] = [
        (MOE, True, "nvlink, 8 expert-parallel ranks", 24),
        (MOE, False, "fp8='hybrid': e4m3 is the format", "1-2"),
        (ATTENTION, False, "cp_backend='megatron'", 2),
        (ATTENTION, False, "its TEDotProductAttention keeps its own exchange", 1),
    ]
    off = [*ROWS, Row("Megatron", "te-linear", "m:f", "off", "turned off by the user")]
    lines = startup_lines(off, features[:2]).splitlines()
    assert ": 1 patches applied" in lines[0]
    assert lines[1] == "  on:  MoE layer (24): nvlink, 8 expert-parallel ranks"
    changed = "MoE layer (1-2): fp8='hybrid', change: --fp8-format e4m3"
    assert lines[2] == f"  off: {changed}; patches left out: te-linear"
    (_, nothing, attention) = startup_lines(ROWS, features[2:]).splitlines()
    assert nothing == "  on:  nothing"
    assert "attention (2): cp_backend='megatron', change: --fluid-cp-backend auto" in attention
    assert attention.endswith("; attention") and len(attention) <= 100
    unused: list[startup.Feature] = [("--fluid-cpu", None, "a GPU is found", "")]
    assert startup_lines(ROWS, unused).endswith("  off: no effect: --fluid-cpu (a GPU is found)")
    unused += [("--fluid-cp-backend rounds", None, "it needs --cp-comm-type a2a, found p2p", "")]
    last = startup_lines(ROWS, unused).splitlines()[-1]
    assert "--fluid-cpu" in last and "--fluid-cp-backend rounds" in last and len(last) <= 100
    *_, last = startup_lines(ROWS, unused * 3).splitlines()
    assert last.endswith(" more (--fluid-verbose)") and len(last) <= 100


def test_features_of_ranks_are_merged_and_those_of_some_ranks_named() -> None:
    on, off = (MOE, True, "rounds", 1), (MOE, False, "fp8", 1)
    two, three = ((ATTENTION, True, "rounds", count) for count in (2, 3))
    assert startup.merged_features({0: [two], 1: [two, on], 2: [three, off], 3: [two, off]}) == [
        (ATTENTION, True, "rounds", "2-3"),
        (MOE, True, "rounds (rank 1)", 1),
        (MOE, False, "fp8 (ranks 2-3)", 1),
    ]


def test_one_loud_line_where_no_moe_layer_is_overlapped() -> None:
    off: list[startup.Feature] = [
        (MOE, False, "cuda_graph_impl='local': graphs", 2),
        (MOE, False, "use_kitchen=True: kitchen linears (ranks 2-3)", 2),
    ]
    text = startup._nothing_overlapped(off)
    assert "WARNING: NO MoE layer is overlapped" in text
    assert "To overlap them: --cuda-graph-impl none, no --use-kitchen." in text
    assert "Why: a hook." in startup._nothing_overlapped([(MOE, False, "a hook", 1)])
    on, asked = (MOE, True, "rounds", 1), (MOE, False, "moe_backend='megatron'", 1)
    for silent in ([*off, on], [asked], []):
        assert startup._nothing_overlapped(silent) == ""


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`job(settings, **changed)`: Megatron's arguments of a job with these settings."""

    def start(settings: FluidConfig, **changed: Any) -> SimpleNamespace:
        args = {"tensor_model_parallel_size": 2, "sequence_parallel": False, "fp8": None}
        args |= {"context_parallel_size": 2, "cp_comm_type": ["p2p"], "num_experts": None}
        args |= {"world_size": 2, "use_distributed_optimizer": False}
        module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**args | changed))
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
        monkeypatch.setattr("megatron_fluid.config._current", settings)
        monkeypatch.setenv("MEGATRON_FLUID_CPU", "0")
        return module._GLOBAL_ARGS

    return start


def test_settings_without_effect_are_named_with_why(job: Any) -> None:
    given = {"tp_overlap": "on", "cp_backend": "rounds", "timeout_s": 5.0}
    args = job(FluidConfig(**given, dx_chunks=2, defer_weight_grads=True))
    told = unused_settings()
    both = {"--fluid-dx-chunks 2", "--fluid-defer-weight-grads"}
    assert set(told) == {"--fluid-tp-overlap on", "--fluid-cp-backend rounds", *both}
    assert "--sequence-parallel" in told["--fluid-tp-overlap on"]
    assert "found p2p" in told["--fluid-cp-backend rounds"]
    args.sequence_parallel, args.cp_comm_type, args.num_experts = True, ["a2a"], 8
    assert unused_settings() == {}
    nvlink = (MOE, True, "nvlink, 2 expert-parallel ranks", 1)
    assert set(unused_settings([nvlink])) == {"--fluid-dx-chunks 2"}
    rounds = (MOE, True, "rounds, 2 expert-parallel ranks (ranks 0-1)", 1)
    for row in (rounds, (ATTENTION, True, "heads move over NVLink", 1)):
        assert unused_settings([nvlink, row]) == {}
    assert set(unused_settings([(MOE, False, "fp8", 1), (ATTENTION, False, "fp8", 1)])) == both


def test_settings_of_waits_profiles_and_experts_say_where_nothing_reads_them(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = {"timeout_s": 5.0, "end_on_timeout": True, "profile_dir": "here"}
    moe = {"machine": "h100", "batch_invariant": True, "moe_recompute": "rows"}
    args = job(FluidConfig(**waits, **moe), world_size=1)  # type: ignore[arg-type]
    alone = {"--fluid-timeout 5.0", "--fluid-end-on-timeout", "--fluid-profile-dir here"}
    experts = {"--fluid-batch-invariant", "--fluid-moe-recompute rows", "--fluid-machine h100"}
    assert set(unused_settings()) == alone | experts
    args.num_experts, args.world_size = 8, 2
    assert set(unused_settings()) == {"--fluid-profile-dir here"}
    rounds, nvlink = (
        (MOE, True, f"{name}, 2 expert-parallel ranks", 1) for name in ("rounds", "nvlink")
    )
    without = {"--fluid-profile-dir here", "--fluid-moe-recompute rows", "--fluid-machine h100"}
    assert set(unused_settings([rounds])) == without
    assert set(unused_settings([nvlink])) == {"--fluid-profile-dir here"}
    monkeypatch.setenv("MEGATRON_FLUID_FUSED_OPTIMIZER", "1")
    assert "--fluid-fused-optimizer" in unused_settings()
    args.use_distributed_optimizer = True
    assert "--fluid-fused-optimizer" not in unused_settings()


@pytest.mark.parametrize(("fp8", "whose", "why"), [
    (None, "ours", "it needs --fp8-format e4m3"),
    ("e4m3", "megatron", "--fluid-moe-fp8 is megatron"),
    ("e4m3", "ours", None),
])  # fmt: skip
def test_the_precision_of_weight_gradients_says_where_nothing_reads_it(
    job: Any, fp8: str | None, whose: str, why: str | None
) -> None:
    job(FluidConfig(moe_fp8=whose, moe_fp8_weight_grads="bf16"), num_experts=8, fp8=fp8)
    assert unused_settings().get("--fluid-moe-fp8-weight-grads bf16") == why
