"""The decode-time all-to-all: dispatch and combine, whole and by halves, beside plain all-to-alls of the padded buffers.

    torchrun --nproc_per_node 4 -m benchmarks.all_to_all [--cases r1-128 v2-lite-1 ...] [--output benchmarks/results/all_to_all.json]

A case is a model's shape and the tokens a GPU brings: r1 (256 experts, top-8, hidden 7168) and v2-lite (64 experts, top-6,
hidden 2048), tokens 1 to 256. Rows go in as fp8 e4m3 with one fp32 scale per 128, come back as bf16. The capacity
(max_num_tokens) is the case's tokens, as in pplx-kernels' benchmark, unless --capacity says otherwise.

Variants: fluid (both operations captured in CUDA graphs, 20 in a row, time of one), fluid_weights_at_combine (weights travel
in combine, which costs an exchange), fluid_eager (each call between two events, as pplx-kernels times), torch_ata (NCCL
all_to_all_single of [experts, tokens, row]), nvshmem_ata (torch's NVSHMEM all-to-all of the same). Microseconds, the slowest
rank; mean and deviation over the samples stand in each row's config.

Mode `gemm`: a bf16 GEMM alone, and run between the send and the receive half of a dispatch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.results import RESULTS, Row, write_results
from benchmarks.timing import quantile
from megatron_fluid.comm.launch_environment import RankLaunch, detect_launch
from megatron_fluid.low_latency import AllToAll

__all__ = ["SHAPES", "TOKENS", "main"]

SHAPES = {"r1": (256, 8, 7168), "v2-lite": (64, 6, 2048)}
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
MODES = ("dispatch", "dispatch_send", "dispatch_receive", "combine", "combine_send", "combine_receive")
_IN_A_ROW = 20


class _Case:
    """Tensors of one case on this rank."""

    def __init__(self, name: str, capacity: int | None, rank: int, world: int, device: torch.device) -> None:
        shape, _, tokens = name.rpartition("-")
        if shape not in SHAPES or not tokens.isdigit() or int(tokens) < 1:
            raise ValueError(
                f"case: found {name!r}, allowed: one of {', '.join(SHAPES)} and a number of tokens, as in r1-128"
            )
        self.name, self.tokens = name, int(tokens)
        self.experts, self.k, self.hidden = SHAPES[shape]
        self.capacity = capacity or self.tokens
        generator = torch.Generator(device=device).manual_seed(17 + rank)
        m, local = self.tokens, self.experts // world
        self.rows = self.capacity * world
        self.x = torch.randn(m, self.hidden, device=device, generator=generator).to(torch.float8_e4m3fn)
        self.scale = torch.rand(m, self.hidden // 128, device=device, generator=generator)
        ids = torch.rand(m, self.experts, device=device, generator=generator).topk(self.k, -1).indices
        self.ids = ids.to(torch.int32).contiguous().view(torch.uint32)
        self.weights = torch.rand(m, self.k, device=device, generator=generator)
        self.counts = torch.zeros(local, dtype=torch.int32, device=device)
        empty = torch.zeros(local, self.rows, self.hidden, dtype=torch.uint8, device=device)
        self.out_x = empty.view(torch.float8_e4m3fn)
        self.out_scale = torch.zeros(local, self.rows, self.hidden // 128, device=device)
        self.y = torch.randn(local, self.rows, self.hidden, device=device, generator=generator, dtype=torch.bfloat16)
        self.out = torch.empty(m, self.hidden, dtype=torch.bfloat16, device=device)

    def open(self, rank: int, world: int) -> AllToAll:
        return AllToAll.intranode(
            self.capacity,
            self.experts,
            self.k,
            rank,
            world,
            1,
            self.hidden,
            self.hidden,
            self.hidden // 32,
            timeout_s=5.0,
        )

    def calls(self, ata: AllToAll, early: bool) -> dict[str, Callable[[], None]]:
        """The halves, with the weights at dispatch (`early`) or at combine."""
        at_dispatch, at_combine = (self.weights, None) if early else (None, self.weights)
        sent = (self.x, self.scale, self.ids)
        received = (self.counts, self.out_x, self.out_scale)
        return {
            "dispatch": lambda: ata.dispatch(*received, *sent, weights=at_dispatch),
            "dispatch_send": lambda: ata.dispatch(None, None, None, *sent, do_recv=False, weights=at_dispatch),
            "dispatch_receive": lambda: ata.dispatch(*received, None, None, None, do_send=False),
            "combine": lambda: ata.combine(self.out, self.ids, at_combine, self.y),
            "combine_send": lambda: ata.combine(None, None, at_combine, self.y, do_recv=False),
            "combine_receive": lambda: ata.combine(self.out, self.ids, at_combine, None, do_send=False),
        }


def _slowest(samples: Sequence[float], device: torch.device) -> list[float]:
    table = torch.tensor(list(samples), dtype=torch.float32, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return [float(v) for v in table.tolist()]


def _row(case: str, mode: str, variant: str, samples: Sequence[float], config: dict[str, object]) -> Row:
    """samples: microseconds."""
    mean = sum(samples) / len(samples)
    deviation = math.sqrt(sum((s - mean) ** 2 for s in samples) / len(samples))
    ordered = list(samples)
    config = {**config, "mean_us": round(mean, 2), "deviation_us": round(deviation, 2)}
    p10, median, p90 = (quantile(ordered, q) / 1e3 for q in (0.1, 0.5, 0.9))
    return Row(case, mode, variant, median, p10, p90, len(ordered), config)


def _time_graph(graph: torch.cuda.CUDAGraph, iters: int, in_a_row: int, device: torch.device) -> list[float]:
    samples = []
    for _ in range(3):
        graph.replay()
    for _ in range(iters):
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1, device=device))
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / in_a_row)
    return _slowest(samples, device)


def _capture(calls: Sequence[Callable[[], None]], in_a_row: int, device: torch.device) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(in_a_row):
            for call in calls:
                call()
    torch.cuda.synchronize()
    dist.barrier()
    return graph


def _time_eager(pieces: Sequence[Callable[[], None]], iters: int, device: torch.device) -> list[list[float]]:
    """Samples of each piece, run one after another, each between two events."""
    for _ in range(10):
        for piece in pieces:
            piece()
    torch.cuda.synchronize()
    dist.barrier()
    events = []
    for _ in range(iters):
        row = [torch.cuda.Event(enable_timing=True) for _ in range(len(pieces) + 1)]
        row[0].record()
        for piece, event in zip(pieces, row[1:], strict=True):
            piece()
            event.record()
        events.append(row)
    torch.cuda.synchronize()
    columns = zip(*[[a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(row)] for row in events], strict=True)
    return [_slowest(column, device) for column in columns]


def run_case(name: str, options: argparse.Namespace, rank: int, world: int, device: torch.device) -> list[Row]:
    """All modes and variants of one case."""
    case = _Case(name, options.capacity, rank, world, device)
    rows: list[Row] = []
    ata = case.open(rank, world)
    config: dict[str, object] = {
        "tokens": case.tokens, "capacity": case.capacity, "experts": case.experts, "top_k": case.k, "hidden": case.hidden,
        "transport": ata.transport,
    }  # fmt: skip
    for variant, early in (("fluid", True), ("fluid_weights_at_combine", False)):
        calls = case.calls(ata, early)
        for mode in ("dispatch", "combine"):
            whole = _capture([calls[mode]], _IN_A_ROW, device)
            rows.append(_row(name, mode, variant, _time_graph(whole, options.iters, _IN_A_ROW, device), config))
            halves = [calls[f"{mode}_send"], calls[f"{mode}_receive"]]
            split = _capture(halves, _IN_A_ROW, device)
            rows.append(
                _row(name, f"{mode}_split", variant, _time_graph(split, options.iters, _IN_A_ROW, device), config)
            )
        ata.check_errors()
    calls = case.calls(ata, True)
    order = ("dispatch", "combine")
    for mode, samples in zip(order, _time_eager([calls[m] for m in order], options.iters * 10, device), strict=True):
        rows.append(_row(name, mode, "fluid_eager", samples, config))
    parts = ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive")
    for mode, samples in zip(parts, _time_eager([calls[m] for m in parts], options.iters * 10, device), strict=True):
        rows.append(_row(name, mode, "fluid_eager", samples, config))
    ata.check_errors()
    rows += _gemm_rows(name, calls, options.iters, device, config)
    ata.check_errors()
    ata.destroy()
    if not options.no_torch_ata:
        padded = torch.randint(0, 255, (case.experts * case.tokens * case.hidden,), dtype=torch.uint8, device=device)
        received = torch.empty_like(padded)
        graph = _capture([lambda: dist.all_to_all_single(received, padded)], 4, device)
        rows.append(_row(name, "dispatch", "torch_ata", _time_graph(graph, options.iters, 4, device), config))
    return rows


def _gemm_rows(
    name: str, calls: dict[str, Callable[[], None]], iters: int, device: torch.device, config: dict[str, object]
) -> list[Row]:
    """The GEMM alone, and between the halves: what the transfer costs a kernel that runs meanwhile."""
    a = torch.randn(2048, 4096, dtype=torch.bfloat16, device=device)
    b = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    out = torch.empty(2048, 4096, dtype=torch.bfloat16, device=device)

    def gemm() -> None:
        torch.mm(a, b, out=out)

    alone = _capture([gemm], _IN_A_ROW, device)
    halves = _capture([calls["dispatch_send"], calls["dispatch_receive"]], _IN_A_ROW, device)
    around = _capture([calls["dispatch_send"], gemm, calls["dispatch_receive"]], _IN_A_ROW, device)
    samples = {
        "alone": _time_graph(alone, iters, _IN_A_ROW, device),
        "dispatch_alone": _time_graph(halves, iters, _IN_A_ROW, device),
        "with_dispatch_around": _time_graph(around, iters, _IN_A_ROW, device),
    }
    inside = _time_eager([calls["dispatch_send"], gemm, calls["dispatch_receive"]], iters * 5, device)[1]
    apart = _time_eager([gemm], iters * 5, device)[0]
    rows = [_row(name, "gemm", variant, values, config) for variant, values in samples.items()]
    rows.append(_row(name, "gemm", "alone_eager", apart, config))
    rows.append(_row(name, "gemm", "between_halves_eager", inside, config))
    return rows


def _nvshmem_main(options: argparse.Namespace, rank: int, device: torch.device) -> None:
    """Times torch's NVSHMEM all-to-all in a process of its own (a process has one symmetric-memory backend)."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.set_backend("NVSHMEM")
    world = dist.group.WORLD
    assert world is not None
    most = 0
    for name in options.cases:
        shape, _, tokens = name.rpartition("-")
        most = max(most, SHAPES[shape][0] * int(tokens) * SHAPES[shape][2])
    send = symmetric_memory.empty(most, dtype=torch.uint8, device=device)
    receive = symmetric_memory.empty(most, dtype=torch.uint8, device=device)
    for buffer in (send, receive):
        symmetric_memory.rendezvous(buffer, world)
    found = {}
    for name in options.cases:
        shape, _, tokens = name.rpartition("-")
        n = SHAPES[shape][0] * int(tokens) * SHAPES[shape][2]
        x, y = send[:n], receive[:n]
        graph = _capture([lambda x=x, y=y: torch.ops.symm_mem.nvshmem_all_to_all(x, y, world.group_name)], 4, device)  # type: ignore[misc]
        found[name] = _time_graph(graph, options.iters, 4, device)
    if rank == 0:
        Path(options.nvshmem_child).write_text(json.dumps(found))


