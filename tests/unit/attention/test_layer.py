"""Attention on one process: layouts, packing, masks, the kernel choice, and the layer's behaviour
under autograd."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megatron_fluid.attention import attention_kernels, overlap, tables
from megatron_fluid.attention import layer as layer_module
from megatron_fluid.attention.attention_kernels import (
    CORE_KERNELS,
    CoreCase,
    CoreKernel,
    choose_kernel,
    window_mask,
)
from megatron_fluid.attention.exchange import symmetric
from megatron_fluid.attention.exchange.buffers import HeadBuffers
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.layouts import HeadLayout, HeadPart, SequenceLayout
from megatron_fluid.attention.packed import Rotary, expand_shared, pack_gradients, rotate_, split
from megatron_fluid.attention.reference import reference_attention
from megatron_fluid.attention.tables import FUSED
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.simulated import SimulatedWorkspace
from megatron_fluid.errors import ConfigError, FluidError


@st.composite
def _head_layouts(draw: st.DrawFn) -> HeadLayout:
    kv = draw(st.integers(1, 8))
    per = draw(st.integers(1, 6))
    heads = kv * per
    world = draw(st.sampled_from([w for w in range(1, heads + 1) if heads % w == 0]))
    most = kv // world if kv % world == 0 else 1
    return HeadLayout(heads, kv, draw(st.integers(1, 3)), world, draw(st.integers(1, max(1, most))))


@settings(max_examples=200, deadline=None)
@given(_head_layouts())
def test_every_head_is_attended_once_with_its_own_key_and_value(layout: HeadLayout) -> None:
    n, dim = layout.num_heads // layout.num_kv_heads, layout.head_dim
    # Label each row of a fused weight in Megatron's order with (kind, head).
    labels = []
    for kv in range(layout.num_kv_heads):
        labels += [(0, kv * n + i) for i in range(n)] + [(1, kv), (2, kv)]
    fused = torch.tensor([label for label in labels for _ in range(dim)])
    seen: list[int] = []
    for rank, group in itertools.product(range(layout.world), range(layout.groups)):
        part = layout.part(rank, group)
        rows = part.weight(fused)
        assert rows.shape[0] == part.width
        q, k, v = split(rows.t().reshape(2, 1, part.width).contiguous(), part)
        kinds, ids = (torch.cat([t[i].flatten() for t in (q, k, v)]) for i in range(2))
        sizes = [len(part.q_heads) * dim, len(part.kv_heads) * dim, len(part.kv_heads) * dim]
        assert kinds.tolist() == [kind for kind, size in enumerate(sizes) for _ in range(size)]
        queries, keys, values = ids.split(sizes)
        assert queries.tolist() == [h for h in part.q_heads for _ in range(dim)]
        assert keys.tolist() == values.tolist() == [h for h in part.kv_heads for _ in range(dim)]
        assert [part.kv_heads[i] for i in part.kv_of_q] == [h // n for h in part.q_heads]
        assert part.output_columns == slice(part.q_heads.start * dim, part.q_heads.stop * dim)
        if layout.disjoint:
            assert len(part.qkv_rows) == 1, "a view, so that the part's projection is one product"
        seen += part.q_heads
    assert sorted(seen) == list(range(layout.num_heads))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(1, 9),
    st.sampled_from(["contiguous", "zigzag"]),
    st.integers(1, 9),
)
def test_every_position_lies_on_one_rank_and_chunks_cut_the_rows(
    length: int, world: int, kind: str, count: int
) -> None:
    layout = SequenceLayout(length, world, kind)
    everywhere = layout.order().tolist()
    assert sorted(everywhere) == list(range(length))
    sizes = [layout.local_length(rank) for rank in range(world)]
    assert max(sizes) - min(sizes) <= (1 if kind == "contiguous" else 2)
    for rank in range(world):
        positions = layout.positions(rank).tolist()
        assert len(positions) == sizes[rank]
        rows: list[int] = []
        for index in range(count):
            chunk = layout.chunk(rank, index, count)
            for local, place in layout.pieces(rank, chunk):
                assert chunk.start <= local.start < local.stop <= chunk.stop
                assert positions[local] == list(range(place.start, place.stop))
                rows += range(local.start, local.stop)
        assert rows == list(range(sizes[rank]))


def test_zigzag_is_megatrons_layout() -> None:
    layout = SequenceLayout(16, 2, "zigzag")
    assert layout.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert layout.positions(1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((6, 4, 8, 1), "num_kv_heads"),
        ((6, 3, 8, 4), "num_heads"),
        ((0, 1, 8, 1), "num_heads"),
        ((4, 4, 8, True), "world"),
        ((8, 4, 8, 2, 3), "head_groups"),
        ((8, 2, 8, 4, 2), "head_groups"),
    ],
)
def test_head_layouts_that_cannot_be_are_refused(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HeadLayout(*arguments)


def test_splitting_a_uniform_part_copies_nothing() -> None:
    part = HeadLayout(8, 4, 6, 2).part(1)
    buffer = torch.randn(5, 3, part.width)
    for view in split(buffer, part):
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("rotary", [Rotary(8), Rotary(4, interleaved=True)])
def test_packed_gradients_are_those_of_autograd(kv: int, rotary: Rotary) -> None:
    part = HeadLayout(8, kv, 8, 1).part(0)
    table = rotary.table(7, torch.device("cpu"), torch.float64)
    jacobian_input = torch.randn(7, 2, part.width, dtype=torch.float64)
    weight = torch.randn_like(jacobian_input)

    def loss(buffer: Tensor) -> Tensor:
        rotated = buffer.clone()
        with torch.no_grad():
            rotate_(rotated, part, table)
        return torch.stack(
            [(a * b).sum() for a, b in zip(split(rotated, part), split(weight, part), strict=True)]
        ).sum()

    # The map is linear: its gradient is the transpose applied to the weights, tested on random
    # directions.
    packed = torch.empty_like(weight)
    pack_gradients(split(weight, part), part, table, packed)
    for _ in range(3):
        direction = torch.randn_like(jacobian_input)
        torch.testing.assert_close((packed * direction).sum(), loss(direction))


def test_a_query_sees_a_window_of_keys() -> None:
    seen = window_mask(5, 2, True, torch.device("cpu"))
    assert seen.nonzero().tolist() == [
        [0, 0],
        [1, 0],
        [1, 1],
        [2, 1],
        [2, 2],
        [3, 2],
        [3, 3],
        [4, 3],
        [4, 4],
    ]
    assert window_mask(4, 2, False, torch.device("cpu")).sum() == 10


def test_the_kernel_choice() -> None:
    case = CoreCase(8, torch.float32, "cpu")
    assert choose_kernel("auto", case).name == "sdpa"
    assert choose_kernel("auto", CoreCase(8, torch.float32, "cpu", window=3)).name == "sdpa"
    for name in ("flash_attn", "te"):
        with pytest.raises(ConfigError, match=rf"{name}.*CUDA"):
            choose_kernel(name, case)
        with pytest.raises(ConfigError, match=rf"{name}.*float32"):
            choose_kernel(name, CoreCase(8, torch.float32, "cuda"))
    with pytest.raises(ConfigError, match="attention_kernel.*auto, sdpa, flash_attn, te"):
        choose_kernel("fast", case)
    assert set(CORE_KERNELS) == {"sdpa", "flash_attn", "te"}


def test_heads_that_a_kernel_does_not_take_are_refused_by_name_and_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        attention_kernels, "_import_problem", lambda module: None
    )  # as if all were installed
    fits, wide = (CoreCase(dim, torch.bfloat16, "cuda", window=8) for dim in (256, 264))
    assert (
        choose_kernel("flash_attn", fits).name == choose_kernel("auto", fits).name == "flash_attn"
    )
    with pytest.raises(
        ConfigError,
        match="attention_kernel: found 'flash_attn'.*up to 256, not 264; allowed: auto, sdpa",
    ):
        choose_kernel("flash_attn", wide)
    assert choose_kernel("auto", wide).name != "flash_attn"
    assert choose_kernel("te", wide).name == "te" and choose_kernel("sdpa", wide).name == "sdpa", (
        "they take any"
    )


def _layer(**settings_: object) -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention(16, 4, num_kv_heads=2, rotary=Rotary(4), dtype=torch.float64, **settings_)  # type: ignore[arg-type]


def _input() -> Tensor:
    return torch.randn(
        6, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()


def _gradients(layer: SelfAttention, y: Tensor, x: Tensor) -> list[Tensor]:
    y.square().sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_the_same_gradients(overlap: bool, reentrant: bool) -> None:
    results = []
    for recompute in (False, True):
        layer, x = _layer(overlap=overlap), _input()
        y = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
        results.append(_gradients(layer, y, x))
    assert len(results[0]) == 3
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_retained_graph_can_be_used_twice_and_another_says_so() -> None:
    layer, x = _layer(), _input()
    y = layer(x)
    y.square().sum().backward(retain_graph=True)
    assert x.grad is not None
    once = x.grad.clone()
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * once)
    with pytest.raises((FluidError, RuntimeError), match="second"):
        y.sum().backward()


def test_the_state_of_a_call_is_let_go_in_backward() -> None:
    layer, x = _layer(), _input()
    y = layer(x)
    node = y.grad_fn
    assert node is not None and node.state is not None
    y.sum().backward()
    assert node.state is None


@pytest.mark.parametrize("groups", [1, 2])
def test_a_checkpoint_without_reentry_recomputes_once_however_many_head_groups(
    monkeypatch: pytest.MonkeyPatch, groups: int
) -> None:
    forwards = mock.Mock(side_effect=overlap.forward)
    monkeypatch.setattr(overlap, "forward", forwards)
    layer, x = _layer(head_groups=groups), _input()
    y = checkpoint(layer, x, use_reentrant=False)
    assert forwards.call_count == 1
    y.sum().backward()
    assert forwards.call_count == 2


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """Weak references to the memory of packed heads, of what attention makes of them, and of what
    backward is given besides."""
    seen: list[StorageWeakRef] = []
    attend, release = overlap.attend, overlap.AttentionState.release

    def attend_seen(
        call: overlap.AttentionCall, part: HeadPart, packed: Tensor, *rest: Any
    ) -> tuple[Any, Any]:
        attended, state = attend(call, part, packed, *rest)
        seen.extend(StorageWeakRef(t.untyped_storage()) for t in (packed, attended))
        return attended, state

    def release_seen(state: overlap.AttentionState) -> list[Tensor | None]:
        tensors = release(state)
        seen.extend(StorageWeakRef(t.untyped_storage()) for t in tensors if t is not None)
        return tensors

    monkeypatch.setattr(overlap, "attend", attend_seen)
    monkeypatch.setattr(overlap.AttentionState, "release", release_seen)
    return seen


def test_a_checkpoint_without_reentry_keeps_nothing_of_attention(
    storages: list[StorageWeakRef],
) -> None:
    layer, x = _layer(qk_norm=True, head_groups=2), _input()
    y = layer(x)
    assert len(storages) == 2 * 2 + 3 and not any(storage.expired() for storage in storages), (
        "two groups, and a checkpoint's control"
    )
    y.sum().backward()
    assert all(storage.expired() for storage in storages), "let go in backward"
    storages.clear()
    y = checkpoint(layer, x, use_reentrant=False)
    assert len(storages) > 2 * 2 + 3 and all(storage.expired() for storage in storages)
    y.sum().backward()
    assert all(storage.expired() for storage in storages)


class _Core(torch.autograd.Function):
    """A kernel whose last node is Python's, as flash-attn's and Transformer Engine's are."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return CORE_KERNELS["sdpa"].run(q, k, v, CoreCase(q.shape[-1], q.dtype, "cpu"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = CORE_KERNELS["sdpa"].run(
                *leaves, CoreCase(leaves[0].shape[-1], leaves[0].dtype, "cpu")
            )
        return torch.autograd.grad(y, leaves, grads[0])


