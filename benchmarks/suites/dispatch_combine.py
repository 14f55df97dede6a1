"""Dispatch and combine alone: 4096 tokens a rank, by the SMs they may take, against NCCL.

    benchmarks/launch.sh dispatch_combine --output benchmarks/results/dispatch_combine.json
    benchmarks/launch.sh dispatch_combine --cases deepseek-v3 --sms 24
    TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh dispatch_combine --smoke       (one tiny case,
    without a GPU)

dispatch: tokens with their ids and probabilities to expert rows (push and scatter, streamed: at the
same time; the plan is a row of its own). push: the wire alone, each token once a rank, as libraries
dispatch that leave tokens in the order of their arrival (copy_engine: packed by a few small
kernels, then copied). combine: expert rows to sums at the tokens' owners, by a pass of its own (in
a layer the GEMM before it may send them). dispatch_once and combine_once: what other libraries call
so, which leave the experts of a rank to the caller: a token's row to each of its ranks, dense
there, and one row back from each, already summed over the rank's experts. A sample is several calls
with a head start of the host (benchmarks/harness/timing.py). GB/s count the bytes that leave a GPU:
each token once per remote destination rank. `nccl` is one all_to_all_single of T * K rows, one per
(token, expert), without any permutation.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.cases.moe import CASES, MoECase, router_logits
from benchmarks.harness.options import chosen, need_gpu_or_smoke, positive_numbers, refuse_ignored
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from megatron_fluid.comm.symmetric import SimulatedWorkspace
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle, shared_buffers
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.steps import (
    barrier,
    make_plan,
    publish,
    push,
    reduce,
    reduce_push,
    scatter,
    stream_push,
    stream_scatter,
)

__all__ = ["main"]

SMS = (8, 16, 24, 48, 132)
_SCHEDULE = Schedule(stream=True)  # with the second stream that a streamed dispatch takes
_REPEATS = 4


def _once_a_rank(
    domain: NvlinkBuffers, bits: torch.Tensor, x: torch.Tensor
) -> dict[str, Callable[[int | None], None]]:
    """dispatch_once and combine_once, by SMs, of tokens x [T, H] that go to the ranks in `bits`
    [T]: as if a rank were an expert, on a domain of as many experts as ranks and as many of them a
    token."""
    ranks = torch.arange(domain.ranks, device=x.device)
    ids = torch.where(((bits[:, None] >> ranks) & 1) != 0, ranks, -1)
    handle = publish(domain, ids, torch.ones(ids.shape, device=x.device))
    make_plan(domain, handle)
    handle.ends = handle.offsets.tolist()
    out = x.new_empty(handle.buffer_rows, domain.hidden)
    y = torch.randn_like(out)

    def dispatch(sms: int | None) -> None:
        push(domain, handle, x)
        scatter(domain, handle, x, out)

    def combine(sms: int | None) -> None:
        reduce_push(domain, handle, y)
        reduce(domain, handle)

    return {"dispatch_once": dispatch, "combine_once": combine}


def _copy_engine(
    domain: NvlinkBuffers, handle: RoutingHandle, x: torch.Tensor
) -> Callable[[], None]:
    """A push without SMs but for packing: the rows of each destination side by side, then one copy
    to each peer, all at once. It lands packed, so a real dispatch by it would also have to send
    places; its row counts are the host's.
    """
    bits = handle.destinations[: x.shape[0]]
    peers = [(domain.rank + 1 + i) % domain.ranks for i in range(domain.ranks - 1)]
    rows = {d: ((bits >> d) & 1).nonzero()[:, 0] for d in peers}
    name, width = "moe receive", x.shape[1]
    landing = {
        d: domain.workspace.peer_view(name, d, (int(rows[d].numel()), width), x.dtype)
        for d in peers
    }
    packed = {d: x.new_empty(rows[d].numel(), width) for d in peers}
    streams = {d: torch.cuda.Stream() for d in peers}

    def run() -> None:
        main = torch.cuda.current_stream()
        for d in peers:
            torch.index_select(x, 0, rows[d], out=packed[d])
            streams[d].wait_stream(main)
            with torch.cuda.stream(streams[d]):
                landing[d].copy_(packed[d], non_blocking=True)
        for d in peers:
            main.wait_stream(streams[d])

    return run


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument(
        "--sms", default=",".join(map(str, SMS)), help="SMs that a step may take, comma-separated"
    )
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny case, on a CPU with the interpreter"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    if options.smoke:
        refuse_ignored(parser, options, ("cases", "tokens", "sms", "iters"), "without --smoke")
    cases = {name: CASES[name] for name in chosen(parser, "--cases", options.cases, CASES)}
    numbers = positive_numbers(parser, "--sms", options.sms)
    need_gpu_or_smoke(parser, "dispatch_combine", options.smoke)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if options.smoke:
        device = torch.device("cpu")
        cases, options.tokens, options.iters, _numbers, ranks = (
            {"smoke": MoECase(64, 32, 4, 2)},
            16,
            1,
            [1],
            1,
        )
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    rows: list[Row] = []
    for name, case in cases.items():
        tokens = options.tokens
        if options.smoke:
            space = SimulatedWorkspace(1).rank(0)
            domain = NvlinkBuffers(
                space, tokens, case.hidden, case.top_k, case.experts, schedule=_SCHEDULE
            )
            once = NvlinkBuffers(space, tokens, case.hidden, ranks, ranks, schedule=_SCHEDULE)
            streams = {None: domain}
        else:
            shape = (group, tokens, case.hidden, case.ffn, case.top_k, case.experts)
            domain = shared_buffers(*shape, schedule=_SCHEDULE)
            once = shared_buffers(
                group, tokens, case.hidden, case.ffn, ranks, ranks, schedule=_SCHEDULE
            )
            streams = {None: domain}
        drawn = router_logits(case, tokens, 0.0, 100 + rank, device).topk(case.top_k)
        ids, probs = drawn.indices, torch.softmax(drawn.values, -1)
        x = torch.randn(tokens, case.hidden, device=device, dtype=torch.bfloat16)
        handle = publish(domain, ids, probs)
        make_plan(domain, handle)
        handle.ends = handle.offsets.tolist()
        out = x.new_empty(handle.buffer_rows, case.hidden)
        y = torch.randn_like(out)
        send = torch.randn(tokens * case.top_k, case.hidden, device=device, dtype=torch.bfloat16)
        receive = torch.empty_like(send)
        bits = handle.destinations
        copies = sum(int(((bits >> d) & 1).sum()) for d in range(ranks) if d != rank)
        wire = copies * case.hidden * 2

        def plan(domain=domain, ids=ids, probs=probs) -> None:
            make_plan(domain, publish(domain, ids, probs))

        def dispatch(sms, domain=domain, handle=handle, x=x, out=out) -> None:
            push(domain, handle, x)
            scatter(domain, handle, x, out)

        def push_only(sms, domain=domain, handle=handle, x=x) -> None:
            push(domain, handle, x)
            barrier(domain)

        def stream_dispatch(sms, streams=streams, handle=handle, x=x, out=out) -> None:
            domain = streams[sms]
            domain.fork()
            stream_push(domain, handle, x, domain.side)
            stream_scatter(domain, handle, x, out)
            domain.join()

        def combine(sms, domain=domain, handle=handle, y=y) -> None:
            reduce_push(domain, handle, y)
            reduce(domain, handle)

        modes: dict[str, Callable[[int | None], None]] = {
            "dispatch": dispatch,
            "push": push_only,
            "combine": combine,
        }
        # every rank has read what was published for the other domain, in the same memory
        dist.barrier()
        modes |= _once_a_rank(once, bits[:tokens], x)
        calls: dict[tuple[str, str], Callable[[], object]] = {
            ("plan", "fluid"): plan,
            ("nccl", "nccl"): functools.partial(dist.all_to_all_single, receive, send),
        }
        for mode, f in modes.items():
            calls[mode, "fluid"] = functools.partial(f, None)
        for n in streams:
            name_of = "fluid_stream" if n is None else f"fluid_stream_sms{n}"
            calls["dispatch", name_of] = functools.partial(stream_dispatch, n)
        if device.type == "cuda":
            calls["push", "copy_engine"] = _copy_engine(domain, handle, x)
        head_start = layer_head_start_ms(device)
        timings = measure(
            {f"{m} {v}": c for (m, v), c in calls.items()},
            device,
            iters=options.iters,
            warmup=3,
            repeats=_REPEATS,
            head_start_ms=head_start,
        )
        shared = {
            "tokens": tokens,
            "ranks": ranks,
            "repeats": _REPEATS,
            "head_start_ms": head_start,
        }
        for mode, variant in calls:
            timing = timings[f"{mode} {variant}"]
            moved = {"nccl": send.numel() * 2 * (ranks - 1) // ranks, "plan": 0}.get(mode, wire)
            rate = moved / timing.median_ms / 1e6
            rows.append(timing.row(name, mode, variant, shared | {"bytes": moved, "gb_s": rate}))
            if rank == 0:
                print(
                    f"{name} {mode} {variant}: {timing.median_ms * 1e3:.0f} us, {rate:.0f} GB/s",
                    flush=True,
                )
        del x, y, out, send, receive, calls, modes
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
