"""`megatron-fluid warm`: which kernels of which model."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megatron_fluid.cli import main
from megatron_fluid.cuda import kernel_build


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


FLAGS = "--num-attention-heads 16 --seq-length 4096 --num-experts"


@pytest.mark.parametrize(
    "command",
    ["qwen3-30b-a3b", f"--from-args --hidden-size 2048 --moe-ffn-hidden-size 768 {FLAGS} 128"],
)
def test_a_model_by_name_or_by_the_flags_of_a_training(
    compiled: list[Any], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", *command.split()]) == 0
    assert [unit.name for unit in compiled] == [
        *("grouped_forward", "grouped_backward", "grouped_gated"),
        *("grouped_weights", "grouped_long_sums", "grouped_sums"),
    ]
    assert not any("-DHALF_FLOATS" in unit.options for unit in compiled)
    assert "no GPU: Triton's kernels will be compiled at the first step" in capsys.readouterr().out


def test_fp16_is_read_from_the_flags(compiled: list[Any]) -> None:
    assert main(["warm", "--from-args", *f"--hidden-size 64 --fp16 {FLAGS} 4".split()]) == 0
    assert compiled and all("-DHALF_FLOATS" in unit.options for unit in compiled)


def test_wide_layers_need_wide_tiles_too(compiled: list[Any]) -> None:
    assert main(["warm", "mixtral-8x7b"]) == 0
    assert "grouped_wide" in [unit.name for unit in compiled]


def test_a_cache_that_keeps_nothing_is_refused_before_anything_is_compiled(
    compiled: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path / "file")
        assert main(["warm", "olmoe"]) == 2
    assert not compiled
    assert "a path that can be written (Not a directory)" in capsys.readouterr().err
