"""Transformer layers, overlapped against plain all-to-all: inference, forward and training, on
every rank of a job.

``tests/test_transformer_speedup.py`` is the command line. Variants (``fluid``; ``rounds``, which
is the same over round-robin P2P exchanges alone; ``all_to_all``) have the same parameters and see
the same data; before anything is timed their outputs and gradients are compared. The host
has a head start (benchmarks/harness/timing.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import Timing, layer_head_start_ms, measure, rows_of
from megatron_fluid import TransformerLayer, get_backward_scheduler
from megatron_fluid.cli.terminal import positive
from megatron_fluid.moe.router import Routing, TopKRouter
from megatron_fluid.moe.sharding import local_part

__all__ = ["MODES", "Shape", "agreement", "build", "check", "data", "main", "run", "table"]

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
MODES = ("inference", "forward", "train")
_TITLES = {"inference": "Inference", "forward": "Forward", "train": "Training"}


@dataclass(frozen=True)
class Shape:
    """What is run. ``seq`` counts the whole sequence, which the ranks share."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 32
    ffn: int = 14336
    experts_per_rank: int = 2
    top_k: int = 2
    seq: int = 4096
    batch: int = 2
    layers: int = 2
    dtype: str = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


SMALL = Shape(64, 8, 8, 96, 2, 2, 64, 2, 2, "float32")


@dataclass(frozen=True)
class Options:
    """How the overlapped variant is run; see TransformerLayer."""

    head_groups: int = 1
    dx_chunks: int = 1
    defer: bool = True


def build(
    shape: Shape, options: Options, overlap: bool, device: torch.device, rounds: bool = False
) -> nn.Sequential:
    """The layers of one variant; context and expert parallelism over all ranks. rounds: exchange
    round by round, whatever faster way there is."""
    group = dist.group.WORLD
    assert group is not None
    layers = [
        TransformerLayer(
            shape.hidden,
            shape.heads,
            shape.ffn,
            shape.experts_per_rank * dist.get_world_size(),
            shape.top_k,
            ep_group=group,
            cp_group=group,
            num_kv_heads=shape.kv_heads,
            head_groups=options.head_groups,
            dx_chunks=options.dx_chunks,
            attention_exchange="rounds" if rounds else "auto",
            overlap=overlap,
            layer_id=index,
            device=device,
            dtype=shape.torch_dtype,
        )
        for index in range(shape.layers)
    ]
    for layer in layers if rounds else ():
        layer.mlp.config = dataclasses.replace(layer.mlp.config, backend="rounds")
    return nn.Sequential(*layers)


def _calls(
    model: nn.Sequential, x: Tensor, g: Tensor, defer: bool
) -> dict[str, Callable[[], Tensor]]:
    scheduler = get_backward_scheduler()

    def inference() -> Tensor:
        with torch.no_grad():
            return model(x)

    def forward() -> Tensor:
        return model(x)

    def train() -> Tensor:
        scheduler.enabled = defer
        y = model(x)
        y.backward(g)
        scheduler.finish_batch()
        scheduler.enabled = False
        return y

    def training_step() -> Tensor:
        model.zero_grad(set_to_none=True)
        x.grad = None
        return train()

    return {"inference": inference, "forward": forward, "train": training_step}


# How far the variants may be apart, as `agreement` measures it.
ALLOWED = {"bfloat16": 6e-2, "float32": 1e-4, "float64": 1e-11}


def _rms(t: Tensor, dim: int | None = None) -> Tensor:
    return t.square().mean(dim).sqrt()


def _distance(a: Tensor, b: Tensor) -> float:
    """The root mean square of a row's difference (a token, or one output of a weight), as a share
    of that row's values or, if that is more, of all values; of the worst row of all ranks."""
    a, b = a.double(), b.double()
    mean = b.square().mean()
    dist.all_reduce(mean)
    whole = (mean / dist.get_world_size()).sqrt().clamp_min(1e-300)
    worst = (_rms(a - b, -1) / _rms(b, -1).clamp_min(whole)).amax()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def _with_scores(router: TopKRouter, tokens: Tensor, routing: Routing) -> Routing:
    """The fused router, which runs on GPUs alone, leaves out scores that no loss wants."""
    if routing.scores is not None:
        return routing
    wide = torch.promote_types(tokens.dtype, torch.float32)
    logits = nn.functional.linear(tokens.to(wide), router.weight.to(wide))
    return Routing(routing.ids, routing.probs, logits.softmax(dim=-1))


