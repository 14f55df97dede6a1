"""The bench of tensor-parallel strategies as a user starts it: what it prints and verifies."""

from pathlib import Path

import pytest

from megatron_fluid.profiling.traces import read_document
from tests.support.forked_program import run_program

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "case", "flags"), [
    ("test_ag_kernel", "ag-256-512-128", ["--dtype=bfloat16", "--has_bias"]),
    ("test_gemm_rs", "rs-256-512-128", ["--dtype=float16", "--transpose_weight"]),
])  # fmt: skip
def test_one_problem_is_verified_and_traced(
    script: str, case: str, flags: list[str], tmp_path: Path
) -> None:
    sizes = case.split("-")[1:]
    flags = [*sizes, *flags, "--iters=2", "--warmup=1", "--verify", "--profile"]
    flags += ["--profile-folder", str(tmp_path)]
    flags += "--backends gemm_only torch fluid flux".split()
    program = ROOT / "benchmarks" / f"{script}.py"
    code, output = run_program(program, 2, flags, tmp_path, {"OMP_NUM_THREADS": "1"})
    assert code == 0, output[-6000:]
    words = [line.split() for line in output.splitlines()]
    fluid = next(line for line in words if line[:1] == ["fluid"])
    assert float(fluid[-1]) < 1e-2, "the error against NCCL's way"
    assert any(line[:2] == ["flux", "absent:"] for line in words)
    assert {tuple(line[:3]) for line in words if line[:1] == ["rank"]} >= {
        ("rank", r, "fluid") for r in "01"
    }
    for variant in ("gemm_only", "torch", "fluid"):
        assert read_document(tmp_path / case / f"{variant}.json.gz")["traceEvents"]
    assert (tmp_path / case / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "fluid" in (tmp_path / case / "timeline.html").read_text()
