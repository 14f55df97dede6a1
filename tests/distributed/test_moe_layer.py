"""MoE layers as a user meets them: MoELayer, MoEBaseline, the seed's function, hooks,
checkpointing, errors."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_fluid
from megatron_fluid import (
    MoEBaseline,
    MoELayer,
    MultiCardOverlapContext,
    moe_multicard_p2p_overlap_forward,
)
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.moe.backends import BACKENDS
from megatron_fluid.moe.reference import moe_reference
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.rounds.transport import overlapped_moe, start_overlapped_moe
from megatron_fluid.moe.router import load_balancing_loss, route
from tests.support.launch import run_ranks, run_ranks_outcomes

LIMIT_S = 200.0  # on ranks that hang; a busy machine takes its time
F64 = torch.float64
CONFIG: dict[str, Any] = {
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_experts": 6,
    "top_k": 2,
    "init_std": 0.4,
    "dx_chunks": 2,
}


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def tokens_of(rank: int, seed: int = 0) -> Tensor:
    """Uneven: rank 0 has none."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(5 * rank, 8, generator=generator, dtype=F64)


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def plain_layer(
    layer: MoELayer | MoEBaseline, world: int
) -> tuple[list[Tensor], list[Tensor], Callable[..., Tensor]]:
    """All ranks' weights of a layer, as leaves: [router, w1, w2], shared ones, and the layer in
    plain torch."""
    stacks = []
    for weight in (layer.weight1, layer.weight2):
        parts = [torch.empty_like(weight) for _ in range(world)]
        dist.all_gather(parts, weight.detach())
        whole = torch.cat(parts)
        stacks.append(whole.transpose(1, 2).contiguous() if layer.layout == "in_out" else whole)
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


def layer_body(rank: int, world: int, kind: str, deferred: bool, extra: dict[str, Any]) -> None:
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
    turned = layer.layout == "in_out"
    for weight, reference in ((layer.weight1, main[1]), (layer.weight2, main[2])):
        assert reference.grad is not None
        part = reference.grad[local]
        close(weight.grad, part.transpose(1, 2) if turned else part)
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
    {
        "score_function": "sigmoid",
        "scaling": 2.5,
        "activation": "relu2",
        "top_k": 4,
        "aux_loss_coefficient": 0.1,
    },
    {"pre_softmax": True, "activation": "geglu", "shared_ffn_hidden_size": 4},
]


def all_layers_body(rank: int, world: int, kind: str, deferred: bool) -> None:
    for extra in LAYERS:
        layer_body(rank, world, kind, deferred, extra)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "deferred"),
    [("overlapped", False), ("overlapped", True), ("baseline", False)],
    ids=str,
)
def test_layers_against_plain_torch(kind: str, deferred: bool, world: int) -> None:
    run_ranks(all_layers_body, world, kind, deferred, timeout_s=LIMIT_S)


def same_start_body(rank: int, world: int) -> list[float]:
    layers = [cls(CONFIG, group(), dtype=F64, layer_id=2) for cls in (MoELayer, MoEBaseline)]
    x = tokens_of(rank)
    close(layers[0](x), layers[1](x))
    sums = torch.stack([layers[0].weight1.double().sum(), layers[0].weight2.double().sum()])
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


def other_layout_body(rank: int, world: int) -> None:
    """Square experts, whose transposed weights have the same shapes."""
    sizes = {"hidden_size": 8, "ffn_hidden_size": 8, "num_experts": 2 * world, "top_k": 2}
    config = {**sizes, "activation": "gelu"}
    kinds = MoELayer, MoEBaseline
    for source, target in (kinds, kinds[::-1], (MoELayer, MoELayer)):
        saved = source(config, group(), dtype=F64, layer_id=1)
        loaded = target(config, group(), dtype=F64, layer_id=7)
        with torch.no_grad():
            saved.weight1 *= 20
        stored = saved.state_dict()
        kept = {name: value.clone() for name, value in stored.items()}
        loaded.load_state_dict(stored)
        x = torch.randn(6, 8, dtype=F64, generator=torch.Generator().manual_seed(rank))
        close(loaded(x), saved(x))
        assert all(torch.equal(stored[name], value) for name, value in kept.items())


def test_the_overlapped_layer_and_the_baseline_load_each_others_weights() -> None:
    run_ranks(other_layout_body, 2, timeout_s=LIMIT_S)


# ---- the seed's function


def seed_body(rank: int, world: int, folded: bool, train: bool) -> None:
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


