"""Self-attention with its norm under context parallelism: ours, Megatron with Transformer Engine's
a2a, and the floor.

    benchmarks/launch.sh attention --output benchmarks/results/attention.json
    benchmarks/launch.sh attention --tiny       the same on gloo ranks, without a GPU

Batch 1, causal, bf16, no biases, no rotation but with `--rotary`, the sequence over all ranks.
Variants: fluid (its exchange, transport and head groups as they choose themselves; `--fluid
copy_engine:2` measures one choice as fluid_copy_engine_2), fluid_no_overlap (the same kernels
over plain all-to-all collectives), fluid_megatron (Megatron's module by patch, with Transformer
Engine where it is installed, else of the local spec), fluid_megatron_exchange (the same with
Megatron's projections: the exchanges alone are ours), megatron_te_a2a (Megatron's own),
floor_sdpa (norm, projections and the attention kernel alone, by torch), floor_te (by Transformer
Engine) and floor, the faster of them. A variant that cannot be built and run forward and backward
on every rank is named and left out. Before anything is timed, outputs and input gradients of ours
are compared with fluid_no_overlap. Cases of gpt-oss, Qwen3-Next and DeepSeek-V3 have Megatron's
modules alone, of equal weights, and are compared with fluid_megatron_exchange. A sample is
--repeats calls in a row, as a model's layers are, divided by their number, and the host has a head
start (benchmarks/harness/timing.py). After a call alone autograd's thread sleeps, and the host
waits for it to wake, which a model does once a backward and not once a layer.

On one GPU, `NPROC=2` lets ranks share it over gloo: kernels then take turns, and only the host's
time of a call (host_ms) says something. `NPROC=1` measures ours alone, without an exchange."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.attention import (
    CASES,
    TINY,
    AttentionCase,
    MegatronAttention,
    NormedAttention,
    attention_floor,
    fluid_attention,
    forward_call,
    megatron_attention,
    megatron_rotations,
    start_megatron,
    step_call,
)
from benchmarks.harness.left_out import everywhere
from benchmarks.harness.options import MODES, chosen
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from benchmarks.harness.variants import runnable
from benchmarks.report.timeline import write_trace
from megatron_fluid.attention.attention_kernels import KERNEL_NAMES
from megatron_fluid.attention.config import EXCHANGE_NAMES
from megatron_fluid.attention.exchange.buffers import TRANSPORTS
from megatron_fluid.attention.overlap import AttentionCall
from megatron_fluid.cli.terminal import positive

__all__ = ["main"]

VARIANTS = (
    "fluid",
    "fluid_no_overlap",
    "fluid_megatron",
    "fluid_megatron_exchange",
    "megatron_te_a2a",
    "floor",
    "floor_te",
    "floor_sdpa",
)


class _Choice(nn.Module):
    """A fluid module whose transport and head groups are fixed while it runs."""

    def __init__(self, module: NormedAttention, transport: str, groups: int | None) -> None:
        super().__init__()
        if transport != "auto" and module.attention.head_buffers is None:
            raise ValueError(
                f"transport {transport} needs symmetric memory, and heads are exchanged in rounds"
            )
        self.module, self.transport, self.groups = module, transport, groups

    def call(self, x: Tensor) -> AttentionCall:
        """How a forward of ``x`` runs."""
        attention, before = self.module.attention, self.module.attention.head_groups
        attention.head_groups = self.groups
        try:
            return attention.call(x)
        finally:
            attention.head_groups = before

    def forward(self, x: Tensor) -> Tensor:
        buffers, attention = self.module.attention.head_buffers, self.module.attention
        before = attention.head_groups
        attention.head_groups = self.groups
        if buffers is not None:
            buffers.transport = self.transport
        try:
            y: Tensor = self.module(x)
        finally:
            attention.head_groups = before
        return y


def _choices(parser: argparse.ArgumentParser, text: str) -> list[tuple[str, str, int | None]]:
    """(name, transport, head groups) of each `transport:groups` in a comma-separated list; `auto`
    for either leaves the choice to the layer."""
    found = []
    for item in text.split(",") if text else ():
        transport, _, groups = item.partition(":")
        chosen(parser, "--fluid", transport, TRANSPORTS)
        try:
            number = None if groups in ("", "auto") else positive(groups)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --fluid: head groups of {item!r}: {error}, or auto")
        found.append((f"fluid_{transport}_{number or 'auto'}", transport, number))
    return found


def _builders(
    case: AttentionCase, options: argparse.Namespace, device: torch.device, megatron: str | None
) -> dict[str, Callable[[], nn.Module]]:
    builders = _of_megatron(case, options, device, megatron)
    if case.of_megatron:
        return builders
    settings: dict[str, Any] = {"rotary": options.rotary, "kernel": options.kernel}
    shared = everywhere(
        "fluid", lambda: fluid_attention(case, device, exchange=options.exchange, **settings)
    )

    def choice(transport: str, groups: int | None) -> nn.Module:
        if shared is None:
            raise RuntimeError("fluid could not be built")
        return _Choice(shared, transport, groups)

    ours: dict[str, Callable[[], Any]] = {
        name: functools.partial(choice, transport, groups)
        for name, transport, groups in [("fluid", "auto", None), *options.fluid]
    }
    ours["fluid_no_overlap"] = lambda: fluid_attention(case, device, overlap=False, **settings)
    floors = {"floor_sdpa": lambda: attention_floor(case, device, "sdpa")}
    if megatron == "te":
        floors = {"floor_te": lambda: attention_floor(case, device, "te"), **floors}
    return ours | builders | floors


def _of_megatron(
    case: AttentionCase, options: argparse.Namespace, device: torch.device, megatron: str | None
) -> dict[str, Callable[[], nn.Module]]:
    """Megatron's modules; none on one rank, where they exchange nothing."""
    if megatron is None or dist.get_world_size() == 1:
        return {}
    te, backend = megatron == "te", "nvlink" if device.type == "cuda" else "rounds"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    common: dict[str, Any] = {"te": te, "dtype": dtype}
    if options.rotary:
        common |= {"rotations": megatron_rotations(case), "apply_rope_fusion": te}
    build = functools.partial(megatron_attention, case, device, **common)
    builders: dict[str, Callable[[], nn.Module]] = {
        "fluid_megatron": functools.partial(build, backend),
        "fluid_megatron_exchange": functools.partial(build, backend, overlap=False),
    }
    if te:
        builders["megatron_te_a2a"] = functools.partial(build, "megatron")
    return builders


