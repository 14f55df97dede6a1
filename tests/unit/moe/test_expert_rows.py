"""Experts on rows that somebody else has dispatched, against one expert at a time in torch."""

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.moe import experts
from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.moe.biases import BiasedExperts
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from megatron_fluid.moe.experts import add_to_main_grads
from tests.support.expert_calls import expert_rows
from tests.support.moe_reference import moe_reference

H, F, COUNTS = 6, 5, [3, 0, 4, 1]
El, N = len(COUNTS), sum(COUNTS)


def _normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def _matrices(order: str, out: int, width: int, seed: int) -> list[Tensor]:
    """Parameters of each expert: of their own, or views of one tensor in either order."""
    stack = _normal(El, out, width, seed=seed)
    if order == "separate":
        return [m.clone().requires_grad_() for m in stack]
    if order == "descending":
        return [m.requires_grad_() for m in reversed(stack.flip(0).unbind(0))]
    return [m.requires_grad_() for m in stack.unbind(0)]


@pytest.mark.parametrize("order", ["separate", "ascending", "descending"])
@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("kind", ["", "biases", "no probabilities", "recompute"])
def test_output_and_every_gradient(order: str, activation: str, kind: str) -> None:
    wide = 2 * F if activation == "swiglu" else F
    rows = _normal(N, H, seed=1).requires_grad_()
    probs = None if kind == "no probabilities" else _normal(N, seed=2).abs().requires_grad_()
    w1, w2 = _matrices(order, wide, H, 3), _matrices(order, H, F, 4)
    biases = None
    if kind == "biases":
        biases = _matrices("separate", wide, 1, 5), _matrices("separate", H, 1, 6)
        biases = tuple([b.detach().squeeze(1).requires_grad_() for b in part] for part in biases)
    added = [] if biases is None else [*biases[0], *biases[1]]
    leaves = [rows, *([] if probs is None else [probs]), *w1, *w2, *added]
    settings = {"recompute": ("hidden",) if kind == "recompute" else (), "biases": biases}
    mine = expert_rows(rows, probs, COUNTS, w1, w2, activation, **settings)  # type: ignore[arg-type]
    ids = torch.arange(El).repeat_interleave(torch.tensor(COUNTS))[:, None]
    stacked = torch.stack(w1), torch.stack(w2)
    tables = biases and (torch.stack(biases[0]), torch.stack(biases[1]))
    factors = None if probs is None else probs[:, None]
    right = moe_reference(rows, ids, factors, *stacked, activation, tables)
    torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    grad = _normal(N, H, seed=7)
    pairs = (torch.autograd.grad(y, leaves, grad) for y in (mine, right))
    for found, expected in zip(*pairs, strict=True):
        assert float(expected.abs().max()) > 0 or expected.shape[0] in (wide, H)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_counts_that_are_not_the_rows_are_refused_by_name() -> None:
    w1, w2 = _matrices("separate", 2 * F, H, 3), _matrices("separate", H, F, 4)
    rows = _normal(N, H, seed=1)
    with pytest.raises(ConfigError, match=r"expert rows: found '\[8, 6\], 7 counted'"):
        expert_rows(rows, None, [3, 0, 3, 1], w1, w2)


@pytest.mark.parametrize("known", [True, False], ids=["on the host", "on the device alone"])
def test_an_expert_without_rows_has_a_zero_gradient_whatever_a_kernel_leaves_there(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    left_there = torch.full((4, 6, 5), float("nan"))
    left_there[1], left_there[3] = 1.0, 2.0  # those with rows
    monkeypatch.setattr(experts, "grouped_weight_grad", lambda *given: left_there.clone())
    ends = [0, 3, 3, 7]
    groups = RowGroups(torch.tensor(ends, dtype=torch.int32), ends if known else None)
    fc = ExpertWeights(torch.zeros(4, 6, 5), 4)
    (found,) = experts.weight_grads(fc, torch.zeros(7, 6), torch.zeros(7, 5), groups)
    right = torch.tensor([0.0, 1.0, 0.0, 2.0]).view(4, 1, 1).expand(4, 6, 5)
    assert torch.equal(found, right)


WIDE, DEEP = 8, 16


@pytest.mark.parametrize("asked", [(), (0, 1, 2), (1,)], ids=["none", "all", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_those_are_overwritten_for_which_it_is_asked(
    asked: tuple[int, ...], dtype: torch.dtype
) -> None:
    counts = [5, 0, 3]
    draw = torch.Generator().manual_seed(2)
    dy = torch.randn(sum(counts), WIDE, generator=draw).to(dtype)
    x = torch.randn(sum(counts), DEEP, generator=draw).to(dtype)
    params = [torch.nn.Parameter(torch.zeros(WIDE, DEEP, dtype=dtype)) for _ in counts]
    for number, param in enumerate(params):
        param.main_grad = torch.full((WIDE, DEEP), 2.0)  # type: ignore[attr-defined]
        param.overwrite_main_grad = number in asked  # type: ignore[attr-defined]
    add_to_main_grads(ExpertWeights(params, len(counts)), dy, x, RowGroups.of_counts(counts))
    rows = zip(dy.float().split(counts), x.float().split(counts), strict=True)
    for number, (param, (left, right)) in enumerate(zip(params, rows, strict=True)):
        wanted = left.T @ right + (0.0 if number in asked else 2.0)
        torch.testing.assert_close(param.main_grad, wanted, rtol=1e-2, atol=1e-2)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stacked", [True, False])
def test_gradients_of_biases_are_rounded_once_over_several_segments(stacked: bool) -> None:
    """Rows that came in rounds: each round's sums are added in fp32."""
    g = torch.Generator().manual_seed(2)
    counts = [[3, 0, 40], [25, 0, 1], [7, 0, 9]]
    groups = [RowGroups.of_counts(count) for count in counts]
    dh, dy = ([torch.randn(sum(count), 16, generator=g).half() for count in counts] for _ in "hy")
    probs = [torch.rand(sum(count), generator=g) for count in counts]
    tables = [torch.zeros(3, 16, dtype=torch.float16) for _ in range(2)]
    added = [table if stacked else list(table.unbind(0)) for table in tables]
    shapes = (3, 16, 16), (3, 16, 8)
    fc1, fc2 = (ExpertWeights(torch.zeros(*shape, dtype=torch.float16), 3) for shape in shapes)
    biased = BiasedExperts(fc1, fc2, resolve_activation("swiglu"), (added[0], added[1]), "moe")
    pairs = [(rows, rows) for rows in dy]
    found = biased.bias_grads(dh, pairs, list(zip(probs, groups, strict=True)))
    if not stacked:
        found = [torch.stack(found[:3]), torch.stack(found[3:])]
    weighted = [rows.float() * p[:, None] for rows, p in zip(dy, probs, strict=True)]
    for one, segments in zip(found, ([rows.float() for rows in dh], weighted), strict=True):
        splits = zip(*(x.split(c) for x, c in zip(segments, counts, strict=True)), strict=True)
        sums = torch.stack([torch.stack([rows.sum(0) for rows in parts]) for parts in splits])
        right, rounded = sums.sum(1), sums.half().sum(1)
        assert one.dtype == torch.float16 and not one[1].any()
        off = (one.float() - right).norm()
        assert off <= 1.01 * (right.half().float() - right).norm()
        assert off < 0.9 * (rounded.float() - right).norm()
