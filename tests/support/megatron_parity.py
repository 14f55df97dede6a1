"""A Megatron MoE layer, and a small GPT-MoE in training, by Megatron's own path and by the patched
layer: what the parity tests run on every rank.

A case that fails hands its traceback back, so that the cases after it still run.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_fluid import patches
from tests.support import tiny_gpt
from tests.support.flex_stand_in import flex_without_deepep
from tests.support.grouped_tensor import GroupedTensor, megatron_with_grouped_tensors

type Settings = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Split:
    """Ranks, sizes of expert, tensor and expert tensor parallelism, and whether the ranks say that
    they are on two hosts."""

    ranks: int
    ep: int = 1
    tp: int = 1
    etp: int = 1
    hosts: bool = False


SPLITS = {
    "ep2": Split(2, ep=2), "etp2": Split(2, tp=2, etp=2), "tp2 ep2": Split(2, tp=2, ep=2),
    "ep1": Split(2), "two hosts": Split(2, ep=2, hosts=True), "ep4": Split(4, ep=4),
    "ep2 dp2": Split(4, ep=2), "ep4 two hosts": Split(4, ep=4, hosts=True),
    "ep2 etp2": Split(4, ep=2, tp=2, etp=2),
}  # fmt: skip

# What runs of this package, by the name of the way: both in one call, the exchange under Megatron's
# experts, both one after the other, and the experts behind Megatron's exchange.
WAYS = {
    "fused": {"fused"}, "exchange": {"exchange"}, "phases": {"exchange", "experts"},
    "experts": {"experts"},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layer:
    """One MoE layer, compared in double precision. What `ours` adds changes no number."""

    model: Settings = dataclasses.field(default_factory=dict)  # settings of TransformerConfig
    ours: Settings = dataclasses.field(default_factory=dict)  # of the patched layer alone
    fluid: Settings = dataclasses.field(default_factory=dict)  # `moe_backend`: by default rounds
    lengths: tuple[int, int] = (6, 8)  # of sequences of even and of odd ranks; the batch size is 2
    wanted: tuple[int, ...] = ()  # experts that all tokens prefer
    padded: int = 0  # tokens at the end of the first sequence
    change: Callable[[Any, int], None] | None = None  # both, before the first forward
    way: str = "fused"  # which parts of this package must run, a name in `WAYS`
    exchange: str = "rounds"  # whose exchange the layer must report
    why: str = ""  # start of the reason that a part is left to Megatron, or the parts are not fused


@dataclasses.dataclass(frozen=True)
class Training:
    """A small GPT-MoE, trained by Megatron and by the patched layers; else as in `Layer`."""

    model: Settings = dataclasses.field(default_factory=dict)
    options: Settings = dataclasses.field(default_factory=dict)  # of `tiny_gpt.train`
    fluid: Settings = dataclasses.field(default_factory=dict)
    ours: Settings = dataclasses.field(default_factory=dict)
    grouped: bool = False  # the experts are TEGroupedMLP
    linears: bool = False  # tensor-parallel linears must be overlapped, too
    way: str = "fused"
    exchange: str = "rounds"


@contextlib.contextmanager
def plug_in(on: bool, way: str = "fused", **fluid: Any) -> Iterator[dict[str, int]]:
    """`tiny_gpt.plug_in`; yields how often this package's parts run: "fused", "exchange" and
    "experts" alone: in this way "auto" chooses as on GPUs that reach no other's memory."""
    from megatron_fluid.moe.open_exchange import OpenExchange
    from megatron_fluid.patches.moe import layer, separate_experts

    counts = {"fused": 0, "exchange": 0, "experts": 0}

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return real(*args, **kwargs)

        return call

    grouped = "megatron_fluid.patches.moe.expert_modules._te_linear_types"
    with contextlib.ExitStack() as stack:
        stack.enter_context(tiny_gpt.plug_in(on, **fluid))
        for owner, name, key in (
            (layer, "start_experts", "fused"),
            (OpenExchange, "dispatch", "exchange"),
            (separate_experts, "run_experts", "experts"),
        ):
            call = counted(key, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, call))
        stack.enter_context(mock.patch(grouped, return_value=(tiny_gpt.GroupedLinear,)))
        if way == "experts":
            active = "megatron_fluid.patches.moe.decision.cpu_mode_active"
            stack.enter_context(mock.patch(active, return_value=False))
        yield counts


# ---- changes of a layer


class _Adapted(ColumnParallelLinear):
    """A linear with a low-rank adapter beside it, as adapters are put on by other software."""

    def adapt(self) -> None:
        g = torch.Generator().manual_seed(11)
        out, width = self.weight.shape
        for name, shape in (("down", (2, width)), ("up", (out, 2))):
            value = torch.randn(shape, generator=g, dtype=self.weight.dtype)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(input_, *args, **kwargs)
        return output + input_ @ self.down.t() @ self.up.t(), bias


