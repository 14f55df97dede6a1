"""The decode-time all-to-all: dispatch and combine, whole and by halves, beside plain all-to-alls
of the padded buffers.

    benchmarks/launch.sh all_to_all --cases r1-128 v2-lite-1

A case is a model's shape and the tokens a GPU brings: r1 (256 experts, top-8, hidden 7168) and
v2-lite (64 experts, top-6, hidden 2048), tokens 1 to 256. Rows go in as fp8 e4m3 with one fp32
scale per 128, come back as bf16. The capacity (max_num_tokens) is the case's tokens, as in
pplx-kernels' benchmark, unless --capacity says otherwise.

Modes dispatch and combine: 20 calls captured in one CUDA graph, time of one. dispatch_eager and
combine_eager: as many launched one by one, the variants in turns. Compare within a mode. Those of
the halves are dispatch_send_eager and so on, each call between two events; dispatch_split and
combine_split are the two halves one after the other.

Variants: fluid (weights travel with the dispatch), fluid_weights_at_combine (weights travel in
combine, which costs an exchange), fluid_packed (packed bf16 rows, as a grouped GEMM wants them),
torch_ata (NCCL all_to_all_single of [experts, tokens, row], rows of a byte an element there and of
bf16 back), nvshmem_ata (torch's NVSHMEM all-to-all of the same, eager alone, as it starts
collectives of its own; in a process of its own, before the others), deepep (low-latency mode, which
also casts bf16 to fp8), nccl_ep (low-latency mode, bf16 both ways). Microseconds, the slowest rank;
mean and deviation over the samples stand in each row's config.

Mode gemm: a bf16 GEMM between the send and the receive half of a dispatch, and after both; what it
loses to the bytes in flight is the difference.

Without a GPU the same runs over gloo by the clock, to try the program: --cases v2-lite-1 --gemm 64
64 64 --iters 2.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases.all_to_all import SHAPES, TOKENS, Call, Case, Clock, row_of
from benchmarks.cases.exchange_rivals import LOW_LATENCY, missing_exchange
from benchmarks.harness.launchers import RankLaunch, detect_launch
from benchmarks.harness.left_out import everywhere
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import quantile
from megatron_fluid.cli.terminal import positive

__all__ = ["main"]


def run_case(
    name: str, options: argparse.Namespace, rank: int, world: int, clock: Clock
) -> list[Row]:
    """All modes and variants of one case."""
    device = clock.device
    case = Case(name, options.capacity, rank, world, device, options.transport)
    rows: list[Row] = []
    ata = case.open(rank, world)
    config: dict[str, object] = {
        "tokens": case.tokens,
        "capacity": case.capacity,
        "experts": case.experts,
        "top_k": case.k,
        "hidden": case.hidden,
        "transport": ata.transport,
    }

    def add(mode: str, variant: str, samples: Sequence[float], **more: object) -> None:
        rows.append(row_of(name, mode, variant, samples, {**config, **more}))

    calls = case.calls(ata, True)
    # The halves alternate, and a combine needs a dispatch before it.
    calls["dispatch"]()
    for mode in ("dispatch", "combine"):
        add(mode, "fluid", clock.captured([calls[mode]]))
        add(
            f"{mode}_split",
            "fluid",
            clock.captured([calls[f"{mode}_send"], calls[f"{mode}_receive"]]),
        )
    parts = ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive")
    for mode, samples in zip(parts, clock.eager([calls[mode] for mode in parts]), strict=True):
        add(f"{mode}_eager", "fluid", samples)
    _add_gemm(add, calls, clock, options.gemm)
    late = case.calls(ata, False)
    late["dispatch"]()
    add("combine", "fluid_weights_at_combine", clock.captured([late["combine"]]))
    if case.tokens in (1, 128):
        packed, operations = case.open_packed(rank, world)
        for mode, call in operations.items():
            add(mode, "fluid_packed", clock.captured([call]))
        clock.meet()
        packed.check_errors()
        packed.destroy()
    variants = {"fluid": {mode: calls[mode] for mode in ("dispatch", "combine")}}
    for variant, build in _rivals(case, options).items():
        rival = everywhere(variant, build)
        if rival is None:
            continue
        variants[variant] = rival
        for mode, call in rival.items():
            samples = everywhere(f"{variant}, captured", lambda c=call: clock.captured([c]))
            if samples is not None:
                add(mode, variant, samples)
    for (variant, mode), samples in clock.in_turns(variants).items():
        add(f"{mode}_eager", variant, samples)
    clock.meet()
    ata.check_errors()
    ata.destroy()
    return rows


def _rivals(case: Case, options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Call]]]:
    """What builds the calls of each rival that is wanted and installed."""

    def padded() -> dict[str, Call]:
        count, calls = case.experts * case.tokens * case.hidden, {}
        for mode, width in (("dispatch", 1), ("combine", 2)):
            sent = torch.randint(0, 255, (count * width,), device=case.x.device, dtype=torch.uint8)
            received = torch.empty_like(sent)
            calls[mode] = functools.partial(dist.all_to_all_single, received, sent)
        return calls

    found: dict[str, Callable[[], dict[str, Call]]] = {}
    if not options.no_torch_ata:
        found["torch_ata"] = padded
    parts = [name.rpartition("-") for name in options.cases]
    largest = (
        max(int(tokens) for _, _, tokens in parts),
        max(SHAPES[shape][2] for shape, _, _ in parts),
        max(SHAPES[shape][0] for shape, _, _ in parts),
    )
    x, ids = case.x.to(torch.bfloat16), case.ids.view(torch.int32)
    for variant, calls in LOW_LATENCY.items():
        if missing_exchange(variant) is None and not options.no_torch_ata:
            of_case = x, ids, case.weights, case.experts, largest
            found[variant] = functools.partial(calls, *of_case)
    return found


def _add_gemm(
    add: Callable[..., None], calls: dict[str, Call], clock: Clock, shape: Sequence[int]
) -> None:
    """The GEMM between the halves, and after them: what the transfer costs a kernel that runs
    meanwhile."""
    m, n, k = shape
    a = torch.randn(m, k, dtype=torch.bfloat16, device=clock.device)
    b = torch.randn(k, n, dtype=torch.bfloat16, device=clock.device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=clock.device)

    def gemm() -> None:
        torch.mm(a, b, out=out)

    send, receive = calls["dispatch_send"], calls["dispatch_receive"]
    after = clock.eager([send, receive, gemm])[2]
    between = clock.eager([send, gemm, receive])[1]
    loss = (quantile(between, 0.5) / quantile(after, 0.5) - 1) * 100
    add("gemm", "after_dispatch", after, gemm=list(shape))
    add("gemm", "between_halves", between, gemm=list(shape), loss_percent=round(loss, 2))
    add(
        "gemm_with_dispatch",
        "after_dispatch",
        clock.captured([send, receive, gemm]),
        gemm=list(shape),
    )
    add(
        "gemm_with_dispatch",
        "between_halves",
        clock.captured([send, gemm, receive]),
        gemm=list(shape),
    )


def _nvshmem_main(options: argparse.Namespace, rank: int, clock: Clock) -> None:
    """Times torch's NVSHMEM all-to-all in a process of its own (a process has one symmetric-memory
    backend)."""
    import torch.distributed._symmetric_memory as symmetric_memory

    symmetric_memory.set_backend("NVSHMEM")
    world = dist.group.WORLD
    assert world is not None
    most = 0
    for name in options.cases:
        shape, _, tokens = name.rpartition("-")
        most = max(most, 2 * SHAPES[shape][0] * int(tokens) * SHAPES[shape][2])
    send = symmetric_memory.empty(most, dtype=torch.uint8, device=clock.device)
    receive = symmetric_memory.empty(most, dtype=torch.uint8, device=clock.device)
    for buffer in (send, receive):
        symmetric_memory.rendezvous(buffer, world)
    found = {}
    for name in options.cases:
        shape, _, tokens = name.rpartition("-")
        n = SHAPES[shape][0] * int(tokens) * SHAPES[shape][2]
        for mode, size in (("dispatch", n), ("combine", 2 * n)):
            x, y = send[:size], receive[:size]

            def exchange(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                torch.ops.symm_mem.nvshmem_all_to_all(x, y, world.group_name)

            found[f"{name} {mode}_eager"] = clock.in_a_row(exchange, clock.iters)
    if rank == 0:
        Path(options.nvshmem_child).write_text(json.dumps(found))


def _nvshmem_rows(options: argparse.Namespace, launch: RankLaunch) -> tuple[list[Row], str]:
    """(rows, reason where there are none)."""
    if not torch.cuda.is_available():
        return [], "no GPU"
    environment = dict(
        os.environ, MASTER_PORT=str(launch.port + 7), NVSHMEM_SYMMETRIC_SIZE=str(3 << 30)
    )
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "samples.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.suites.all_to_all",
            "--nvshmem-child",
            str(result),
            "--iters",
            str(options.iters),
            "--cases",
            *options.cases,
        ]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
        if launch.rank != 0:
            return [], ""
        if done.returncode or not result.exists():
            return [], (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        samples = json.loads(result.read_text())
    return [
        row_of(*name.split(" "), "nvshmem_ata", values, {}) for name, values in samples.items()
    ], ""


def _cell(rows: Sequence[Row], case: str, mode: str, variant: str) -> str:
    found = [r for r in rows if (r.case, r.mode, r.variant) == (case, mode, variant)]
    return (
        f"{found[0].config['mean_us']:.1f} ± {found[0].config['deviation_us']:.1f}"
        if found
        else "x"
    )


_RIVALS = ("torch_ata", "nvshmem_ata", "deepep", "nccl_ep")
_TABLES = (
    (
        "captured",
        ("Dispatch", "dispatch", "fluid"),
        ("packed", "dispatch", "fluid_packed"),
        *((name, "dispatch", name) for name in _RIVALS),
        ("Combine", "combine", "fluid"),
        ("weights late", "combine", "fluid_weights_at_combine"),
        ("packed", "combine", "fluid_packed"),
        *((name, "combine", name) for name in _RIVALS),
    ),
    (
        "eager, and by halves",
        ("Dispatch", "dispatch_eager", "fluid"),
        *((name, "dispatch_eager", name) for name in _RIVALS),
        ("send", "dispatch_send_eager", "fluid"),
        ("receive", "dispatch_receive_eager", "fluid"),
        ("send + receive captured", "dispatch_split", "fluid"),
        ("Combine", "combine_eager", "fluid"),
        *((name, "combine_eager", name) for name in _RIVALS),
        ("send", "combine_send_eager", "fluid"),
        ("receive", "combine_receive_eager", "fluid"),
        ("send + receive captured", "combine_split", "fluid"),
    ),
    (
        "a GEMM",
        ("after the dispatch", "gemm", "after_dispatch"),
        ("between its halves", "gemm", "between_halves"),
        ("dispatch + GEMM captured", "gemm_with_dispatch", "after_dispatch"),
        ("send + GEMM + receive captured", "gemm_with_dispatch", "between_halves"),
    ),
)


def tables(rows: Sequence[Row], shape: str) -> list[str]:
    """A line a number of tokens, a column a variant: mean and deviation in microseconds."""
    lines = []
    cases = [
        case for case in dict.fromkeys(row.case for row in rows) if case.rpartition("-")[0] == shape
    ]
    for title, *columns in _TABLES:
        lines += [
            f"\n{shape}, {title}, microseconds",
            "tokens | " + " | ".join(heading for heading, _, _ in columns),
        ]
        for case in cases:
            cells = [_cell(rows, case, mode, variant) for _, mode, variant in columns]
            losses = [
                r.config["loss_percent"]
                for r in rows
                if r.case == case and "loss_percent" in r.config
            ]
            if title == "a GEMM" and losses:
                cells.append(f"loses {losses[0]:.1f}%")
            lines.append(f"{case.rpartition('-')[2]:>6} | " + " | ".join(cells))
    return lines


def _case(name: str) -> str:
    """A case as argparse takes it, which names the argument before what is said here."""
    shape, _, tokens = name.rpartition("-")
    if shape not in SHAPES or not tokens.isdecimal() or int(tokens) < 1:
        allowed = f"one of {', '.join(SHAPES)} and a number of tokens, as in r1-128"
        raise argparse.ArgumentTypeError(f"found {name!r}, allowed: {allowed}")
    return name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [f"{shape}-{tokens}" for shape in SHAPES for tokens in TOKENS]
    parser.add_argument(
        "--cases", nargs="+", type=_case, default=every, help="such as r1-128 (default: all)"
    )
    parser.add_argument("--capacity", type=int, help="max_num_tokens (default: the case's tokens)")
    parser.add_argument(
        "--transport",
        default="auto",
        help="AllToAll's transport: auto, nvlink, nccl, gloo, nvshmem (default: auto)",
    )
    parser.add_argument("--iters", type=positive, default=20, help="samples of each variant")
    parser.add_argument(
        "--gemm", type=int, nargs=3, default=(2048, 4096, 4096), metavar=("M", "N", "K")
    )
    parser.add_argument(
        "--no-torch-ata", action="store_true", help="leave NCCL, DeepEP and NCCL EP out"
    )
    parser.add_argument(
        "--no-nvshmem-ata", action="store_true", help="leave NVSHMEM's padded all-to-all out"
    )
    parser.add_argument(
        "--output",
        type=Path,
        help="result file (default: benchmarks/results/all_to_all.json or with 2 GPUs "
        "all_to_all-2gpu.json)",
    )
    parser.add_argument("--nvshmem-child", help=argparse.SUPPRESS)
    return parser


def _join(launch: RankLaunch) -> torch.device:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", launch.local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{launch.address}:{launch.port}",
        rank=launch.rank,
        world_size=launch.world_size,
        device_id=device if on_gpu else None,
    )
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on all ranks that torchrun or mpirun started."""
    options = _parser().parse_args(arguments)
    launch = detect_launch()
    if not isinstance(launch, RankLaunch):
        print("start one process a GPU, with torchrun or mpirun", file=sys.stderr)
        return 2
    started = time.monotonic()
    clock = Clock(_join(launch), options.iters)
    if options.nvshmem_child:
        _nvshmem_main(options, launch.rank, clock)
        clock.meet()
        os._exit(0)  # NVSHMEM's own teardown may wait for ranks that have left
    rows: list[Row] = []
    if not options.no_nvshmem_ata:
        found, reason = _nvshmem_rows(options, launch)
        rows += found
        if launch.rank == 0 and reason:
            print(f"NVSHMEM AtA is missing: {reason}")
    dist.barrier()
    for name in options.cases:
        rows += run_case(name, options, launch.rank, launch.world_size, clock)
        if clock.on_gpu:
            torch.cuda.empty_cache()
    if launch.rank == 0:
        for shape in SHAPES:
            if any(row.case.rpartition("-")[0] == shape for row in rows):
                print("\n".join(tables(rows, shape)), flush=True)
        path = write_results("all_to_all", rows, launch.world_size, options.output)
        print(f"results: {path}; {time.monotonic() - started:.0f} s")
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