@pytest.mark.parametrize("kernel", ["sdpa", "python"])
def test_hooks_for_saved_tensors_put_all_of_attention_away(
    monkeypatch: pytest.MonkeyPatch, storages: list[StorageWeakRef], kernel: str
) -> None:
    if kernel == "python":
        run = CoreKernel("python", lambda _: None, lambda q, k, v, case: _Core.apply(q, k, v))  # type: ignore[no-untyped-call]
        monkeypatch.setattr(layer_module, "choose_kernel", lambda *_: run)
    results = []
    for away in (False, True):
        layer, x = _layer(qk_norm=True, head_groups=2), _input()
        storages.clear()
        put = (
            saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy)
            if away
            else contextlib.nullcontext()
        )
        with put:
            y = layer(x)
        # A kernel that saves nothing of its output leaves every second storage to nobody.
        kept = storages if away or kernel == "sdpa" else storages[::2]
        assert all(storage.expired() == away for storage in kept)
        y.square().sum().backward(retain_graph=True)
        assert all(storage.expired() == away for storage in kept), (
            "given back for the next backward"
        )
        results.append(_gradients(layer, y, x))
        assert all(storage.expired() for storage in storages)
    assert len(results[0]) == 5
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(
    "frozen", ["x", "linear_qkv.weight", "linear_proj.weight", "weights", "everything"]
)
def test_only_what_is_asked_for_gets_a_gradient(frozen: str, deferred: bool) -> None:
    expected_layer, expected_x = _layer(), _input()
    _gradients(
        expected_layer,
        reference_attention(expected_x, expected_layer.weights(), 4, 2, rotary=Rotary(4)),
        expected_x,
    )
    expected = {"x": expected_x.grad, **{n: p.grad for n, p in expected_layer.named_parameters()}}
    scheduler = WeightGradScheduler()
    scheduler.enabled = deferred
    layer, x = _layer(scheduler=scheduler), _input()
    members = {"x": x, **dict(layer.named_parameters())}
    off = {"weights": list(members)[1:], "everything": list(members)}.get(frozen, [frozen])
    for name in off:
        members[name].requires_grad_(False)
    y = layer(x)
    assert y.requires_grad == (frozen != "everything")
    if y.requires_grad:
        y.square().sum().backward()
    for name, tensor in members.items():
        if name in off:
            assert tensor.grad is None, name
        else:
            torch.testing.assert_close(tensor.grad, expected[name])