def _reference(case: AttentionCase) -> str:
    """The variant that others are compared with."""
    return "fluid_megatron_exchange" if case.of_megatron else "fluid_no_overlap"


def _difference(case: AttentionCase, modules: dict[str, nn.Module], x: Tensor) -> float:
    """The largest relative RMS difference of ours from the reference, in y and dx, over ranks.
    Megatron's modules get its weights where it is one of them."""
    results = {}
    reference = modules[_reference(case)]
    for name, module in modules.items():
        if case.of_megatron:
            module.load_state_dict(reference.state_dict(), strict=False)
        ours = name.startswith("fluid") and not name.startswith("fluid_megatron")
        if case.of_megatron or ours:
            x.grad = None
            y = module(x)
            y.backward(torch.ones_like(y) + y.detach())
            assert x.grad is not None
            results[name] = (y.detach().float(), x.grad.float())
            module.zero_grad(set_to_none=True)
    expected = results.pop(_reference(case))
    worst = torch.zeros(1, device=x.device)
    for found in results.values():
        for a, b in zip(found, expected, strict=True):
            worst = torch.maximum(
                worst, ((a - b).square().mean() / b.square().mean()).sqrt().view(1)
            )
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    x.grad = None
    return worst.item()


def _settings(module: nn.Module, x: Tensor) -> dict[str, Any]:
    """How a variant of ours runs; nothing for others."""
    if isinstance(module, MegatronAttention):
        from megatron_fluid.patches.attention.self_attention import overlapped

        return {
            "overlapped": overlapped(module.module),
            "core": type(module.module.core_attention).__name__,
        }
    if not isinstance(module, _Choice):
        return {}
    call = module.call(x)
    return {
        "exchange": type(call.exchange).__name__,
        "transport": module.transport,
        "head_groups": call.exchange.heads.groups,
        "kernel": call.kernel.__name__,
    }


