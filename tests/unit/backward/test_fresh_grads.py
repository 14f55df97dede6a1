"""Gradients that hold no sums yet: who writes them, and who finds zeros."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_fluid.backward import fresh_grads
from megatron_fluid.backward.fresh_grads import GradGroup, any_fresh, begin, settle, settle_all
from megatron_fluid.moe import experts
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.experts import RowGroups, add_to_main_grads

EXPERTS, WIDE, DEEP = 3, 4, 5


def parameters() -> list[Tensor]:
    params = [torch.nn.Parameter(torch.zeros(WIDE, DEEP)) for _ in range(EXPERTS)]
    for param in params:
        param.main_grad = torch.full((WIDE, DEEP), float("nan"))  # type: ignore[attr-defined]
    return list(params)


def grads(params: Sequence[Tensor]) -> Tensor:
    return torch.stack([param.main_grad for param in params])  # type: ignore[attr-defined]


def fresh() -> tuple[list[Tensor], GradGroup]:
    params = parameters()
    group = GradGroup(params)
    group.mark()
    return params, group


def add(params: Sequence[Tensor], counts: Sequence[int], seed: int) -> Tensor:
    """Add gradients of random rows; returns them."""
    torch.manual_seed(seed)
    dy, x = torch.randn(sum(counts), WIDE), torch.randn(sum(counts), DEEP)
    add_to_main_grads(ExpertWeights(params, EXPERTS), dy, x, RowGroups.of_counts(counts))
    pairs = zip(dy.split(list(counts)), x.split(list(counts)), strict=True)
    return torch.stack([a.t() @ b for a, b in pairs])


def test_the_first_call_writes_and_the_next_adds() -> None:
    params, group = fresh()
    first = add(params, [2, 0, 3], 1)
    assert not group.fresh and not any_fresh()
    assert torch.equal(grads(params), first) and not first[1].any()
    second = add(params, [1, 1, 1], 2)
    torch.testing.assert_close(grads(params), first + second)


def test_a_call_without_rows_writes_zeros() -> None:
    params, _ = fresh()
    add(params, [0, 0, 0], 1)
    assert not grads(params).any() and not any_fresh()


def test_another_order_of_the_same_parameters_writes_too() -> None:
    params, _ = fresh()
    assert begin(params[::-1])


@pytest.mark.parametrize("which", [slice(0, 2), slice(2, 3)])
def test_a_call_for_some_of_them_adds_to_zeros(which: slice) -> None:
    params, group = fresh()
    assert not begin(params[which])
    assert not group.fresh and not grads(params).any()


def test_a_call_for_more_than_one_group_adds_to_zeros() -> None:
    (first, _), (second, _), other = fresh(), fresh(), parameters()
    assert not begin([*first, *second, *other])
    assert not grads([*first, *second]).any() and grads(other).isnan().all()


def test_what_fails_before_it_has_written_leaves_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise MemoryError

    params, group = fresh()
    with monkeypatch.context() as patch:
        patch.setattr(experts, "add_product_to_main_grad", fails)
        with pytest.raises(MemoryError):
            add(params, [1, 1, 1], 1)
    assert group.fresh
    settle(params[1:2])
    assert not group.fresh and not grads(params).any()


def test_all_are_settled_at_once() -> None:
    (first, _), (second, _) = fresh(), fresh()
    settle_all()
    assert not grads([*first, *second]).any() and not any_fresh()


@pytest.mark.parametrize("flags", [(True, True, True), (False, True, False)])
def test_megatrons_own_flag_overwrites_those_that_have_it(flags: tuple[bool, ...]) -> None:
    params = parameters()
    for param, flag in zip(params, flags, strict=True):
        param.main_grad.fill_(7.0)  # type: ignore[attr-defined]
        param.overwrite_main_grad = flag  # type: ignore[attr-defined]
    wanted = add(params, [2, 0, 3], 1)
    for e, flag in enumerate(flags):
        torch.testing.assert_close(grads(params)[e], wanted[e] + 7.0 * (not flag))


def test_a_dissolved_group_has_zeros_and_no_parameter() -> None:
    params, group = fresh()
    group.dissolve()
    assert not grads(params).any() and not any_fresh()
    assert all(fresh_grads.group_with(param) is None for param in params)


def test_a_mark_holds_no_parameter() -> None:
    params, _ = fresh()
    del params, _
    gc.collect()
    assert not any_fresh()
    settle_all()


def test_a_mark_is_left_behind_by_copies_and_pickles() -> None:
    params, group = fresh()
    assert copy.deepcopy(group) is None and pickle.loads(pickle.dumps(group)) is None
    found = pickle.loads(pickle.dumps(params[0]))
    assert fresh_grads.group_with(found) is None
    group.clear()
