"""Iterations whose graph lacks room, by a stand-in for Megatron's wrapper: no GPU here captures
one. tests/gpu/test_megatron_graphs.py trains with real ones."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron_fluid.moe.room import ROOMS, LayerRoom
from megatron_fluid.patches import iteration_graph
from megatron_fluid.patches.iteration_graph import graphed_iteration

WARM_UP, MICROBATCHES = 3, 2


class Buffers:
    def __init__(self) -> None:
        self.overflow = torch.zeros(1, dtype=torch.int32)
        self.most_rows = 10_000


class Model(torch.nn.Module):
    """A layer that receives `rows` in each microbatch, and drops what it has no room for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("counted", torch.zeros(1))
        self.main_grad, self.rows, self.learns = torch.zeros(1), 200, True
        self.room, self.exchange = LayerRoom(), Buffers()

    def zero_grad_buffer(self) -> None:
        self.main_grad.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        capacity = self.room.capacity(self.exchange)  # type: ignore[arg-type]
        if capacity is None:
            self.room.saw(self.rows)
            capacity = self.rows
        elif self.rows > capacity:
            self.exchange.overflow.fill_(self.rows)
        self.counted += self.rows
        if self.learns:
            self.main_grad += x * min(capacity, self.rows)
        return x * min(capacity, self.rows)


class Wrapper:
    """What FullCudaGraphWrapper does, its graph being the function itself."""

    curr_iteration: dict[str, int]

    def __init__(self, function: Any) -> None:
        type(self).curr_iteration = {"training": 0, "validation": 0}
        self.forward_backward_func, self.cuda_graph_warmup_steps = function, WARM_UP
        self.graphs: dict[str, Any] = {"training": None, "validation": None}
        self.static_loader = SimpleNamespace(static_buffers={"training": [], "validation": []})
        self.captures = 0

    def curr_iter(self, stage: str) -> int:
        return self.curr_iteration[stage]

    def reset_cuda_graph(self, stage: str) -> None:
        self.graphs[stage], self.curr_iteration[stage] = None, 0

    def __call__(self, **given: Any) -> Any:
        stage = "validation" if given["forward_only"] else "training"
        data = [next(given["data_iterator"]) for _ in range(given["num_microbatches"])]
        self.static_loader.static_buffers[stage] = data
        given["data_iterator"] = [iter(data)]
        if self.curr_iter(stage) == self.cuda_graph_warmup_steps:
            self.captures += 1
            count = given["num_microbatches"]
            self.graphs[stage] = functools.partial(
                self.forward_backward_func, num_microbatches=count
            )
        self.curr_iteration[stage] += 1
        if self.graphs[stage] is not None:
            given.pop("num_microbatches")
            return self.graphs[stage](**given)
        return self.forward_backward_func(**given)


def _forward_backward(**given: Any) -> float:
    return sum(
        given["forward_step_func"](given["data_iterator"][0], given["model"]).item()
        for _ in range(given["num_microbatches"])
    )