@pytest.mark.parametrize("folded", [False, True], ids=["stacked", "folded"])
def test_the_seeds_function(folded: bool) -> None:
    for world, train in ((1, True), (2, False), (3, True)):
        run_ranks(seed_body, world, folded, train, timeout_s=LIMIT_S)


def test_public_names() -> None:
    for name in (
        "MoEBaseline",
        "MoELayer",
        "MultiCardOverlapContext",
        "P2PRounds",
        "WeightGradScheduler",
        "get_backward_scheduler",
        "moe_multicard_p2p_overlap_forward",
    ):
        assert getattr(megatron_fluid, name) is not None


# ---- hooks, DistributedDataParallel, checkpointing, autocast


def hooks_body(rank: int, world: int, deferred: bool) -> None:
    if deferred:
        get_backward_scheduler().enable()
    layer = MoELayer({**CONFIG, "shared_ffn_hidden_size": 4}, group(), dtype=F64)
    fired: dict[str, int] = {}

    def hook(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        fired[name] = fired.get(name, 0) + 1

    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, n=name: hook(n, p))
    for turn in range(1, 3):
        layer(tokens_of(rank)).sum().backward()
        assert fired == {name: turn for name, _ in layer.named_parameters()}, fired


@pytest.mark.parametrize("deferred", [False, True])
def test_hooks_fire_once_for_each_parameter(deferred: bool) -> None:
    run_ranks(hooks_body, 2, deferred, timeout_s=LIMIT_S)


def stack(count: int) -> nn.ModuleList:
    return nn.ModuleList(
        [
            MoELayer({**CONFIG, "shared_ffn_hidden_size": 4}, group(), dtype=F64, layer_id=i)
            for i in range(count)
        ]
    )


def through(layers: nn.ModuleList, x: Tensor, reentrant: bool | None = None) -> Tensor:
    for layer in layers:
        x = x + (layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant))
    return x


def checkpoint_body(rank: int, world: int, deferred: bool) -> None:
    if deferred:
        get_backward_scheduler().enable()
    found = []
    for reentrant in (None, True, False):
        layers = stack(3)
        x = tokens_of(rank + 1).requires_grad_()
        through(layers, x, reentrant).square().sum().backward()
        found.append([x.grad, *(p.grad for p in layers.parameters())])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            close(b, a)


@pytest.mark.parametrize("deferred", [False, True])
def test_activation_checkpointing(deferred: bool) -> None:
    run_ranks(checkpoint_body, 2, deferred, timeout_s=LIMIT_S)


def ddp_body(rank: int, world: int) -> None:
    """Two replicas of one rank each: torch's DistributedDataParallel averages, deferred or not."""
    single = [dist.new_group([r]) for r in range(world)][rank]
    found = []
    for deferred in (False, True):
        (get_backward_scheduler().enable if deferred else get_backward_scheduler().disable)()
        layer = MoELayer(CONFIG, single, dtype=F64)
        model = nn.parallel.DistributedDataParallel(layer)
        for m in range(2):
            model(tokens_of(rank + 1, m)).square().sum().backward()
        found.append([p.grad for p in layer.parameters()])
    for a, b in zip(*found, strict=True):
        close(b, a)


def test_distributed_data_parallel() -> None:
    run_ranks(ddp_body, 2, timeout_s=LIMIT_S)


def autocast_body(rank: int, world: int) -> None:
    layer = MoELayer(CONFIG, group(), dtype=torch.float32)
    x = tokens_of(rank + 1).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    y.float().square().sum().backward()
    exact = MoELayer(CONFIG, group(), dtype=torch.float32)
    z = exact(x)
    assert (y - z).norm() / z.norm() < 0.05
    for parameter in layer.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


def test_autocast() -> None:
    run_ranks(autocast_body, 2, timeout_s=LIMIT_S)


