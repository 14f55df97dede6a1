"""Dispatch and combine alone: 4096 tokens a rank, against NCCL.

    benchmarks/launch.sh dispatch_combine --output benchmarks/results/dispatch_combine.json
    benchmarks/launch.sh dispatch_combine --cases deepseek-v3

Without a GPU, one tiny case: TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh dispatch_combine
--smoke

A sample is several calls with a head start of the host (harness/timing.py). GB/s count the bytes
that leave a GPU: each token once per remote destination rank. Modes:

    plan           the tables of a routing
    dispatch       tokens with ids and probabilities to expert rows: push, then scatter;
                   fluid_stream runs both at the same time
    push           the wire alone, each token once a rank; copy_engine packs the rows with a few
                   small kernels and copies them
    combine        expert rows to sums at the tokens' owners, by a pass of its own (in a layer the
                   GEMM before it may send them)
    dispatch_once  what libraries call dispatch that leave the experts of a rank to the caller: a
                   token's row to each of its ranks, dense there; fluid_stream as above
    combine_once   one row back from each rank, already summed over the rank's experts
    nccl           one all_to_all_single of T * K rows, one per (token, expert), no permutation

All of this is eager. DeepEP and NCCL EP (benchmarks/cases/exchange_rivals.py) have the modes
dispatch_once and combine_once; the routing's tables are made before, for them as for `fluid`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases.exchange_rivals import EXCHANGES, missing_exchange
from benchmarks.cases.moe import CASES, MoECase, router_logits
from benchmarks.harness.left_out import everywhere
from benchmarks.harness.options import chosen, need_gpu_or_smoke, refuse_ignored
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from benchmarks.suites.moe_phases import phase_buffers
from megatron_fluid.cli.terminal import positive
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle
from megatron_fluid.moe.nvlink.buffers import (
    NvlinkBuffers,
    barrier,
    make_plan,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
)
from megatron_fluid.moe.nvlink.schedule import Schedule

__all__ = ["main"]

_SCHEDULE = Schedule(stream=True)  # with the second stream that a streamed dispatch takes
_REPEATS = 4


def _once_a_rank(
    buffers: NvlinkBuffers, bits: torch.Tensor, x: torch.Tensor
) -> dict[tuple[str, str], Callable[[], None]]:
    """dispatch_once, also streamed, and combine_once of tokens x [T, H] that go to the ranks in
    `bits` [T]: as if a rank were an expert, on a buffers of as many experts as ranks and as many of
    them a token."""
    ranks = torch.arange(buffers.ranks, device=x.device)
    ids = torch.where(((bits[:, None] >> ranks) & 1) != 0, ranks, -1)
    handle = publish(buffers, ids, torch.ones(ids.shape, device=x.device))
    make_plan(buffers, handle)
    handle.ends = handle.offsets.tolist()
    out = x.new_empty(handle.buffer_rows, buffers.hidden)
    y = torch.randn_like(out)

    def dispatch(streamed: bool) -> None:
        push(buffers, handle, x, streamed=streamed)
        scatter(buffers, handle, x, out, streamed=streamed)

    def combine() -> None:
        reduce_push(buffers, handle, y)
        reduce(buffers, handle)

    return {
        ("dispatch_once", "fluid"): functools.partial(dispatch, False),
        ("dispatch_once", "fluid_stream"): functools.partial(dispatch, True),
        ("combine_once", "fluid"): combine,
    }


def _copy_engine(
    buffers: NvlinkBuffers, handle: RoutingHandle, x: torch.Tensor
) -> Callable[[], None]:
    """A push without SMs but for packing: the rows of each destination side by side, then one copy
    to each peer, all at once. It lands packed, so a real dispatch by it would also have to send
    addresses; its row counts are the host's.
    """
    bits = handle.destinations[: x.shape[0]]
    peers = [(buffers.rank + 1 + i) % buffers.ranks for i in range(buffers.ranks - 1)]
    rows = {d: ((bits >> d) & 1).nonzero()[:, 0] for d in peers}
    width = x.shape[1]
    received = {}
    for d in peers:
        flat = buffers.workspace.peer_buffers("moe receive", x.dtype)[d]
        received[d] = flat[: rows[d].numel() * width].view(-1, width)
    packed = {d: x.new_empty(rows[d].numel(), width) for d in peers}
    streams = {d: torch.cuda.Stream() for d in peers}

    def run() -> None:
        main = torch.cuda.current_stream()
        for d in peers:
            torch.index_select(x, 0, rows[d], out=packed[d])
            streams[d].wait_stream(main)
            with torch.cuda.stream(streams[d]):
                received[d].copy_(packed[d], non_blocking=True)
        for d in peers:
            main.wait_stream(streams[d])

    return run


def _calls(
    buffers: NvlinkBuffers, case: MoECase, tokens: int, device: torch.device
) -> tuple[dict[tuple[str, str], Callable[[], object]], dict[str, int], dict[str, str]]:
    """Return the calls by mode and variant, the bytes that leave a GPU by mode, and the settings of
    rivals. Collective."""
    rank, ranks = buffers.rank, buffers.ranks
    drawn = router_logits(case, tokens, 0.0, 100 + rank, device).topk(case.top_k)
    ids, probs = drawn.indices, torch.softmax(drawn.values, -1)
    x = torch.randn(tokens, case.hidden, device=device, dtype=torch.bfloat16)
    handle = publish(buffers, ids, probs)
    make_plan(buffers, handle)
    handle.ends = handle.offsets.tolist()
    out = x.new_empty(handle.buffer_rows, case.hidden)
    y = torch.randn_like(out)
    send = torch.randn(tokens * case.top_k, case.hidden, device=device, dtype=torch.bfloat16)
    receive = torch.empty_like(send)
    bits = handle.destinations
    copies = sum(int(((bits >> d) & 1).sum()) for d in range(ranks) if d != rank)

    def dispatch() -> None:
        push(buffers, handle, x)
        scatter(buffers, handle, x, out)

    def push_only() -> None:
        push(buffers, handle, x)
        barrier(buffers)

    def stream_dispatch() -> None:
        push(buffers, handle, x, streamed=True)
        scatter(buffers, handle, x, out, streamed=True)

    def combine() -> None:
        reduce_push(buffers, handle, y)
        reduce(buffers, handle)

    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("plan", "fluid"): lambda: make_plan(buffers, publish(buffers, ids, probs)),
        ("nccl", "nccl"): functools.partial(dist.all_to_all_single, receive, send),
        ("dispatch", "fluid"): dispatch,
        ("dispatch", "fluid_stream"): stream_dispatch,
        ("push", "fluid"): push_only,
        ("combine", "fluid"): combine,
    }
    if device.type == "cuda":
        calls["push", "copy_engine"] = _copy_engine(buffers, handle, x)
    # Every rank has read what was published here before the other buffers take the same memory.
    dist.barrier()
    by_rank = dataclasses.replace(case, experts=ranks, top_k=ranks)
    once = phase_buffers(by_rank, tokens, device, _SCHEDULE, buffers.workspace)
    calls |= _once_a_rank(once, bits[:tokens], x)
    settings = {}
    for variant, build in EXCHANGES.items():
        of_case = functools.partial(build, x, ids, probs, case.experts)
        if (reason := missing_exchange(variant)) is None:
            found = everywhere(variant, of_case)
            for mode, call in found[0].items() if found else ():
                calls[mode, variant], settings[variant] = call, found[1]
        elif rank == 0:
            print(f"{variant} left out: {reason}", file=sys.stderr, flush=True)
    moved = dict.fromkeys((mode for mode, _ in calls), copies * case.hidden * 2)
    moved |= {"nccl": send.numel() * 2 * (ranks - 1) // ranks, "plan": 0}
    return calls, moved, settings


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--iters", type=positive, default=20)
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny case, on a CPU with the interpreter"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    if options.smoke:
        refuse_ignored(parser, options, ("cases", "tokens", "iters"), "without --smoke")
    cases = {name: CASES[name] for name in chosen(parser, "--cases", options.cases, CASES)}
    need_gpu_or_smoke(parser, "dispatch_combine", options.smoke)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.smoke:
        device, ranks = torch.device("cpu"), 1
        cases, options.tokens, options.iters = {"smoke": MoECase(64, 32, 4, 2)}, 16, 1
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    tokens, head_start = options.tokens, layer_head_start_ms(device)
    shared = {"tokens": tokens, "ranks": ranks, "repeats": _REPEATS, "head_start_ms": head_start}
    rows: list[Row] = []
    for name, case in cases.items():
        buffers = phase_buffers(case, tokens, device, _SCHEDULE)
        calls, moved, settings = _calls(buffers, case, tokens, device)
        timings = measure(
            {f"{mode} {variant}": call for (mode, variant), call in calls.items()},
            device,
            iters=options.iters,
            warmup=3,
            repeats=_REPEATS,
            head_start_ms=head_start,
        )
        for mode, variant in calls:
            timing = timings[f"{mode} {variant}"]
            rate = moved[mode] / timing.median_ms / 1e6
            config: dict[str, Any] = shared | {"bytes": moved[mode], "gb_s": rate}
            if variant in settings:
                config["settings"] = settings[variant]
            rows.append(timing.row(name, mode, variant, config))
            if rank == 0:
                took = f"{timing.median_ms * 1e3:.0f} us, {rate:.0f} GB/s"
                print(f"{name} {mode} {variant}: {took}", flush=True)
        del calls
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rank == 0 and options.output is not None:
        print(write_results("dispatch_combine", rows, ranks, options.output))
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
