"""What `auto` takes for each part of a model's layers that moves data between ranks, and why, on
GPUs that reach each other's memory. Nothing is measured: it follows from shapes, from a table of
measured shapes and from reference figures of this GPU, or of an H200 where there is no GPU.
--machine names other figures. --write keeps them in a file, which can be edited and given to
--machine and `--fluid-machine`. The last lines are what to expect of an iteration, as measured with
Megatron's fastest flags and with this package, with the nearest number of sequences a microbatch;
--gpus chooses those of the nearest number of GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_fluid.cli.models import Model, add_models, wanted_models
from megatron_fluid.cli.terminal import paragraph, positive, wrapped_table, writing
from megatron_fluid.errors import ConfigError
from megatron_fluid.plan.machine import REFERENCE, Machine, machine_named

__all__ = ["HELP", "Part", "add_arguments", "parts_of", "run"]

HELP = "say what auto takes for each part of a model, and why"


class Part(NamedTuple):
    """A part of a layer, what `auto` takes for it, and why."""

    name: str
    taken: str
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the subcommand takes."""
    add_models(parser)
    add = parser.add_argument
    length, batch = "positions of a sequence (4096)", "sequences of a microbatch (1)"
    add("--seq-length", dest="sequence", type=positive, metavar="N", help=length)
    add("--micro-batch-size", dest="batch", type=positive, metavar="N", help=batch)
    for name in ("context", "tensor"):
        add(f"--{name}-parallel", dest=name, type=positive, metavar="RANKS", help="(1)")
    names = ", ".join(REFERENCE)
    add("--machine", "--gpu", default="auto", help=f"figures: auto (this GPU's), {names} or a file")
    add("--gpus", type=positive, metavar="N", help="of the job; chooses measured iterations (all)")
    add("--write", type=Path, metavar="FILE", help="write the figures to a file")


def run(args: argparse.Namespace) -> int:
    """Print the choices. Raises ConfigError for models that the ranks do not divide."""
    models = wanted_models(args)
    for name, model in models.items():
        _check(name, model)
    machine = machine_named(args.machine)
    if args.write is not None:
        with writing("--write", args.write):
            args.write.write_text(machine.dumps())
    figures = (
        f"machine: {machine.device}, {machine.flops_per_s / 1e12:.4g} TFLOP/s, memory "
        f"{machine.bytes_per_s / 1e9:.4g} GB/s, between ranks "
        f"{machine.wire_bytes_per_s / 1e9:.3g} GB/s ({machine.source})"
    )
    print(paragraph(figures, "  ", ""))
    for name, model in models.items():
        print(f"\n{_report(name, model, machine)}\n\n{_iterations(name, model, args.gpus)}")
    return 0


def _iterations(name: str, model: Model, gpus: int | None) -> str:
    """How long an iteration of a model takes without and with this package, as measured on `gpus`
    GPUs or the nearest number (None: on each number), of each those with the nearest number of
    sequences a microbatch."""
    text = importlib.resources.files("megatron_fluid.plan").joinpath("iterations.json").read_text()
    measured = [found for found in json.loads(text) if found["model"] == name]
    lines = []
    if measured and gpus is not None:
        nearest = _nearest((found["gpus"] for found in measured), gpus)
        measured = [found for found in measured if found["gpus"] == nearest]
        if nearest != gpus:
            lines = [f"no iteration was measured on {gpus} GPUs; the nearest number is {nearest}:"]
    for found in measured:
        same = [other["sequences"] for other in measured if other["gpus"] == found["gpus"]]
        sequences = _nearest(same, model.batch)
        if found["sequences"] != sequences:
            continue
        before, after = found["megatron_ms"], found["fluid_ms"]
        where = f"{found['layers']} of {model.layers} layers on {found['gpus']} {found['gpu']}"
        if found["experts"] != model.experts:
            where += f" with {found['experts']} of {model.experts} experts"
        routing = "force" if found["routing"] == "forced" else "an auxiliary loss"
        version = " with an earlier version" if found["earlier"] else ""
        where += f", {sequences} sequence{'s' * (sequences > 1)} a microbatch"
        where += f", cuBLAS {found['cublas']}" if found["cublas"] else ""
        where += f", routing balanced by {routing}{', one CUDA graph' if found['graph'] else ''}"
        lines.append(
            f"expected iteration: {before:.1f} -> {after:.1f} ms, {before / after:.2f} times as "
            f"fast, measured {found['date']}{version} beside Megatron's fastest flags ({where})"
        )
    if not lines:
        lines = ["iterations of this model were not measured; `megatron-fluid compare` does it"]
    return "\n".join(paragraph(line, "  ", "") for line in lines)


