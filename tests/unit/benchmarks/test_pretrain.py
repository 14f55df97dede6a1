"""The end-to-end benchmark: its flags are Megatron's, a tiny model is measured, failures named."""

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from benchmarks.cases import pretrain as cases
from benchmarks.cases.model_flags import MODEL_FLAGS
from benchmarks.cases.parallel_layouts import LAYOUTS
from benchmarks.cases.pretrain import (
    CASES,
    OPTIONS,
    VARIANTS,
    Variant,
    best_variant,
    common_flags,
    flags_of,
)
from benchmarks.harness.kernel_times import totals
from benchmarks.suites import pretrain
from benchmarks.tune import megatron_best

ROOT = Path(__file__).resolve().parents[3]


@functools.cache
def parser_of(fluid: bool) -> argparse.ArgumentParser:
    """Megatron's, with our flags or without; it takes 0.2 s to make."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_fluid.patches.arguments import add_fluid_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    return add_fluid_arguments(parser) if fluid else parser


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_flag_is_one_of_megatrons(case: str, ranks: int) -> None:
    for name, variant in {**VARIANTS, **OPTIONS}.items():
        parser = parser_of(variant.fluid)
        flags = common_flags(CASES[case], ranks, 16, gpu=True) + flags_of(variant, ranks, gpu=True)
        flags += MODEL_FLAGS[case]
        args, unknown = parser.parse_known_args(flags)
        assert unknown == [], name
        assert args.num_experts % ranks == 0
        assert args.moe_router_topk <= args.num_experts
        # Megatron refuses it without Apex.
        assert args.gradient_accumulation_fusion == (variant.fluid or "apex" in name), name


@pytest.mark.parametrize(
    ("layout", "sizes"), [("ep", (1, 1, 4)), ("cp2", (1, 2, 4)), ("tp2-ep2", (2, 1, 2))]
)
def test_a_layout_divides_the_model_as_its_row_says(
    layout: str, sizes: tuple[int, int, int]
) -> None:
    shared = common_flags(CASES["tiny"], 4, 16, gpu=True)
    args, unknown = parser_of(False).parse_known_args([*shared, *LAYOUTS[layout].flags])
    assert unknown == []
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    assert (tensor, context, args.expert_model_parallel_size) == sizes
    assert args.sequence_parallel == (tensor > 1)
    assert (LAYOUTS[layout].expert_parallel or 4) == sizes[2]


def test_what_cannot_be_run_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    apex = "fused_weight_gradient_mlp_cuda"
    assert OPTIONS["apex"].missing() == f"{apex} is not importable"
    assert "transformer_engine" in str(VARIANTS["megatron_graph"].missing())
    assert VARIANTS["megatron"].missing() is None is VARIANTS["fluid"].missing()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == apex else name)
    assert VARIANTS["megatron_graph_apex"].missing() == f"{apex} is not importable"
    assert VARIANTS["megatron_graph"].missing() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert VARIANTS["fluid_whole_graph"].missing() is None
    assert VARIANTS["megatron_graph_apex"].missing() is None


def test_the_search_keeps_what_is_faster_and_trains_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apex = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == apex else name)
    monkeypatch.setattr(cases, "BEST", tmp_path / "best.json")

    def measure(variant: Variant) -> dict[str, object]:
        flags, seconds, losses = variant.flags, 1.0, [6.0, 5.0]
        fused, graph = "--moe-router-fusion" in flags, "--cuda-graph-impl" in flags
        if "--moe-paged-stash" in flags:
            raise RuntimeError("exit code 1: not with this dispatcher")
        seconds -= 0.4 if graph else 0.3 * fused
        seconds -= (0.1 + 0.1 * fused) * ("NVTE_USE_CUTLASS_GROUPED_GEMM" in variant.environment)
        if "--cross-entropy-loss-fusion" in flags:
            seconds, losses = 0.1, [6.0, 4.0]
        return {"seconds": [9.0, seconds], "losses": losses, "peak_bytes": 2**30}

    names = ["apex", "graph", "router_fusion", "nccl_ep", "cross_entropy", "cutlass"]
    kept: list[str] = []
    found = megatron_best.search(names, measure, 1, lambda found: kept.append(json.dumps(found)))
    assert found["winner"] == ["graph", "cutlass", "router_fusion"]
    assert found["base_ms"] == 1000 and round(found["ms"]) == 400
    ahead = megatron_best.search(names, measure, 1, lambda found: None, ["graph", "cutlass"])
    assert ahead["winner"] == found["winner"] and ahead["tried"][1]["options"] == names[1::4]
    reasons = {trial["options"][-1]: trial.get("why_not", "") for trial in found["tried"][1:]}
    assert reasons["apex"] == f"{apex} is not importable" and not reasons["router_fusion"]
    assert "not with this dispatcher" in reasons["nccl_ep"]
    assert "its losses [6.0, 4.0] are not" in reasons["cross_entropy"]
    document = {"tiny, 2 GPU": {**json.loads(kept[-1]), "gpu": "H100", "commit": "c0ffee1"}}
    cases.BEST.write_text(json.dumps(document))
    best = best_variant("tiny", 2)
    assert best is not None and "NVTE_USE_CUTLASS_GROUPED_GEMM" in best.environment
    assert best_variant("tiny", 2, fp8=True) is best_variant("olmoe", 2) is None
    text = megatron_best.table(cases.BEST)
    assert "2 GPU:** graph + cutlass + router_fusion, 400.0 ms (without options 1000.0)" in text
    assert "| graph + cross_entropy | 100.0 | its losses" in text
    own = megatron_best.search(["cutlass", "capacity_graph"], measure, 1, lambda found: None)
    assert own["winner"] == ["capacity_graph", "cutlass"]


ONE = {
    "flops": 4e12,
    "tokens": 100,
    "peak_bytes": 0,
    "losses": [1.0],
    "overlap": [],
    "overflows": 1,
}


def test_the_warm_up_is_left_out_of_every_round() -> None:
    rounds = [ONE | {"seconds": times} for times in ([9.0, 1.0, 3.0], [8.0, 2.0, 2.0])]
    measured = pretrain.Measured(rounds)
    row = measured.row("tiny", "fluid", 1, 2, layers=2)
    assert row.median_ms == 2000 and row.iters == 4
    assert row.config["tokens_per_s"] == 50 and row.config["tflops_per_gpu"] == 1.0
    assert row.config["first_iteration_s"] == [9.0, 8.0] and row.config["graph_overflows"] == [1, 1]
    assert pretrain._NO_ROOM in (ROOT / "patches" / "iteration_graph.py").read_text()


def test_a_run_adds_to_a_file_of_its_commit_and_a_row_stays_until_it_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr(pretrain, "measure_once", lambda *_: ONE | {"seconds": [next(times)] * 2})
    monkeypatch.setattr(pretrain, "draw_later", lambda *_: None)
    words = ["--cases", "tiny", "--rounds", "1", "--iters", "2", "--warm-up", "1", "--ranks", "1"]
    words += ["--append", "--output", str(tmp_path / "pretrain.json"), "--variants"]
    monkeypatch.setenv("FLUID_COMMIT", "abc")
    for variant in ("megatron", "fluid", "megatron"):
        assert pretrain.main([*words, variant]) == 0
    document = json.loads((tmp_path / "pretrain.json").read_text())
    found = {row["variant"]: row["median_ms"] for row in document["rows"]}
    assert found == {"fluid": 2000.0, "megatron": 3000.0}
    assert document["command"].count(" && ") == 2
    for commit, found in (("abd", "abc, allowed: abd"), ("abc-dirty", "abc-dirty")):
        monkeypatch.setenv("FLUID_COMMIT", commit)
        assert pretrain.main([*words, "fluid"]) == 1
        assert f"found {found}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.process
def test_a_tiny_model_is_measured_and_what_cannot_be_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if pretrain.torch.cuda.is_available():
        pytest.skip("a GPU was initialised in this process; the tiny case is for CPUs")
    output = tmp_path / "pretrain.json"
    words = ["--cases", "tiny", "--variants", "megatron_graph_apex,fluid", "--rounds", "1"]
    words += ["--ranks", "1", "--limit", "1500"]
    assert pretrain.main([*words, "--iters", "4", "--warm-up", "1", "--output", str(output)]) == 0
    rows = {row["variant"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {"fluid"}
    ours = rows["fluid"]["config"]
    assert "fused_weight_gradient_mlp_cuda" in ours["absent"]["megatron_graph_apex"]
    assert len(ours["losses"]) == 4 and "--fluid-moe-backend auto" in ours["flags"]
    assert any("2 on (local" in words for words in ours["overlap"])
    assert rows["fluid"]["iters"] == 3 and ours["tokens_per_s"] > 0 == sum(ours["graph_overflows"])


@pytest.mark.process
def test_a_variant_that_fails_is_named_and_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    output = tmp_path / "pretrain.json"
    words = ["--cases", "tiny", "--variants", "fluid", "--rounds", "1", "--ranks", "1"]
    assert pretrain.main([*words, "--output", str(output)]) == 1
    assert "failed: tiny fluid: exit code" in capsys.readouterr().err
    assert not output.exists()


def test_where_a_gpus_time_went_is_told_by_kind_and_by_kernel() -> None:
    kernels = [("grouped_forward", 0.0, 2.0), ("grouped_forward", 1.0, 4.0), ("nccl_x", 6.0, 7.0)]
    found = totals(kernels)
    assert found["kinds"] == {"expert GEMMs of megatron_fluid": 5.0, "communication": 1.0}
    assert found["kernels"]["grouped_forward"] == [5.0, 2]
    assert (found["busy_ms"], found["span_ms"]) == (5.0, 7.0)
    assert totals([])["span_ms"] == 0.0