def partial_inputs_body(rank: int, world: int) -> None:
    """backward(inputs=...) may leave out the node that waits for dX: the exchange must still
    end."""
    layer = MoELayer(CONFIG, group(), dtype=F64)
    for _ in range(2):
        x = tokens_of(rank + 1).requires_grad_()
        layer(x).sum().backward(inputs=[layer.weight1])
        assert layer.weight1.grad is not None and layer.weight2.grad is None and x.grad is None
    layer.weight1.requires_grad_(False)
    layer(tokens_of(rank + 1)).sum().backward()
    assert layer.weight2.grad is not None
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    get_backward_scheduler().enable()
    layer = MoELayer(CONFIG, group(), dtype=F64)
    (dx,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(dx, expected) and all(
        parameter.grad is None for parameter in layer.parameters()
    )


def test_backward_for_some_inputs_only() -> None:
    run_ranks(partial_inputs_body, 2, timeout_s=LIMIT_S)


def twice_body(rank: int, world: int, deferred: bool) -> None:
    """A kept graph can be gone through again; gradients of gradients are refused by name."""
    if deferred:
        get_backward_scheduler().enable()
    layer = MoELayer(CONFIG, group(), dtype=F64)
    x = tokens_of(rank + 1).requires_grad_()
    loss = layer(x).square().sum()
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, *layer.parameters()) if t.grad is not None]
    loss.backward()
    for a, t in zip(once, (x, *layer.parameters()), strict=True):
        close(t.grad, 2 * a)
    if deferred:
        with pytest.raises(
            ConfigError,
            match="layer 0 moe.*create_graph: found True, allowed: False while weight gradients",
        ):
            layer(x).square().sum().backward(create_graph=True)
        return
    for loss in (layer(x).square().sum(), (x + layer(x)).sum()):
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (x * gradient).sum().backward()


@pytest.mark.parametrize("deferred", [False, True])
def test_backward_twice(deferred: bool) -> None:
    run_ranks(twice_body, 2, deferred, timeout_s=LIMIT_S)


def copied_buffers_body(rank: int, world: int) -> None:
    """What a layer keeps for the NVLink path: a copy shares buffers, and reads its own weights."""
    layer = MoELayer(CONFIG, group(), dtype=F64)
    layer._backend = kept = BACKENDS["nvlink"](layer)
    unsized = copy.deepcopy(layer)
    buffers = kept.sized.buffers = object()
    layer.expert_weights()
    copied = copy.deepcopy(layer)
    assert copied._backend.sized.buffers is buffers and unsized._backend.sized.buffers is None, (
        "sized by a forward of its own"
    )
    assert copied.expert_weights()[0].params[0] is copied.weight1
    assert layer.expert_weights()[0].params[0] is layer.weight1


def test_a_deep_copy_shares_the_buffers_alone() -> None:
    run_ranks(copied_buffers_body, 1, timeout_s=LIMIT_S)


def other_work_body(rank: int, world: int) -> list[str]:
    """What is recorded between start and finish runs its backward before dX is waited for."""
    rounds = shared_rounds(group())
    plan = ExactPlan.from_counts(torch.tensor([2, 3]), rounds)
    w1, w2 = (
        torch.ones(1, 4, 8, dtype=F64, requires_grad=True),
        torch.ones(1, 8, 4, dtype=F64, requires_grad=True),
    )
    x = torch.ones(5, 8, dtype=F64, requires_grad=True)
    started = start_overlapped_moe(x * 1, None, plan, w1, w2, "gelu", rounds)
    order: list[str] = []
    other = (x * 2).sin()
    other.register_hook(
        lambda gradient: order.append(
            f"other work, {len(started.call.transport.returning)} rounds travelling"
        )
    )
    x.register_hook(
        lambda gradient: order.append(
            f"dX, {len(started.call.transport.returning)} rounds travelling"
        )
    )
    (started.finish() + other).sum().backward()
    return order


def test_other_work_runs_while_dx_travels() -> None:
    assert (
        run_ranks(other_work_body, 2, timeout_s=LIMIT_S)
        == [["other work, 1 rounds travelling", "dX, 0 rounds travelling"]] * 2
    )


# ---- errors


