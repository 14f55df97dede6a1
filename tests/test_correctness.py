"""Overlapped MoE against the plain oracle: outputs, dX, dprobs and every dW.

pytest tests/test_correctness.py                          # spawns gloo ranks
torchrun --nproc_per_node=4 tests/test_correctness.py     # NCCL or gloo; prints a table
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # torchrun puts only tests/ there

from megatron_fluid.errors import FluidError
from tests.support.launch import run_ranks
from tests.support.moe_cases import ROUTINGS, Case, check_case, run_cases

BF16 = torch.bfloat16

# name of the group -> its cases
CASES: dict[str, list[Case]] = {
    "routings": [
        Case(routing=name, dx_chunks=1 + i % 3, seed=i) for i, name in enumerate(ROUTINGS)
    ],
    "routings, deferred": [
        Case(routing=name, dx_chunks=1 + i % 4, deferred=True, layers=2, seed=10 + i)
        for i, name in enumerate(ROUTINGS)
    ],
    "top-k": [
        Case(top_k=k, experts_per_rank=4, deferred=k % 2 == 0, routing="uneven", seed=20 + k)
        for k in range(1, 9)
    ],
    "chunks": [
        Case(dx_chunks=n, tokens=17, routing="uneven", seed=30 + n) for n in (1, 2, 3, 5, 8, 50)
    ],
    "layers": [
        Case(layers=n, deferred=d, dx_chunks=2, seed=40 + n)
        for n in (2, 6, 12)
        for d in (False, True)
    ],
    "accumulation": [
        Case(microbatches=3, layers=2, deferred=d, routing=r, seed=50)
        for d in (False, True)
        for r in ("uneven", "first rank has no tokens")
    ],
    "activations": [
        Case(activation=a, weights=w, deferred=d, seed=60)
        for a, w, d in (
            ("geglu", "stacked", False),
            ("gelu", "in_out", False),
            ("relu2", "tuple", True),
            ("silu", "in_out", True),
            ("gelu_tanh", "tuple", False),
            ("callable", "stacked", True),
        )
    ],
    "frozen tokens": [
        Case(train_tokens=False, deferred=d, layers=2, seed=70) for d in (False, True)
    ],
    "fp32 and bf16": [
        Case(dtype=t, deferred=d, layers=n, dx_chunks=2, weights=w, routing=r, seed=80)
        for t in (torch.float32, BF16)
        for d, n, w, r in (
            (False, 1, "stacked", "random"),
            (True, 2, "stacked", "uneven"),
            (False, 1, "tuple", "empty experts"),
            (True, 1, "in_out", "masked"),
        )
    ],
}


def pytest_generate_tests(metafunc: Any) -> None:
    """Each group of cases on 1, 3 and 4 ranks (test_readme.py: all on 2, by torchrun); a hook and
    not a mark, since under torchrun pytest may be absent."""
    pairs = [(group, world) for group in CASES for world in (3, 1, 4)]
    metafunc.parametrize(
        ("group", "world"), pairs, ids=[f"{group}, {world} ranks" for group, world in pairs]
    )


def test_against_the_oracle(group: str, world: int) -> None:
    cases = CASES[group]
    if world in (1, 4):  # the whole tables run on an even and on an odd number of ranks
        cases = cases[world // 4 :: 3]
    run_ranks(run_cases, world, cases)


def main() -> int:
    """Under torchrun: every case on every rank, a table from rank 0. Returns the exit status."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    group = dist.group.WORLD
    assert group is not None
    rank, failures = dist.get_rank(), 0
    if rank == 0:
        print(
            f"overlapped MoE against the oracle, {group.size()} ranks, "
            f"{'NCCL' if cuda else 'gloo'}",
            flush=True,
        )
        print(f"{'cases':24}{'number':>8}{'largest error':>16}{'seconds':>10}", flush=True)
    for name, cases in CASES.items():
        started, worst, failed = time.monotonic(), 0.0, 0
        for case in cases:
            try:
                worst = max(worst, check_case(case, group, device))
            except AssertionError as error:
                failed += 1
                print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        totals = torch.tensor([failed, worst], dtype=torch.float64, device=device)
        dist.all_reduce(totals, dist.ReduceOp.MAX)
        failures += int(totals[0])
        if rank == 0:
            seconds = time.monotonic() - started
            verdict = f"   {int(totals[0])} FAILED" if totals[0] else ""
            print(
                f"{name:24}{len(cases):8}{totals[1].item():16.2e}{seconds:10.1f}{verdict}",
                flush=True,
            )
    if rank == 0:
        print("FAILED" if failures else "all correct", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(failures > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FluidError as failure:
        sys.exit(str(failure))
