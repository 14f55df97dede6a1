"""Gradients that bypass autograd are reported as autograd would: once, after all contributions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fluid.backward.autograd import ReadyGate, gate_with, readiness_of, set_gradient_owner
from megatron_fluid.backward.deferred_linear import deferred_linear
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.moe.autograd import run_experts
from megatron_fluid.moe.call import ExpertCall
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.local.transport import LocalPlan, LocalTransport
from tests.support.moe_reference import moe_reference

EXPERTS, HIDDEN, FFN, TOKENS = 3, 8, 4, 6
IDS = torch.arange(TOKENS).view(TOKENS, 1) % (EXPERTS - 1)  # one expert has no token
PROBS = torch.linspace(0.1, 0.9, TOKENS).view(TOKENS, 1)


class Gate(ReadyGate):
    def __init__(self, owner: Owner, params: Sequence[Tensor]) -> None:
        super().__init__(params)
        self.owner = owner

    def report(self, pending: Callable[[], set[int]]) -> None:
        left_out = pending()
        for param in self.params:
            if id(param) not in left_out:
                self.owner.ready(param)


class Owner:
    """Gradient buffers and hooks as Megatron's DistributedDataParallel has them. Each report is
    kept with the sum that main_grad had then."""

    def __init__(self, open_: bool = True, in_graphs: bool = False) -> None:
        self.open, self.in_graphs = open_, in_graphs
        self.gates: dict[int, Gate] = {}
        self.nodes: list[Any] = []
        self.reports: list[tuple[int, Tensor]] = []

    def own(self, param: Tensor) -> None:
        param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
        set_gradient_owner(param, self)
        node = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(functools.partial(self._visited, param))
        self.nodes.append(node)

    def _visited(self, param: Tensor, *_: Any) -> None:
        assert param.grad is not None
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
        gate = gate_with(param)
        if gate is None or not gate.waits(param):
            self.ready(param)

    def ready(self, param: Tensor) -> None:
        self.reports.append((id(param), param.main_grad.clone()))  # type: ignore[attr-defined]

    def accepts(self) -> bool:
        return self.open

    def accepts_in_graphs(self) -> bool:
        return self.in_graphs

    def gate_of(self, params: Sequence[Tensor]) -> Gate | None:
        found = {self.gates.get(id(param)) for param in params}
        if found == {None}:
            gate = Gate(self, params)
            self.gates.update(dict.fromkeys(map(id, params), gate))
            return gate
        (gate,) = found if len(found) == 1 else (None,)  # type: ignore[assignment]
        return gate if gate is not None and len(gate.params) == len(params) else None

    def gate_with(self, param: Tensor) -> Gate | None:
        return self.gates.get(id(param))


class Model:
    """Experts, and a linear layer before them whose gradient is deferred."""

    def __init__(self, owner: Owner | None) -> None:
        torch.manual_seed(3)
        shapes = [(2 * FFN, HIDDEN)] * EXPERTS + [(HIDDEN, FFN)] * EXPERTS + [(HIDDEN, HIDDEN)]
        self.params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for param in self.params:
            if owner is not None:
                owner.own(param)
        self.experts, self.linear = self.params[:-1], self.params[-1]

    def layer(self, x: Tensor, scheduler: WeightGradScheduler) -> Tensor:
        x = deferred_linear(x, self.linear, scheduler=scheduler)
        fcs = self.experts[:EXPERTS], self.experts[EXPERTS:]
        weights = ExpertWeights(fcs[0], EXPERTS), ExpertWeights(fcs[1], EXPERTS)
        transport = LocalTransport(LocalPlan.of(IDS, EXPERTS))
        given = {"w1": weights[0], "w2": weights[1], "num_experts": EXPERTS}
        call = ExpertCall(x=x, probs=PROBS, scheduler=scheduler, **given)  # type: ignore[arg-type]
        return run_experts(call, transport)

    def plain(self, x: Tensor) -> Tensor:
        """The layer by autograd alone."""
        x = torch.nn.functional.linear(x, self.linear)
        fc1, fc2 = (torch.stack(w) for w in (self.experts[:EXPERTS], self.experts[EXPERTS:]))
        return moe_reference(x, IDS, PROBS, fc1, fc2, "swiglu")

    def penalty(self) -> Tensor:
        """Of some experts' weights, and the linear's."""
        chosen = (self.experts[0], self.experts[-1], self.linear)
        return torch.stack([param.square().sum() for param in chosen]).sum()


def tokens() -> Tensor:
    torch.manual_seed(4)
    return torch.randn(TOKENS, HIDDEN, requires_grad=True)


type Layer = Callable[[Tensor], Tensor]


def once(model: Model, layer: Layer) -> Tensor:
    return layer(tokens()).square().sum()


def twice(model: Model, layer: Layer) -> Tensor:
    return layer(layer(tokens())).square().sum()


def regularised(model: Model, layer: Layer) -> Tensor:
    return once(model, layer) + model.penalty()


def regularised_before(model: Model, layer: Layer) -> Tensor:
    """Its backward comes after the layer's, since it was recorded before."""
    penalty = model.penalty()
    return once(model, layer) + penalty


