"""Variants of the attention benchmarks: one that fails on a rank is named, and left out on all."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.cases.attention import CASES, megatron_attention, start_megatron
from benchmarks.harness.variants import runnable
from tests.support.launch import run_ranks

ROOT = Path(__file__).resolve().parents[3]


class _Fails(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), where
        self.reach("construction")

    def reach(self, place: str) -> None:
        if place == self.where:
            raise RuntimeError("no such kernel")

    def forward(self, x: Tensor) -> Tensor:
        self.reach("forward")
        y: Tensor = self.linear(x)
        y.register_hook(lambda _: self.reach("backward"))
        return y


def _variants(rank: int, world: int) -> tuple[list[str], list[str], str]:
    places = ("construction", "forward", "backward", "nowhere")
    builders = {place: (lambda place=place: _Fails(place if rank else "")) for place in places}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        found = runnable(builders, set(), torch.randn(3, 4, requires_grad=True))
        chosen = runnable(builders, {"nowhere", "forward"}, torch.randn(3, 4, requires_grad=True))
    return list(found), list(chosen), said.getvalue()


def test_a_variant_that_fails_on_one_rank_is_left_out_on_all() -> None:
    results = run_ranks(_variants, 2)
    for found, chosen, _ in results:
        assert found == chosen == ["nowhere"]
    lines = results[0][2].splitlines()
    assert [line.split()[0] for line in lines] == ["construction", "forward", "backward", "forward"]
    assert all(line.endswith("left out: rank 1: RuntimeError: no such kernel") for line in lines)
    assert results[1][2] == "", "one rank speaks for all"


@pytest.mark.slow
def test_the_command_for_machines_without_a_gpu_writes_rows_of_ours(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "FLUID" not in name}
    environment |= {"NPROC": "2", "PYTHON": sys.executable}
    command = ["benchmarks/launch.sh", "attention", "--tiny", "--cases", "tiny", "--iters", "2"]
    command += ["--modes", "forward", "--output", str(tmp_path / "rows.json")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=600)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {"fluid", "fluid_megatron"} <= {row["variant"] for row in rows}


def _of_real_models(rank: int, world: int) -> dict[str, bool]:
    """Whether a case's linears have biases; every model's own settings, made small."""
    start_megatron(te=False)
    found = {}
    for name, case in CASES.items():
        small = dataclasses.replace(
            case, hidden=64, heads=4, kv_heads=4 if case.latent else 2, length=16, head_dim=16
        )
        module = megatron_attention(
            small, torch.device("cpu"), "auto", te=False, dtype=torch.float32
        ).module
        found[name] = module.linear_proj.bias is not None
    return found


def test_modules_of_every_case_can_be_built() -> None:
    pytest.importorskip("megatron.core")
    [found] = run_ranks(_of_real_models, 1, env={"MEGATRON_FLUID_CPU": "1"})
    assert found.keys() == CASES.keys()
    assert {name for name, biased in found.items() if biased} == {
        name for name in CASES if name.startswith("gpt-oss")
    }
