"""Experts that somebody changes, before the first forward or after it: adapters, quantisers, hooks,
other weights. Before it the result is Megatron's own; after it they are an error by name on all
ranks, until the layers are reset."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.mlp import MLP

from megatron_fluid import patches
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.moe import layer as moe_layer
from megatron_fluid.patches.moe.expert_modules import linears_of, share_storage
from tests.distributed.test_rank_agreement import outcome_of
from tests.support import tiny_gpt
from tests.support.launch import on_ranks, run_ranks


class Adapter(torch.nn.Module):
    """A linear with a low-rank product beside it, as Megatron-Bridge and PEFT wrap one."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        rows, columns = base.weight.shape
        self.a = torch.nn.Parameter(torch.full((4, columns), 0.1, dtype=base.weight.dtype))
        self.b = torch.nn.Parameter(torch.full((rows, 4), 0.1, dtype=base.weight.dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.base(x)[0] + x @ self.a.t() @ self.b.t(), None


def _linears(layer: Any) -> list[Any]:
    return [expert.linear_fc1 for expert in layer.experts.local_experts]


def _scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        output, bias = forward(*args, **kwargs)
        return output * 1.5, bias

    return scaled


def wrapper(layer: Any) -> None:
    for expert in layer.experts.local_experts:
        expert.linear_fc1 = Adapter(expert.linear_fc1)


def forward_in_place(layer: Any) -> None:
    """The adapter becomes a child of the linear, whose forward is replaced on the instance."""
    for linear in _linears(layer):
        own = linear.forward
        linear.adapter = torch.nn.Linear(32, linear.weight.shape[0], bias=False).double()
        torch.nn.init.constant_(linear.adapter.weight, 0.05)
        linear.forward = lambda x, own=own, linear=linear: (own(x)[0] + linear.adapter(x), None)


def quantiser(layer: Any) -> None:
    """As ModelOpt does: the linear stays, its class becomes another one."""
    for linear in _linears(layer):
        own = type(linear)

        def forward(self: Any, x: torch.Tensor, own: Any = own) -> Any:
            return own.forward(self, (x * 8).round() / 8)

        linear.__class__ = type(f"Quant{own.__name__}", (own,), {"forward": forward})


def expert_class(layer: Any) -> None:
    own = type(layer.experts)
    layer.experts.__class__ = type("Scaled", (own,), {"forward": _scaled(own.forward)})


def whole_experts(layer: Any) -> None:
    inner = layer.experts
    layer.experts = torch.nn.Module()
    layer.experts.inner, layer.experts.forward = inner, _scaled(inner)


def dispatcher_phase(layer: Any) -> None:
    layer.routed_experts_compute = _scaled(layer.routed_experts_compute)


def activation(layer: Any) -> None:
    for expert in layer.experts.local_experts:
        expert.activation_func = torch.nn.functional.gelu


def activation_by_config(layer: Any) -> None:
    """As built by a config that got another activation before the first forward."""
    layer.experts.config.activation_func = torch.tanh
    for expert in layer.experts.local_experts:
        expert.activation_func = torch.tanh


def frozen_in_part(layer: Any) -> None:
    layer.experts.local_experts[0].linear_fc2.weight.requires_grad_(False)


def bias(layer: Any) -> None:
    for linear in _linears(layer):
        linear.bias = torch.nn.Parameter(torch.full((linear.weight.shape[0],), 0.3).double())
        linear.skip_bias_add = False


def hook(layer: Any) -> None:
    for linear in _linears(layer):
        linear.register_forward_hook(lambda module, args, output: (output[0] * 1.5, output[1]))


def parametrisation(layer: Any) -> None:
    class Halved(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    for linear in _linears(layer):
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", Halved())


def data_swapped(layer: Any) -> None:
    for linear in _linears(layer):
        linear.weight.data = linear.weight.data * 0.5


def narrowed(layer: Any) -> None:
    """Half of each expert's width is pruned, without a move."""
    for expert in layer.experts.local_experts:
        fc1, fc2 = expert.linear_fc1.weight, expert.linear_fc2.weight
        fc1.data, fc2.data = fc1.data[: len(fc1) // 2], fc2.data[:, : fc2.shape[1] // 2]


def layers_config(layer: Any) -> None:
    """Which SequentialMLP has copied when it was built."""
    assert layer.config is not layer.experts.config
    layer.config.activation_func = torch.nn.functional.gelu
    layer.config.activation_func_clamp_value, layer.config.glu_linear_offset = 0.01, 1.0
    layer.config.moe_apply_probs_on_input = True


def experts_config(layer: Any) -> None:
    layer.experts.config.glu_linear_offset = 1.0


def fp8(layer: Any) -> None:
    layer.config.fp8, layer.config.fp8_recipe = "e4m3", "blockwise"


def linear_impl(layer: Any) -> None:
    for linear in _linears(layer):
        own = linear._forward_impl
        linear._forward_impl = lambda *args, own=own, **kwargs: own(*args, **kwargs) * 1.5


def weight_replaced(layer: Any) -> None:
    for linear in _linears(layer):
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 0.5)


def linear_rebuilt(layer: Any) -> None:
    """Another plain linear, which the overlapped path can stand for as well."""
    for expert in layer.experts.local_experts:
        linear = copy.copy(expert.linear_fc1)
        linear._parameters = {**linear._parameters}
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 0.5)
        expert.linear_fc1 = linear


LEFT_TO_MEGATRON: dict[str, Callable[[Any], None]] = {
    "a wrapper": wrapper, "a forward in place": forward_in_place, "a quantiser's class": quantiser,
    "a class of the experts": expert_class, "other experts": whole_experts,
    "a phase of the layer": dispatcher_phase, "an activation": activation,
    "an activation in the experts' config": activation_by_config,
    "weights frozen in part": frozen_in_part, "a bias": bias, "a hook": hook,
    "a parametrisation": parametrisation, "fp8": fp8, "a linear's _forward_impl": linear_impl,
}  # fmt: skip
HONOURED: dict[str, Callable[[Any], None]] = {
    "data swapped": data_swapped, "weights narrowed": narrowed,
    "the layer's own config": layers_config, "the experts' config": experts_config,
    "weights replaced": weight_replaced, "linears built anew": linear_rebuilt,
}  # fmt: skip


def _scale_experts(module: Any, _: Any, output: Any) -> Any:
    return (output[0] * 1.5, output[1]) if type(module).__name__ == "MLP" else None


# What no layer holds; inside a context.
GLOBAL: dict[str, Callable[[Any], Any]] = {
    "a class's forward": lambda _: mock.patch.object(MLP, "forward", _scaled(MLP.forward)),
    "a class's _forward_impl": lambda _: mock.patch.object(
        RowParallelLinear,
        "_forward_impl",
        lambda *args, own=RowParallelLinear._forward_impl, **kw: own(*args, **kw) * 1.5,
    ),
    "a global hook": lambda _: torch.nn.modules.module.register_module_forward_hook(_scale_experts),
}
CASES = LEFT_TO_MEGATRON | HONOURED | GLOBAL


def _step(layer: Any, rank: int) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(6, 1, 32, dtype=torch.float64, generator=generator, requires_grad=True)
    y = layer(x)[0]
    y.square().sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **grads}


def _built() -> Any:
    settings = {"params_dtype": torch.float64, "moe_router_dtype": "fp64"}
    layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))
    for linears in linears_of(layer.experts):  # as on a GPU
        share_storage(tuple(linear.weight for linear in linears))
    return layer


