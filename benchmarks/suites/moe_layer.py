"""One MoE layer, router included, under every way that is installed of running it: forward, and
forward with backward.

    benchmarks/launch.sh moe_layer --output benchmarks/results/moe_layer.json
    benchmarks/launch.sh moe_layer --cases deepseek-v3 --routing balanced --variants floor,fluid
    --phases benchmarks/launch.sh moe_layer --cases olmoe --schedules all --modes forward
    TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh moe_layer --smoke --phases      (one tiny case,
    without a GPU)

bf16, SwiGLU, no bias, dropless, 4096 tokens a rank. A sample is --repeats calls in a row, as a
model's layers are, divided by their number, and the host has a head start (timing.py): it runs
ahead of the GPU as it does in a model. Every variant routes by the same fixed random logits: its
own router computes its logits, which are then replaced. `floor` is two grouped GEMMs over as many
rows, evenly spread (in train, three times that work); it moves and routes nothing.
`fluid_no_overlap` moves, multiplies, sums and moves again one after the other; `fluid_graph`
replays the forward of bounded mode from a CUDA graph; `fluid_megatron` is Megatron's layer with our
path by patch, `megatron_te_*` are Megatron's own. Cases of which popular experts get more carry
`-zipf`. In train, config holds the bytes that a layer keeps for its backward and the most it ever
holds above its input and weights. --phases adds the time of every step (moe_phases.py), --schedules
measures schedules by name, --profile leaves a trace of each variant.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.moe import (
    CASES,
    MoECase,
    router_logits,
    torch_grouped_matmul,
    torch_grouped_weight_grad,
)
from benchmarks.harness.options import MODES, chosen, need_gpu_or_smoke, refuse_ignored
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import Timing, layer_head_start_ms, measure
from benchmarks.report.timeline import write_trace
from benchmarks.suites.moe_phases import host_times, measure_phases, print_phases
from megatron_fluid.comm.symmetric import SimulatedWorkspace
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import FluidError
from megatron_fluid.moe import fused_router
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, shared_buffers
from megatron_fluid.moe.nvlink.schedule import CANDIDATES, NO_OVERLAP, Schedule
from megatron_fluid.moe.nvlink.transport import nvlink_moe

__all__ = ["FluidLayer", "main"]

ZIPF = 0.6
ROUTINGS = ("balanced", "zipf")
MEGATRON = {
    "fluid_megatron": ("alltoall", False, "nvlink"),
    "megatron_te_alltoall": ("alltoall", False, "megatron"),
    "megatron_te_allgather": ("allgather", False, "megatron"),
    "megatron_te_overlap_wgrad": ("alltoall", True, "megatron"),
}
VARIANTS = ("floor", "fluid", "fluid_graph", "fluid_no_overlap", *MEGATRON)


class FluidLayer(nn.Module):
    """Router and experts over NVLink, with the weights in Megatron's layout."""

    def __init__(
        self, case: MoECase, domain: NvlinkBuffers, logits: Tensor, like: FluidLayer | None = None
    ) -> None:
        """With the weights of `like`, or of its own."""
        super().__init__()
        self.case, self.domain, self.logits = case, domain, logits
        if like is not None:
            self.router, self.w1, self.w2 = like.router, like.w1, like.w2
            self.experts = like.experts
            return
        local = domain.local_experts

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                torch.randn(*shape, device=logits.device, dtype=torch.bfloat16) * 0.02
            )

        self.router = weight(case.experts, case.hidden)
        self.w1 = weight(local, 2 * case.ffn, case.hidden)
        self.w2 = weight(local, case.hidden, case.ffn)
        self.experts = (
            ExpertWeights(self.w1, local),
            ExpertWeights(self.w2, local),
        )  # looked at once, as MoELayer does

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> ids [T, K], probs [T, K]."""
        computed = fused_router.router_logits(x, self.router)
        return fused_router.topk_softmax(
            torch.add(self.logits, computed, alpha=0.0), self.case.top_k
        )

    def forward(self, x: Tensor, capacity: int | None = None) -> Tensor:
        """x [T, H] -> [T, H]."""
        ids, probs = self.route(x)
        return nvlink_moe(self.domain, x, ids, probs, *self.experts, capacity=capacity)


class _Megatron(nn.Module):
    """Megatron's MoE layer; `backend` "megatron" leaves it its own way of moving tokens, "nvlink"
    is ours by patch."""

    def __init__(
        self, case: MoECase, dispatcher: str, overlap: bool, logits: Tensor, backend: str
    ) -> None:
        super().__init__()
        self.config = FluidConfig(moe_backend=backend)
        set_config(self.config)
        self.layer = _megatron_layer(case, dispatcher, overlap, logits)
        set_config(None)

    def forward(self, x: Tensor) -> Any:
        set_config(self.config)  # a layer chooses its way at its first call
        return self.layer(x)


def _megatron_layer(case: MoECase, dispatcher: str, overlap: bool, logits: Tensor) -> nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=16,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.experts,
        moe_router_topk=case.top_k,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        expert_model_parallel_size=dist.get_world_size(),
        moe_router_load_balancing_type="none",
        moe_permute_fusion=True,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
        moe_router_dtype="fp32",
        **({"overlap_dispatch_backward_with_experts_wgrad": True} if overlap else {}),
    )
    build = get_moe_module_spec(use_te=True, num_experts=case.experts, moe_grouped_gemm=True)
    layer = build(config).to(logits.device).bfloat16()
    if hasattr(layer, "set_layer_number"):
        layer.set_layer_number(1)
    gating = layer.router.gating
    layer.router.gating = lambda x: torch.add(
        logits.view(*x.shape[:-1], case.experts), gating(x), alpha=0.0
    )
    return layer


def _start_megatron() -> str | None:
    """Initialise Megatron's groups; the reason where it cannot be measured."""
    try:
        import transformer_engine.pytorch  # noqa: F401
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    except ImportError as error:
        return str(error)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    return None