def test_inference_keeps_nothing_and_equals_training() -> None:
    layer, x = _layer(), _input()
    expected = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)
    assert torch.equal(layer(x).detach(), expected), (
        "tables made under inference mode serve training"
    )


def test_autocast_computes_in_its_type_and_reaches_the_parameters() -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(16, 4, rotary=Rotary(4)), torch.randn(6, 2, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.02)
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())


def test_dropout_acts_in_training_only_and_follows_the_seed() -> None:
    layer, x = _layer(dropout=0.5), _input()
    without = _layer()(x)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.allclose(first, without)
    assert torch.equal(layer.eval()(x), without)
    # The mask of the forward is that of the backward: y is linear in the values, and so in
    # linear_proj's input.
    layer.train()
    torch.manual_seed(4)
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.sum(), layer.linear_proj.weight)
    torch.testing.assert_close((gradient * layer.linear_proj.weight).sum(), y.sum().detach())


def test_wrong_inputs_are_named() -> None:
    layer = _layer()
    for x, length in (
        (torch.zeros(3, 1, 15), None),
        (torch.zeros(3, 16), None),
        (torch.zeros(3, 1, 16), 4),
    ):
        with pytest.raises(ConfigError, match="input|rows"):
            layer(x.double(), length)
    with pytest.raises(ConfigError, match="head_dim"):
        SelfAttention(10, 4)
    with pytest.raises(ConfigError, match="overlap=False"):
        SelfAttention(16, 4, head_groups=2, overlap=False)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", [(0, 2, 16), (6, 0, 16)])
