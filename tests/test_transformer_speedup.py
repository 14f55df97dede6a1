"""The speed of overlapped transformer layers beside plain all-to-all ones.

Under torchrun it measures and prints a table (Mode, Baseline, Overlap, Speedup); ``--output`` also
writes benchmarks/results/transformer_speedup.json (with 2 GPUs transformer_speedup-2gpu.json),
``--help`` lists the sizes::

    torchrun --nproc_per_node 4 tests/test_transformer_speedup.py --output
    torchrun --nnodes 2 --nproc_per_node 8 --node_rank 0 --master_addr HOST --master_port 29500
    tests/test_transformer_speedup.py

Under pytest it runs small on gloo ranks and checks that both variants compute the same.
"""

import sys
from pathlib import Path

# Under torchrun: before the imports below, as it needs neither pytest nor a test.
if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from benchmarks.suites.transformer_speedup import main

    main()
    sys.exit()

import dataclasses
import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.harness.results import Row, read_results
from benchmarks.suites.transformer_speedup import MODES, SMALL, Options, Shape, run, table
from megatron_fluid.moe.router import Routing, TopKRouter
from tests.support.forked_program import run_program
from tests.support.launch import run_ranks

EXACT = dataclasses.replace(SMALL, dtype="float64")


def _measure(
    rank: int, world: int, shape: Shape, options: Options
) -> tuple[list[Row], dict[str, float]]:
    plain = TopKRouter.forward

    def fused(router: TopKRouter, tokens: Tensor) -> Routing:
        """What the fused router gives, which needs a GPU."""
        made = plain(router, tokens)
        return Routing(made.ids.int(), made.probs, None)

    with mock.patch.object(TopKRouter, "forward", fused if options.defer else plain):
        return run(shape, options, torch.device("cpu"), iters=2, warmup=1)


@pytest.mark.parametrize(
    ("world", "options"), [(2, Options(head_groups=2, dx_chunks=3)), (4, Options(defer=False))]
)
def test_both_variants_agree_and_the_table_has_figures(world: int, options: Options) -> None:
    results = run_ranks(_measure, world, EXACT, options)
    rows, differences = results[0]
    assert results[1][0] == rows, "ranks report different figures"
    wanted = {(m, v) for m in MODES for v in ("fluid", "rounds", "all_to_all")}
    assert {(row.mode, row.variant) for row in rows} == wanted
    for row in rows:
        assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms < math.inf
        assert row.iters == 2 and row.config["cp"] == world
    # Choices, output, dX, and per layer two norms, two projections, router, two expert weights:
    # none is missing.
    assert len(differences) == 3 + 7 * EXACT.layers
    text = table(rows)
    heads = [line.split("|")[1].strip() for line in text.splitlines() if line]
    assert heads == ["Mode", "------", "Inference", "Forward", "Training"] * 2


def test_speedup_is_baseline_over_overlap() -> None:
    times = {"fluid": 2.0, "all_to_all": 3.0}.items()
    rows = [Row("seed", m, v, t, t, t, 1) for m in MODES for v, t in times]
    assert table(rows).splitlines()[2] == "| Inference | 3.00 ms | 2.00 ms | 1.50x (+50%) |"


def test_on_two_ranks_it_prints_the_table_and_writes_results(tmp_path: Path) -> None:
    target = tmp_path / "speed.json"
    variables = {"FLUID_COMMIT": "named-by-the-test", "MEGATRON_FLUID": "off"}
    variables["TORCHELASTIC_RUN_ID"] = "as torchrun sets"
    flags = ["--iters", "2", "--warmup", "1", "--output", str(target)]
    code, output = run_program(Path(__file__), 2, flags, tmp_path, variables)
    assert code == 0, output[-3000:]
    assert "| Mode | Baseline | Overlap | Speedup |" in output
    document = read_results(target)
    assert document["suite"] == "transformer_speedup" and document["gpus"] == 2
    assert document["commit"] == "named-by-the-test"
    started = "torchrun --nproc_per_node 2 tests/test_transformer_speedup.py"
    assert document["command"] == f"{started} --iters 2 --warmup 1"
    assert len(document["rows"]) == 9