def regularised_twice(model: Model, layer: Layer) -> Tensor:
    penalty = model.penalty()
    return twice(model, layer) + penalty


def penalty_alone(model: Model, layer: Layer) -> Tensor:
    return model.penalty()


def with_another_path(model: Model, layer: Layer) -> Tensor:
    """As where a layer's second call is left to Megatron."""
    return model.plain(layer(model.plain(tokens()))).square().sum()


def aborted(model: Model, layer: Layer) -> Tensor:
    kept.append(once(model, layer))  # whose backward never runs
    twice(model, layer)
    return once(model, layer)


def evaluated(model: Model, layer: Layer) -> Tensor:
    loss = once(model, layer)
    with torch.no_grad():
        once(model, layer)
    return loss


def recomputed(model: Model, layer: Layer) -> Tensor:
    return checkpoint(layer, tokens(), use_reentrant=True).square().sum()


def recomputed_twice(model: Model, layer: Layer) -> Tensor:
    y = checkpoint(layer, layer(tokens()), use_reentrant=True)
    return checkpoint(layer, y, use_reentrant=True).square().sum() + model.penalty()


def recomputed_without_reentry(model: Model, layer: Layer) -> Tensor:
    y = checkpoint(layer, layer(tokens()), use_reentrant=False)
    return y.square().sum() + model.penalty()


kept: list[Tensor] = []
LOSSES = (
    once, twice, regularised, regularised_before, regularised_twice, penalty_alone,
    with_another_path, aborted, evaluated, recomputed, recomputed_twice, recomputed_without_reentry,
)  # fmt: skip


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("losses", [*((loss,) * 2 for loss in LOSSES), LOSSES, LOSSES[::-1]])
def test_what_bypasses_autograd_is_reported_as_autograd_would(
    losses: Sequence[Callable[[Model, Layer], Tensor]], deferred: bool
) -> None:
    """In each backward as often for each parameter, and never before a later share of it."""
    reference, owner, scheduler = Owner(), Owner(), WeightGradScheduler()
    plain, model = Model(reference), Model(owner)
    if deferred:
        scheduler.enable()
    for number, loss in enumerate(losses):
        for one in (reference, owner):
            one.reports.clear()
        loss(plain, plain.plain).backward()
        loss(model, functools.partial(model.layer, scheduler=scheduler)).backward()
        for param, other in zip(model.params, plain.params, strict=True):
            found = [grad for key, grad in owner.reports if key == id(param)]
            expected = [grad for key, grad in reference.reports if key == id(other)]
            assert len(found) == len(expected), (loss.__name__, number)
            total: Tensor = other.main_grad  # type: ignore[attr-defined]
            assert (param.main_grad - total).norm() <= 1e-5 * total.norm()  # type: ignore[attr-defined]
            if found:  # nothing is added behind the last report
                assert torch.equal(found[-1], param.main_grad)  # type: ignore[attr-defined]
        assert not any(gate._backwards for gate in owner.gates.values())
    kept.clear()


def made(deferred: bool = False) -> tuple[Owner, Model, Layer]:
    """A model that reports to an owner, and its layer."""
    owner, scheduler = Owner(), WeightGradScheduler()
    scheduler.enabled = deferred
    model = Model(owner)
    return owner, model, functools.partial(model.layer, scheduler=scheduler)


def check_reports(owner: Owner, params: Sequence[Tensor]) -> None:
    """Each of these parameters was reported once, and no other."""
    assert sorted(key for key, _ in owner.reports) == sorted(map(id, params))