def _both(rank: int, change: Callable[[Any], Any], first: bool) -> dict[str, Any]:
    """One step after the change, by Megatron and by the patched layer, which is reset where it
    refuses the change."""
    found: dict[str, Any] = {}
    for on in (False, True):
        with contextlib.ExitStack() as stack:
            calls = stack.enter_context(tiny_gpt.plug_in(on, moe_backend="auto"))
            layer = _built()
            if first:
                _step(layer, rank)
                layer.zero_grad()
            before, refused = len(calls), ""
            if (context := change(layer)) is not None:
                stack.enter_context(context)
            moe_layer.DECISIONS.report.said.clear()
            if on and first:
                try:
                    _step(layer, rank)
                except ConfigError as error:
                    refused = str(error)
                    patches.reset_layers()
            layer.zero_grad()
            changed, printed = len(calls), io.StringIO()
            with contextlib.redirect_stdout(printed):
                _step(layer, rank)
                found["fluid" if on else "stock"] = _step(layer, rank)
            if on:
                found["overlapped"] = before, len(calls) - changed
                found["refused"], found["printed"] = refused, printed.getvalue()
                found["backend"] = moe_layer.backend_of(layer)
                found["experts"] = moe_layer.experts_reason_of(layer)
    return found


def _changes(rank: int, world_size: int) -> dict[str, Any]:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    return {
        f"{name}, {'after' if first else 'before'}": _both(rank, change, first)
        for name, change in CASES.items()
        for first in (False, True)
    }


