"""Experts of every kind, Megatron's behind our exchange and our own: the same losses and the same
gradient of every parameter as Megatron's own layer.

One world of two ranks (and one of four) runs every case by Megatron, with our exchange alone and,
where they can be ours, with our experts; the tests judge them one by one.
"""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from megatron.core import activations
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

BIASES = {"add_bias_linear": True}
GPT_OSS = {
    "activation_func": activations.quick_gelu,
    "activation_func_clamp_value": 1.5,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "num_moe_experts": 8,
    "moe_router_topk": 4,
}

# name: (TransformerConfig overrides, tokens of the two ranks, what else changes the layer)
LAYERS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "biases": (BIASES, (9, 9), ""),
    "megatron's defaults": (
        {
            "add_bias_linear": True,
            "activation_func": F.gelu,
            "gated_linear_unit": False,
            "moe_token_dispatcher_type": "allgather",
        },
        (6, 6),
        "",
    ),
    "gpt-oss": (GPT_OSS, (3, 12), ""),
    "grouped, interleaved gates": (
        GPT_OSS | {"moe_grouped_gemm": True, "moe_mlp_glu_interleave_size": 6},
        (5, 8),
        "",
    ),
    "fused quick GeGLU": (
        {
            "activation_func": activations.quick_gelu,
            "activation_func_clamp_value": 1.5,
            "glu_linear_offset": 1.0,
            "bias_activation_fusion": True,
        },
        (5, 8),
        "",
    ),
    "one local expert": (BIASES | {"num_moe_experts": 2}, (4, 5), ""),
    "all tokens to one rank": (
        BIASES | {"num_moe_experts": 6, "moe_router_topk": 3},
        (4, 6),
        "wanted",
    ),
    "dropping": (BIASES | {"moe_expert_capacity_factor": 0.75}, (9, 9), ""),
    "capacity padding": (
        BIASES | {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        (9, 9),
        "",
    ),
    "probabilities on the input": (
        BIASES
        | {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
        (6, 8),
        "",
    ),
    "shared experts beside": (
        {
            "activation_func_clamp_value": 1.5,
            "moe_shared_expert_intermediate_size": 40,
            "moe_shared_expert_overlap": True,
        },
        (6, 8),
        "",
    ),
    "adapters": ({}, (6, 8), "adapters"),
    "a hook of one rank": ({}, (6, 8), "hook"),
    "an overridden phase": ({}, (6, 8), "phase"),
    "grouped, padded for quantisation": (
        {"moe_grouped_gemm": True, "num_moe_experts": 6},
        (16, 24),  # Megatron pads with each rank's own tokens: full tiles of 16 need as many
        "quantisation",
    ),
    "frozen experts": (BIASES, (6, 6), "frozen"),
}
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "biases": (BIASES, {"microbatches": 2}),
    "gpt-oss, overlapped reduction": (GPT_OSS, {"overlap_grad_reduce": True, "microbatches": 2}),
    "recompute": (
        {
            "activation_func_clamp_value": 1.5,
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_shared_expert_intermediate_size": 40,
            "moe_z_loss_coeff": 1e-3,
        },
        {},
    ),
    "full recompute, sigmoid, groups": (
        BIASES
        | {
            "num_moe_experts": 8,
            "moe_router_topk": 3,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}


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


def _change(layer: Any, what: str, rank: int) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if what == "adapters":
        for expert in layer.experts.local_experts:
            expert.linear_fc1.__class__ = _Adapted
            expert.linear_fc1.adapt()
    if what == "hook" and rank == 1:
        layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *_: None)
    if what == "phase":

        class Scaled(MoELayer):
            def combine(self, output: torch.Tensor) -> torch.Tensor:
                return super().combine(2 * output)

        layer.__class__ = Scaled
    if what == "quantisation":
        # Of Transformer Engine's quantised linears only what they ask of a dispatcher: full tiles.
        layer.config.fp8, layer.config.fp8_recipe = "hybrid", "blockwise"
        layer.config.moe_router_padding_for_quantization = True
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.register_forward_pre_hook(_full_tiles)
    if what == "frozen":
        layer.experts.requires_grad_(False)


NEVER_OURS = ("adapters", "hook", "phase", "quantisation")
WAYS = ("stock", "exchange", "ours")


def _keep_megatrons(layers: Any) -> None:
    """A hook on an expert, which ours would never call."""
    for layer in layers:
        layer.experts.register_forward_hook(lambda *_: None)


def _full_tiles(_: Any, arguments: tuple[torch.Tensor, list[int]]) -> None:
    rows, splits = arguments
    assert rows.shape[0] == sum(splits) and all(split % 16 == 0 for split in splits), splits


@contextlib.contextmanager
def _plug_in(on: bool) -> Iterator[tuple[list[int], list[int]]]:
    """tiny_gpt.plug_in, which yields the calls whose experts are ours, and those whose exchange
    alone is."""
    from megatron_fluid.moe.open_exchange import OpenExchange
    from tests.support import tiny_gpt

    exchanged: list[int] = []
    real = OpenExchange.dispatch

    def counted(self: Any, *args: Any) -> Any:
        exchanged.append(1)
        return real(self, *args)

    with (
        tiny_gpt.plug_in(on) as calls,
        mock.patch.object(OpenExchange, "dispatch", counted),
        mock.patch(
            "megatron_fluid.patches.moe.expert_parameters._te_linear_types",
            return_value=(tiny_gpt.GroupedLinear,),
        ),
    ):
        yield calls, exchanged


def _guarded(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return body()
    except Exception:  # noqa: BLE001 (reported by the test)
        return {"error": traceback.format_exc()}


def _layer_both(
    rank: int, overrides: dict[str, Any], lengths: tuple[int, int], what: str
) -> dict[str, Any]:
    """One MoELayer in fp64, two accumulated passes: for output, input gradient and every weight
    gradient its size and the difference, by our exchange alone and by our experts."""
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    settings = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", **overrides}
    found: dict[str, dict[str, torch.Tensor]] = {}
    counts: dict[str, tuple[int, int]] = {}
    reason: str | None = None
    for way in WAYS[:2] if what in NEVER_OURS else WAYS:
        with _plug_in(way != "stock") as (calls, exchanged):
            config = tiny_gpt.config_of(**settings)
            layer = tiny_gpt.moe_layer(config, grouped="moe_grouped_gemm" in overrides)
            for name, parameter in layer.named_parameters():
                if "bias" in name:  # Megatron starts them at zero
                    with torch.no_grad():
                        parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
            _change(layer, what, rank)
            if way == "exchange" and what not in NEVER_OURS:
                _keep_megatrons([layer])
            generator = torch.Generator().manual_seed(77 + rank)
            shape = lengths[rank], 2, config.hidden_size
            hidden = torch.randn(*shape, dtype=torch.float64, generator=generator)
            if what == "wanted":
                hidden = hidden.abs()
                with torch.no_grad():
                    layer.router.weight[[0, 1, 2]] = 1.0
            hidden.requires_grad_()
            for _ in range(2):
                output, bias = layer(hidden)
                (output.square().sum() + output.sum()).backward()
            assert bias is None
            values = {"output": output.detach(), "input": hidden.grad}
            values |= {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}
            assert all(value is not None for value in values.values())
            with torch.no_grad():
                values["output without gradients"] = layer.eval()(hidden)[0]
            found[way] = values  # type: ignore[assignment]
            counts[way] = len(calls), len(exchanged)
            reason = moe_layer.experts_reason_of(layer) if way == "exchange" else reason
    stock = found.pop("stock")
    assert all(values.keys() == stock.keys() for values in found.values())
    differences = {
        way: {
            name: (float(value.abs().max()), float((value - values[name]).abs().max()))
            for name, value in stock.items()
        }
        for way, values in found.items()
    }
    return {"differences": differences, "counts": counts, "reason": reason}


def _train_both(config: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from tests.support import tiny_gpt

    found: dict[str, Any] = {}
    for way in WAYS:
        with _plug_in(way != "stock") as (calls, exchanged):
            model = tiny_gpt.gpt(tiny_gpt.config_of(**config))
            if way == "exchange":
                _keep_megatrons(m for m in model.modules() if isinstance(m, MoELayer))
            run = tiny_gpt.train(model, **training)
            found[way] = run.losses, run.gradient_norms, (len(calls), len(exchanged))
    return found


def _world(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}
    if world_size == 2:
        for name, layer in LAYERS.items():
            found[name] = _guarded(lambda c=layer: _layer_both(rank, *c))
        for name, case in TRAININGS.items():
            found[f"train {name}"] = _guarded(lambda c=case: _train_both(*c))
    else:
        case = GPT_OSS, {"distributed_optimizer": True, "microbatches": 2}
        found["train four ranks"] = _guarded(lambda: _train_both(*case))
    return found


@pytest.fixture(scope="module")
def ep2() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


@pytest.mark.parametrize("name", LAYERS)
def test_output_and_every_gradient_in_double_precision(
    ep2: list[dict[str, Any]], name: str
) -> None:
    for rank, result in enumerate(ep2):
        case = result[name]
        assert "error" not in case, f"rank {rank}:\n{case['error']}"
        ways = WAYS[1:2] if LAYERS[name][2] in NEVER_OURS else WAYS[1:]
        assert tuple(case["differences"]) == ways
        assert case["counts"]["stock"] == (0, 0) and case["counts"]["exchange"] == (0, 3)
        assert case["counts"].get("ours", (3, 0)) == (3, 0)
        for way, differences in case["differences"].items():
            biased = "add_bias_linear" in LAYERS[name][0]
            assert any("bias" in n and size > 0 for n, (size, _) in differences.items()) is biased
            for what, (size, difference) in differences.items():
                where = f"rank {rank}, {way}, {what}: {difference} of {size}"
                assert difference <= 1e-11 * max(size, 1.0), where


def test_the_reason_is_that_of_a_setting_or_of_the_first_rank_with_one(
    ep2: list[dict[str, Any]],
) -> None:
    for result in ep2:
        reason = result["grouped, padded for quantisation"]["reason"]
        assert reason.startswith("fp8='hybrid': expert GEMMs")
        assert "Scaled.combine is overridden" in result["an overridden phase"]["reason"]
        hook = result["a hook of one rank"]["reason"]
        assert hook.startswith("rank 1 of the group: a hook is registered on")


def _judge(result: dict[str, Any], layers: int = 2) -> None:
    assert "error" not in result, result["error"]
    losses, norms, counts = result["stock"]
    assert losses[-1] < 0.9 * losses[0] and counts == (0, 0)
    for way, mine in (("exchange", 1), ("ours", 0)):
        found, found_norms, counts = result[way]
        assert found == pytest.approx(losses, rel=1e-6, abs=0), way
        assert found_norms == pytest.approx(norms, rel=1e-4, abs=0), way
        assert counts[mine] >= 20 * layers and counts[1 - mine] == 0


@pytest.mark.parametrize("name", TRAININGS)
def test_twenty_iterations_have_megatrons_losses(ep2: list[dict[str, Any]], name: str) -> None:
    for result in ep2:
        _judge(result[f"train {name}"])


def test_four_expert_parallel_ranks() -> None:
    for result in run_ranks(_world, 4, timeout_s=300):
        _judge(result["train four ranks"])