def _nvshmem_rows(options: argparse.Namespace, launch: RankLaunch) -> tuple[list[Row], str]:
    """(rows, reason where there are none)."""
    environment = dict(os.environ, MASTER_PORT=str(launch.port + 7), NVSHMEM_SYMMETRIC_SIZE=str(3 << 30))
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "samples.json"
        command = [
            sys.executable, "-m", "benchmarks.all_to_all", "--nvshmem-child", str(result), "--iters", str(options.iters),
            "--cases", *options.cases,
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if launch.rank != 0:
            return [], ""
        if done.returncode or not result.exists():
            return [], (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        samples = json.loads(result.read_text())
    return [_row(name, "dispatch", "nvshmem_ata", values, {}) for name, values in samples.items()], ""


def _table(rows: Sequence[Row], shape: str) -> list[str]:
    """The seed's table: a line a number of tokens, a column a variant, mean and deviation."""
    columns = [
        ("Dispatch", "dispatch", "fluid"), ("Combine", "combine", "fluid"),
        ("Dispatch split", "dispatch_split", "fluid"), ("Combine split", "combine_split", "fluid"),
        ("Combine, weights late", "combine", "fluid_weights_at_combine"),
        ("Dispatch eager", "dispatch", "fluid_eager"), ("Combine eager", "combine", "fluid_eager"),
        ("Torch AtA", "dispatch", "torch_ata"), ("NVSHMEM AtA", "dispatch", "nvshmem_ata"),
    ]  # fmt: skip
    lines = [f"{shape}, microseconds", "tokens | " + " | ".join(title for title, _, _ in columns)]
    for case in dict.fromkeys(row.case for row in rows if row.case.rpartition("-")[0] == shape):
        cells = []
        for _, mode, variant in columns:
            found = [r for r in rows if (r.case, r.mode, r.variant) == (case, mode, variant)]
            cells.append(f"{found[0].config['mean_us']:.1f} ± {found[0].config['deviation_us']:.1f}" if found else "x")
        lines.append(f"{case.rpartition('-')[2]:>6} | " + " | ".join(cells))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{shape}-{tokens}" for shape in SHAPES for tokens in TOKENS]
    parser.add_argument("--cases", nargs="+", default=every, help="such as r1-128 (default: all)")
    parser.add_argument("--capacity", type=int, help="max_num_tokens (default: the case's tokens)")
    parser.add_argument("--iters", type=int, default=20, help="samples of each variant")
    parser.add_argument("--no-torch-ata", action="store_true", help="leave NCCL's padded all-to-all out")
    parser.add_argument("--no-nvshmem-ata", action="store_true", help="leave NVSHMEM's padded all-to-all out")
    parser.add_argument("--output", type=Path, default=RESULTS / "all_to_all.json")
    parser.add_argument("--nvshmem-child", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on all ranks that torchrun or mpirun started."""
    options = _parser().parse_args(arguments)
    launch = detect_launch()
    if not isinstance(launch, RankLaunch) or not torch.cuda.is_available():
        print("start one process a GPU, with torchrun or mpirun", file=sys.stderr)
        return 2
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"tcp://{launch.address}:{launch.port + 1}", rank=launch.rank, world_size=launch.world_size,
        device_id=device,
    )  # fmt: skip
    if options.nvshmem_child:
        _nvshmem_main(options, launch.rank, device)
        torch.cuda.synchronize()
        dist.barrier()
        os._exit(0)  # NVSHMEM's own teardown may wait for ranks that have left
    rows: list[Row] = []
    if not options.no_nvshmem_ata:
        found, reason = _nvshmem_rows(options, launch)
        rows += found
        if launch.rank == 0 and reason:
            print(f"NVSHMEM AtA is missing: {reason}")
    dist.barrier()
    for name in options.cases:
        rows += run_case(name, options, launch.rank, launch.world_size, device)
        torch.cuda.empty_cache()
    if launch.rank == 0:
        for shape in SHAPES:
            if any(row.case.startswith(shape) for row in rows):
                print("\n".join(_table(rows, shape)), flush=True)
        print(f"results: {write_results('all_to_all', rows, launch.world_size, options.output)}")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