def adapt(layer: Any, rank: int) -> None:
    for expert in layer.experts.local_experts:
        expert.linear_fc1.__class__ = _Adapted
        expert.linear_fc1.adapt()


def hook_one_rank(layer: Any, rank: int) -> None:
    if rank == 1:
        layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *_: None)


def keep_megatrons_experts(layer: Any, rank: int = 0) -> None:
    """A hook on the experts, which this package's would never call."""
    layer.experts.register_forward_hook(lambda *_: None)


def override_combine(layer: Any, rank: int) -> None:
    class Scaled(MoELayer):
        def combine(self, output: torch.Tensor) -> torch.Tensor:
            return super().combine(2 * output)

    layer.__class__ = Scaled


def pad_for_quantization(layer: Any, rank: int) -> None:
    """Of Transformer Engine's quantised linears only what they ask of a dispatcher: full tiles."""

    def full_tiles(_: Any, arguments: tuple[torch.Tensor, list[int]]) -> None:
        rows, splits = arguments
        assert rows.shape[0] == sum(splits) and all(split % 16 == 0 for split in splits), splits

    layer.config.fp8, layer.config.fp8_recipe = "hybrid", "blockwise"
    layer.config.moe_router_padding_for_quantization = True
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        linear.register_forward_pre_hook(full_tiles)


def _move_biases(layer: torch.nn.Module) -> None:
    """Give biases values, each expert its own: Megatron starts them at zero."""
    for name, bias in layer.named_parameters():
        if "bias" not in name:
            continue
        line = torch.linspace(-1, 1, bias.shape[-1], dtype=bias.dtype)
        with torch.no_grad():
            if bias.dim() == 2:  # one parameter of all experts
                bias.copy_(torch.stack([line * (1 + n) for n in range(len(bias))]))
            else:
                bias.copy_(line * (1 + int(name[-1]) if name[-1].isdigit() else 1))


# ---- what Megatron wants of a machine with GPUs


class _Projection(torch.nn.Linear):
    """Stands in for Transformer Engine's linear, which needs a GPU."""

    def __init__(self, width: int, out: int, *, config: Any, bias: bool, **_: Any) -> None:
        super().__init__(width, out, bias, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@contextlib.contextmanager
def _stand_ins(settings: Settings) -> Iterator[None]:
    """What Megatron needs of Transformer Engine for latent experts and grouped parameters."""
    from megatron.core.transformer.moe import moe_layer

    with contextlib.ExitStack() as stack:
        if "moe_latent_size" in settings:
            stack.enter_context(mock.patch.object(moe_layer, "HAVE_TE", True))
            stack.enter_context(mock.patch.object(moe_layer, "TELinear", _Projection))
        if _single_grouped(settings):
            stack.enter_context(megatron_with_grouped_tensors())
        yield


def _single_grouped(settings: Settings) -> bool:
    return any(name.startswith("moe_single_grouped") for name in settings)


@contextlib.contextmanager
def _uneven_collectives() -> Iterator[None]:
    """Inside, gloo gathers and reduce-scatters parts of several sizes, as NCCL does: Megatron's
    all-to-all does so where experts are split."""

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        for rank, part in enumerate(parts):
            if rank == group.rank():
                part.copy_(mine)
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group)

    def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in parts])[group.rank()])

    with (
        mock.patch.object(dist, "all_gather", all_gather),
        mock.patch.object(dist, "reduce_scatter", reduce_scatter),
    ):
        yield


# ---- both ways


def _layer(rank: int, case: Layer, on: bool) -> dict[str, Any]:
    """What one layer, the patched one or Megatron's own, finds in two accumulated passes and one
    without gradients. "values": the outputs, the input's gradient and every weight gradient."""
    from megatron_fluid.patches.moe import layer as moe_layer

    wide = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", **case.model}
    settings, fluid = (wide | case.ours, case.fluid) if on else (wide, {})
    with _stand_ins(wide | case.ours), plug_in(on, case.way, kept=True, **fluid) as counts:
        layer: Any = tiny_gpt.moe_layer(
            tiny_gpt.config_of(**settings), grouped="moe_grouped_gemm" in settings
        )
        _move_biases(layer)
        if case.change is not None:
            case.change(layer, rank)
        length = case.lengths[rank % 2]
        generator = torch.Generator().manual_seed(77 + rank)
        shape = length, 2, layer.config.hidden_size
        hidden = torch.randn(*shape, dtype=torch.float64, generator=generator)
        if case.wanted:
            hidden = hidden.abs()
            with torch.no_grad():
                layer.router.weight[list(case.wanted)] = 1.0
        hidden.requires_grad_()
        mask = torch.zeros(2, length, dtype=torch.bool)  # [batch, sequence], True is padding
        mask[0, length - case.padded :] = True
        extra = {"padding_mask": mask} if case.padded else {}
        copies = GroupedTensor.copies
        for _ in range(2):  # the second adds to the first's gradients
            output, bias = layer(hidden, **extra)
            (output.square().sum() + output.sum()).backward()
        assert bias is None
        with torch.no_grad():
            last = layer.eval()(hidden)[0]
        values = {"output": output.detach(), "input": hidden.grad, "last": last}
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad:
                values |= _gradients(name, parameter, on and _single_grouped(settings))
        assert all(value is not None for value in values.values())
        return {
            "values": values, "counts": dict(counts), "copies": GroupedTensor.copies - copies,
            "exchange": moe_layer.backend_of(layer), "experts": moe_layer.experts_reason_of(layer),
            "fusion": moe_layer.DECISIONS.parts_of(layer).fusion,
        }  # fmt: skip


