"""Gradients that are not zeroed beside CUDA graphs, which a stand-in plays: what is captured is
noted down, and a replay does it again without a word to anybody."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core")

from megatron_fluid.backward import fresh_grads
from megatron_fluid.patches import gradient_readiness, gradient_zeroing
from megatron_fluid.patches.engine.module_hooks import ModuleHooks

MICROBATCHES, SIZE = 3, 6


class Ddp(SimpleNamespace):
    """One that may be referred to weakly."""


class Model:
    """Two projections of two parameters, in one buffer with room around them."""

    def __init__(self) -> None:
        self.buffer = SimpleNamespace(grad_data=torch.full((40,), 9.0), extra_main_grads=[])
        self.params = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(4)]
        self.buffer.param_index_map = {
            p: (9 * n + 1, 9 * n + 7, 0) for n, p in enumerate(self.params)
        }
        for param, (begin, end, _) in self.buffer.param_index_map.items():
            param.main_grad = self.buffer.grad_data[begin:end]  # type: ignore[attr-defined]
        self.bucket_group = SimpleNamespace()
        self.ddp = Ddp(
            buffers=[],
            expert_parallel_buffers=[self.buffer],
            param_to_bucket_group=dict.fromkeys(self.params, self.bucket_group),
            module=torch.nn.ParameterList(self.params),
        )
        self.zeroing = gradient_zeroing.GradientZeroing(self.ddp)
        self.projections = [self.params[:2], self.params[2:]]
        self.values = torch.zeros(())

    def grads(self) -> Tensor:
        return torch.stack([param.main_grad for param in self.params])  # type: ignore[attr-defined]

    def reset(self) -> list[bool]:
        """Megatron's call before an iteration; which projections were spared, now full of NaNs."""

        def whole(buffer: Any) -> None:
            buffer.grad_data.zero_()

        gradient_zeroing.reset(whole)(self.buffer)
        groups = [fresh_grads.group_of(params) for params in self.projections]
        spared = [group is not None and group.fresh for group in groups]
        for params, fresh in zip(self.projections, spared, strict=True):
            for param in params if fresh else ():
                param.main_grad.fill_(float("nan"))  # type: ignore[attr-defined]
        around = self.buffer.grad_data.clone()
        for begin, end, _ in self.buffer.param_index_map.values():
            around[begin:end] = 0.0
        assert not around.any()
        return spared

    def backward(self, launch: Callable[[Callable[[], None]], None], skip: int | None) -> None:
        """An iteration's backward passes, each of which adds `values` to all gradients, and their
        reduction."""
        for _ in range(MICROBATCHES):
            for number, params in enumerate(self.projections):
                if number == skip:
                    continue
                overwrite = fresh_grads.begin(params)
                launch(lambda params=params, overwrite=overwrite: self._add(params, overwrite))
                if overwrite:
                    fresh_grads.written(params)
                self.zeroing.reported(params)
        gradient_zeroing.start_grad_sync(lambda group: None)(self.bucket_group)

    def _add(self, params: Sequence[Tensor], overwrite: bool) -> None:
        for param in params:
            grad: Tensor = param.main_grad  # type: ignore[attr-defined]
            grad.copy_(self.values.expand(SIZE)) if overwrite else grad.add_(self.values)


class Graph:
    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []


class Wrapper:
    """As Megatron's FullCudaGraphWrapper: the second iteration captures, and all from there on
    replay."""

    def __init__(self, model: Model) -> None:
        self.model, self.skip = model, None
        self.cuda_graph: dict[str, Graph | None] = {"training": None}
        self.iteration = 0
        self.error: Exception | None = None
        self.zeroed: list[bool] = []  # before each replay

    def run(self, forward_only: bool) -> None:
        if self.error is not None:
            raise self.error
        graph = self.cuda_graph["training"]
        if graph is None and self.iteration == 1:
            graph = Graph()
            Capture.on = True
            self.model.backward(graph.launches.append, self.skip)
            Capture.on = False
            self.cuda_graph["training"] = graph
        self.iteration += 1
        if graph is None:
            self.model.backward(lambda launch: launch(), self.skip)
            return
        self.zeroed.append(not self.model.grads().isnan().all())
        for launch in graph.launches:
            launch()

    fluid = gradient_zeroing.whole_iteration(run)


