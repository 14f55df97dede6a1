"""nvlink_moe on one simulated rank: every kernel of the path, forward and backward, under the
interpreter where there is no GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm.launch import Owners, grouped_matmul
from megatron_fluid.moe import experts
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.nvlink import transport as nvlink_transport
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from megatron_fluid.moe.nvlink.transport import plan_nvlink
from tests.support.expert_calls import nvlink_moe
from tests.support.moe_reference import gradients, moe_reference
from tests.support.nvlink_calls import CANDIDATES
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = pytest.mark.interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T, K, E, H, F = 10, 2, 4, 32, 24
SENT = Schedule(stream=True, sent_rows=True)


def make(
    seed: int = 1, gated: bool = True, schedule: Schedule = NO_OVERLAP
) -> tuple[NvlinkBuffers, Tensor, list[Tensor], Tensor]:
    """Buffers of one rank, ids [T, K] with dropped choices and an empty expert, leaves (x, probs,
    w1, w2), grad [T, H].
    """
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E - 1, generator=g).topk(K, -1).indices  # nothing goes to the last expert
    ids[0, 1] = -1
    ids[3] = -1
    shapes = [(T, H), (T, K), (E, 2 * F if gated else F, H), (E, H, F), (T, H)]
    *leaves, grad = (torch.randn(*shape, generator=g).to(DEVICE) * 0.5 for shape in shapes)
    buffers = NvlinkBuffers(
        SimulatedWorkspace(1, DEVICE).rank(0), T, H, K, E, torch.float32, schedule=schedule
    )
    return buffers, ids.to(DEVICE), [leaf.requires_grad_() for leaf in leaves], grad


def reference(ids: Tensor, leaves: list[Tensor], activation: str) -> Tensor:
    x, probs, w1, w2 = leaves
    return moe_reference(x, ids, probs, w1, w2, activation)


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("activation", "capacity"), [("swiglu", T * K), ("relu2", None)])
def test_outputs_and_gradients_agree_with_the_reference(
    activation: str, capacity: int | None
) -> None:
    buffers, ids, leaves, grad = make(gated=activation == "swiglu")
    x, probs, w1, w2 = leaves
    found = gradients(
        nvlink_moe(buffers, x, ids, probs, w1, w2, activation, capacity), leaves, grad
    )
    agree(found, gradients(reference(ids, leaves, activation), leaves, grad))


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_schedule_agrees_with_the_reference(name: str) -> None:
    """The order of its steps; without a GPU nothing runs beside anything."""
    buffers, ids, leaves, grad = make(schedule=CANDIDATES[name])
    x, probs, w1, w2 = leaves
    expected = gradients(reference(ids, leaves, "swiglu"), leaves, grad)
    for _ in range(2):
        found = gradients(nvlink_moe(buffers, x, ids, probs, w1, w2), leaves, grad)
        agree(found, expected)
    buffers.workspace.check_errors()


def test_offsets_that_a_plan_is_writing_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers, *_ = make()
    buffers.told.copy_(torch.tensor([7, 2, 9, 4, T]))
    assert buffers.earlier_offsets() == [2, 4, 7, 9]


@pytest.mark.parametrize("what", [("rows",), ("hidden",), ("rows", "hidden")], ids=str)
@pytest.mark.parametrize("schedule", [NO_OVERLAP, Schedule(stream=True), SENT], ids=str)
def test_what_is_not_kept_is_made_again(what: tuple[str, ...], schedule: Schedule) -> None:
    buffers, ids, leaves, grad = make(schedule=schedule)
    x, probs, w1, w2 = leaves
    y = nvlink_moe(buffers, x, ids, probs, w1, w2, recompute=what)
    assert y.grad_fn is not None
    kept = {tuple(t.shape) for t in y.grad_fn.saved_tensors if t is not None}  # type: ignore[attr-defined]
    assert all(shape[1] != H or shape[0] == T for shape in kept) or "rows" not in what
    assert all(shape[1] != 2 * F for shape in kept) or "hidden" not in what
    found = gradients(y, leaves, grad)
    settled = buffers.barrier_flags.counter.item()
    assert settled == ("rows" in what), (
        "peers have read what landed, before the gradient lands there"
    )
    agree(found, gradients(reference(ids, leaves, "swiglu"), leaves, grad))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("capacity", [None, T * K])
def test_one_matrix_for_each_expert(deferred: bool, fused: bool, capacity: int | None) -> None:
    buffers, ids, leaves, grad = make()
    x, probs, *_ = leaves
    _, _, _, dw1, dw2 = gradients(reference(ids, leaves, "swiglu"), leaves, grad)
    matrices = [[m.detach().clone().requires_grad_() for m in w] for w in leaves[2:]]
    scheduler = WeightGradScheduler()
    if deferred:
        scheduler.enable()
    for m in (*matrices[0], *matrices[1]):
        m.main_grad = torch.ones_like(m)  # type: ignore[attr-defined]
    prepared = [ExpertWeights(w, E) for w in matrices]
    for w1, w2 in (matrices, prepared):
        settings = {"capacity": capacity, "scheduler": scheduler, "fused_main_grad": fused}
        nvlink_moe(buffers, x, ids, probs, w1, w2, **settings).backward(grad)
    for found, expected in zip(matrices, (dw1, dw2), strict=True):
        values = torch.stack([m.main_grad - 1 if fused else m.grad for m in found])  # type: ignore[attr-defined]
        assert torch.allclose(values, 2 * expected, atol=1e-4)


def test_deferred_weight_gradients_run_during_the_next_layer() -> None:
    """Of two projections a layer no more than one layer's are ever queued, with all that they
    hold."""
    buffers, ids, leaves, grad = make()
    x, probs, w1, w2 = leaves
    scheduler, queued = WeightGradScheduler(), []
    scheduler.enable()
    y = x
    for _ in range(4):
        # Called behind the layer's own backward.
        y.register_hook(lambda _: queued.append(scheduler.pending()))
        y = nvlink_moe(buffers, y, ids, probs, w1, w2, scheduler=scheduler)
    y.backward(grad)
    assert queued == [2] * 4 and not scheduler.pending()
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    z = x
    for _ in range(4):
        z = nvlink_moe(buffers, z, ids, probs, w1, w2, scheduler=WeightGradScheduler())
    z.backward(grad)
    torch.testing.assert_close(found, [leaf.grad for leaf in leaves], rtol=1e-4, atol=1e-8)


def test_a_recomputation_replays_its_plan() -> None:
    buffers, ids, leaves, grad = make()
    handle = plan_nvlink(buffers, ids, leaves[1])

    def layer(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return nvlink_moe(buffers, x, ids, probs, w1, w2, handle=handle)

    y = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=False)
    plans = buffers.plan_flags.counter.item()
    agree(gradients(y, leaves, grad), gradients(reference(ids, leaves, "swiglu"), leaves, grad))
    assert buffers.plan_flags.counter.item() == plans


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("schedule", [NO_OVERLAP, SENT], ids=str)
def test_a_call_with_more_tokens_than_fit_goes_on_in_larger_buffers(
    schedule: Schedule, planned: bool
) -> None:
    """Also between forward and backward of a call whose routing is of the smaller ones."""
    whole, ids, leaves, grad = make(schedule=schedule)
    x, probs, w1, w2 = leaves
    few = T // 2
    made = [NvlinkBuffers(whole.workspace, few, H, K, E, torch.float32, schedule=schedule)]
    given: list[int] = []

    def grow(tokens: int) -> NvlinkBuffers:
        given.append(tokens)
        made.append(whole)
        return whole

    small = [x[:few].detach().requires_grad_(), probs[:few].detach().requires_grad_(), w1, w2]
    before = nvlink_moe(made[0], small[0], ids[:few], small[1], w1, w2, grow=grow)
    assert not given
    handle = plan_nvlink(made[0], ids, probs, grow=grow) if planned else None
    after = nvlink_moe(made[-1], x, ids, probs, w1, w2, handle=handle, grow=grow)
    assert given == [T]
    for y, inputs, tokens in ((before, small, few), (after, leaves, T)):
        expected = gradients(reference(ids[:tokens], inputs, "swiglu"), inputs, grad[:tokens])
        agree(gradients(y, inputs, grad[:tokens]), expected)
    whole.workspace.check_errors()


def test_what_does_not_fit_is_named() -> None:
    buffers, ids, (x, probs, w1, w2), _ = make()
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
    buffers, ids, (x, probs, *weights), _ = make()
    w1, w2 = (torch.nn.Parameter(w.detach()) for w in weights)
    kept = []
    real = experts.PlainExperts.forward

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
    buffers, ids, leaves, grad = make(schedule=schedule)
    x, probs, w1, w2 = leaves
    y = nvlink_moe(buffers, x, ids, probs, w1, w2)
    first = tuple(g.clone() for g in torch.autograd.grad(y, leaves, grad, retain_graph=True))
    for kept in (True, True, False):
        again = torch.autograd.grad(y, leaves, grad, retain_graph=kept)
        torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_backward_holds_what_it_needs_and_no_more(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """The gradient of fc1's output takes the place of that output; dw1 may have the memory of what
    dw2 was made of."""
    buffers, ids, leaves, grad = make()
    x, probs, w1, w2 = leaves
    y = nvlink_moe(buffers, x, ids, probs, w1, w2)
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
    y.backward(grad, retain_graph=kept)
    (_, _), (grad_hidden, _) = steps
    assert (grad_hidden == hidden) != kept


def test_ids_and_probs_may_begin_anywhere() -> None:
    """Views off a 16-byte boundary: prepared launches take it for granted, so they are copied
    there."""
    buffers, ids, (x, probs, w1, w2), _ = make()
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
    buffers = NvlinkBuffers(
        SimulatedWorkspace(1, DEVICE).rank(0), T, H, K, 1, torch.float32, schedule=schedule
    )
    buffers.local("combine", torch.float32).fill_(float("nan"))
    _, _, (x, probs, w1, w2), _ = make()
    y = nvlink_moe(
        buffers, x, torch.zeros(T, K, dtype=torch.long, device=DEVICE), probs, w1[:1], w2[:1]
    )
    assert y.isfinite().all() and y.any()


def test_one_token_a_rank() -> None:
    """A capacity of 1 is a constant to the compiler."""
    buffers = NvlinkBuffers(SimulatedWorkspace(1, DEVICE).rank(0), 1, H, K, E, torch.float32)
    _, ids, (x, probs, w1, w2), _ = make()
    leaves = [t.detach().clone().requires_grad_() for t in (x[1:2], probs[1:2], w1, w2)]
    x, probs, w1, w2 = leaves
    grad = torch.ones(1, H, device=DEVICE)
    found = gradients(nvlink_moe(buffers, x, ids[1:2], probs, w1, w2), leaves, grad)
    agree(found, gradients(reference(ids[1:2], leaves, "swiglu"), leaves, grad))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("able", [False, True])
def test_rows_are_sent_by_the_gemm_itself_where_it_can(
    monkeypatch: pytest.MonkeyPatch, able: bool, stacked: bool
) -> None:
    """Both products before a combine; else by a kernel that reads them, and the values are the
    same."""
    buffers, ids, leaves, grad = make(schedule=SENT)
    x, probs, *weights = leaves
    expected = gradients(reference(ids, leaves, "swiglu"), leaves, grad)
    sent: list[tuple[int, ...]] = []

    def sends(
        rows: Tensor, matrices: Tensor, offsets: Tensor, owners: Owners, programs: int | None = None
    ) -> None:
        sent.append(tuple(matrices.shape))
        y = grouped_matmul(rows, matrices, offsets, offsets.tolist())
        received = buffers.local("combine", rows.dtype).view(-1, H)
        assert owners.buffers.tolist() == [received.data_ptr()] and owners.shift == buffers.shift
        received[owners.origins[: y.shape[0]].long() & (1 << owners.shift) - 1] = y

    monkeypatch.setattr(nvlink_transport, "can_send", lambda rows, matrices: able)
    monkeypatch.setattr(nvlink_transport, "sent_matmul", sends)
    # Matrices that do not lie at equal distances cannot be taken for a stack.
    w1, w2 = weights if stacked else ([m.clone() for m in w.flip(0)][::-1] for w in weights)
    found = gradients(nvlink_moe(buffers, x, ids, probs, w1, w2), leaves, grad)
    assert sent == ([(E, F, H), (E, 2 * F, H)] if able and stacked else [])
    agree(found, expected)
    buffers.workspace.check_errors()