def refusal_body(rank: int, world: int) -> None:
    rounds = shared_rounds(group())
    with pytest.raises(
        ConfigError,
        match="num_experts: found 7, allowed: a multiple of the 2 expert-parallel ranks",
    ):
        MoELayer({**CONFIG, "num_experts": 7}, group())
    with pytest.raises(ConfigError, match="group: found None"):
        MoEBaseline(CONFIG, None)
    with pytest.raises(
        ConfigError,
        match="moe_backend: found 'nvlink', allowed: auto or rounds: its tensors are on the cpu",
    ):
        MoELayer({**CONFIG, "backend": "nvlink"}, group(), dtype=F64)(torch.ones(3, 8, dtype=F64))
    with pytest.raises(
        ConfigError,
        match="backend: found 'nvlnk', allowed: auto, nvlink, hierarchical, rounds, local, or None",
    ):
        MoELayer({**CONFIG, "backend": "nvlnk"}, group(), dtype=F64)(torch.ones(3, 8, dtype=F64))
    layer = MoELayer(CONFIG, group(), dtype=F64)
    with pytest.raises(
        ConfigError, match="layer 0 moe: last dimension of tokens: found 9, allowed: 8"
    ):
        layer(torch.ones(3, 9, dtype=F64))
    plan = ExactPlan.from_counts(torch.tensor([2, 3]), rounds)
    with pytest.raises(ConfigError, match="num_experts: found 3"):
        ExactPlan.from_counts(torch.tensor([2, 3, 1]), rounds)
    w1, w2, x = (
        torch.ones(1, 4, 8, dtype=F64),
        torch.ones(1, 8, 4, dtype=F64),
        torch.ones(5, 8, dtype=F64),
    )
    for expected, arguments in {
        r"moe: tokens: found \[4, 8\], allowed: \[5, hidden\]": (
            x[:4],
            None,
            plan,
            w1,
            w2,
            "gelu",
            rounds,
        ),
        r"moe: probs: found \[4\], allowed: \[5\]": (x, x[:4, 0], plan, w1, w2, "gelu", rounds),
        r"width of weight2: found 4, allowed: 2 \(swiglu of 4\)": (
            x,
            None,
            plan,
            w1,
            w2,
            "swiglu",
            rounds,
        ),
        r"hidden size of the weights: found \[7, 8\], allowed: 8": (
            x,
            None,
            plan,
            w1[..., :7],
            w2,
            "gelu",
            rounds,
        ),
        r"dtype of the weights: found torch.float32": (
            x,
            None,
            plan,
            w1.float(),
            w2,
            "gelu",
            rounds,
        ),
        r"weight1: found \[4, 8\], allowed: three dimensions": (
            x,
            None,
            plan,
            w1[0],
            w2,
            "gelu",
            rounds,
        ),
        r"dx_chunks: found 0": (x, None, plan, w1, w2, "gelu", rounds, 0),
        r"activation: found 'swish'": (x, None, plan, w1, w2, "swish", rounds),
        "no process group yet": (x, None, plan, w1, w2, "gelu", MultiCardOverlapContext("cpu", 2)),
        f"the plan is for rank 0 of 1, the group's rank is {rank} of 2": (
            x,
            None,
            ExactPlan(0, ((5,),), ((5,),)),
            w1,
            w2,
            "gelu",
            rounds,
        ),
    }.items():
        with pytest.raises(ConfigError, match=expected):
            overlapped_moe(*arguments)  # type: ignore[arg-type]
    context = MultiCardOverlapContext("cpu", 2)
    seed = [
        x,
        [2, 3],
        [4, 6],
        w1.transpose(1, 2),
        w2.transpose(1, 2),
        group(),
        "gelu",
        context,
        4,
        1,
        [2, 3],
        [[2], [3]],
    ]
    with pytest.raises(
        ConfigError, match=r"layer 4 moe: output_splits: found \[4, 6\], allowed: \[2, 3\]"
    ):
        moe_multicard_p2p_overlap_forward(*seed)  # type: ignore[arg-type]
    seed[10] = [2, 3, 1]
    with pytest.raises(ConfigError, match=r"tokens_per_expert: found \[3\], allowed: \[2, 1\]"):
        moe_multicard_p2p_overlap_forward(*seed)  # type: ignore[arg-type]
    y = overlapped_moe(
        x, None, plan, w1, w2, "gelu", rounds
    )  # after all that the group still works
    assert y.shape == x.shape


def test_refusals_name_what_is_wrong() -> None:
    run_ranks(refusal_body, 2, timeout_s=LIMIT_S)


def lost_rank_body(rank: int, world: int, where: str) -> str:
    """Rank 1 leaves in the second layer's forward, or in the backward of the first."""
    set_config(FluidConfig(timeout_s=6.0))
    layers = stack(2)

    def leave(*unused: Any) -> None:
        if rank == 1:
            os._exit(0)

    layers[1].register_forward_pre_hook(leave) if where == "forward" else None
    try:
        x = tokens_of(rank + 1).requires_grad_()
        y = layers[0](x)
        if where == "backward":
            y.register_hook(leave)
        layers[1](y).sum().backward()
        dist.barrier()
    except PeerTimeoutError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies_is_named(where: str) -> None:
    outcomes = run_ranks_outcomes(lost_rank_body, 3, where, timeout_s=LIMIT_S)
    layer = "layer 1 moe" if where == "forward" else "layer 0 moe"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.error
        assert f"rank {outcome.rank}: no answer from" in outcome.value
        assert layer in outcome.value
