"""Deferred weight gradients: none lost, twice or from a backward that failed, hooks as ever."""

import functools
import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_fluid.backward import autograd
from megatron_fluid.backward.deferred_linear import deferred_linear
from megatron_fluid.backward.main_grad import add_product_to_main_grad, mark_added_to_main_grad
from megatron_fluid.backward.weight_grads import WeightGradScheduler, deliver_gradients
from megatron_fluid.errors import ConfigError


def acts_in_backward(x: Tensor, act: Callable[[], object]) -> Tensor:
    """A copy of x, in whose backward `act` is called."""

    def hook(grad: Tensor) -> None:
        act()

    copy = x.clone()
    copy.register_hook(hook)
    return copy


class Exchange:
    def __init__(self, finished_after: int = 10**9) -> None:
        self.left = finished_after

    def done(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.fixture
def scheduler() -> WeightGradScheduler:
    scheduler = WeightGradScheduler()
    scheduler.enable()
    return scheduler


def layers(count: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(5, 5, generator=generator, dtype=torch.float64))
        for _ in range(count)
    ]


def run(
    weights: Sequence[Tensor], x: Tensor, scheduler: WeightGradScheduler | None, through: Any = None
) -> Tensor:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        if scheduler is None:
            return torch.tanh(torch.nn.functional.linear(x, weight))
        return torch.tanh(deferred_linear(x, weight, scheduler=scheduler))

    for weight in weights:
        one = functools.partial(layer, weight=weight)
        x = one(x) if through is None else through(one, x)
    return x