class Capture:
    on = False


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setattr(gradient_zeroing, "_off_reason", lambda ddp: None)
    # What is zeroed during a capture is zeroed at once, beside it.
    monkeypatch.setattr(
        fresh_grads, "_capturing", lambda t: Capture.on and isinstance(t, torch.nn.Parameter)
    )
    yield Model()
    fresh_grads.settle_all()


def iterations(
    model: Model, call: Callable[[], None], number: int = 5, wanted: int = MICROBATCHES
) -> list[list[bool]]:
    """What was spared in each iteration, whose gradients are looked at."""
    spared = []
    for _ in range(number):
        model.values.add_(1.0)
        spared.append(model.reset())
        call()
        assert (model.grads() == wanted * model.values).all()
    return spared


NONE, BOTH = [False, False], [True, True]


def test_a_graph_of_the_iteration_writes_and_its_replays_count_as_writing(model: Model) -> None:
    wrapper = Wrapper(model)
    assert iterations(model, lambda: wrapper.fluid(forward_only=False)) == [NONE] + 4 * [BOTH]
    assert wrapper.zeroed == [False] * 4 and not fresh_grads.any_fresh()


def test_a_graph_that_nobody_watches_adds_to_zeros(model: Model) -> None:
    wrapper = Wrapper(model)
    found = iterations(model, lambda: wrapper.run(forward_only=False))
    assert found == [NONE, BOTH, NONE, NONE, NONE]

    def twice() -> None:
        wrapper.run(forward_only=False)
        wrapper.run(forward_only=False)

    iterations(model, twice, 2, 2 * MICROBATCHES)


def test_a_graph_that_was_captured_with_zeros_goes_on_adding(model: Model) -> None:
    """The second projection's first iteration is the captured one."""
    wrapper = Wrapper(model)
    wrapper.skip = 1  # type: ignore[assignment]
    model.values.add_(1.0)
    model.reset()
    wrapper.fluid(forward_only=False)
    wrapper.skip = None
    found = iterations(model, lambda: wrapper.fluid(forward_only=False), 4)
    # After the capture, which looked like a write, it is zeroed before the replay.
    assert found == [[True, False], BOTH, [True, False], [True, False]]


def test_eager_iterations_between_replays_write_too(model: Model) -> None:
    wrapper = Wrapper(model)
    iterations(model, lambda: wrapper.fluid(forward_only=False), 3)
    eager = lambda: model.backward(lambda launch: launch(), None)  # noqa: E731
    assert iterations(model, eager, 2) == [BOTH, BOTH]
    assert iterations(model, lambda: wrapper.fluid(forward_only=False), 2) == [BOTH, BOTH]


def test_a_graph_is_captured_anew(model: Model) -> None:
    wrapper = Wrapper(model)
    iterations(model, lambda: wrapper.fluid(forward_only=False), 3)
    wrapper.cuda_graph["training"], wrapper.iteration = None, 0
    assert iterations(model, lambda: wrapper.fluid(forward_only=False), 4) == [BOTH] * 4


def test_a_second_replay_without_zeros_adds(model: Model) -> None:
    wrapper = Wrapper(model)

    def twice() -> None:
        wrapper.fluid(forward_only=False)
        wrapper.fluid(forward_only=False)

    iterations(model, lambda: wrapper.fluid(forward_only=False), 2)
    assert iterations(model, twice, 3, 2 * MICROBATCHES) == [BOTH] * 3


def test_a_replay_that_did_not_come_about_leaves_the_marks(model: Model) -> None:
    wrapper = Wrapper(model)
    iterations(model, lambda: wrapper.fluid(forward_only=False), 3)
    assert model.reset() == BOTH
    wrapper.error = StopIteration()
    with pytest.raises(StopIteration):
        wrapper.fluid(forward_only=False)
    fresh_grads.settle_all()
    assert not model.grads().any()


def test_a_forward_alone_leaves_the_marks(model: Model) -> None:
    wrapper = Wrapper(model)
    iterations(model, lambda: wrapper.fluid(forward_only=False), 3)
    assert model.reset() == BOTH
    wrapper.cuda_graph["training"] = Graph()  # which does nothing
    wrapper.fluid(forward_only=True)
    assert all(fresh_grads.group_of(p).fresh for p in model.projections)  # type: ignore[union-attr]


def test_parameters_that_are_reported_in_other_company_are_always_zeroed(model: Model) -> None:
    def run() -> None:
        model.backward(lambda launch: launch(), None)

    assert iterations(model, run, 2) == [NONE, BOTH]
    model.projections = [model.params[:3], model.params[3:]]
    # The last is alone from now on.
    assert iterations(model, run, 3) == [NONE, [False, True], [False, True]]


