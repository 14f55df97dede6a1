"""Gradients in main_grad that are reported, and not given to autograd."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_fluid.backward.main_grad import ready_report, set_ready_report
from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.moe.autograd import make_call, run_experts
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.local.transport import LocalPlan, LocalTransport

EXPERTS, HIDDEN, FFN, TOKENS = 3, 8, 4, 6


class Report:
    def __init__(self, open_: bool = True, in_graphs: bool = False) -> None:
        self.open, self.in_graphs = open_, in_graphs
        self.groups = list[Sequence[Tensor]]()

    def accepts(self) -> bool:
        return self.open

    def accepts_in_graphs(self) -> bool:
        return self.in_graphs

    def __call__(self, params: Sequence[Tensor]) -> None:
        self.groups.append(params)


def parameters(report: Report | None) -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    shapes = [(2 * FFN, HIDDEN)] * EXPERTS + [(HIDDEN, FFN)] * EXPERTS
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
        if report is not None:
            set_ready_report(param, report)
    return params


def run(params: Sequence[Tensor]) -> Tensor:
    """One forward and backward; returns the gradient of the tokens."""
    torch.manual_seed(4)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    ids = torch.arange(TOKENS).view(TOKENS, 1) % (EXPERTS - 1)  # one expert has no token
    probs = torch.rand(TOKENS, 1)
    fcs = ExpertWeights(params[:EXPERTS], EXPERTS), ExpertWeights(params[EXPERTS:], EXPERTS)
    transport = LocalTransport(LocalPlan.of(ids, EXPERTS))
    call = make_call(transport, resolve_activation("swiglu"), fcs, fused_main_grad=True)
    run_experts(call, x, probs).square().sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_layer_reports_each_projection_once_with_the_gradients_that_autograd_would_add() -> None:
    report = Report()
    params, plain = parameters(report), parameters(None)
    assert torch.equal(run(params), run(plain))
    assert [len(group) for group in report.groups] == [EXPERTS, EXPERTS]
    assert {id(p) for group in report.groups for p in group} == set(map(id, params))
    for param, reference in zip(params, plain, strict=True):
        assert param.grad is None and reference.grad is not None
        assert torch.equal(param.main_grad, reference.main_grad)  # type: ignore[attr-defined]


def test_frozen_weights_are_not_reported() -> None:
    report = Report()
    params = parameters(report)
    for param in params[EXPERTS:]:
        param.requires_grad_(False)
    run(params)
    assert [id(p) for group in report.groups for p in group] == list(map(id, params[:EXPERTS]))
    assert not any(param.main_grad.any() for param in params[EXPERTS:])  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["hook", "post-accumulate hook", "gradient", "other report"])
def test_what_autograd_alone_serves_keeps_its_visit(what: str) -> None:
    report = Report()
    params = parameters(report)
    assert ready_report(params) is not None
    calls: list[Tensor] = []
    if what == "hook":
        params[1].register_hook(calls.append)
    elif what == "post-accumulate hook":
        params[1].register_post_accumulate_grad_hook(calls.append)
    elif what == "gradient":
        params[1].grad = torch.ones_like(params[1])
    else:
        set_ready_report(params[1], Report())
    assert ready_report(params) is None
    run(params)
    assert not report.groups
    assert all(param.grad is not None for param in params)
    assert bool(calls) == ("hook" in what)


def test_a_backward_that_asks_for_each_gradient_has_the_parameters_in_the_graph() -> None:
    report = Report(open_=False)
    params = parameters(report)
    run(params)
    assert not report.groups and all(param.grad is not None for param in params)


def test_a_captured_backward_adds_to_main_grad_and_gives_autograd_nothing() -> None:
    """The bits of a backward that reports."""
    report = Report(open_=False, in_graphs=True)
    params, plain = parameters(report), parameters(Report())
    assert torch.equal(run(params), run(plain))
    assert not report.groups
    for param, reference in zip(params, plain, strict=True):
        assert param.grad is None
        assert torch.equal(param.main_grad, reference.main_grad)  # type: ignore[attr-defined]


def test_a_captured_backward_is_asked_for_each_parameter() -> None:
    """As Megatron's graphs ask, which pass the gradients that they are given on."""
    params = parameters(Report(open_=False, in_graphs=True))
    torch.manual_seed(4)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    ids, probs = torch.zeros(TOKENS, 1, dtype=torch.long), torch.ones(TOKENS, 1)
    fcs = ExpertWeights(params[:EXPERTS], EXPERTS), ExpertWeights(params[EXPERTS:], EXPERTS)
    transport = LocalTransport(LocalPlan.of(ids, EXPERTS))
    call = make_call(transport, resolve_activation("swiglu"), fcs)
    out = run_experts(call, x, probs).square().sum()
    dx, *dw = torch.autograd.grad(out, (x, *params), allow_unused=True)
    assert dx.any() and dw == [None] * len(params)
    assert params[0].main_grad.any()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("impl", "overlap", "accepted"),
    [
        ("local", True, True),
        ("local", False, True),
        ("transformer_engine", False, True),
        ("transformer_engine", True, False),  # whose hooks refuse a parameter without .grad
    ],
)
def test_which_graphs_may_add_to_main_grad(impl: str, overlap: bool, accepted: bool) -> None:
    pytest.importorskip("megatron.core")
    from megatron_fluid.patches.gradient_readiness import _Report

    ddp = torch.nn.Linear(1, 1)
    ddp.config = SimpleNamespace(cuda_graph_impl=impl)  # type: ignore[assignment]
    ddp.ddp_config = SimpleNamespace(overlap_grad_reduce=overlap)  # type: ignore[assignment]
    assert _Report(ddp).accepts_in_graphs() is accepted


def test_megatrons_report_is_left_behind_by_copies_and_pickles() -> None:
    pytest.importorskip("megatron.core")
    from megatron_fluid.patches.gradient_readiness import _Report

    report = _Report(torch.nn.Linear(1, 1))
    assert copy.deepcopy(report) is None and pickle.loads(pickle.dumps(report)) is None