def _floor(
    case: MoECase, tokens: int, ranks: int, device: torch.device, train: bool
) -> Callable[[], object]:
    rows, local, bf16 = tokens * case.top_k, case.experts // ranks, torch.bfloat16
    x = torch.randn(rows, case.hidden, device=device, dtype=bf16)
    h = torch.randn(rows, 2 * case.ffn, device=device, dtype=bf16)
    a = torch.randn(rows, case.ffn, device=device, dtype=bf16)
    w1 = torch.randn(local, 2 * case.ffn, case.hidden, device=device, dtype=bf16) * 0.02
    w2 = torch.randn(local, case.hidden, case.ffn, device=device, dtype=bf16) * 0.02
    ends = [(e + 1) * (rows // local) for e in range(local)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)

    def run() -> None:
        torch_grouped_matmul(x, w1.transpose(1, 2), offsets, ends)
        torch_grouped_matmul(a, w2.transpose(1, 2), offsets, ends)
        if train:
            torch_grouped_matmul(x, w2, offsets, ends)
            torch_grouped_matmul(h, w1, offsets, ends)
            torch_grouped_weight_grad(x, a, offsets, ends)
            torch_grouped_weight_grad(h, x, offsets, ends)

    return run


def _call(
    layer: Callable[[Tensor], Any],
    parameters: list[nn.Parameter],
    x: Tensor,
    grad: Tensor,
    train: bool,
) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            layer(x)

    def step() -> None:
        y = layer(x)
        (y[0] if isinstance(y, tuple) else y).backward(grad)
        for p in [*parameters, x]:
            p.grad = None

    return step if train else forward


def _graph(layer: FluidLayer, x: Tensor) -> Callable[[], None]:
    """The forward in bounded mode, with room for twice the rows that all ranks alike would get."""
    domain = layer.domain
    capacity = min(domain.most_rows, 2 * x.shape[0] * layer.case.top_k)
    side = torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x, capacity)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may ask after events of theirs meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            layer(x, capacity)
    return graph.replay


def _memory(
    call: Callable[[], None], device: torch.device, layer: nn.Module, x: Tensor
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
    del y
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    found = torch.tensor([kept, torch.cuda.max_memory_allocated() - before], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    kept, peak = found.tolist()
    return {"kept_bytes": kept, "peak_bytes": peak}


def _hidden_share(timings: dict[str, Timing]) -> dict[str, float]:
    """The share of what is not GEMM that overlap hides."""
    if not {"fluid", "fluid_no_overlap", "floor"} <= set(timings):
        return {}
    floor, plain, fluid = (timings[v].median_ms for v in ("floor", "fluid_no_overlap", "fluid"))
    return {"hidden_share": (plain - fluid) / max(plain - floor, 1e-9)}


def _check_overflow(domain: NvlinkBuffers, device: torch.device) -> None:
    """Raise on every rank if a graph of any rank had too little room: what is left out would
    flatter it."""
    wanted = domain.overflow.to(device)
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    if int(wanted):
        domain.check_overflow()
        raise FluidError(
            f"another rank's routing wanted {int(wanted)} expert rows, more than the graph has "
            "room for"
        )


def _domain(
    case: MoECase, tokens: int, device: torch.device, schedule: Schedule | None
) -> NvlinkBuffers:
    if device.type != "cuda":
        space = SimulatedWorkspace(1).rank(0)
        schedule = Schedule(stream=True, sent_rows=True) if schedule is None else schedule
        return NvlinkBuffers(
            space, tokens, case.hidden, case.top_k, case.experts, schedule=schedule
        )
    group = dist.group.WORLD
    assert group is not None
    shape = (tokens, case.hidden, case.ffn, case.top_k, case.experts)
    return shared_buffers(group, *shape, schedule=schedule)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=4, help="layers in a row of one sample")
    parser.add_argument("--routing", default=",".join(ROUTINGS), help="comma-separated")
    parser.add_argument(
        "--variants", default="", help="comma-separated beginnings of variants' names; default all"
    )
    parser.add_argument("--phases", action="store_true", help="time every step and the host, too")
    parser.add_argument(
        "--schedules",
        default="",
        help=f"measure these, too: all, or some of {', '.join(CANDIDATES)}",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="also write a trace and a timeline picture of each case",
    )
    parser.add_argument("--profile-folder", type=Path, default=Path("profiles"))
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny case, on a CPU with the interpreter"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    return parser


def _with_megatron(names: Iterable[str]) -> bool:
    """Whether variants that need Megatron were asked for. By "fluid" our own are meant, though one
    of Megatron's begins so."""
    return any(
        m.startswith(name) and not "fluid".startswith(name) for m in MEGATRON for name in names
    )


def _layers(
    case: MoECase, options: argparse.Namespace, logits: Tensor, absent: str | None
) -> dict[str, nn.Module]:
    """Every layer that was asked for and can be built, by variant."""
    device = logits.device
    wanted = tuple(options.variants) or ("",)
    fluid = FluidLayer(case, _domain(case, options.tokens, device, None), logits)
    schedules = {"fluid_no_overlap": NO_OVERLAP}
    names = CANDIDATES if "all" in options.schedules else options.schedules
    schedules |= {f"schedule_{name}": CANDIDATES[name] for name in names}
    layers: dict[str, nn.Module] = {"fluid": fluid}
    for name, schedule in schedules.items():
        if name.startswith((*wanted, "schedule")):
            layers[name] = FluidLayer(
                case, _domain(case, options.tokens, device, schedule), logits, like=fluid
            )
    for variant, (dispatcher, overlap, backend) in MEGATRON.items():
        if absent is None and variant.startswith(wanted):
            try:
                layers[variant] = _Megatron(case, dispatcher, overlap, logits, backend)
            except (
                Exception
            ) as error:  # a rival that does not start is named, and the others are measured
                print(
                    f"{variant} left out: {type(error).__name__}: {error}",
                    file=sys.stderr,
                    flush=True,
                )
    return layers


def _measure_case(
    label: str,
    case: MoECase,
    options: argparse.Namespace,
    logits: Tensor,
    absent: str | None,
    zipf: float,
) -> list[Row]:
    device, ranks = logits.device, dist.get_world_size()
    layers = _layers(case, options, logits, absent)
    fluid = layers["fluid"]
    assert isinstance(fluid, FluidLayer)
    rows: list[Row] = []
    for mode in options.modes:
        train = mode == "train"
        calls: dict[str, Callable[[], object]] = {
            "floor": _floor(case, options.tokens, ranks, device, train)
        }
        memory: dict[str, dict[str, int]] = {}
        for variant, layer in layers.items():
            flat = isinstance(layer, FluidLayer)
            size = (options.tokens, case.hidden) if flat else (options.tokens, 1, case.hidden)
            x = torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=True)
            call = calls[variant] = _call(
                layer, list(layer.parameters()), x, torch.randn_like(x), train
            )
            if train:
                call()
                memory[variant] = _memory(call, device, layer, x)
            elif variant == "fluid" and device.type == "cuda":
                calls["fluid_graph"] = _graph(fluid, x.detach())
        head_start = layer_head_start_ms(device)
        timings = measure(
            calls,
            device,
            iters=options.iters,
            warmup=3,
            repeats=options.repeats,
            head_start_ms=head_start,
        )
        _check_overflow(fluid.domain, device)
        shared = {
            "tokens": options.tokens,
            "ranks": ranks,
            "zipf": zipf,
            "repeats": options.repeats,
        }
        shared["head_start_ms"] = head_start
        hidden = _hidden_share(timings) if fluid.domain.schedule != NO_OVERLAP else {}
        for variant, timing in timings.items():
            config: dict[str, Any] = shared | memory.get(variant, {})
            layer = layers.get(variant, fluid)
            if variant != "floor" and isinstance(layer, FluidLayer):
                config["schedule"] = str(layer.domain.schedule)
            if variant == "fluid":
                config |= hidden
            rows.append(timing.row(label, mode, variant, config))
        if dist.get_rank() == 0:
            floor = timings["floor"].median_ms
            line = "  ".join(
                f"{v} {t.median_ms:.3f} ({t.median_ms / floor:.2f})" for v, t in timings.items()
            )
            print(f"{label} {mode}: {line}  {hidden}", flush=True)
            for variant, held in memory.items():
                if held:
                    print(
                        f"  {variant}: "
                        + ", ".join(f"{k} {v / 2**20:.0f} MiB" for k, v in held.items()),
                        flush=True,
                    )
        if options.profile:
            write_trace(calls, device, options.profile_folder / f"moe_layer-{label}-{mode}.json")
    if options.phases:
        x = torch.randn(
            options.tokens, case.hidden, device=device, dtype=torch.bfloat16, requires_grad=True
        )
        grad = torch.randn_like(x)
        steps = Schedule(
            sent_rows=fluid.domain.schedule.sent_rows
        )  # those that are launches of their own
        plain = FluidLayer(case, _domain(case, options.tokens, device, steps), logits, like=fluid)
        phases = measure_phases(label, case, plain.domain, plain, x, grad, options.iters)
        phases += host_times(fluid.domain, fluid, x, grad, label, options.iters)
        if dist.get_rank() == 0:
            print_phases(phases)
        rows += phases
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and, on rank 0, print a table and write the results."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.smoke:
        refuse_ignored(parser, options, ("cases", "tokens", "iters"), "without --smoke")
    options.modes = chosen(parser, "--modes", options.modes, MODES)
    options.routing = chosen(parser, "--routing", options.routing, ROUTINGS)
    names = chosen(parser, "--cases", options.cases, CASES)
    if options.variants:
        options.variants = chosen(parser, "--variants", options.variants, VARIANTS, beginnings=True)
    if options.schedules:
        options.schedules = chosen(parser, "--schedules", options.schedules, ("all", *CANDIDATES))
    need_gpu_or_smoke(parser, "moe_layer", options.smoke)
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
        absent = (
            _start_megatron()
            if not options.variants or _with_megatron(options.variants)
            else "not asked for"
        )
        cases = {name: CASES[name] for name in names}
    if absent and rank == 0:
        print(f"no megatron_te variants: {absent}", flush=True)
    rows: list[Row] = []
    for name, case in cases.items():
        for routing in options.routing:
            zipf = ZIPF if routing == "zipf" else 0.0
            logits = router_logits(case, options.tokens, zipf, 100 + rank, device)
            label = name if routing == "balanced" else f"{name}-zipf"
            rows += _measure_case(label, case, options, logits, absent, zipf)
            if (
                rank == 0 and options.output is not None
            ):  # a run that is cut short has told what it measured
                write_results("moe_layer", rows, dist.get_world_size(), options.output)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