def _gradients(name: str, parameter: torch.nn.Parameter, packed: bool) -> dict[str, Any]:
    """A gradient; that of a parameter of all experts under the names that they have apart."""
    grad = parameter.grad
    if not packed or "experts" not in name or name[-1].isdigit():
        return {name: grad}
    assert type(grad) is torch.Tensor, name
    return {f"{name}{i}": member for i, member in enumerate(grad.unbind(0))}


def _train(case: Training, on: bool) -> dict[str, Any]:
    """Losses and gradient norms of a model with patched layers, or with Megatron's own. "reported":
    how many parameters had their gradient written past autograd."""
    from megatron_fluid.patches import gradient_readiness, linears
    from megatron_fluid.patches.moe import layer as moe_layer

    reported: list[Any] = []
    gather, scatter = linears.all_gather_matmul, linears.matmul_reduce_scatter
    report = gradient_readiness._Gate.report

    def counted(self: Any, pending: Any) -> None:
        reported.append([param.grad for param in self.params])
        report(self, pending)

    settings = case.model | case.ours if on else case.model
    with (
        _stand_ins(settings),
        plug_in(on, case.way, kept=True, **(case.fluid if on else {})) as counts,
        mock.patch.object(gradient_readiness._Gate, "report", counted),
        mock.patch.object(linears, "all_gather_matmul", wraps=gather) as gathers,
        mock.patch.object(linears, "matmul_reduce_scatter", wraps=scatter) as scatters,
    ):
        config = tiny_gpt.config_of(**settings)
        model = tiny_gpt.gpt(config, tiny_gpt.grouped_spec(config) if case.grouped else None)
        layers = [m for m in model.modules() if isinstance(m, MoELayer)]
        for layer in layers if case.way == "exchange" else ():
            keep_megatrons_experts(layer)
        run = tiny_gpt.train(model, **{"iterations": 3, **case.options})
        assert all(grad is None for grads in reported for grad in grads)
        return {
            "values": (run.losses, run.gradient_norms),
            "counts": dict(counts),
            "exchanges": {moe_layer.backend_of(layer)[0] for layer in layers},
            "descending": tiny_gpt.descending(model),
            "linears": (gathers.called, scatters.called),
            "least calls": len(run.losses) * len(layers),
            "reported": len(reported),
        }


def _both(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """What is told of a case; the traceback of what failed."""
    for side in (stock, ours):
        if "error" in side:
            return side
    return {**ours, "stock": stock}


def compare(cases: dict[str, dict[str, Any]]) -> Settings:
    """What `_layer` or `_train` gives on this rank, by split and name: the patched layer's, and
    under "stock" Megatron's. A case that fails gives its traceback. To apply the patches takes a
    tenth of a second, so all cases of a split are run without them and then all with them."""
    logging.getLogger("megatron").setLevel(logging.WARNING)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def one(case: Layer | Training, on: bool) -> dict[str, Any]:
        return _layer(rank, case, on) if isinstance(case, Layer) else _train(case, on)

    found: dict[str, Any] = {}
    for name, group in cases.items():
        split = SPLITS[name]
        if split.ranks != ranks:
            continue
        os.environ.pop("MEGATRON_FLUID_NVLINK_DOMAIN", None)
        if split.hosts:
            os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{2 * rank // ranks}"
        tiny_gpt.parallel(
            tensor_model_parallel_size=split.tp,
            expert_model_parallel_size=split.ep,
            expert_tensor_parallel_size=split.etp,
        )
        uneven = split.etp > 1 and ranks > 2
        with _uneven_collectives() if uneven else contextlib.nullcontext(), flex_without_deepep():
            patches.revert(*tiny_gpt.MOE_PATCHES)
            run = functools.partial(functools.partial, one)
            stock = {key: tiny_gpt.guarded(run(case, on=False)) for key, case in group.items()}
            with patches.patched(*tiny_gpt.MOE_PATCHES):
                ours = {key: tiny_gpt.guarded(run(case, on=True)) for key, case in group.items()}
        found[name] = {key: _both(stock[key], ours[key]) for key in group}
    return found
