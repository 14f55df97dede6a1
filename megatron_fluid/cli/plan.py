"""`megatron-fluid plan`: what each part of a model is predicted to take, in Megatron's form and in
the overlapped ones, and which `auto` takes.

megatron-fluid plan mixtral-8x7b --context-parallel 4       a model by name, one or several
megatron-fluid plan --from-args --num-layers 32 ...         the flags of a training, the last option

Times are of one layer's call in a training step of one microbatch, on the slower of device and
host; of latent attention, of what lies between its compressed rows and its heads. Nothing is
measured: they follow from reference figures of this GPU, or of an H200 where there is no GPU.
--machine names others. --write keeps the figures in a file, which can be edited and given to
--machine and `--fluid-machine`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_fluid.cli.arguments import positive
from megatron_fluid.cli.models import Model, add_models, wanted_models
from megatron_fluid.cli.tables import paragraph, wrapped_table
from megatron_fluid.errors import ConfigError
from megatron_fluid.plan import layers
from megatron_fluid.plan.machine import REFERENCE, Link, Machine, machine_named
from megatron_fluid.plan.model import Forecast, fastest, linear_forms

__all__ = ["Part", "add_parser", "attention_work", "parts_of", "run"]


@dataclass(frozen=True)
class Part:
    """A part of a layer: the predicted times of its forms, Megatron's form, the one that `auto`
    takes, and why, where not by prediction."""

    name: str
    forms: Mapping[str, Forecast]
    plain: str
    chosen: str
    why: str = ""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="predict what each part of a model takes, and what auto chooses",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_models(parser)
    add = parser.add_argument
    length, batch = "positions of a sequence (4096)", "sequences of a microbatch (1)"
    add("--seq-length", dest="sequence", type=positive, help=length)
    add("--micro-batch-size", dest="batch", type=positive, help=batch)
    for name in ("context", "tensor"):
        add(f"--{name}-parallel", dest=name, type=positive, help="ranks (1)")
    names = ", ".join(REFERENCE)
    add("--machine", default="auto", help=f"figures: auto (this GPU's), {names} or a file")
    add("--write", type=Path, metavar="FILE", help="write the figures to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the predictions; 2 if the command line is wrong."""
    try:
        models = wanted_models(args)
        for name, model in models.items():
            _check(name, model)
        machine = machine_named(args.machine, "cuda")
        if args.write is not None:
            args.write.write_text(machine.dumps())
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(_figures(machine))
    for name, model in models.items():
        print("\n" + _report(name, model, machine))
    return 0


def _check(name: str, model: Model) -> None:
    for what, number, ranks in (
        ("attention heads", model.heads, model.context * model.tensor),
        ("positions", model.sequence, 2 * model.context if model.context > 1 else 1),
    ):
        if number % ranks:
            raise ConfigError.of(f"{name}: {what}", number, f"a multiple of {ranks}")


# ---- figures


def _figures(machine: Machine) -> str:
    def link(name: str, found: Link) -> str:
        return (
            f"; {name}: {found.bytes_per_s / 1e9:.3g} GB/s after {found.latency_s * 1e6:.3g} us, "
            f"{found.hidden:.0%} of it behind a GEMM"
        )

    copies = link("copies", machine.copies) if machine.copies else ""

    text = (
        f"machine: {machine.device}, {machine.flops_per_s / 1e12:.4g} TFLOP/s, memory "
        f"{machine.bytes_per_s / 1e9:.4g} GB/s, {machine.operation_s * 1e6:.3g} us of the host an "
        f"operation{copies}{link('all-to-all', machine.collective)} "
        f"({machine.source})"
    )
    return paragraph(text, "  ", "")


# ---- predictions


def parts_of(model: Model, machine: Machine) -> Iterator[Part]:
    """Yield the parts of a layer that move data between ranks, with their forms."""
    plain = layers.EXCHANGED
    if model.context > 1 and model.kv_rank:
        forms = layers.latent_forms(machine, _latent(model))
        chosen, why = fastest(forms, plain), ""
        if model.tensor > 1:
            chosen, why = plain, "(always beside tensor parallelism)"
        yield Part("latent attention, up", forms, plain, chosen, why)
    elif model.context > 1:
        forms = layers.attention_forms(machine, attention_work(model))
        yield Part("attention", forms, plain, fastest(forms, plain))
    if model.tensor > 1 and not model.kv_rank:
        yield from _linears(model, machine)
    if model.expert > 1 and model.experts:
        yield _experts(model, machine)