def _nearest(numbers: Iterable[int], wanted: int) -> int:
    return min(numbers, key=lambda number: (abs(number - wanted), number))


def _check(name: str, model: Model) -> None:
    for what, number, ranks in (
        ("attention heads", model.heads, model.context * model.tensor),
        ("positions", model.sequence, 2 * model.context if model.context > 1 else 1),
    ):
        if number % ranks:
            raise ConfigError.of(f"{name}: {what}", number, f"a multiple of {ranks}")


def parts_of(model: Model, machine: Machine) -> Iterator[Part]:
    """Yield the parts of a layer that move data between ranks."""
    if model.context > 1:
        yield _attention(model)
    if model.tensor > 1 and not model.kv_rank:
        yield from _linears(model, machine)
    if model.expert > 1 and model.experts:
        yield _experts(model, machine)


def _attention(model: Model) -> Part:
    from megatron_fluid.attention.overlap import gather_slower_reason, overlap_slower_reason

    if not model.kv_rank:
        reason = overlap_slower_reason(model.tensor)
        around = "exchanged between the projections"
        return Part("attention", "overlapped" if reason is None else around, reason or "")
    values = model.value_dim or model.head_dim
    columns = model.heads * (2 * model.head_dim + values) // model.context
    reason = gather_slower_reason((model.q_rank or model.hidden) + model.kv_rank, columns)
    if model.tensor > 1:
        reason = "always beside tensor parallelism"
    taken = "compressed rows are gathered" if reason is None else "heads are exchanged"
    return Part("latent attention, up", taken, reason or "")


def _linears(model: Model, machine: Machine) -> Iterator[Part]:
    from megatron_fluid.tensor_parallel.choice import measured_backend

    values = model.value_dim or model.head_dim
    qkv = (model.heads + model.kv_heads) * model.head_dim + model.kv_heads * values
    linears = [
        ("linear_qkv", "gather", qkv // model.tensor, model.hidden),
        ("linear_proj", "scatter", model.hidden, model.heads * values // model.tensor),
    ]
    if model.ffn:
        linears += [
            ("linear_fc1", "gather", (1 + model.gated) * model.ffn // model.tensor, model.hidden),
            ("linear_fc2", "scatter", model.hidden, model.ffn // model.tensor),
        ]
    for name, operation, n, k in linears:
        shape = model.rows, n, k
        taken = measured_backend(machine.device, model.tensor, operation, *shape)
        yield Part(name, taken, "fastest of the nearest measured shape")


def _experts(model: Model, machine: Machine) -> Part:
    from megatron_fluid.moe.nvlink.schedule import choose_schedule

    sizes = model.hidden, model.expert_ffn, model.top_k, model.experts
    schedule = choose_schedule(model.rows // model.tensor, *sizes, model.expert, True, machine)
    overlaps = {"stream": "the dispatch is sent in chunks", "sent_rows": "GEMMs send their rows"}
    used = [overlaps[name] for name, on in dataclasses.asdict(schedule).items() if on]
    return Part("experts", "nvlink", "; ".join(used) or "dispatch and combine as a whole")


def _report(name: str, model: Model, machine: Machine) -> str:
    ranks = (
        f"{name}: {model.sequence} positions, microbatch of {model.batch}, context parallel "
        f"{model.context}, tensor parallel {model.tensor}, expert parallel {model.expert}"
    )
    parts = list(parts_of(model, machine))
    if not parts:
        none = "nothing to choose for these ranks: give --context-parallel, --expert-parallel (for "
        none += "experts) or --tensor-parallel (but for latent attention)"
        return f"{paragraph(ranks)}\n{paragraph(none)}"
    return f"{paragraph(ranks)}\n\n{wrapped_table(('part', 'auto takes', 'why'), parts)}"