@pytest.fixture(scope="module")
def changes() -> list[dict[str, Any]]:
    return run_ranks(_changes, 2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", CASES)
def test_the_result_is_megatrons_whatever_became_of_the_experts_or_it_is_refused(
    changes: list[dict[str, Any]], name: str, when: str
) -> None:
    honoured = name in HONOURED
    for rank, found in enumerate(changes):
        case = found[f"{name}, {when}"]
        stock, fluid = case["stock"], case["fluid"]
        assert stock.keys() == fluid.keys()
        for what, expected in stock.items():
            if expected is None:
                assert fluid[what] is None, what
                continue
            assert fluid[what] is not None, f"no gradient of {what}"
            scale = float(expected.abs().max())
            torch.testing.assert_close(fluid[what], expected, rtol=0, atol=1e-9 * max(scale, 1e-9))
        assert case["overlapped"] == (1 if when == "after" else 0, 2 if honoured else 0)
        assert case["backend"] == ("rounds", None)
        assert (case["experts"] is None) is honoured
        told = case["printed"].count("Megatron's experts: ")
        assert told == (0 if honoured or rank else 1), case["printed"]
        expected = f"MoE layer 1 (rank {rank}) was changed after its first forward: "
        refused = not honoured or name in ("linears built anew", "the experts' config")
        refuses = when == "after" and refused
        assert (expected in case["refused"]) == refuses, case["refused"]
        assert ("reset_layers() on all ranks" in case["refused"]) == bool(case["refused"])


def _on_one_rank(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    with tiny_gpt.plug_in(True, moe_backend="auto"):
        layer = _built()
        before = outcome_of(layer)
        if rank == 1:
            wrapper(layer)
        shared_rounds(layer.ep_group, 4.0)
        return [before, outcome_of(layer)]


def test_a_change_on_one_rank_alone_is_an_error_by_name_on_all() -> None:
    ranks = run_ranks(_on_one_rank, 2)
    assert [kind for (kind, *_), _ in ranks] == ["", ""]
    assert [kind for _, (kind, *_) in ranks] == ["PeerTimeoutError", "ConfigError"]
    for _, (_, text, _) in ranks:
        assert "MoE layer 1 (rank 1) was changed after its first forward: a module of " in text


@on_ranks(2)
def test_experts_that_ddp_lays_out_in_reverse_after_a_forward_are_read_where_they_lie(
    rank: int, world_size: int
) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    losses = []
    for on in (False, True):
        with tiny_gpt.plug_in(on, moe_backend="auto"):
            model = tiny_gpt.gpt(tiny_gpt.config_of())
            tokens, _, positions = tiny_gpt.batch(rank, 0, 0)
            length = tiny_gpt.SEQUENCE
            mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
            with torch.no_grad():
                model(tokens, positions, mask)
            trained = tiny_gpt.train(model, iterations=4, distributed_optimizer=True)
            losses.append(trained.losses)
    stock, fluid = losses
    assert fluid == pytest.approx(stock, rel=1e-6)
