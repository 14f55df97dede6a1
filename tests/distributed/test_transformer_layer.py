"""The standalone TransformerLayer, overlapped and plain, against one process in plain torch: output
and every gradient."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_fluid import TransformerLayer, get_backward_scheduler
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.overlap import AttentionWeights
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.router import route
from megatron_fluid.moe.sharding import local_part
from tests.distributed.test_attention import OVERLAP, check_cases
from tests.distributed.test_attention import _close as close
from tests.support.attention_reference import reference_attention
from tests.support.launch import on_ranks, world_group
from tests.support.moe_layers import whole
from tests.support.moe_reference import moe_reference

HIDDEN, HEAD_DIM, FFN, BATCH = 16, 4, 10, 2


@dataclass(frozen=True)
class Case:
    length: int = 16
    heads: int = 4
    kv_heads: int = 4
    experts: int = 4
    top_k: int = 2
    layers: int = 2
    layout: str = "contiguous"
    norm: str = "rmsnorm"
    qk_norm: bool = False
    bias: bool = False
    shared: int = 0
    chunks: int = 1
    overlap: bool = True
    scheduler: bool = False
    context_parallel: bool = True
    aux: float = 0.0
    microbatches: int = 1


def _layer(case: Case, index: int) -> TransformerLayer:
    layer = TransformerLayer(
        HIDDEN, case.heads, FFN, case.experts, case.top_k, ep_group=dist.group.WORLD,
        cp_group=dist.group.WORLD if case.context_parallel else None, num_kv_heads=case.kv_heads,
        head_dim=HEAD_DIM, qk_norm=case.qk_norm, qkv_bias=case.bias, norm=case.norm,
        sequence_layout=case.layout, shared_ffn_hidden_size=case.shared,
        aux_loss_coefficient=case.aux, init_std=0.3, dx_chunks=case.chunks, overlap=case.overlap,
        layer_id=index, dtype=torch.float64,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:  # norms and biases: away from ones and zeros
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise * 0.3)
    return layer


def _data(case: Case, microbatch: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7 + microbatch + 1000 * rank)
    shape = case.length, BATCH, HIDDEN
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, g


def _body(rank: int, world: int, case: Case) -> dict[str, Any]:
    layers = [_layer(case, index) for index in range(case.layers)]
    scheduler = get_backward_scheduler()
    scheduler.enabled = case.scheduler
    rows = SequenceLayout(case.length, world, case.layout).positions(rank)
    outputs = []
    for microbatch in range(case.microbatches):
        if case.context_parallel:
            x, g = (t[rows] for t in _data(case, microbatch))
        else:
            x, g = _data(case, microbatch, rank)
        h = x.requires_grad_()
        for layer in layers:
            h = layer(h, case.length if case.context_parallel else None)
        h.backward(g)
        scheduler.finish_batch()
        outputs.append((h.detach(), x.grad))
    for layer in layers:
        layer.sum_replicated_gradients(dist.group.WORLD)
    named = dict(torch.nn.ModuleList(layers).named_parameters())
    values = {name: whole(p) for name, p in named.items()}
    grads = {name: whole(p.grad) for name, p in named.items() if p.grad is not None}
    return {"rows": rows, "outputs": outputs, "values": values, "grads": grads}


def _reference(case: Case, values: dict[str, Tensor], index: int, x: Tensor) -> Tensor:
    """One layer on whole sequences, with all experts."""
    layer = f"{index}."
    p = {n.removeprefix(layer): value for n, value in values.items() if n.startswith(layer)}

    def norm(x: Tensor, name: str) -> Tensor:
        if case.norm == "rmsnorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * p[f"{name}.weight"]
        return F.layer_norm(x, (HIDDEN,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-6)

    weights = AttentionWeights(
        p["self_attention.linear_qkv.weight"], p["self_attention.linear_proj.weight"],
        p.get("self_attention.linear_qkv.bias"), None, p.get("self_attention.q_layernorm.weight"),
        p.get("self_attention.k_layernorm.weight"),
    )  # fmt: skip
    h = norm(x, "input_layernorm")
    x = x + reference_attention(h, weights, case.heads, case.kv_heads, rotary=Rotary(HEAD_DIM))
    tokens = norm(x, "pre_mlp_layernorm").reshape(-1, HIDDEN)
    routing = route(tokens @ p["mlp.router.weight"].t(), case.top_k)
    out = moe_reference(
        tokens, routing.ids, routing.probs, p["mlp.weight1"], p["mlp.weight2"], "swiglu"
    )
    if case.shared:
        gate, up = (tokens @ p["mlp.shared_weight1"].t()).chunk(2, -1)
        out = out + (F.silu(gate) * up) @ p["mlp.shared_weight2"].t()
    return x + out.view_as(x)


def _close(found: Tensor, expected: Tensor, what: str) -> None:
    close(found, expected, torch.float64, 10, what)


def _compare(case: Case, world: int, results: list[dict[str, Any]]) -> None:
    values = {n: value.requires_grad_() for n, value in results[0]["values"].items()}
    for name, value in values.items():
        same = all(torch.equal(value, r["values"][name]) for r in results)
        assert same, f"{name} differs between ranks"
    for microbatch in range(case.microbatches):
        found = [r["outputs"][microbatch] for r in results]
        if case.context_parallel:
            order = torch.cat([r["rows"] for r in results])
            places: list[Any] = [(order, _data(case, microbatch))]
            found = [tuple(torch.cat([f[i] for f in found]) for i in range(2))]
        else:
            places = [(slice(None), _data(case, microbatch, rank)) for rank in range(len(results))]
        for (rows, (x, g)), (y, dx) in zip(places, found, strict=True):
            h = x.requires_grad_()
            for index in range(case.layers):
                h = _reference(case, values, index, h)
            h.backward(g)
            assert x.grad is not None
            _close(y, h.detach()[rows], f"y of microbatch {microbatch}")
            _close(dx, x.grad[rows], f"dx of microbatch {microbatch}")
    for name, value in values.items():
        assert value.grad is not None
        for result in results:
            _close(result["grads"][name], value.grad, f"dW of {name}")


def check(world: int, *cases: Case) -> None:
    check_cases(_body, _compare, world, cases)


@OVERLAP
@pytest.mark.parametrize("world", [1, 2, 4])
def test_equals_one_process(world: int, overlap: bool) -> None:
    base = Case(overlap=overlap)
    check(
        world,
        base,
        dataclasses.replace(base, kv_heads=1, qk_norm=True, bias=True, shared=6, layout="zigzag"),
        dataclasses.replace(
            base, norm="layernorm", length=13, chunks=3, scheduler=True, microbatches=2
        ),
        dataclasses.replace(base, length=3, top_k=4, kv_heads=2),
        dataclasses.replace(base, context_parallel=False, scheduler=True),
    )


def test_three_ranks_and_many_layers() -> None:
    sizes: dict[str, Any] = {"heads": 6, "kv_heads": 3, "experts": 6, "layers": 8, "length": 17}
    check(3, Case(**sizes, chunks=2, scheduler=True, qk_norm=True))


@OVERLAP
@on_ranks(2)
def test_a_deep_copy_has_parameters_of_its_own_and_trains_as_the_layer(
    rank: int, world: int, overlap: bool
) -> None:
    case = Case(overlap=overlap, qk_norm=True, shared=6)
    layer = _layer(case, 0)
    rows = SequenceLayout(case.length, world, case.layout).positions(rank)
    x, g = (t[rows] for t in _data(case, 0))

    def step(layer: TransformerLayer) -> dict[str, Tensor]:
        y = layer(x)
        y.backward(g)
        layer.sum_replicated_gradients()
        return {
            "y": y.detach(),
            **{n: local_part(p.grad) for n, p in layer.named_parameters() if p.grad is not None},
        }

    expected = step(layer)
    copied = copy.deepcopy(layer)
    attention = copy.deepcopy(layer.self_attention)
    assert attention.group is copied.cp_group is copied.ep_group is dist.group.WORLD
    assert attention.connection is layer.self_attention.connection
    assert attention.scheduler is get_backward_scheduler()
    whole = copy.deepcopy(_layer(dataclasses.replace(case, context_parallel=False), 1))
    assert whole.cp_group is None and whole.ep_group is dist.group.WORLD
    assert copied.mlp.rounds is copy.deepcopy(layer.mlp).rounds is layer.mlp.rounds
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        assert not torch.equal(layer(x), expected["y"])
    found = step(copied)
    assert found.keys() == expected.keys() == {"y", *layer.state_dict()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    average = torch.optim.swa_utils.AveragedModel(layer)
    average.update_parameters(copied)
    assert torch.equal(average(x), expected["y"])


# What the error names, and settings that it refuses.
REFUSED: dict[str, tuple[dict[str, Any], ...]] = {
    "num_heads": ({"num_attention_heads": 3},), "num_kv_heads": ({"num_kv_heads": 3},),
    "num_experts": ({"num_experts": 3},), "norm": ({"norm": "batchnorm"}, {"norm": []}),
    "causal": ({"causal": 0}, {"causal": "no"}), "overlap": ({"overlap": "false"},),
    "rope_theta": ({"rope_theta": "1e4"}, {"rope_theta": -1.0}),
    "sequence_layout": ({"sequence_layout": "striped"},),
    "kernel": ({"attention_kernel": "magic"}, {"attention_kernel": "te"}),
    "head_groups": ({"head_groups": 5},),
    "dx_chunks": ({"dx_chunks": 0}, {"dx_chunks": -1}, {"dx_chunks": 1025}),
    "window": ({"window": 0}, {"window": 1.5}), "dropout": ({"attention_dropout": 1.5},),
    "rotary": ({"rotary_dim": 3}, {"rotary_dim": 8}, {"rotary_dim": 0}),
    "group": ({"ep_group": None},), "top_k": ({"top_k": 9},),
    "activation": ({"activation": "tanhshrinkish"},),
}  # fmt: skip


@on_ranks(2)
def test_what_cannot_be_met_is_refused_by_name(rank: int, world: int) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 8, "num_experts": 4}
    group = dist.group.WORLD
    common: dict[str, Any] = {**sizes, "top_k": 2, "ep_group": group, "cp_group": group}
    for named, wrong in REFUSED.items():
        for settings in wrong:
            with pytest.raises(ConfigError, match=named):
                TransformerLayer(**{**common, "head_dim": 4, **settings})
    layer = TransformerLayer(**common)
    for shape, length, named in (
        ((3, 1, 15), None, "input"),
        ((3, 16), None, "input"),
        ((3, 1, 16), 9, "rows"),
        ((3, 1, 16), 6.0, "sequence_length: found 6.0, allowed: an integer"),
        ((3, 1, 16), "6", "sequence_length"),
        ((3, 1, 16), torch.tensor(6), "sequence_length"),
    ):
        with pytest.raises(ConfigError, match=named):
            layer(torch.zeros(shape), length)
    for length in (None, 6):
        assert layer(torch.zeros(3, 1, 16), length).shape == (3, 1, 16)


@on_ranks(3)
def test_sums_over_ranks_outside_of_the_experts_group_are_refused(rank: int, world: int) -> None:
    """Experts of other ranks have seen other tokens, and nothing would add their gradients up."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        layer = TransformerLayer(8, 2, 16, 4, 2, ep_group=pair)
        with pytest.raises(ConfigError, match=r"found \[0, 1, 2\], allowed: a part of ep_group"):
            layer.sum_replicated_gradients(dist.group.WORLD)


@on_ranks(2)
def test_autocast_leaves_fp64_alone(rank: int, world: int) -> None:
    """As torch's own operations do."""
    group, x = world_group(), torch.ones(2, 1, 16, dtype=torch.float64).cumsum(2)
    layer = TransformerLayer(16, 2, 8, 4, 2, ep_group=group, cp_group=group, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    torch.testing.assert_close(found, layer(x))


@on_ranks(2)
def test_without_a_context_parallel_group_gradients_are_summed_over_the_experts_ranks(
    rank: int, world: int
) -> None:
    layer = TransformerLayer(16, 2, 8, 4, 2, ep_group=world_group())
    layer(torch.full((2, 1, 16), rank + 1.0).cumsum(2)).sum().backward()
    gradient = layer.input_layernorm.weight.grad
    assert gradient is not None
    total = gradient.clone()
    dist.all_reduce(total)
    layer.sum_replicated_gradients()
    torch.testing.assert_close(gradient, total)
