"""nvlink_moe on one simulated rank: every kernel of the path, forward and backward, under the
interpreter where there is no GPU.
"""

import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe import experts
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from megatron_fluid.moe.nvlink.transport import plan_nvlink
from tests.support.expert_calls import nvlink_moe
from tests.support.moe_reference import ExpertProblem
from tests.support.nvlink_calls import CANDIDATES
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = pytest.mark.interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T, K, E, H, F = 10, 2, 4, 32, 24
SENT = Schedule(stream=True, sent_rows=True)


def buffers_of(
    schedule: Schedule = NO_OVERLAP, tokens: int = T, experts: int = E, space: Any = None
) -> NvlinkBuffers:
    """Of one rank."""
    space = space or SimulatedWorkspace(1, DEVICE).rank(0)
    return NvlinkBuffers(space, tokens, H, K, experts, torch.float32, schedule=schedule)


def make(tokens: int = T, activation: str = "swiglu") -> ExpertProblem:
    """With dropped choices and an empty expert."""
    g = torch.Generator().manual_seed(1)
    ids = torch.rand(T, E - 1, generator=g).topk(K, -1).indices  # nothing goes to the last expert
    ids[0, 1] = -1
    ids[3] = -1
    return ExpertProblem.draw(ids[-tokens:].to(DEVICE), E, H, F, activation=activation)


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("schedule", "tokens", "activation", "capacity"),
    [
        *((schedule, T, "swiglu", None) for schedule in CANDIDATES.values()),
        (NO_OVERLAP, T, "swiglu", T * K),
        (NO_OVERLAP, T, "relu2", None),
        (NO_OVERLAP, 1, "swiglu", None),  # a capacity of 1 is a constant to the compiler
    ],
    ids=str,
)
def test_outputs_and_gradients_agree_with_the_reference(
    schedule: Schedule, tokens: int, activation: str, capacity: int | None
) -> None:
    """For a schedule, the order of its steps; without a GPU nothing runs beside anything."""
    buffers, problem = buffers_of(schedule, tokens), make(tokens, activation)
    expected = problem.expected(activation)
    for _ in range(2):
        y = nvlink_moe(buffers, *problem.arguments, activation, capacity)
        agree(problem.gradients(y), expected)
    buffers.workspace.check_errors()


@pytest.mark.parametrize("what", [("rows",), ("hidden",), ("rows", "hidden")], ids=str)
@pytest.mark.parametrize("schedule", [NO_OVERLAP, Schedule(stream=True), SENT], ids=str)
def test_what_is_not_kept_is_made_again(what: tuple[str, ...], schedule: Schedule) -> None:
    buffers, problem = buffers_of(schedule), make()
    y = nvlink_moe(buffers, *problem.arguments, recompute=what)
    assert y.grad_fn is not None
    kept = {tuple(t.shape) for t in y.grad_fn.saved_tensors if t is not None}  # type: ignore[attr-defined]
    assert all(shape[1] != H or shape[0] == T for shape in kept) or "rows" not in what
    assert all(shape[1] != 2 * F for shape in kept) or "hidden" not in what
    found = problem.gradients(y)
    settled = buffers.barrier_flags.counter.item()
    assert settled == ("rows" in what), (
        "peers have read what landed, before the gradient lands there"
    )
    agree(found, problem.expected())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("capacity", [None, T * K])
def test_one_matrix_for_each_expert(deferred: bool, fused: bool, capacity: int | None) -> None:
    buffers, problem = buffers_of(), make()
    (x, ids, probs, *_), leaves = problem.arguments, problem.leaves
    matrices = [[m.detach().clone().requires_grad_() for m in w] for w in leaves[2:]]
    scheduler = WeightGradScheduler()
    if deferred:
        scheduler.enable()
    for m in (*matrices[0], *matrices[1]):
        m.main_grad = torch.ones_like(m)  # type: ignore[attr-defined]
    prepared = [ExpertWeights(w, E) for w in matrices]
    for w1, w2 in (matrices, prepared):
        settings = {"capacity": capacity, "scheduler": scheduler, "fused_main_grad": fused}
        nvlink_moe(buffers, x, ids, probs, w1, w2, **settings).backward(problem.grad)
    for found, expected in zip(matrices, problem.expected()[3:], strict=True):
        values = torch.stack([m.main_grad - 1 if fused else m.grad for m in found])  # type: ignore[attr-defined]
        assert torch.allclose(values, 2 * expected, atol=1e-4)