def test_nothing_has_gradients_of_nothing(shape: tuple[int, ...], overlap: bool) -> None:
    layer = _layer(overlap=overlap)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape == y.shape
    assert all(param.grad is None or not param.grad.any() for param in layer.parameters())


def test_ways_that_were_asked_for_and_cannot_be_taken_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="exchange: found 'symmetric', allowed: auto or rounds with overlap=False"
    ):
        _layer(exchange="symmetric", overlap=False)
    rounds = mock.Mock()
    with pytest.raises(
        ConfigError, match="exchange: found 'symmetric', allowed: auto or rounds with `rounds`"
    ):
        _layer(exchange="symmetric", rounds=rounds)
    with pytest.raises(
        ConfigError, match="rounds: found 'P2P rounds', allowed: None with overlap=False"
    ):
        _layer(rounds=rounds, overlap=False)


def test_head_groups_can_be_given_after_construction() -> None:
    layer, x = _layer(), _input()
    expected = layer(x)
    layer.head_groups = 2
    assert layer.call(x).exchange.heads.groups == 2
    torch.testing.assert_close(layer(x), expected)
    layer.exchange, layer.connection = "symmetric", HeadBuffers(SimulatedWorkspace(1).rank(0))
    assert layer.call(x).exchange.heads.groups == 2  # type: ignore[attr-defined]
    layer.head_groups = None
    assert layer.call(x).exchange.heads.groups == 1
    for wrong in (0, 3, True):
        with pytest.raises(ConfigError, match="groups"):
            layer.head_groups = wrong
    with pytest.raises(ConfigError, match="overlap=False"):
        _layer(overlap=False).head_groups = 2