def expected(count: int, inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = layers(count)
    for x in inputs:
        run(weights, x, None).sum().backward()
    return [weight.grad for weight in weights if weight.grad is not None]


def inputs(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def same(weights: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
    found = [weight.grad for weight in weights]
    torch.testing.assert_close(found, list(gradients), rtol=1e-12, atol=1e-14)


def reentrant(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def hooked(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize(
    "through", [None, reentrant, hooked], ids=["plain", "reentrant", "non-reentrant"]
)
@pytest.mark.parametrize("count", [1, 14])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_are_complete_when_backward_returns(
    scheduler: WeightGradScheduler, through: Any, count: int, microbatches: int
) -> None:
    weights, reference = layers(count), layers(count)
    for x, other in zip(inputs(microbatches), inputs(microbatches), strict=True):
        for each in (x, other):
            each.requires_grad_(through is not None)
        run(weights, x, scheduler, through).sum().backward()
        assert scheduler.pending() == 0
        run(reference, other, None).sum().backward()
        assert (x.grad is None) == (other.grad is None) == (through is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=0)
    same(weights, expected(count, inputs(microbatches)))
    scheduler.finish_batch()
    scheduler.finish_batch()
    same(weights, expected(count, inputs(microbatches)))


def test_hooks_fire_once_with_the_gradient_in_place(scheduler: WeightGradScheduler) -> None:
    (weight,) = layers(1)
    fired: list[str] = []

    def check(name: str, gradient: Tensor | None) -> None:
        assert gradient is not None and gradient.abs().sum() > 0
        fired.append(name)

    weight.register_hook(lambda gradient: check("tensor", gradient))
    weight.register_post_accumulate_grad_hook(lambda parameter: check("post", parameter.grad))
    # What DistributedDataParallel of torch and of Megatron do: a hook on the node that accumulates.
    view = weight.expand_as(weight)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    node.register_hook(lambda *unused: check("node", weight.grad))
    for turn in range(1, 4):
        run([weight], inputs(1)[0], scheduler).sum().backward()
        assert sorted(fired) == sorted(["tensor", "post", "node"] * turn)


def test_weights_that_are_frozen_before_the_backward_get_none(
    scheduler: WeightGradScheduler,
) -> None:
    weights = layers(3)
    y = run(weights, inputs(1)[0], scheduler)
    weights[1].requires_grad_(False)
    y.sum().backward()
    assert weights[1].grad is None
    same(weights[::2], expected(3, inputs(1))[::2])


def test_another_threads_tasks_are_left_to_its_own_backward(scheduler: WeightGradScheduler) -> None:
    queued, looked, ran = threading.Event(), threading.Event(), []
    (weight,) = layers(1)

    def queue() -> None:
        scheduler.submit("other", [weight], lambda: [torch.ones_like(weight)])
        queued.set()
        assert looked.wait(30)

    def go_through(act: Callable[[], None]) -> None:
        acts_in_backward(torch.ones(2, requires_grad=True), act).sum().backward()

    other = threading.Thread(target=go_through, args=(queue,))
    other.start()
    assert queued.wait(30)
    go_through(lambda: ran.append(scheduler.run_during([Exchange()])))
    looked.set()
    other.join()
    assert ran == [0]
    assert weight.grad is not None and torch.equal(weight.grad, torch.ones_like(weight))


def test_a_backward_that_is_recorded_defers_nothing(scheduler: WeightGradScheduler) -> None:
    weights, [x] = layers(2), inputs(1)
    loss = run(weights, x.requires_grad_(), scheduler).sum()
    with pytest.raises(ConfigError, match="create_graph: found True, allowed: False"):
        loss.backward(create_graph=True)
    assert not scheduler.pending()
    run(weights, x, scheduler).sum().backward()
    same(weights, expected(2, [x]))


def test_a_failed_backward_leaves_nothing_behind(scheduler: WeightGradScheduler) -> None:
    weights = layers(4)
    x = run(weights[:2], inputs(1)[0].requires_grad_(), scheduler)

    def fail() -> None:
        raise ArithmeticError("overflow in backward")

    with pytest.raises(ArithmeticError) as caught:
        run(weights[2:], acts_in_backward(x, fail), scheduler).sum().backward()
    del x
    gc.collect()
    assert scheduler.pending() == 0
    scheduler.finish_batch()
    assert all(weight.grad is None for weight in weights), "tasks of the failed backward ran"
    run(weights, inputs(1)[0], scheduler).sum().backward()
    same(weights, expected(4, inputs(1)))
    # Alive until here: it must not keep the tasks alive.
    assert caught.value.__traceback__ is not None


def submits(
    x: Tensor, weight: Tensor, compute: Any, after: Any, scheduler: WeightGradScheduler
) -> Tensor:
    """Submits `compute` for `weight` in backward, then calls `after`."""
    return acts_in_backward(x, lambda: (scheduler.submit("task", [weight], compute), after()))  # type: ignore[func-returns-value]


def test_a_failing_task_takes_the_rest_of_its_backward_with_it(
    scheduler: WeightGradScheduler,
) -> None:
    weights = layers(2)
    ran: list[int] = []

    def fail() -> list[Tensor]:
        raise ArithmeticError("no dW")

    def fine() -> list[Tensor]:
        ran.append(1)
        return [torch.ones_like(weights[1])]

    x = submits(inputs(1)[0].requires_grad_(), weights[1], fine, lambda: None, scheduler)
    with pytest.raises(ArithmeticError, match="no dW") as caught:
        submits(x, weights[0], fail, lambda: None, scheduler).sum().backward()
    scheduler.finish_batch()
    assert not ran and scheduler.pending() == 0
    assert caught.value.__traceback__ is not None  # its frames hold the failed backward's queue


def test_run_during_runs_while_the_exchange_is_in_flight(scheduler: WeightGradScheduler) -> None:
    weights = layers(5)
    ran: list[int] = []
    counts: list[int] = []

    def beside(exchanges: list[Exchange], limit: int | None) -> Callable[[], None]:
        return lambda: counts.append(scheduler.run_during(exchanges, limit))

    def task(i: int) -> Callable[[], list[Tensor]]:
        return lambda: (ran.append(i), [torch.full_like(weights[i], float(i))])[1]  # type: ignore[func-returns-value]

    def nothing() -> None:
        counts.append(-1)

    x = inputs(1)[0].requires_grad_()
    # Backward goes from the last to the first.
    # Nothing in flight: nothing runs.
    x = submits(x, weights[4], task(4), beside([], None), scheduler)
    # It ends after one task.
    x = submits(x, weights[3], task(3), beside([Exchange(1)], None), scheduler)
    x = submits(x, weights[2], task(2), nothing, scheduler)
    x = submits(x, weights[1], task(1), beside([Exchange()], 1), scheduler)
    x = submits(x, weights[0], task(0), nothing, scheduler)
    x.sum().backward()
    assert counts == [-1, 1, -1, 1, 0]
    assert ran == [0, 1, 2, 3, 4], "oldest first"
    assert all(torch.equal(w.grad, torch.full_like(w, float(i))) for i, w in enumerate(weights))  # type: ignore[arg-type]


def test_outside_of_backward_and_after_disable_tasks_run_at_once(
    scheduler: WeightGradScheduler,
) -> None:
    weights = layers(2)
    scheduler.submit("outside", [weights[0]], lambda: [torch.ones_like(weights[0])])
    assert weights[0].grad is not None and weights[0].grad.sum() == weights[0].numel()
    seen: list[bool] = []

    def after() -> None:
        scheduler.disable()  # flushes
        seen.append(weights[1].grad is not None)

    x, ones = inputs(1)[0].requires_grad_(), torch.ones_like(weights[1])
    submits(x, weights[1], lambda: [ones], after, scheduler).sum().backward()
    assert seen == [True] and not scheduler.is_enabled()
    with pytest.raises(RuntimeError, match="odd: 2 gradients for 1 parameters"):
        scheduler.submit("odd", [weights[0]], lambda: [torch.ones(1), torch.ones(1)])


def test_weights_that_are_computed_are_left_to_autograd(scheduler: WeightGradScheduler) -> None:
    (weight,) = layers(1)
    (reference,) = layers(1)
    deferred_linear(inputs(1)[0], weight * 2, scheduler=scheduler).sum().backward()
    torch.nn.functional.linear(inputs(1)[0], reference * 2).sum().backward()
    assert reference.grad is not None
    same([weight], [reference.grad])


def test_under_autocast_a_linear_is_torchs(scheduler: WeightGradScheduler) -> None:
    weight, reference = (nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2))
    x = torch.linspace(-2, 2, 20).view(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = deferred_linear(x, weight, scheduler=scheduler)
        expected = torch.nn.functional.linear(x, reference)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert weight.grad is not None and reference.grad is not None
    assert torch.equal(weight.grad, reference.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grad_gets_the_product_in_its_own_precision(
    dtype: torch.dtype, rows: int, overwrite: bool
) -> None:
    generator = torch.Generator().manual_seed(rows)
    left, right = (torch.randn(rows, width, generator=generator).to(dtype) for width in (3, 4))
    before = torch.randn(3, 4, generator=generator)
    main_grad = before.clone()
    add_product_to_main_grad(main_grad, left, right, overwrite)
    expected = left.float().t() @ right.float()
    torch.testing.assert_close(
        main_grad, expected if overwrite else before + expected, rtol=1e-6, atol=1e-6
    )


def test_a_tensor_hook_gets_the_sum_of_all_uses_in_autograds_order(
    scheduler: WeightGradScheduler,
) -> None:
    weight, x, seen = nn.Parameter(torch.ones(3, 3)), torch.ones(2, 3), list[Tensor]()
    weight.register_hook(seen.append)  # what it sends to other ranks must not wait in a queue
    y = deferred_linear(deferred_linear(x, weight, "a", scheduler), weight, "b", scheduler)
    y.sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.full((3, 3), 12.0))


def test_many_gradients_are_delivered_by_one_backward_and_not_copied() -> None:
    params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(5)]
    gradients = list(torch.arange(60.0).view(5, 3, 4).unbind(0))
    backwards: list[int] = []
    for param in params:
        param.register_post_accumulate_grad_hook(
            lambda _: backwards.append(torch._C._current_graph_task_id())
        )
    deliver_gradients(params, gradients)
    assert len(backwards) == 5 and len(set(backwards)) == 1 and backwards[0] >= 0
    for param, gradient in zip(params, gradients, strict=True):
        assert param.grad is not None and param.grad.data_ptr() == gradient.data_ptr()
    deliver_gradients(params, [torch.ones(3, 4)] * 5)
    same(params, list(torch.arange(60.0).view(5, 3, 4) + 1))


def test_many_parameters_are_marked_with_one_memory_but_those_that_want_zeros() -> None:
    params = [nn.Parameter(torch.zeros(3, 4)) for _ in range(3)]
    for param in params:
        param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    given = mark_added_to_main_grad(params)
    assert all(param.grad_added_to_main_grad for param in params)  # type: ignore[attr-defined]
    assert [(g.shape, g.dtype, g.stride()) for g in given] == [
        (p.shape, p.dtype, p.stride()) for p in params
    ]
    assert len({g.data_ptr() for g in given}) == 1
    params[1].zero_out_wgrad = True  # type: ignore[attr-defined]
    given = mark_added_to_main_grad(params)
    assert not given[1].any() and given[0].data_ptr() != given[1].data_ptr()


def test_a_backward_that_leaves_deferred_weights_out_says_so_once(
    scheduler: WeightGradScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    autograd._say_left_out.cache_clear()
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        torch.autograd.grad(deferred_linear(x, weight, scheduler=scheduler).sum(), x)
    (record,) = caplog.records
    assert "gives deferred weights no gradient" in record.message and weight.grad is None
    deferred_linear(x, weight, scheduler=scheduler).sum().backward()
    assert weight.grad is not None and len(caplog.records) == 1


@pytest.mark.slow
def test_a_compiled_backward_computes_deferred_weight_gradients(
    scheduler: WeightGradScheduler,
) -> None:
    """Compiled autograd never calls what is queued for the end of a backward."""
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    def step(x: Tensor) -> None:
        deferred_linear(x, weight, scheduler=scheduler).square().sum().backward()

    step(x)
    expected, weight.grad = weight.grad, None
    try:
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(step, backend="eager")(x)
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(weight.grad, expected)


def test_a_recomputation_is_taken_for_that_of_the_ddp_that_has_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicated, beside = nn.Linear(2, 2), nn.Linear(2, 2)
    monkeypatch.setattr(autograd, "_replicated", {replicated})
    monkeypatch.setattr(autograd, "_running", lambda: 0)
    assert autograd._inside_ddp([replicated.weight])
    assert not autograd._inside_ddp([beside.weight])