def _step(data: Iterator[torch.Tensor], model: Model) -> torch.Tensor:
    found: torch.Tensor = model(next(data) * (1 + 0 * torch.rand(())))
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run(model, rows, forward_only, microbatches)`: the result of an iteration by the patch."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for kept in ("_overflows", "_states", "_groups_of_losses", "_microbatches"):
        monkeypatch.setattr(iteration_graph, kept, {})
    monkeypatch.setattr(iteration_graph, "_sums_for_the_log", lambda: iter(()))
    monkeypatch.setattr(ROOMS, "layers", type(ROOMS.layers)())
    monkeypatch.setattr(ROOMS, "buffers", type(ROOMS.buffers)())
    monkeypatch.setattr(ROOMS, "margin", 0.125)
    wrapper, call = Wrapper(_forward_backward), graphed_iteration(Wrapper.__call__)

    def one(
        model: Model, rows: int, forward_only: bool = False, microbatches: int = MICROBATCHES
    ) -> float:
        model.rows = rows
        if not forward_only:
            model.zero_grad_buffer()
        result: float = call(
            wrapper, model=model, data_iterator=iter([torch.ones(1)] * microbatches),
            num_microbatches=microbatches, seq_length=1, forward_only=forward_only,
            forward_step_func=_step,
        )  # fmt: skip
        return result

    one.wrapper = wrapper  # type: ignore[attr-defined]
    return one


def test_an_iteration_that_lacks_room_gives_what_an_eager_one_does(run: Any) -> None:
    for _ in range(2):  # a process may have another model afterwards
        model, counted = Model(), 0.0
        for rows in (200, 180, 200, 220, 225, 226, 250, 200, 400, 100):
            assert run(model, rows) == MICROBATCHES * rows
            assert model.main_grad.item() == MICROBATCHES * rows
            counted += MICROBATCHES * rows
            assert model.counted.item() == counted, "a buffer has counted an iteration twice"
        # 225 rows are 12.5% above 200. Then 25% are room, and after 400 rows 50%.
        assert run.wrapper.captures == 3 and ROOMS.margin == 0.5
        run.wrapper.reset_cuda_graph("training")
        run.wrapper.captures, ROOMS.margin = 0, 0.125


def test_the_last_eager_iteration_has_bounded_room_already(run: Any) -> None:
    model = Model()
    for rows in (200, 200, 300):
        assert run(model, rows) == MICROBATCHES * rows
    assert ROOMS.margin == 0.25 and run.wrapper.captures == 0
    run(model, 375)
    assert run.wrapper.captures == 1 and ROOMS.margin == 0.25


def test_another_number_of_microbatches_is_captured_anew(run: Any) -> None:
    model = Model()
    for microbatches in (2, 2, 2, 2, 2, 4, 4, 6):
        assert run(model, 200, microbatches=microbatches) == microbatches * 200
    assert run.wrapper.captures == 3


def test_a_capture_after_an_evaluation_gathers_parameters(run: Any) -> None:
    """Megatron's forward gathers none that are marked as gathered, and a replay has to."""
    model, group = Model(), SimpleNamespace(param_gather_dispatched=False)
    model.bucket_groups = [group]  # type: ignore[assignment]
    for _ in range(WARM_UP):
        run(model, 200)
    group.param_gather_dispatched = True  # as evaluation and checkpoints leave it
    run(model, 200)
    assert run.wrapper.captures == 1 and not group.param_gather_dispatched


@pytest.mark.parametrize("helper", [
    "multi_token_prediction.MTPLossLoggingHelper",
    "experimental_attention_variant.dsa.DSAIndexerLossLoggingHelper",
])  # fmt: skip
def test_a_replay_reduces_losses_that_megatron_keeps_for_the_log(run: Any, helper: str) -> None:
    """Megatron forgets the groups when it logs, and only a forward on the host names them."""
    model, group = Model(), object()
    name = f"megatron.core.transformer.{helper}.tracker"
    with mock.patch(name, {"avg_group": group}) as tracker:
        run(model, 200)
        tracker["avg_group"] = None  # it was logged
        run(model, 200)
        assert tracker["avg_group"] is group


def test_evaluation_has_a_graph_of_its_own_and_leaves_gradients(run: Any) -> None:
    model = Model()
    for _ in range(WARM_UP + 1):
        run(model, 200)
    model.learns = False
    for rows in (200, 200, 200, 200, 300):
        assert run(model, rows, forward_only=True) == MICROBATCHES * rows
    assert model.main_grad.item() == MICROBATCHES * 200
    assert run.wrapper.captures == 2


def test_a_model_without_layers_over_symmetric_memory_is_left_alone(run: Any) -> None:
    model = Model()
    ROOMS.layers.clear()
    for rows in (200, 300, 400, 500, 600):
        run(model, rows)
    assert not iteration_graph._overflows


def test_the_wait_for_a_replay_ends_soon_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls get rarer, but the GPU does not idle for a noticeable share of an iteration."""
    overflow, pauses = iteration_graph.Overflow(torch.device("cpu")), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) > 1.0:
            overflow._told[0] = 1

    monkeypatch.setattr(iteration_graph.time, "sleep", sleep)
    assert not overflow.found()
    assert 10 * pauses[0] < pauses[-1] < 0.002


@pytest.mark.parametrize(("implementation", "workers", "given", "expected"), [
    ("full_iteration", 2, None, 8),
    ("full_iteration", 3, None, 6),
    ("full_iteration", 2, 20, 20),
    ("full_iteration", 0, None, None),
    ("none", 2, None, 2),
])  # fmt: skip
def test_workers_have_all_sixteen_microbatches_of_a_graphed_iteration_ready(
    monkeypatch: pytest.MonkeyPatch, implementation: str, workers: int, given: int | None,
    expected: int | None,
) -> None:  # fmt: skip
    args = SimpleNamespace(
        global_batch_size=96, micro_batch_size=2, data_parallel_size=3,
        cuda_graph_impl=implementation,
    )  # fmt: skip
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    data: Any = range(4)
    loader = torch.utils.data.DataLoader(data, num_workers=workers, prefetch_factor=given)
    built = iteration_graph.read_ahead(lambda dataset, consumed: loader)(data, 0)
    assert (built, built.prefetch_factor) == (loader, expected)
    theirs = iteration_graph.read_ahead(lambda dataset, consumed: dataset)(loader, 0)
    assert theirs.prefetch_factor == expected, "a loader of the user's is left alone"