def test_shared_heads_are_looked_up_in_one_table() -> None:
    part = HeadLayout(12, 6, 4, 4).part(1)
    assert not part.uniform
    keys = torch.randn(3, 1, len(part.kv_heads), 4, requires_grad=True)
    with torch.inference_mode():
        expand_shared(keys, part)  # the table is made here, and serves training below
    made: list[object] = []
    original = torch.tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *a, **k: made.append(a) or original(*a, **k))
        expanded = expand_shared(keys, part)
    assert not made, "a table made at every call synchronises the host"
    assert torch.equal(expanded, keys[:, :, list(part.kv_of_q)])
    expanded.sum().backward()
    assert keys.grad is not None


def test_tables_that_a_capture_read_are_never_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    @tables.cached_tables(1)
    def table(length: int) -> Tensor:
        made.append(length)
        return torch.zeros(length)

    kept: dict[int, object] = {}
    monkeypatch.setattr(tables, "_captured", kept)
    before = table(3)
    assert not kept
    monkeypatch.setattr(tables, "capturing", lambda: True)
    assert table(3) is before
    with pytest.raises(FluidError, match="table: run attention once at this size"):
        table(4)
    monkeypatch.setattr(tables, "capturing", lambda: False)
    table(5)
    assert made == [3, 5] and list(kept.values()) == [before]


def test_a_capture_is_asked_for_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tables.capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert tables.capturing()


def test_a_capture_keeps_the_tables_of_an_exchange_that_was_used_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: dict[int, object] = {}
    monkeypatch.setattr(tables, "_captured", kept)
    exchange = SymmetricExchange(
        HeadBuffers(SimulatedWorkspace(1).rank(0)), HeadLayout(4, 4, 8, 1), SequenceLayout(6, 1)
    )
    before = exchange.tables(FUSED)
    assert exchange.tables(FUSED) is before and not kept
    monkeypatch.setattr(symmetric, "capturing", lambda: True)
    assert exchange.tables(FUSED) is before and list(kept.values()) == [before]
