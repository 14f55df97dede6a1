"""Options of the benchmarks that would not be followed: refused by name, before any rank waits for another."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks import options

MODES = "found 'nosuch', allowed: some of forward, train, comma-separated"


@pytest.mark.parametrize(
    ("suite", "arguments", "words"),
    [
        ("attention", "--tiny --modes nosuch", f"argument --modes: {MODES}"),
        ("attention", "--tiny --modes forward,", "argument --modes: found ''"),
        ("attention", "--tiny --cases nosuch", "argument --cases: found 'nosuch', allowed: some of tiny, tiny-mha"),
        ("attention", "--cases tiny", "argument --cases: found 'tiny', allowed: some of mixtral"),
        ("attention", "--tiny --kernel nosuch", "argument --kernel: invalid choice: 'nosuch'"),
        ("attention", "--tiny --exchange nosuch", "argument --exchange: invalid choice: 'nosuch'"),
        (
            "attention",
            "--tiny --fluid push:1,nosuch:2",
            "argument --fluid: found 'nosuch', allowed: some of auto, push, engine",
        ),
        ("block", "--tiny --modes train,nosuch", f"argument --modes: {MODES}"),
        ("block", "--tiny --cases nosuch", "argument --cases: found 'nosuch', allowed: some of tiny"),
        ("moe_layer", "--smoke --modes nosuch", f"argument --modes: {MODES}"),
        (
            "moe_layer",
            "--smoke --routing nosuch",
            "argument --routing: found 'nosuch', allowed: some of balanced, zipf",
        ),
        ("moe_layer", "--smoke --cases nosuch --iters 3", "--cases, --iters: allowed without --smoke only"),
        ("moe_layer", "--cases nosuch", "argument --cases: found 'nosuch', allowed: some of mixtral-8x7b, qwen3"),
        ("grouped_gemm", "--smoke --cases olmoe", "--cases: allowed without --smoke only"),
        ("grouped_gemm", "--cases nosuch", "argument --cases: found 'nosuch'"),
        ("dispatch_combine", "--smoke --sms 24", "--sms: allowed without --smoke only"),
        ("dispatch_combine", "--cases nosuch", "argument --cases: found 'nosuch'"),
    ],
)
def test_an_unknown_or_idle_option_is_refused(
    suite: str, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.{suite}").main(arguments.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("suite", ["moe_layer", "grouped_gemm", "dispatch_combine"])
@pytest.mark.parametrize(
    ("arguments", "found"), [([], "no GPU"), (["--smoke"], "--smoke without Triton's interpreter")]
)
def test_without_a_gpu_a_suite_says_what_runs_instead(
    suite: str, arguments: list[str], found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(options, "INTERPRETED", False)
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.{suite}").main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"found {found}; one tiny case runs without a GPU" in said
    assert f"TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh {suite} --smoke" in said