def test_deferred_weight_gradients_run_during_the_next_layer() -> None:
    """Of two projections a layer no more than one layer's are ever queued with what they hold."""
    buffers, found = buffers_of(), []
    for deferred in (True, False):
        problem = make()
        y, *others = problem.arguments
        scheduler, queued = WeightGradScheduler(), list[int]()
        scheduler.enabled = deferred
        for _ in range(4):
            # Called behind the layer's own backward.
            y.register_hook(lambda _, s=scheduler, q=queued: q.append(s.pending()))  # type: ignore[misc]
            y = nvlink_moe(buffers, y, *others, scheduler=scheduler)
        y.backward(problem.grad)
        found.append([leaf.grad for leaf in problem.leaves])
        assert queued == [2 * deferred] * 4 and not scheduler.pending()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-8)


def test_a_recomputation_replays_its_plan() -> None:
    buffers, problem = buffers_of(), make()
    handle = plan_nvlink(buffers, problem.ids, problem.leaves[1])

    def layer(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return nvlink_moe(buffers, x, problem.ids, probs, w1, w2, handle=handle)

    y = torch.utils.checkpoint.checkpoint(layer, *problem.leaves, use_reentrant=False)
    plans = buffers.plan_flags.counter.item()
    agree(problem.gradients(y), problem.expected())
    assert buffers.plan_flags.counter.item() == plans


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("schedule", [NO_OVERLAP, SENT], ids=str)
def test_a_call_with_more_tokens_than_fit_goes_on_in_larger_buffers(
    schedule: Schedule, planned: bool
) -> None:
    """Also between forward and backward of a call whose routing is of the smaller ones."""
    whole, problem, few = buffers_of(schedule), make(), T // 2
    _, ids, probs, w1, w2 = problem.arguments
    made = [buffers_of(schedule, few, space=whole.workspace)]
    asked: list[int] = []

    def grow(tokens: int) -> NvlinkBuffers:
        asked.append(tokens)
        made.append(whole)
        return whole

    cut = [leaf.detach()[:few].requires_grad_() for leaf in problem.leaves[:2]]
    small = ExpertProblem(ids[:few], [*cut, w1, w2], problem.grad[:few])
    before = nvlink_moe(made[0], *small.arguments, grow=grow)
    assert not asked
    handle = plan_nvlink(made[0], ids, probs, grow=grow) if planned else None
    after = nvlink_moe(made[-1], *problem.arguments, handle=handle, grow=grow)
    assert asked == [T]
    for y, each in ((before, small), (after, problem)):
        agree(each.gradients(y), each.expected())
    whole.workspace.check_errors()


def test_what_does_not_fit_is_named() -> None:
    buffers = buffers_of()
    x, ids, probs, w1, w2 = make().arguments
    with pytest.raises(ConfigError, match="activation"):
        nvlink_moe(buffers, x, ids, probs, w1, w2, "tanh")
    more = torch.zeros(T + 1, H), ids.new_zeros(T + 1, K), torch.ones(T + 1, K)
    # Told by the plan; and before, since a bounded one is not read.
    for capacity, why in ((None, "$"), (T * K, "; with a capacity factor buffers stay as the")):
        words = f"tokens of a rank: found {T + 1}, allowed: at most max_tokens = {T}{why}"
        with pytest.raises(ConfigError, match=words):
            nvlink_moe(buffers, *more, w1, w2, capacity=capacity)
    with pytest.raises(ConfigError, match="topk_ids"):
        nvlink_moe(buffers, x, ids[:, :1], probs, w1, w2)
    with pytest.raises(ConfigError, match="recompute"):
        nvlink_moe(buffers, x, ids, probs, w1, w2, recompute=("everything",))
    with pytest.raises(ConfigError, match="width of weight2"):
        nvlink_moe(buffers, x, ids, probs, w1, w2[..., :8])


def test_inference_keeps_nothing_even_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = buffers_of()
    x, ids, probs, *weights = make().arguments
    w1, w2 = (torch.nn.Parameter(w.detach()) for w in weights)
    kept, real = [], experts.PlainExperts.forward

    def noted(self: Any, rows: Tensor, *args: Any) -> Any:
        out = real(self, rows, *args)
        kept.append((weakref.ref(rows), out[1] is not None))
        return out

    monkeypatch.setattr(experts.PlainExperts, "forward", noted)
    with torch.no_grad():
        y = nvlink_moe(buffers, x, ids, probs, w1, w2)
    assert not y.requires_grad
    rows, hidden = kept.pop()
    assert rows() is None and not hidden
    y = nvlink_moe(buffers, x.detach(), ids, probs.detach(), w1, w2)
    assert y.requires_grad
    rows, hidden = kept.pop()
    assert rows() is not None and hidden


@pytest.mark.parametrize("schedule", [NO_OVERLAP, Schedule(stream=True), SENT], ids=str)
def test_a_kept_graph_gives_its_gradients_again(schedule: Schedule) -> None:
    problem = make()
    y = nvlink_moe(buffers_of(schedule), *problem.arguments)
    first, *others = (
        [g.clone() for g in torch.autograd.grad(y, problem.leaves, problem.grad, kept)]
        for kept in (True, True, True, False)
    )
    for again in others:
        torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_backward_holds_what_it_needs_and_no_more(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The gradient of fc1's output takes its place; dw1 may have the memory of dw2's operands."""
    problem = make()
    y = nvlink_moe(buffers_of(), *problem.arguments)
    assert y.grad_fn is not None
    [hidden] = [t.data_ptr() for t in y.grad_fn.saved_tensors if t.shape[1] == 2 * F]  # type: ignore[attr-defined]
    steps: list[tuple[int, list[Any]]] = []
    real = experts.weight_grads

    def noted(fc: ExpertWeights, dy: Tensor, x: Tensor, *rest: Any) -> list[Tensor]:
        alive = [ref() is not None for _, refs in steps for ref in refs]
        assert not any(alive), "what the other gradient was made of is still there"
        steps.append((dy.data_ptr(), [weakref.ref(dy), weakref.ref(x)]))
        return real(fc, dy, x, *rest)

    monkeypatch.setattr(experts, "weight_grads", noted)
    y.backward(problem.grad, retain_graph=kept)
    (_, _), (grad_hidden, _) = steps
    assert (grad_hidden == hidden) != kept


def test_ids_and_probs_may_begin_anywhere() -> None:
    """Views off a 16-byte boundary are copied: prepared launches take it for granted."""
    buffers = buffers_of()
    x, ids, probs, w1, w2 = make().arguments
    wide = [
        torch.cat([t.detach().flatten()[:1], t.detach().flatten()])[1:].view(T, K)
        for t in (ids.int(), probs)
    ]
    assert all(t.data_ptr() % 16 and t.is_contiguous() for t in wide)
    handle = plan_nvlink(buffers, *wide)
    assert handle.ids.data_ptr() % 16 == 0
    assert torch.equal(
        nvlink_moe(buffers, x, wide[0], wide[1], w1, w2, handle=handle),
        nvlink_moe(buffers, x, ids, probs, w1, w2),
    )


@pytest.mark.parametrize("schedule", [NO_OVERLAP, Schedule(sent_rows=True)], ids=str)
def test_rows_without_room_do_not_bring_what_was_there_before(schedule: Schedule) -> None:
    """In exact mode too, where a token names the only expert twice."""
    buffers = buffers_of(schedule, experts=1)
    buffers.local("combine", torch.float32).fill_(float("nan"))
    x, ids, probs, w1, w2 = make().arguments
    y = nvlink_moe(buffers, x, torch.zeros_like(ids), probs, w1[:1], w2[:1])
    assert y.isfinite().all() and y.any()
