"""MoE layers as a user meets them, against plain torch: MoELayer, MoEBaseline, the seed's
function."""

from __future__ import annotations

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
from megatron_fluid.moe.sharding import local_part
from tests.support.launch import on_ranks, run_ranks
from tests.support.moe_layers import CONFIG, F64, LIMIT_S, close, group, tokens_of
from tests.support.moe_reference import moe_reference


def plain_layer(
    layer: MoELayer | MoEBaseline, world: int
) -> tuple[list[Tensor], list[Tensor], Callable[..., Tensor]]:
    """All ranks' weights of a layer, as leaves: [router, w1, w2], shared ones, and the layer in
    plain torch."""
    stacks = []
    for weight in (layer.weight1, layer.weight2):
        parts = [torch.empty_like(local_part(weight)) for _ in range(world)]
        dist.all_gather(parts, local_part(weight))
        stacks.append(torch.cat(parts))
    main = [t.detach().clone().requires_grad_() for t in (layer.router.weight, *stacks)]
    shared = [
        w.detach().clone().requires_grad_()
        for w in (layer.shared_weight1, layer.shared_weight2)
        if w is not None
    ]
    config, act = layer.config, resolve_activation(layer.config.activation)

    def forward(x: Tensor, upstream: Tensor) -> Tensor:
        """The loss of one rank: its tokens' output times upstream, and its own balancing loss."""
        router, w1, w2 = main
        choice = route(
            x @ router.t(), config.top_k, config.score_function, config.pre_softmax, config.scaling
        )
        y = moe_reference(x, choice.ids, choice.probs, w1, w2, act)
        if shared:
            y = y + act.forward(x @ shared[0].t()) @ shared[1].t()
        outputs.append(y.detach())
        loss = (y * upstream).sum()
        if config.aux_loss_coefficient:
            loss = loss + load_balancing_loss(choice, config.aux_loss_coefficient)
        return loss

    outputs: list[Tensor] = []
    forward.outputs = outputs  # type: ignore[attr-defined]
    return main, shared, forward


def check_layer(rank: int, world: int, kind: str, deferred: bool, extra: dict[str, Any]) -> None:
    scheduler = get_backward_scheduler()
    if deferred:
        scheduler.enable()
    cls: type[MoELayer] | type[MoEBaseline] = MoELayer if kind == "overlapped" else MoEBaseline
    layer = cls({**CONFIG, **extra}, group(), dtype=F64, layer_id=3)
    main, shared, plain = plain_layer(layer, world)
    xs, ys = [], []
    for m in range(2):  # two microbatches accumulate
        x = tokens_of(rank, m).requires_grad_()
        y = layer(x.view(1, -1, 8))
        assert y.shape == (1, *x.shape)
        y.backward(tokens_of(rank, m + 7).view_as(y))
        xs.append(x)
        ys.append(y[0].detach())
    for m in range(2):
        for r in range(world):
            x = tokens_of(r, m).requires_grad_()
            plain(x, tokens_of(r, m + 7)).backward()
            if r == rank:
                close(xs[m].grad, x.grad)
                close(ys[m], plain.outputs[-1])  # type: ignore[attr-defined]
    local = slice(rank * layer.num_local_experts, (rank + 1) * layer.num_local_experts)
    for weight, reference in ((layer.weight1, main[1]), (layer.weight2, main[2])):
        assert reference.grad is not None
        close(weight.grad, reference.grad[local])
    # Router and shared expert are replicated: the sum over ranks is the whole gradient.
    for parameter, reference in zip(
        [layer.router.weight, layer.shared_weight1, layer.shared_weight2],
        [main[0], *shared],
        strict=False,
    ):
        assert parameter is not None and parameter.grad is not None
        dist.all_reduce(parameter.grad)
        close(parameter.grad, reference.grad)


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
    [("overlapped", False), ("overlapped", True), ("baseline", False)],
    ids=str,
)
@on_ranks(timeout_s=LIMIT_S)
def test_layers_against_plain_torch(rank: int, world: int, kind: str, deferred: bool) -> None:
    for extra in LAYERS:
        check_layer(rank, world, kind, deferred, extra)


def same_start_body(rank: int, world: int) -> list[float]:
    layers = [cls(CONFIG, group(), dtype=F64, layer_id=2) for cls in (MoELayer, MoEBaseline)]
    x = tokens_of(rank)
    close(layers[0](x), layers[1](x))
    weights = layers[0].weight1, layers[0].weight2
    sums = torch.stack([local_part(weight).double().sum() for weight in weights])
    dist.all_reduce(sums)
    assert not any(p.grad is not None for p in layers[0].parameters())
    with torch.no_grad():
        y = layers[0](x)
    assert not y.requires_grad
    close(y, layers[1](x))
    return [*sums.tolist(), layers[0].router.weight.sum().item()]


def test_layers_start_alike_on_any_number_of_ranks() -> None:
    found = [run_ranks(same_start_body, world, timeout_s=LIMIT_S)[0] for world in (1, 2, 3)]
    assert found[1] == pytest.approx(found[0])
    assert found[2] == pytest.approx(found[0])


@pytest.mark.parametrize("folded", [False, True], ids=["stacked", "folded"])
@pytest.mark.parametrize(("world", "train"), [(1, True), (2, False), (3, True)])
@on_ranks(timeout_s=LIMIT_S)
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
        reference[0],
        torch.cat(ids).unsqueeze(1),
        None,
        reference[1].transpose(1, 2),
        reference[2].transpose(1, 2),
        torch.nn.functional.gelu,
    )
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
