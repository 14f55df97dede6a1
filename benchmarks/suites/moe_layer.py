"""One MoE layer, router included, under every way that is installed of running it: forward, and
forward with backward.

    benchmarks/launch.sh moe_layer --output benchmarks/results/moe_layer.json
    benchmarks/launch.sh moe_layer --routing balanced --variants floor,fluid --phases
    benchmarks/launch.sh moe_layer --cases olmoe --schedules all --modes forward

Without a GPU, one tiny case: TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh moe_layer --smoke

bf16, SwiGLU, no bias, dropless, 4096 tokens a rank. A sample is --repeats calls in a row, as a
model's layers are, divided by their number, with a head start of the host (harness/timing.py).
Every variant gets tokens from which its own router computes the same random logits. Variants:

    floor             two grouped GEMMs over as many rows, evenly spread (in train, three times that
                      work); it moves and routes nothing
    floor_fluid       on one GPU, the same by the kernels of `fluid`, on its rows as they are routed
    fluid             megatron_fluid.MoELayer
    fluid_no_overlap  the same, which dispatches, multiplies, sums and combines one after the other
    fluid_batch_invariant   the same with batch_invariant, which changes the router's GEMM, and over
                      NVLink what a combine sends
    fluid_fp8         the same with fp8_recipe="blockwise", on Hopper GPUs
    fluid_graph       the same with a capacity factor, its forward replayed from a CUDA graph
    fluid_megatron    Megatron's layer with our path by patch
    fluid_megatron_te our exchange by patch, and Transformer Engine's experts
    fluid_experts_*   our experts behind Megatron's dispatcher
    fluid_rounds      the same over round-robin P2P exchanges, dX in chunks
    all_to_all        megatron_fluid.MoEBaseline: plain all-to-alls and nothing overlapped
    megatron_te_*     Megatron's own; `grouped_weight` with one parameter for all experts, whose
                      GEMMs are a launch each from cuBLAS 13.4 on, `deepep` and `nccl_ep` with the
                      flex dispatcher over these
    *_cutlass         with the GEMMs of all experts as one launch of CUTLASS in Transformer Engine
    *_fp8             with --fp8-format e4m3 --fp8-recipe blockwise
    torch_grouped, liger_triton, sonic    on one GPU: moe_rivals.py
    liger_cute        LigerCute's fused expert parallelism: moe_rivals.py

The layers of moe_rivals.py get the weights of `fluid`, and one whose output or gradients differ by
more than bf16 explains is left out. On one GPU nothing is exchanged, and a case has SonicMoE's
published shape. But for `fluid_graph`, nothing is captured.

Cases of which popular experts get more carry `-zipf`. In train, config holds the bytes that a layer
keeps for its backward and the most it ever holds above its input and weights. --phases adds the
time of every step (moe_phases.py), and to each variant the clock (`sm_mhz`) and the power (`watts`)
of the first rank's GPU while it runs alone; --schedules measures schedules by name, --profile
leaves a trace of each variant.

--hosts 2 plays so many hosts by this machine's GPUs, with NCCL's sockets over loopback between them
(harness/loopback_hosts.py), at each rate of --gbit (0: no limit). `fluid_no_overlap` then waits for
each exchange where it starts, and config has the bytes of one call (`wire_bytes`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.attention import forward_call, start_megatron, step_call
from benchmarks.cases.moe import CASES, ONE_GPU_CASES, MoECase, router_logits
from benchmarks.cases.moe_layers import (
    CAPACITY_FACTOR,
    chosen_schedule,
    floor_call,
    fluid_layer,
    graph_call,
    own_gemms_call,
    routed_tokens,
    schedule_of,
)
from benchmarks.cases.moe_rivals import RIVALS, close_rivals, missing, prepare_rivals
from benchmarks.cases.moe_variants import (
    MEGATRON,
    SCHEDULES,
    VARIANTS,
    build_layers,
    close_layers,
    rival_gaps,
    with_cutlass,
)
from benchmarks.harness.gpu_readings import READ_S, read_gpu
from benchmarks.harness.left_out import everywhere
from benchmarks.harness.loopback_hosts import bytes_on_the_wire, join_host, limited_to
from benchmarks.harness.loopback_hosts import missing as no_limit
from benchmarks.harness.options import MODES, chosen, need_gpu_or_smoke, refuse_ignored
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import Timing, layer_head_start_ms, measure
from benchmarks.report.timeline import write_trace
from benchmarks.suites.moe_phases import host_times, measure_phases, phase_buffers, print_phases
from megatron_fluid import MoELayer
from megatron_fluid.cli.terminal import positive
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule

__all__ = ["main", "memory_of"]

ZIPF = 0.6
ROUTINGS = ("balanced", "zipf")


def memory_of(
    call: Callable[[], object], device: torch.device, layer: nn.Module, x: Tensor
) -> dict[str, int]:
    """Bytes of one step above what was allocated before: `kept` between forward and backward,
    `peak` at any time; of the rank that has most.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = layer(x)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    y.backward(torch.zeros_like(y))  # a backward gives back what its forward holds elsewhere
    del y
    for tensor in (*layer.parameters(), x):
        tensor.grad = None
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    found = torch.tensor([kept, torch.cuda.max_memory_allocated() - before], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    kept, peak = found.tolist()
    return {"kept_bytes": kept, "peak_bytes": peak}


def _readings(
    calls: Mapping[str, Callable[[], object]], timings: Mapping[str, Timing], device: torch.device
) -> dict[str, dict[str, float]]:
    """Clock and power of this rank's GPU under each variant alone, as often on every rank."""
    found = {}
    for variant, timing in timings.items():
        count = math.ceil(READ_S * 1e3 / max(timing.median_ms, 1e-3))
        with read_gpu(device) as readings:
            for _ in range(count if device.type == "cuda" else 1):
                calls[variant]()
            if device.type == "cuda":
                torch.cuda.synchronize()
        found[variant] = readings
    return found


def _hidden_share(timings: dict[str, Timing]) -> dict[str, float]:
    """The share of what is not GEMM that overlap hides."""
    if not {"fluid", "fluid_no_overlap", "floor"} <= set(timings):
        return {}
    floor, plain, fluid = (timings[v].median_ms for v in ("floor", "fluid_no_overlap", "fluid"))
    return {"hidden_share": (plain - fluid) / max(plain - floor, 1e-9)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default="", help=f"{', '.join(CASES | ONE_GPU_CASES)}; default: all that fit"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--iters", type=positive, default=20)
    parser.add_argument("--repeats", type=positive, default=4, help="layers in a row of one sample")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="comma-separated")
    parser.add_argument(
        "--variants", default="", help="comma-separated beginnings of variants' names; default all"
    )
    parser.add_argument("--phases", action="store_true", help="time every step and the host, too")
    parser.add_argument(
        "--schedules",
        default="",
        help=f"measure these, too: all, or some of {', '.join(SCHEDULES)}",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write a trace and a timeline picture of each case",
    )
    parser.add_argument("--profile-folder", type=Path, default=Path("profiles"))
    parser.add_argument("--hosts", type=positive, default=1, help="that this machine plays")
    parser.add_argument("--gbit", default="0", help="rates between them in Gbit/s, comma-separated")
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny case, on a CPU with the interpreter"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    return parser


def _rates(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[float]:
    """The rates between hosts that this rank has joined, or 0 alone."""
    try:
        rates = [float(rate) for rate in options.gbit.split(",")]
    except ValueError:
        parser.error(f"--gbit: found {options.gbit!r}, allowed: numbers, comma-separated")
    if options.hosts == 1:
        if any(rates):
            parser.error(f"--gbit: found {options.gbit}, allowed: with --hosts 2 or more")
        return [0.0]
    if options.phases or options.schedules or options.smoke:
        parser.error("--hosts: not beside --phases, --schedules or --smoke")
    if any(rates) and (why := no_limit()) is not None:
        parser.error(f"--gbit: this machine cannot limit a rate: {why}")
    try:
        join_host(options.hosts)
    except ValueError as error:
        parser.error(str(error))
    return rates


def _with_megatron(names: Iterable[str]) -> bool:
    """Whether variants that need Megatron were asked for. By "fluid" our own are meant, though one
    of Megatron's begins so."""
    return any(
        m.startswith(name) and not "fluid".startswith(name) for m in MEGATRON for name in names
    )


def _print_case(
    label: str,
    timings: Mapping[str, Timing],
    hidden: Mapping[str, float],
    memory: Mapping[str, Mapping[str, int]],
) -> None:
    floor = timings["floor"].median_ms
    over = (f"{v} {t.median_ms:.3f} ({t.median_ms / floor:.2f})" for v, t in timings.items())
    print(f"{label}: {'  '.join(over)}  {hidden}", flush=True)
    for variant, held in memory.items():
        if held:
            words = ", ".join(f"{k} {v / 2**20:.0f} MiB" for k, v in held.items())
            print(f"  {variant}: {words}", flush=True)


def _measure_case(
    label: str,
    case: MoECase,
    options: argparse.Namespace,
    logits: Tensor,
    absent: str | None,
    zipf: float,
    gbit: float,
) -> list[Row]:
    device, ranks = logits.device, dist.get_world_size()
    tokens = case.tokens or options.tokens
    layers, fixed = build_layers(case, options, device, absent, ranks)
    fluid = layers["fluid"]
    assert isinstance(fluid, MoELayer)
    schedules = {"fluid": schedule_of(case, tokens, device), **fixed}
    x = routed_tokens(logits, case.hidden).requires_grad_()
    for variant, layer in layers.items():
        if variant not in RIVALS and variant not in MEGATRON:
            with chosen_schedule(fixed.get(variant)), torch.no_grad():
                layer(x)
    gaps = rival_gaps(layers, x)
    rows: list[Row] = []
    for mode in options.modes:
        train = mode == "train"
        floor = floor_call(case, tokens, ranks, device, train)
        calls: dict[str, Callable[[], object]] = {"floor": floor}
        if ranks == 1 and device.type == "cuda":
            calls["floor_fluid"] = own_gemms_call(fluid, x, train)
        memory: dict[str, dict[str, int]] = {}
        for variant, layer in layers.items():
            call = (step_call if train else forward_call)(layer, x)
            calls[variant] = call = with_cutlass(call) if variant.endswith("cutlass") else call
            if train:
                call()
                memory[variant] = memory_of(call, device, layer, x)
        bounded, sent = None, {}
        if options.hosts > 1:
            sent = {variant: bytes_on_the_wire(call) for variant, call in calls.items()}
        elif not train and device.type == "cuda":
            bounded = fluid_layer(case, device, fluid, capacity_factor=CAPACITY_FACTOR)
            replay = everywhere("fluid_graph", lambda layer=bounded: graph_call(layer, x.detach()))
            if replay is not None:
                calls["fluid_graph"] = replay
        head_start = layer_head_start_ms(device)
        counts = {"iters": options.iters, "warmup": 3, "repeats": options.repeats}
        timings = measure(calls, device, **counts, head_start_ms=head_start)
        readings = _readings(calls, timings, device) if options.phases else {}
        if "fluid_graph" in timings:
            # Rows that a graph of too little capacity leaves out would flatter it.
            assert bounded is not None
            fits = everywhere("fluid_graph", lambda layer=bounded: layer.check_overflow() or True)
            if not fits:
                del timings["fluid_graph"]
        shared = {
            "tokens": tokens,
            "ranks": ranks,
            "zipf": zipf,
            "repeats": options.repeats,
            "head_start_ms": head_start,
        }
        overlaps = options.hosts > 1 or schedules["fluid"] != NO_OVERLAP
        hidden = _hidden_share(timings) if overlaps else {}
        for variant, timing in timings.items():
            config: dict[str, Any] = shared | gaps.get(variant, {})
            config |= {**memory.get(variant, {}), **readings.get(variant, {})}
            if variant in sent:
                config |= {"hosts": options.hosts, "gbit": gbit, "wire_bytes": sent[variant]}
            schedule = schedules.get("fluid" if variant == "fluid_graph" else variant)
            if schedule is not None and options.hosts == 1:
                config["schedule"] = str(schedule)
            if variant == "fluid":
                config |= hidden
            rows.append(timing.row(label, mode, variant, config))
        if dist.get_rank() == 0:
            _print_case(f"{label} {mode}", timings, hidden, memory)
        if options.profile:
            write_trace(calls, device, options.profile_folder / f"moe_layer-{label}-{mode}.json")
    if options.phases:
        x, grad = x.detach(), torch.randn_like(x)
        # On a CPU, where nothing is timed in earnest, all kernels run.
        own = schedules["fluid"] if x.is_cuda else SCHEDULES["stream_sent"]
        # The steps that are launches of their own: nothing is streamed.
        steps = Schedule(sent_rows=own.sent_rows)
        buffers = phase_buffers(case, tokens, device, steps)
        phases = measure_phases(label, case, buffers, fluid, x, grad, options.iters)
        whole = phase_buffers(case, tokens, device, own)
        phases += host_times(whole, fluid, x.requires_grad_(), grad, label, options.iters)
        if dist.get_rank() == 0:
            print_phases(phases)
        rows += phases
    close_layers(layers, fixed)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.smoke:
        refuse_ignored(parser, options, ("cases", "tokens", "iters"), "without --smoke")
    options.modes = chosen(parser, "--modes", options.modes, MODES)
    options.routing = chosen(parser, "--routing", options.routing, ROUTINGS)
    names = list(CASES)
    if options.cases:
        names = chosen(parser, "--cases", options.cases, CASES | ONE_GPU_CASES)
    if options.variants:
        options.variants = chosen(parser, "--variants", options.variants, VARIANTS, beginnings=True)
    if options.schedules:
        options.schedules = chosen(parser, "--schedules", options.schedules, ("all", *SCHEDULES))
    need_gpu_or_smoke(parser, "moe_layer", options.smoke)
    rates = _rates(parser, options)
    warnings.filterwarnings("ignore")
    rank = int(os.environ.get("RANK", "0"))
    if options.smoke:
        options.tokens, options.iters = 16, 2
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        device, absent = torch.device("cpu"), "not measured in --smoke"
        cases = {"smoke": MoECase(64, 32, 4, 2)}
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        absent = "not asked for"
        if not options.variants or _with_megatron(options.variants):
            absent = start_megatron(expert_model_parallel_size=dist.get_world_size())
        if dist.get_world_size() == 1 and not options.cases:
            names = [*names, *ONE_GPU_CASES]
        cases = {name: (CASES | ONE_GPU_CASES)[name] for name in names}
    if absent and rank == 0:
        print(f"no megatron_te variants: {absent}", flush=True)
    cute = any("liger_cute".startswith(name) for name in options.variants or [""])
    cute = cute and not options.smoke and options.hosts == 1 and missing("liger_cute") is None
    if cute:
        prepare_rivals(cases.values(), options.tokens, device)
    rows: list[Row] = []
    for name, case in cases.items():
        for routing in options.routing:
            zipf = ZIPF if routing == "zipf" else 0.0
            logits = router_logits(case, case.tokens or options.tokens, zipf, 100 + rank, device)
            for gbit in rates:
                label = name if routing == "balanced" else f"{name}-zipf"
                limit: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                if options.hosts > 1:
                    label += f"-{options.hosts}-hosts-{gbit:g}-gbit"
                    limit = limited_to(gbit)
                with limit:
                    rows += _measure_case(label, case, options, logits, absent, zipf, gbit)
                if rank == 0 and options.output is not None:  # also kept if the run is cut short
                    write_results("moe_layer", rows, dist.get_world_size(), options.output)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    if cute:
        close_rivals()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
