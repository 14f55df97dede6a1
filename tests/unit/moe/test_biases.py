"""Experts with biases, clamps, offsets and interleaved gates on one rank, by torch's operations and
by the kernels (interpreted on a CPU), against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Variant, resolve_activation
from megatron_fluid.moe.biases import BiasedExperts
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from megatron_fluid.moe.local import transport
from tests.support.expert_calls import local_moe
from tests.support.moe_reference import moe_reference, routing

T, K, E, H, F = 11, 2, 5, 16, 8
GPT_OSS = resolve_activation("quick_geglu", variant=Variant(0.5, 1.0))
INTERLEAVED = resolve_activation("swiglu", variant=Variant(0.5, 0.25, 4))


@pytest.fixture(
    params=[
        "torch",
        *(pytest.param(way, marks=pytest.mark.interpreter) for way in ("kernels", "unread")),
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """unread: by kernels, and the host reads no row counts: rows of dropped choices are left at the
    tensors' ends."""
    kernels = request.param != "torch"
    monkeypatch.setattr(transport, "_kernels_serve", lambda *given: kernels)
    if request.param == "unread":
        monkeypatch.setattr(transport, "groups_on_device", lambda device, dtype: True)
    return str(request.param)


def _make(gated: bool) -> tuple[Tensor, list[Tensor], Tensor]:
    """ids [T, K], some dropped; leaves x, probs, w1, w2, b1, b2; grad [T, H]."""
    g = torch.Generator().manual_seed(4)
    ids = routing("dropped", T, E, K, g)
    ids[ids == 2] = -1  # an expert without rows
    wide = 2 * F if gated else F
    shapes = [(T, H), (T, K), (E, wide, H), (E, H, F), (E, wide), (E, H), (T, H)]
    *leaves, grad = (torch.randn(*shape, generator=g) * 0.4 for shape in shapes)
    return ids, [leaf.requires_grad_() for leaf in leaves], grad


def _expected(ids: Tensor, leaves: list[Tensor], activation: Any) -> Tensor:
    x, probs, w1, w2, b1, b2 = leaves
    return moe_reference(x, ids, probs, w1, w2, activation, (b1, b2))


@pytest.mark.parametrize(
    "activation", ["gelu", "quick_geglu", GPT_OSS, INTERLEAVED],
    ids=["gelu", "quick GeGLU", "gpt-oss", "interleaved"],
)  # fmt: skip
@pytest.mark.parametrize("recompute", [(), ("rows", "hidden")], ids=str)
def test_outputs_and_every_gradient_agree_with_plain_torch(
    way: str, activation: object, recompute: tuple[str, ...]
) -> None:
    gated = activation != "gelu"
    ids, leaves, grad = _make(gated)
    x, probs, w1, w2, *biases = leaves
    y = local_moe(  # type: ignore[misc]
        x, ids, probs, w1, w2, activation, biases=biases, recompute=recompute  # type: ignore[arg-type]
    )  # fmt: skip
    right = _expected(ids, leaves, activation)
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(y, leaves, grad)
    torch.testing.assert_close(
        found, torch.autograd.grad(right, leaves, grad), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_of_several_segments_are_rounded_once(stacked: bool) -> None:
    """Rows that came in rounds: each round's sums are added in fp32."""
    g = torch.Generator().manual_seed(2)
    counts = [[3, 0, 40], [25, 0, 1], [7, 0, 9]]
    groups = [RowGroups.of_counts(count) for count in counts]
    dh, dy = ([torch.randn(sum(c), w, generator=g).half() for c in counts] for w in (2 * F, H))
    probs = [torch.rand(sum(count), generator=g) for count in counts]
    tables = [torch.zeros(3, width, dtype=torch.float16) for width in (2 * F, H)]
    added = [table if stacked else list(table.unbind(0)) for table in tables]
    shapes = (3, 2 * F, H), (3, H, F)
    fcs = [ExpertWeights(torch.zeros(*shape, dtype=torch.float16), 3) for shape in shapes]
    experts = BiasedExperts(fcs[0], fcs[1], GPT_OSS, (added[0], added[1]), "moe")
    pairs = [(rows, rows) for rows in dy]
    found = experts.bias_grads(dh, pairs, list(zip(probs, groups, strict=True)))
    weighted = [rows.float() * p[:, None] for rows, p in zip(dy, probs, strict=True)]
    parts = ([rows.float() for rows in dh], weighted)
    sums = [
        torch.stack(
            [torch.stack([x.sum(0) for x in r.split(c)]) for r, c in zip(rows, counts, strict=True)]
        )
        for rows in parts
    ]
    twice = [each.half().sum(0) for each in sums]
    once = [each.sum(0) for each in sums]
    if not stacked:
        found = [torch.stack(found[:3]), torch.stack(found[3:])]
    for one, right, rounded in zip(found, once, twice, strict=True):
        assert one.dtype == torch.float16 and not one[1].any()
        off = (one.float() - right).norm()
        assert off <= 1.01 * (right.half().float() - right).norm()
        assert off < 0.9 * (rounded.float() - right).norm()


def test_deferred_weights_leave_biases_their_gradients_at_once() -> None:
    ids, leaves, grad = _make(True)
    expected = torch.autograd.grad(_expected(ids, leaves, GPT_OSS), leaves, grad)
    x, probs, *others = leaves
    w1, w2, b1, b2 = (
        [one.detach().clone().requires_grad_() for one in other] for other in others
    )  # one parameter for each expert, as Megatron has them
    scheduler = WeightGradScheduler()
    scheduler.enable()
    y = local_moe(x, ids, probs, w1, w2, GPT_OSS, biases=(b1, b2), scheduler=scheduler)  # type: ignore[arg-type]
    y.backward(grad)
    scheduler.finish_batch()
    for params, value in zip((w1, w2, b1, b2), expected[2:], strict=True):
        found = torch.stack([param.grad for param in params])  # type: ignore[arg-type]
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, expected[0], rtol=1e-5, atol=1e-6)


def test_biases_that_do_not_fit_are_named() -> None:
    ids, (x, probs, w1, w2, b1, b2), _ = _make(True)
    with pytest.raises(ConfigError, match=r"moe: bias2: found \[\[4, 16\]\].*5 local experts"):
        local_moe(x, ids, probs, w1, w2, biases=(b1, b2[1:]))  # type: ignore[arg-type]
