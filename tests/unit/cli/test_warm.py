"""`megatron-fluid warm`: which kernels of which model."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from benchmarks.cases.moe import CASES
from megatron_fluid.cli import main, warm
from megatron_fluid.cuda import kernel_build
from megatron_fluid.errors import ConfigError


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The units that were to be compiled, on a machine without a GPU."""
    found: list[Any] = []

    def start(units: Any) -> list[Future[bytes]]:
        futures = []
        for unit in units:
            found.append(unit)
            futures.append(Future[bytes]())
            futures[-1].set_result(b"code")
        return futures

    monkeypatch.setattr(kernel_build, "start", start)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return found


@pytest.mark.parametrize(
    "command",
    [
        ["qwen3-30b-a3b"],
        ["--hidden", "2048", "--ffn", "768", "--experts", "128", "--top-k", "8"],
        ["--from-args", "--hidden-size", "2048", "--ffn-hidden-size", "6144", "--num-experts"]
        + ["128", "--moe-ffn-hidden-size", "768", "--seq-length", "4096", "--bf16"],
    ],
)
def test_a_model_in_three_spellings(
    compiled: list[Any], command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", *command]) == 0
    assert [unit.name for unit in compiled] == [
        *("grouped_forward", "grouped_backward", "grouped_gated"),
        *("grouped_weights", "grouped_long_sums", "grouped_sums"),
    ]
    assert not any("-DHALF_FLOATS" in unit.options for unit in compiled)
    assert "no GPU: Triton's kernels will be compiled at the first step" in capsys.readouterr().out


def test_fp16_is_read_from_the_flags(compiled: list[Any]) -> None:
    flags = ["--hidden-size", "64", "--ffn-hidden-size", "96", "--num-experts", "4", "--fp16"]
    assert main(["warm", "--from-args", *flags]) == 0
    assert compiled and all("-DHALF_FLOATS" in unit.options for unit in compiled)


def test_wide_layers_need_wide_tiles_too(compiled: list[Any]) -> None:
    assert main(["warm", "mixtral-8x7b"]) == 0
    assert "grouped_wide" in [unit.name for unit in compiled]


def test_sizes_of_a_share_of_the_experts() -> None:
    flags = ["--hidden-size", "64", "--ffn-hidden-size", "96", "--num-experts", "8"]
    shape = warm.shape_of_flags([*flags, "--expert-model-parallel-size", "4"])
    assert shape == (warm.Shape(64, 96, 8, 2), "bf16", 4)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ([], "warm: give exactly one of MODEL, all four sizes, or --from-args"),
        (["olmoe", "--hidden", "2"], "warm: give exactly one of"),
        (["--hidden", "2"], "missing: --ffn, --experts, --top-k"),
        (["--from-args", "--hidden-size", "2"], "--from-args: give --moe-ffn-hidden-size"),
        (["olmoe", "--expert-parallel", "7"], "--expert-parallel: found 7, allowed: a divisor"),
    ],
)
def test_a_wrong_command_is_named(
    compiled: list[Any], command: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", *command]) == 2
    assert named in capsys.readouterr().err.replace("'", "") and not compiled


def test_a_flag_that_is_missing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--num-experts"):
        warm.shape_of_flags(["--hidden-size", "2", "--ffn-hidden-size", "2"])


def test_the_models_are_those_of_the_benchmarks() -> None:
    for name, shape in warm.MODELS.items():
        case = CASES[name]
        assert shape == (case.hidden, case.ffn, case.experts, case.top_k)
