"""Options of the benchmarks that would not be followed: refused by name, before any rank waits for
another."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from benchmarks.harness import options

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


@pytest.mark.parametrize("suite", ["moe_layer", "grouped_gemm"])
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