@contextmanager
def _hooks(model: nn.Sequential, hook: Callable[[int, Routing], Routing]) -> Iterator[None]:
    """Give each layer's routing to ``hook`` (layer, routing with its scores), which returns what
    the layer goes by."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    handles = [
        router.register_forward_hook(
            lambda module, inputs, routing, layer=layer: hook(
                layer, _with_scores(module, *inputs, routing)
            )
        )
        for layer, router in enumerate(routers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def agreement(
    ours: nn.Sequential, plain: nn.Sequential, x: Tensor, g: Tensor, defer: bool
) -> dict[str, float]:
    """How far outputs, dX and every dW of the two variants are apart; see ``_distance``.

    A token whose best experts are all but equal goes to others after other rounding, and nothing of
    its row is alike then. So the plain variant sends tokens where ours did. How much worse it holds
    those experts for than its own choice is compared as "choices": the difference of both choices'
    scores as a share of them, of the worst token.
    """
    chosen: list[Tensor] = []
    worse = x.new_zeros((), dtype=torch.float64)

    def note(layer: int, routing: Routing) -> Routing:
        chosen.append(routing.ids)
        return routing

    def follow(layer: int, routing: Routing) -> Routing:
        assert routing.scores is not None
        own, scores = (
            routing.scores.gather(-1, ids.long()) for ids in (routing.ids, chosen[layer])
        )
        worse.copy_(torch.maximum(worse, (1 - scores.sum(-1) / own.sum(-1)).amax()))
        return Routing(chosen[layer], scores / scores.sum(-1, keepdim=True), routing.scores)

    found: list[dict[str, Tensor]] = []
    for model, deferred, hook in ((ours, defer, note), (plain, False, follow)):
        with _hooks(model, hook):
            y = _calls(model, x, g, deferred)["train"]()
        assert x.grad is not None
        values = {"output": y.detach(), "dX": x.grad}
        values |= {
            name: local_part(p.grad) for name, p in model.named_parameters() if p.grad is not None
        }
        found.append(values)
        model.zero_grad(set_to_none=True)
        x.grad = None
    if found[0].keys() != found[1].keys():
        raise AssertionError(
            f"gradients of {found[0].keys() ^ found[1].keys()} exist in one variant only"
        )
    dist.all_reduce(worse, dist.ReduceOp.MAX)
    return {"choices": worse.item()} | {
        name: _distance(value, found[1][name]) for name, value in found[0].items()
    }


def check(differences: dict[str, float], dtype: str) -> None:
    """Raises:
    AssertionError: variants this far apart (see ``agreement``) differ by more than rounding
    explains.
    """
    wrong = {name: value for name, value in differences.items() if not value <= ALLOWED[dtype]}
    if wrong:
        raise AssertionError(
            f"overlapped and plain layers differ by more than {ALLOWED[dtype]}: {wrong}"
        )


def data(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's rows of x, which wants a gradient, and of the gradient of the output: [seq / W,
    batch, hidden]."""
    generator = torch.Generator(device=device).manual_seed(1 + dist.get_rank())
    size = (shape.seq // dist.get_world_size(), shape.batch, shape.hidden)
    x, g = (
        torch.randn(size, generator=generator, device=device).to(shape.torch_dtype)
        for _ in range(2)
    )
    return x.requires_grad_(), g


def run(
    shape: Shape, options: Options, device: torch.device, iters: int, warmup: int
) -> tuple[list[Row], dict[str, float]]:
    """Compare, then time both variants in all modes. Collective; returns rows and what
    ``agreement`` found.

    Raises:
        AssertionError: the variants disagree by more than rounding explains.
    """
    world = dist.get_world_size()
    ours, plain = (build(shape, options, overlap, device) for overlap in (True, False))
    models = {"fluid": ours}
    if world > 1:
        models["rounds"] = build(shape, options, True, device, rounds=True)
    x, g = data(shape, device)
    differences: dict[str, float] = {}
    for model in (*models.values(), plain):
        model.load_state_dict(ours.state_dict())
    for model in models.values():
        apart = agreement(model, plain, x, g, options.defer)
        check(apart, shape.dtype)
        differences = {n: max(v, differences.get(n, 0.0)) for n, v in apart.items()}
    head_start = layer_head_start_ms(device)
    config = {**dataclasses.asdict(shape), **dataclasses.asdict(options), "cp": world, "ep": world}
    config["head_start_ms"] = head_start
    calls = {name: _calls(model, x, g, options.defer) for name, model in models.items()}
    calls["all_to_all"] = _calls(plain, x, g, False)
    rows: list[Row] = []
    for mode in MODES:
        timings: dict[str, Timing] = measure(
            {variant: calls[variant][mode] for variant in calls},
            device,
            warmup=warmup,
            iters=iters,
            head_start_ms=head_start,
        )
        rows += rows_of(timings, "seed" if shape == Shape() else "custom", mode, config)
    return rows, differences


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: Mode, Baseline, Overlap, Speedup; a table of `rounds` below."""
    time = {(row.mode, row.variant): row.median_ms for row in rows}
    lines = []
    for variant, title in (("fluid", "Overlap"), ("rounds", "Rounds")):
        if (MODES[0], variant) in time:
            head = f"| Mode | Baseline | {title} | Speedup |"
            lines += [*([""] if lines else []), head, "|------|----------|---------|---------|"]
        for mode in MODES:
            if (overlap := time.get((mode, variant))) is not None:
                baseline = time[mode, "all_to_all"]
                gain = baseline / overlap
                lines.append(
                    f"| {_TITLES[mode]} | {baseline:.2f} ms | {overlap:.2f} ms | {gain:.2f}x "
                    f"({gain - 1:+.0%}) |"
                )
    return "\n".join(lines)


def _parser(on_gpu: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Transformer layers with overlapped exchanges against plain all-to-all. "
        "Run under torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Shape() if on_gpu else SMALL
    for field in dataclasses.fields(Shape):
        value = getattr(default, field.name)
        known = sorted(DTYPES) if field.name == "dtype" else None
        parser.add_argument(
            "--" + field.name.replace("_", "-"), type=type(value), default=value, choices=known
        )
    for name in ("head_groups", "dx_chunks"):
        parser.add_argument(
            "--" + name.replace("_", "-"), type=int, default=1, help="see TransformerLayer"
        )
    parser.add_argument(
        "--no-defer", action="store_true", help="weight gradients in their own layer's backward"
    )
    parser.add_argument("--iters", type=positive, default=20, help="samples of each variant")
    parser.add_argument("--warmup", type=int, default=4, help="rounds before measuring")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="bound in seconds on every wait for a peer"
    )
    parser.add_argument(
        "--output",
        nargs="?",
        const="",
        default=None,
        help="write the figures as JSON; without a path to transformer_speedup.json in "
        "benchmarks/results, or with 2 GPUs to "
        "transformer_speedup-2gpu.json",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Under torchrun: measure, print the table on rank 0, and write the results if asked to."""
    on_gpu = torch.cuda.is_available()
    arguments = _parser(on_gpu).parse_args(argv)
    if "RANK" not in os.environ:
        raise SystemExit(
            "start this with torchrun, for example: torchrun --nproc_per_node 2 "
            "tests/test_transformer_speedup.py"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    bound: dict[str, Any] = {"timeout": timedelta(seconds=arguments.timeout)}
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **bound)
    else:
        dist.init_process_group("gloo", **bound)
    world = dist.get_world_size()
    shape = Shape(
        **{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Shape)}
    )
    if shape.seq % world:
        raise SystemExit(f"--seq {shape.seq} must be a multiple of the {world} ranks")
    options = Options(arguments.head_groups, arguments.dx_chunks, not arguments.no_defer)
    rows, differences = run(shape, options, device, arguments.iters, arguments.warmup)
    if dist.get_rank() == 0:
        worst = max(differences, key=lambda name: differences[name])
        print(f"{world} ranks, {device.type}, {shape}, {options}")
        print(
            f"largest difference between the variants: {differences[worst]:.2e} of a row, in "
            f"{worst}"
        )
        if not on_gpu:
            print("no GPU: ranks share this machine's memory, which leaves no wire to hide")
        print(table(rows), flush=True)
        if arguments.output is not None:
            print(
                "written to "
                f"{write_results('transformer_speedup', rows, world, arguments.output or None)}"
            )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