def test_gradients_that_lie_elsewhere_are_always_zeroed(model: Model) -> None:
    """Such as an fp32 copy of a bf16 gradient."""
    copy = torch.zeros(SIZE)
    model.params[1].main_grad = copy  # type: ignore[attr-defined]
    model.buffer.extra_main_grads.append(copy)

    def run() -> None:
        model.backward(lambda launch: launch(), None)
        copy.zero_()

    for _ in range(3):
        found = model.reset()
        run()
    assert found == [False, True]


OPEN = {
    "use_megatron_fsdp": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "overlap_param_gather": True,
    "use_distributed_optimizer": True,
}


@pytest.mark.parametrize(
    ("settings", "impl", "modules", "words"),
    [
        ({}, "none", [], None),
        ({}, "full_iteration", [], None),
        ({}, "local", ["mlp"], None),
        ({}, "local", ["attn"], "graph"),
        ({}, "local", [], "graph"),
        ({}, "transformer_engine", ["attn", "moe"], "graph"),
        ({"use_megatron_fsdp": True}, "none", [], "FSDP"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "none", [], "gathered into"),
        ({"use_distributed_optimizer": False}, "none", [], "gathered into"),
    ],
)
def test_settings_that_rule_it_out(
    settings: dict[str, bool], impl: str, modules: list[str], words: str | None
) -> None:
    from megatron.core.distributed import DistributedDataParallel

    ddp = DistributedDataParallel.__new__(DistributedDataParallel)
    named = [SimpleNamespace(name=name) for name in modules]
    config = SimpleNamespace(cuda_graph_impl=impl, cuda_graph_modules=named)
    vars(ddp).update(config=config, ddp_config=SimpleNamespace(**OPEN | settings))
    reason = gradient_zeroing._off_reason(ddp)
    assert reason is None if words is None else words in str(reason)
    assert gradient_zeroing._off_reason(torch.nn.Linear(1, 1)) is not None


def test_guards_are_no_hooks_that_our_path_would_have_to_run(model: Model) -> None:
    """Nor are those that a copied module took along."""
    modules = model.ddp.module
    before = ModuleHooks(experts=modules)
    iterations(model, lambda: model.backward(lambda launch: launch(), None), 2)
    assert len(modules._forward_pre_hooks) == len(model.projections)
    assert model.reset() == BOTH
    for hooks in (
        before,
        ModuleHooks(experts=modules),
        ModuleHooks(experts=copy.deepcopy(modules)),
    ):
        assert not hooks.registered() and hooks.foreign() is None
        hooks.run_parameter_gather()
    modules.register_forward_pre_hook(lambda module, inputs: None)
    assert before.registered() and "pre-hook" in str(before.foreign())
    assert model.grads().isnan().all()
    for hook in modules._forward_pre_hooks.values():
        hook(modules, ())
    assert not model.grads().any()


def _spared(model: Model) -> None:
    """One iteration, after which both projections are fresh."""
    model.backward(lambda launch: launch(), None)
    assert model.reset() == [True, True]


def test_a_gradient_that_a_kernel_added_to_no_sums_is_an_error(model: Model) -> None:
    """One that ran past the guards; Megatron's hook would take its word for it."""
    calls: list[Tensor] = []
    ddp = SimpleNamespace(_fluid_report=object())
    make = gradient_readiness.backward_post_hook(lambda self, param: lambda *_: calls.append(param))
    _spared(model)
    one, other = model.params[0], model.params[2]
    one.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="--fluid-disable-patch gradient-zeroing"):
        make(ddp, one)()
    other.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    make(ddp, other)()  # what autograd has is added to zeros
    assert [call is other for call in calls] == [True]
    assert not torch.stack([p.main_grad for p in model.params[2:]]).any()  # type: ignore[attr-defined]


def test_parameters_that_other_kernels_served_are_zeroed_once_more(model: Model) -> None:
    _spared(model)
    with torch.no_grad():
        gradient_zeroing.serve_elsewhere(model.params[:2])
    assert model.grads().isnan().all()  # nobody will add
    model.backward(lambda launch: launch(), None)
    gradient_zeroing.serve_elsewhere(model.params[:2])  # none is fresh now
    assert model.reset() == [False, True]
