"""Settings of the router as the standalone layers take them: one expert a token, and the dtype in
which logits are computed, against plain torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid import MoEBaseline, MoELayer, TransformerLayer
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import InferenceMoELayer
from megatron_fluid.moe.router import TopKRouter
from tests.support.launch import on_ranks
from tests.support.moe_reference import moe_reference

BF16 = torch.bfloat16
SIZES: dict[str, Any] = {
    "hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 8, "top_k": 2, "init_std": 0.3,
}  # fmt: skip
LAYERS: dict[str, Callable[..., Any]] = {
    "MoELayer": MoELayer,
    "MoEBaseline": MoEBaseline,
    "TransformerLayer": lambda config, **made: (
        TransformerLayer({**config, "num_attention_heads": 4}, **made).mlp
    ),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    return made.requires_grad_()


def reference(layer: Any, x: Tensor, dtype: torch.dtype, scaling: float) -> Tensor:
    """The layer in plain torch, with probabilities of logits in dtype."""
    config = layer.config
    scores = x.to(dtype) @ layer.router.weight.to(dtype).t()
    if config.pre_softmax:
        probs, ids = scores.softmax(-1).topk(config.top_k, -1)
    else:
        best, ids = scores.topk(config.top_k, -1)
        probs = best.softmax(-1)
    return moe_reference(x, ids, probs * scaling, layer.weight1, layer.weight2, "swiglu")


@each_layer
def test_top_1_with_softmax_after_the_choice_is_refused(make: Callable[..., Any]) -> None:
    for fields in ({}, {"scaling": 2.5}, {"aux_loss_coefficient": 0.1}):
        with pytest.raises(ConfigError, match="pre_softmax with top_k 1: found False.*sigmoid"):
            make({**SIZES, **fields, "top_k": 1})
    make({**SIZES, "top_k": 1, "score_function": "sigmoid"})
    layer, x = make({**SIZES, "top_k": 1, "pre_softmax": True, "scaling": 2.5}), tokens()
    found = torch.autograd.grad(layer(x).square().sum(), layer.router.weight)
    wanted = torch.autograd.grad(
        reference(layer, x, torch.float32, 2.5).square().sum(), layer.router.weight
    )
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@on_ranks(1)
def test_the_layer_for_decoding_takes_no_such_router_either(rank: int, world: int) -> None:
    layer = MoELayer({**SIZES, "top_k": 1, "pre_softmax": True}, dtype=BF16)
    low = InferenceMoELayer.of(layer, max_num_tokens=64)
    x = tokens(BF16).detach()
    torch.testing.assert_close(low(x), layer(x), rtol=2e-2, atol=2e-2)
    low.destroy()
    with pytest.raises(ConfigError, match="pre_softmax with top_k 1"):
        InferenceMoELayer(
            layer.weight1, layer.weight2, TopKRouter(32, 8, 1, dtype=BF16), max_num_tokens=64,
            experts_per_token=1,
        )  # fmt: skip


@each_layer
@pytest.mark.parametrize("kept_in_fp32", [False, True], ids=["weight in bf16", "weight in fp32"])
def test_the_router_of_a_bf16_model_computes_in_its_own_dtype(
    make: Callable[..., Any], kept_in_fp32: bool
) -> None:
    found = {}
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64), (None, BF16)):
        layer, x = make({**SIZES, "router_dtype": name}, dtype=BF16), tokens(BF16)
        if kept_in_fp32:
            layer.router.float()
            with torch.no_grad():  # values that bf16 does not have
                layer.router.weight.mul_(1.0001)
        weight = layer.router.weight
        for autocast in (False, True):
            with torch.autocast("cpu", BF16, enabled=autocast and name is not None):
                routing, y = layer.router(x), layer(x)
            wide = torch.promote_types(dtype, weight.dtype)
            best, ids = (x.to(wide) @ weight.to(wide).t()).float().topk(2, -1)
            assert torch.equal(routing.ids, ids) and routing.probs.dtype == torch.float32
            torch.testing.assert_close(routing.probs, best.softmax(-1), rtol=1e-6, atol=1e-6)
            wanted = reference(layer, x, wide, 1.0)
            grads = [torch.autograd.grad(out.float().square().sum(), weight) for out in (y, wanted)]
            for one, other in ((y, wanted), (grads[0][0], grads[1][0])):
                assert (one - other).norm() / other.norm() < 3e-2
            assert grads[0][0].dtype == weight.dtype
        found[name] = routing.probs.detach()
    # Rounding logits to bf16 shows, unless the weight itself is in fp32.
    torch.testing.assert_close(found["fp32"], found["fp64"], rtol=1e-5, atol=1e-6)
    assert torch.equal(found["fp32"], found[None]) == kept_in_fp32


def test_an_unknown_router_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="router_dtype: found 'bf16', allowed: fp32, fp64, None"):
        MoELayer({**SIZES, "router_dtype": "bf16"})