def _start() -> tuple[int, int, torch.device]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, gpus = torch.device("cpu"), torch.cuda.device_count()
    if gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % gpus)
        torch.cuda.set_device(device)
    if ranks > gpus > 0:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if device.type == "cuda" and ranks <= gpus:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return rank, ranks, device


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=None, help="comma-separated; all by default")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--iters", type=positive, default=20)
    parser.add_argument("--repeats", type=positive, default=4, help="calls in a row of one sample")
    parser.add_argument(
        "--variants", default="", help="comma-separated; all that can run by default"
    )
    parser.add_argument(
        "--fluid",
        default="",
        metavar="TRANSPORT:GROUPS,...",
        help="further choices to measure, as sm_push:1,copy_engine:2",
    )
    parser.add_argument("--exchange", choices=EXCHANGE_NAMES, default="auto", help="of fluid")
    parser.add_argument(
        "--kernel", choices=KERNEL_NAMES, default="auto", help="attention kernel of fluid"
    )
    parser.add_argument(
        "--rotary",
        action="store_true",
        help="rotate queries and keys, in Megatron's modules too (the floor does not)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write a trace and a timeline picture of each case",
    )
    parser.add_argument("--profile-folder", type=Path, default=Path("profiles"))
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes, which gloo ranks can run too"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    known = TINY if options.tiny else CASES
    names = (
        list(known) if options.cases is None else chosen(parser, "--cases", options.cases, known)
    )
    modes = chosen(parser, "--modes", options.modes, MODES)
    options.fluid = _choices(parser, options.fluid)
    known_variants = (*VARIANTS, *(variant for variant, _, _ in options.fluid))
    wanted = set(
        chosen(parser, "--variants", options.variants, known_variants) if options.variants else ()
    )
    warnings.filterwarnings("ignore")
    rank, ranks, device = _start()
    megatron: str | None = "te"
    absent = "Transformer Engine needs GPUs"
    if device.type == "cuda":
        absent = start_megatron(context_parallel_size=ranks) or ""
    if absent:
        without = start_megatron(te=False, context_parallel_size=ranks)
        megatron = "local" if without is None else None
        if rank == 0:
            print(f"no megatron_te_a2a: {absent}", flush=True)
            print(f"fluid_megatron: {without or 'of the local spec'}", flush=True)
    rows: list[Row] = []
    for name in names:
        case = known[name]
        generator = torch.Generator(device=device).manual_seed(100 + rank)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        x = torch.randn(
            case.length // ranks, 1, case.hidden, device=device, dtype=dtype, generator=generator
        )
        x.requires_grad_()
        builders = _builders(case, options, device, megatron)
        if "floor" in wanted:
            wanted = wanted - {"floor"} | {
                variant for variant in builders if variant.startswith("floor")
            }
        if not builders:
            if rank == 0:
                print(f"{name}: not measured: it is of several ranks, with Megatron", flush=True)
            continue
        if not case.of_megatron and not wanted <= builders.keys():
            raise SystemExit(f"--variants {options.variants}: here there are {', '.join(builders)}")
        # What ours is compared with is always built.
        shares = ranks > torch.cuda.device_count() > 0  # gloo sends no tensors of GPUs
        modules = runnable(builders, wanted and wanted | {_reference(case)}, x)
        if _reference(case) not in modules and not shares:
            if rank == 0:
                print(f"{name}: not measured, as there is nothing to compare ours with", flush=True)
            continue
        difference = None
        if _reference(case) in modules:
            difference = _difference(case, modules, x)
        if difference is not None and difference > (3e-2 if dtype == torch.bfloat16 else 1e-4):
            raise RuntimeError(
                f"{name}: ours differs from the plain form by {difference:.2e} of its RMS; not "
                "measured"
            )
        if wanted:
            modules = {variant: module for variant, module in modules.items() if variant in wanted}
        for mode in modes if modules else ():
            make = step_call if mode == "train" else forward_call
            calls = {variant: make(module, x) for variant, module in modules.items()}
            head_start = layer_head_start_ms(device)
            counts = {"iters": options.iters, "warmup": 3, "repeats": options.repeats}
            timings = measure(calls, device, **counts, head_start_ms=head_start)
            config = {
                "ranks": ranks,
                "shares_gpus": shares,
                "rotary": options.rotary,
                "difference": difference,
                "repeats": options.repeats,
                "head_start_ms": head_start,
            }
            for variant, timing in timings.items():
                rows.append(
                    timing.row(name, mode, variant, config | _settings(modules[variant], x))
                )
            # An installed kernel need not be the fastest: without flash-attn, Transformer Engine
            # may fall back to plain GEMMs.
            floors = {
                variant: timings[variant] for variant in timings if variant.startswith("floor")
            }
            fastest = min(floors, key=lambda variant: floors[variant].median_ms, default=None)
            floor = None if fastest is None else floors[fastest]
            if floor is not None:
                rows.append(floor.row(name, mode, "floor", config | {"of": fastest}))
            if rank == 0:
                over = {
                    v: "" if floor is None else f" ({t.median_ms / floor.median_ms:.2f})"
                    for v, t in timings.items()
                }
                hosts = {
                    v: "" if t.host_ms is None else f" host {t.host_ms:.3f}"
                    for v, t in timings.items()
                }
                line = "  ".join(
                    f"{v} {t.median_ms:.3f}{over[v]}{hosts[v]}" for v, t in timings.items()
                )
                print(f"{name} {mode}: {line}", flush=True)
                if (
                    options.output is not None
                ):  # kept up to date, so that a run cut short has told what it measured
                    write_results("attention", rows, ranks, options.output)
            if options.profile:
                write_trace(calls, device, options.profile_folder / f"attention-{name}-{mode}.json")
            del calls
        del modules, builders
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
