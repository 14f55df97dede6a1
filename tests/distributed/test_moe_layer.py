"""MoE layers as users meet them, against torch: MoELayer, MoEBaseline, the seed's function."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import (
    MoEBaseline,
    MoELayer,
    MultiCardOverlapContext,
    moe_multicard_p2p_overlap_forward,
)
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.moe.router import load_balancing_loss, route
from megatron_fluid.moe.sharding import is_sharded
from tests.support.launch import on_ranks
from tests.support.moe_layers import CONFIG, F64, close, group, tokens_of, whole
from tests.support.moe_reference import moe_reference


def plain_layer(
    layer: MoELayer,
) -> tuple[dict[str, Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """All ranks' weights of a layer by name, as leaves, and the layer in plain torch: the output of
    one rank's tokens, and their balancing loss."""
    weights = {name: whole(p).requires_grad_() for name, p in layer.named_parameters()}
    config, act = layer.config, resolve_activation(layer.config.activation)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ weights["router.weight"].t()
        settings = config.score_function, config.pre_softmax, config.scaling
        choice = route(logits, config.top_k, *settings)
        experts = weights["weight1"], weights["weight2"]
        y = moe_reference(x, choice.ids, choice.probs, *experts, act)
        if "shared_weight1" in weights:
            hidden = act.forward(x @ weights["shared_weight1"].t())
            y = y + hidden @ weights["shared_weight2"].t()
        if not config.aux_loss_coefficient:
            return y, torch.zeros(())
        return y, load_balancing_loss(choice, config.aux_loss_coefficient)

    return weights, forward


BACKENDS = {"one host": "rounds", "two hosts": "hierarchical"}


def check_layer(rank: int, world: int, kind: str, deferred: bool, extra: dict[str, Any]) -> None:
    get_backward_scheduler().enabled = deferred
    if kind == "two hosts":
        os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{rank % 2}"
    cls = MoEBaseline if kind == "baseline" else MoELayer
    layer = cls({**CONFIG, **extra}, group(), dtype=F64, layer_id=3)
    weights, plain = plain_layer(layer)
    for m in range(2):  # two microbatches accumulate
        mine = tokens_of(rank, m).requires_grad_()
        y = layer(mine.view(1, -1, 8))
        assert y.shape == (1, *mine.shape)
        y.backward(tokens_of(rank, m + 7).view_as(y))
        for r in range(world):
            x = tokens_of(r, m).requires_grad_()
            expected, balancing = plain(x)
            ((expected * tokens_of(r, m + 7)).sum() + balancing).backward()
            if r == rank:
                close(mine.grad, x.grad)
                close(y[0].detach(), expected.detach())
    if world > 1 and kind in BACKENDS:
        assert layer.backend == BACKENDS[kind]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        if not is_sharded(parameter):  # the sum over ranks is the whole gradient
            dist.all_reduce(parameter.grad)
        close(whole(parameter.grad), weights[name].grad)


LAYERS = [
    {},
    {"shared_ffn_hidden_size": 10, "activation": "gelu", "aux_loss_coefficient": 0.3},
    {"score_function": "sigmoid", "scaling": 2.5, "activation": "relu2"}
    | {"top_k": 4, "aux_loss_coefficient": 0.1},
    {"pre_softmax": True, "activation": "geglu", "shared_ffn_hidden_size": 4},
]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "deferred"),
    [("one host", False), ("one host", True), ("two hosts", True), ("baseline", False)],
    ids=str,
)
@on_ranks()
def test_layers_against_plain_torch(rank: int, world: int, kind: str, deferred: bool) -> None:
    for extra in LAYERS:
        check_layer(rank, world, kind, deferred, extra)


@pytest.mark.parametrize("folded", [False, True], ids=["stacked", "folded"])
@pytest.mark.parametrize(("world", "train"), [(1, True), (2, False), (3, True)])
@on_ranks()
def test_the_seeds_function(rank: int, world: int, folded: bool, train: bool) -> None:
    local, hidden, ffn, experts = 2, 8, 12, 2 * world
    generator = torch.Generator().manual_seed(5)
    w1 = torch.randn(experts, hidden, ffn, generator=generator, dtype=F64) * 0.4
    w2 = torch.randn(experts, ffn, hidden, generator=generator, dtype=F64) * 0.4
    ids = [
        torch.randint(0, experts, (4 * r + 1,), generator=generator).sort().values
        for r in range(world)
    ]
    xs = [torch.randn(len(i), hidden, generator=generator, dtype=F64) for i in ids]
    counts = torch.stack([torch.bincount(i, minlength=experts) for i in ids])  # [W, E]
    mine = slice(rank * local, (rank + 1) * local)
    global_counts = counts[:, mine]
    weight1, weight2 = w1[mine].clone(), w2[mine].clone()
    if folded:
        weight1, weight2 = weight1.view(hidden, local * ffn), weight2.view(local * ffn, hidden)
    weight1.requires_grad_(train)
    weight2.requires_grad_(train)
    tokens = xs[rank].clone().requires_grad_(train)

    overlap_ctx = MultiCardOverlapContext(torch.device("cpu"), ep_size=dist.get_world_size())
    output = moe_multicard_p2p_overlap_forward(
        tokens, counts[rank].view(world, local).sum(1), global_counts.sum(1).tolist(),
        weight1, weight2, group(), torch.nn.functional.gelu,
        overlap_ctx, 0,
        local, counts[rank], global_counts.unsqueeze(0),
    )  # fmt: skip
    reference = [t.clone().requires_grad_() for t in (torch.cat(xs), w1, w2)]
    y = moe_reference(
        reference[0], torch.cat(ids).unsqueeze(1), None, reference[1].transpose(1, 2),
        reference[2].transpose(1, 2), torch.nn.functional.gelu,
    )  # fmt: skip
    begin = sum(len(i) for i in ids[:rank])
    rows = slice(begin, begin + len(ids[rank]))
    close(output, y[rows].detach())
    assert output.requires_grad == train
    if not train:
        return
    # As the README shows it: the scheduler is enabled between forward and backward.
    scheduler = get_backward_scheduler()
    scheduler.enable()
    (output * output).sum().backward()
    scheduler.finish_batch()
    scheduler.disable()
    (y * y).sum().backward()
    gradients = [t.grad for t in reference]
    assert gradients[0] is not None and gradients[1] is not None and gradients[2] is not None
    close(tokens.grad, gradients[0][rows])
    close(weight1.grad, gradients[1][mine].reshape(weight1.shape))
    close(weight2.grad, gradients[2][mine].reshape(weight2.shape))