def attention_work(model: Model) -> layers.AttentionWork:
    """Return what one call of a model's attention computes and sends on one rank."""
    from megatron_fluid.attention.exchange.symmetric import choose_groups, choose_transport
    from megatron_fluid.attention.layouts import HeadLayout

    values, heads = model.value_dim or model.head_dim, model.heads // model.tensor
    key_values = max(1, model.kv_heads // model.tensor)
    layout = HeadLayout(heads, key_values, model.head_dim, model.context, value_dim=values)
    seen = min(model.sequence / 2, model.window or model.sequence)
    flops = 2.0 * model.batch * model.sequence * seen * (model.head_dim + values) * heads
    sent = model.rows * layout.qkv_rows * 2 * (model.context - 1) // model.context
    return layers.AttentionWork(
        ranks=model.context,
        rows=model.rows,
        hidden=model.hidden,
        qkv_columns=layout.qkv_rows,
        output_columns=layout.output_columns,
        core_flops=flops / model.context,
        groups=choose_groups(layout, model.sequence, model.batch, 2),
        by_copies=choose_transport("auto", sent) == "copy_engine",
        shards=model.tensor,
    )


def _latent(model: Model) -> layers.LatentWork:
    values = model.value_dim or model.head_dim
    plain = model.head_dim - model.rotated
    products = (
        (model.heads * model.head_dim, model.q_rank or model.hidden),
        (model.heads * (plain + values), model.kv_rank),
    )
    columns = model.heads * (2 * model.head_dim + values)
    return layers.LatentWork(model.context, model.rows, products, columns)


def _linears(model: Model, machine: Machine) -> Iterator[Part]:
    from megatron_fluid.tensor_parallel.measured import measured_backend

    values = model.value_dim or model.head_dim
    qkv = (model.heads + model.kv_heads) * model.head_dim + model.kv_heads * values
    linears = [
        ("linear_qkv", "gather", qkv // model.tensor, model.hidden),
        ("linear_proj", "scatter", model.hidden, model.heads * values // model.tensor),
    ]
    if model.ffn:
        linears += [
            ("linear_fc1", "gather", 2 * model.ffn // model.tensor, model.hidden),
            ("linear_fc2", "scatter", model.hidden, model.ffn // model.tensor),
        ]
    for name, operation, n, k in linears:
        forms = linear_forms(machine, operation, model.tensor, model.rows, n, k)
        shape = model.rows, n, k
        measured = measured_backend(machine.device, model.tensor, operation, *shape)
        chosen = measured or fastest(forms, "collective")
        why = "" if measured is None else "(measured)"
        yield Part(f"{name}, forward", forms, "collective", chosen, why)


def _experts(model: Model, machine: Machine) -> Part:
    from megatron_fluid.moe.nvlink.schedule import choose_schedule

    sizes = model.hidden, model.expert_ffn, model.top_k, model.experts
    tokens = model.rows // model.tensor
    forms = layers.expert_forms(machine, layers.ExpertWork(tokens, *sizes, model.expert))
    why = "(always; in rounds)"
    if machine.copies is not None:
        schedule = choose_schedule(tokens, *sizes, model.expert, True, machine)
        said = [name for name, on in dataclasses.asdict(schedule).items() if on]
        why = f"(always; {' and '.join(said) or 'whole'})"
    return Part("experts", forms, layers.MEGATRON, layers.OVERLAPPED, why)


def _report(name: str, model: Model, machine: Machine) -> str:
    ranks = (
        f"{name}: {model.sequence} positions, microbatch of {model.batch}, context parallel "
        f"{model.context}, tensor parallel {model.tensor}, expert parallel {model.expert}"
    )
    parts = list(parts_of(model, machine))
    if not parts:
        return f"{paragraph(ranks)}\nnothing moves between ranks: give --context-parallel, ..."
    rows = []
    for part in parts:
        for form in dict.fromkeys([part.plain, *part.forms, part.chosen]):
            found = part.forms.get(form)
            times = ("", "") if found is None else (_ms(found.seconds), _ms(found.host_s))
            taken = f"yes {part.why}".rstrip() if form == part.chosen else ""
            rows.append((part.name if form == part.plain else "", form, *times, taken))
    head = ("part", "form", "ms", "of the host", "auto takes it")
    plain = sum(part.forms[part.plain].seconds for part in parts)
    auto = sum(part.forms.get(part.chosen, part.forms[part.plain]).seconds for part in parts)
    total = f"in all {_ms(plain)} ms in Megatron's form, {_ms(auto)} ms as auto takes it"
    return f"{paragraph(ranks)}\n\n{wrapped_table(head, rows)}\n\n{total}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