def test_a_backward_that_fails_holds_up_no_later_one() -> None:
    owner, model, layer = made(deferred=True)

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    x = tokens()
    x.register_hook(fail)
    with pytest.raises(ArithmeticError):
        layer(layer(x)).sum().backward()
    owner.reports.clear()
    once(model, layer).backward()
    check_reports(owner, model.params)


def test_gradients_of_tokens_alone_report_nothing() -> None:
    owner, model, layer = made()
    x = tokens()
    torch.autograd.grad(layer(x).sum(), x)
    loss = layer(x).sum() + model.penalty()
    loss.backward(inputs=[x, model.experts[0]])
    check_reports(owner, model.experts[:1])


def test_frozen_weights_are_not_reported_until_they_are_trained_again() -> None:
    owner, model, layer = made()
    second = model.experts[EXPERTS:]
    for trained in (True, False, True):
        owner.reports.clear()
        for param in second:
            param.requires_grad_(trained)
            param.main_grad.zero_()  # type: ignore[attr-defined]
        once(model, layer).backward()
        check_reports(owner, model.params if trained else [*model.experts[:EXPERTS], model.linear])
        assert any(param.main_grad.any() for param in second) is trained  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["hook", "post-accumulate hook", "gradient", "shared in parts"])
def test_what_autograd_alone_serves_keeps_its_visit(what: str) -> None:
    owner, model, layer = made()
    params, calls = model.experts, list[Tensor]()
    if what == "hook":
        params[1].register_hook(calls.append)
    elif what == "post-accumulate hook":
        params[1].register_post_accumulate_grad_hook(calls.append)
    elif what == "gradient":
        params[1].grad = torch.zeros_like(params[1])
    else:  # with another layer
        readiness_of(params[1:2])
    once(model, layer).backward()
    assert bool(calls) == ("hook" in what)
    check_reports(owner, model.params)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_hook_registered_within_an_iteration_sees_the_gradients_after_it(
    deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, model, layer = made(deferred)
    monkeypatch.setattr(Gate, "iteration", lambda gate: owner)  # one iteration
    once(model, layer).backward()
    calls = list[Tensor]()
    for param, called in ((model.experts[-1], 1), (model.experts[1], 3)):
        loss = once(model, layer)
        param.register_hook(calls.append)  # behind a forward and before the next
        owner.reports.clear()
        loss.backward()
        assert len(calls) == called
        check_reports(owner, model.params)


def _captured(owner: Owner) -> tuple[Model, Tensor, list[Tensor | None]]:
    """A backward that asks autograd for each gradient, as Megatron's graphs do."""
    model, x = Model(owner), tokens()
    loss = model.layer(x, WeightGradScheduler()).square().sum()
    dx, *dw = torch.autograd.grad(loss, (x, *model.experts), allow_unused=True)
    return model, dx, dw


def test_a_captured_backward_adds_to_main_grad_where_the_owner_is_told_at_replays() -> None:
    model, dx, dw = _captured(Owner(open_=False, in_graphs=True))
    assert dx.any() and dw == [None] * len(model.experts)
    assert model.experts[0].main_grad.any()  # type: ignore[attr-defined]


def test_a_captured_backward_gives_autograd_each_gradient_elsewhere() -> None:
    owner = Owner(open_=False)
    model, _, dw = _captured(owner)
    assert all(grad is not None for grad in dw) and not owner.reports
    assert not model.experts[0].main_grad.any()  # type: ignore[attr-defined]


def test_a_context_that_outlives_its_graph_is_not_waited_for() -> None:
    owner, model, layer = made()
    loss = once(model, layer)
    contexts = [node for gate in owner.gates.values() for node in gate._calls]
    del loss
    assert contexts
    once(model, layer).backward()
    check_reports(owner, model.params)


def test_a_gradient_set_by_hand_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(Owner(), weights := [torch.ones(2, requires_grad=True) for _ in range(2)])
    for weight in weights:
        weight.main_grad = torch.zeros(2)  # type: ignore[attr-defined]
    monkeypatch.setattr(gate, "iteration", lambda: "one")
    assert gate.takes_main_grads()
    weights[0].grad = torch.ones(2)
    assert not gate.takes_main_grads()
