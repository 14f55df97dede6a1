"""The overlapped tensor-parallel forms side by side, the flagged GEMM with tiles of many sizes and
different numbers of SMs.

    benchmarks/launch.sh tp_tune --sweep goals --rows 8192
    benchmarks/launch.sh tp_tune --sweep llama-3-8b --rows 1024 2048

Each variant has symmetric memory of its own. What wins belongs into the defaults
(megatron_fluid/tensor_parallel), shape by shape.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.cases.tensor_parallel import ROWS, SWEEPS, divided, select
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from benchmarks.suites.tp_backends import Problem, gemm_only, torch_nccl
from benchmarks.suites.tp_overlap import Options, problem_of
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.cuda.hopper_kernels import is_hopper
from megatron_fluid.tensor_parallel.choice import Backend
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.fused import FusedBackend
from megatron_fluid.tensor_parallel.gemm import Gemm
from megatron_fluid.tensor_parallel.signal_wait import SignalWaitBackend, Tile

__all__ = ["main"]

FORMS = ("copy_engine", "fused", "flagged")
TILES = {
    "128x256x64s3": Tile({"BM": 128, "BN": 256, "BK": 64, "GROUP": 8, "STAGES": 3}, 8),
    "128x256x64s4": Tile({"BM": 128, "BN": 256, "BK": 64, "GROUP": 8, "STAGES": 4}, 8),
    "128x128x64s4": Tile({"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "STAGES": 4}, 4),
    "128x128x64s4w8": Tile({"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "STAGES": 4}, 8),
    "64x256x64s4": Tile({"BM": 64, "BN": 256, "BK": 64, "GROUP": 16, "STAGES": 4}, 4),
    "256x128x64s3": Tile({"BM": 256, "BN": 128, "BK": 64, "GROUP": 4, "STAGES": 3}, 8),
}


def _variants(
    group: dist.ProcessGroup, device: torch.device
) -> tuple[dict[str, Backend], list[SymmetricWorkspace]]:
    """Every variant, on a workspace of its own. Collective."""
    driver = CudaDriver(device)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspaces: list[SymmetricWorkspace] = []

    def workspace() -> SymmetricWorkspace:
        workspaces.append(SymmetricWorkspace(group))
        return workspaces[-1]

    plain = CopyEngineBackend(workspace(), driver)
    found: dict[str, Backend] = {"copy_engine": plain}
    if is_hopper(torch.cuda.current_device()):
        found["fused"] = FusedBackend(workspace(), driver)
    for name, tile in TILES.items():
        found[f"flagged {name}"] = SignalWaitBackend(workspace(), driver, plain, sms - 2, (tile,))
    for spare in (0, 4, 8):
        found[f"flagged default, {spare} SMs spared"] = SignalWaitBackend(
            workspace(), driver, plain, sms - spare
        )
    return found, workspaces


def _call(backend: Backend, problem: Problem) -> Callable[[], Tensor]:
    gemm = Gemm(problem.b, problem.transpose_b, problem.bias)
    if problem.operation == "ag":
        return lambda: backend.gather_matmul(problem.a, gemm, keep=False)[0]
    return lambda: backend.matmul_scatter(problem.a, gemm)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the knobs for some cases; rank 0 prints them by time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", nargs="+", choices=sorted(SWEEPS), default=["goals"])
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[], metavar="M", help=f"only these M, of {ROWS}"
    )
    parser.add_argument("--operation", choices=("ag", "rs"), help="only this operation")
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument(
        "--forms",
        nargs="+",
        metavar="WORD",
        help="only variants that begin with one of these words",
    )
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    try:
        cases = select(options.sweep, options.rows, options.operation)
    except ValueError as error:
        parser.error(str(error))
    for word in options.forms or ():
        if not any(form.startswith(word) or word.startswith(form) for form in FORMS):
            parser.error(
                f"argument --forms: found {word!r}, allowed: beginnings of variants' names, as "
                f"{', '.join(FORMS)}"
            )
    cases = divided(cases, int(os.environ.get("WORLD_SIZE", "1")))
    if not torch.cuda.is_available():
        print("tp_tune: the overlapped forms need CUDA", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    backends, workspaces = _variants(group, device)
    if options.forms:
        words = tuple(options.forms)
        backends = {name: form for name, form in backends.items() if name.startswith(words)}
    rows: list[Row] = []
    for case in cases:
        problem = problem_of(case, Options(), device)
        calls: dict[str, Callable[[], Tensor]] = {
            "gemm_only": gemm_only(problem),
            "torch": torch_nccl(problem),
        }
        calls |= {name: _call(backend, problem) for name, backend in backends.items()}
        wanted = calls["torch"]().float()
        for name, call in calls.items():
            error = float((call().float() - wanted).norm() / wanted.norm())
            if name != "gemm_only" and not error < 1e-2:
                raise ValueError(f"{case}: {name} differs from NCCL's result by {error:.1e}")
        local = (problem.rows, *reversed(problem.b_kn.shape))
        repeats = min(20, max(3, round(5e-3 * 650e12 / (2 * math.prod(local)))))
        head_start = layer_head_start_ms(device)
        timings = measure(
            calls, device, warmup=2, iters=options.iters, repeats=repeats, head_start_ms=head_start
        )
        label = "-".join(map(str, (problem.operation, *local)))
        rows += [timing.row(label, "forward", name) for name, timing in timings.items()]
        if dist.get_rank() == 0:
            print(label)
            for name, timing in sorted(timings.items(), key=lambda item: item[1].median_ms):
                of_gemm = timing.median_ms / timings["gemm_only"].median_ms
                print(
                    f"  {timing.median_ms:8.3f} ms  {of_gemm:6.3f} of the GEMM  {name}", flush=True
                )
            if options.output is not None:
                write_results("tp_tune", rows, dist.get_world_size(), options.output)
    dist.barrier()
    for workspace in workspaces:
        workspace.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
