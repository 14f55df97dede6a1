"""Options of the benchmarks that would not be followed: refused by name, before any rank waits for
another."""

from __future__ import annotations

import argparse
import importlib
from types import ModuleType

import pytest
import torch

from benchmarks.cases.moe import MoECase
from benchmarks.harness import options
from benchmarks.suites import attention, block, moe_layer

MODES = "found 'nosuch', allowed: some of forward, train, comma-separated"


def _program(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.suites.{name}")


@pytest.mark.parametrize(
    ("suite", "arguments", "words"),
    [
        ("attention", "--tiny --modes nosuch", f"argument --modes: {MODES}"),
        ("attention", "--tiny --modes forward,", "argument --modes: found ''"),
        ("attention", "--cases tiny", "argument --cases: found 'tiny', allowed: some of mixtral"),
        ("attention", "--tiny --fluid sm_push:1,nosuch:2", "argument --fluid: found 'nosuch'"),
        ("attention", "--tiny --fluid sm_push:0", "groups of 'sm_push:0': found '0', allowed: 1"),
        ("attention", "--tiny --variants fluid,nosuch", "argument --variants: found 'nosuch'"),
        ("attention", "--phases --repeats 2", "--repeats: allowed without --phases only"),
        ("attention", "--groups 2", "--groups: allowed with --phases only"),
        ("block", "--tiny --cases nosuch", "argument --cases: found 'nosuch', allowed: some of"),
        ("moe_layer", "--smoke --cases olmoe --iters 3", "--cases, --iters: allowed without --smo"),
        ("moe_layer", "--smoke --variants flood", "--variants: found 'flood', allowed: beginning"),
        ("grouped_gemm", "--smoke --cases olmoe", "--cases: allowed without --smoke only"),
        ("dispatch_combine", "--cases nosuch", "argument --cases: found 'nosuch'"),
        ("all_to_all", "--cases r1-1 r1-", "argument --cases: found 'r1-', allowed: one of r1"),
        ("losses", "--smoke --seeds 0", "found 0, 500, allowed: 1 or more"),
    ],
)
def test_an_unknown_or_idle_option_is_refused(
    suite: str, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _program(suite).main(arguments.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["moe_layer", "determinism"])
@pytest.mark.parametrize(
    ("arguments", "found"), [([], "no GPU"), (["--smoke"], "--smoke without Triton's interpreter")]
)
def test_without_a_gpu_a_suite_says_what_runs_instead(
    suite: str,
    arguments: list[str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(options, "INTERPRETED", False)
    with pytest.raises(SystemExit) as caught:
        _program(suite).main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"found {found}; one tiny case runs without a GPU" in said
    assert f"TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh {suite} --smoke" in said


def test_variants_that_may_be_asked_for_are_those_that_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, logits = torch.device("cpu"), torch.empty(2, 4)
    monkeypatch.setattr(attention, "everywhere", lambda name, attempt: None)
    monkeypatch.setattr(attention.dist, "get_world_size", lambda *group: 2)
    given = argparse.Namespace(rotary=False, kernel="auto", exchange="auto", fluid=[])
    built = attention._builders(attention.TINY["tiny"], given, cpu, "te")
    assert sorted([*built, "floor"]) == sorted(attention.VARIANTS)

    monkeypatch.setattr(block, "runnable", lambda builders, wanted, x: builders)
    built = block._variants(block.TINY["tiny"], cpu, True, set(), logits)
    assert sorted([*built, "fluid_graph"]) == sorted(block.VARIANTS)

    for name in ("fluid_layer", "MegatronMoE"):
        monkeypatch.setattr(moe_layer, name, lambda *arguments, **named: None)
    monkeypatch.setattr(moe_layer.dist, "new_group", lambda: None)
    given = argparse.Namespace(variants="", schedules="", tokens=2)
    found = {"floor", "floor_fluid", "fluid_graph"}
    monkeypatch.setattr(moe_layer, "missing", lambda variant: None)
    monkeypatch.setattr(moe_layer, "fp8_device_reason", lambda device: None)
    for ranks in (1, 2):
        layers, fixed = moe_layer._layers(MoECase(256, 32, 4, 2), given, cpu, None, ranks)
        assert set(fixed) < set(layers)
        assert ("torch_grouped" in layers) is (ranks == 1)
        found |= layers.keys()
    assert sorted(found) == sorted(moe_layer.VARIANTS)
