"""The attention layer on one process: its behaviour under autograd, and what it refuses."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megatron_fluid.attention import layer as layer_module
from megatron_fluid.attention import overlap
from megatron_fluid.attention.attention_kernels import CoreCase, run_sdpa
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.layouts import HeadLayout, HeadPart
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.transformer_layer import TransformerLayer
from tests.support.attention_reference import reference_attention
from tests.support.simulated_driver import head_buffers
from tests.support.simulated_workspace import SimulatedWorkspace


def _layer(**settings: Any) -> SelfAttention:
    torch.manual_seed(0)
    defaults = {"num_kv_heads": 2, "rotary": Rotary(4), "dtype": torch.float64}
    return SelfAttention(16, 4, **defaults | settings)


def _input(length: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(length, 2, 16, dtype=torch.float64, generator=generator).requires_grad_()


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
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_selective_checkpoint_that_saves_products_gives_the_same_gradients() -> None:
    def policy(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        saved = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    layer, x, same = _layer(), _input(), _input()
    expected = _gradients(layer, layer(x), x)
    layer.zero_grad()
    y = checkpoint(layer, same, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(_gradients(layer, y, same), expected, rtol=0, atol=0)


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
        return run_sdpa(q, k, v, CoreCase(q.shape[-1], q.dtype, "cpu"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = run_sdpa(*leaves, CoreCase(leaves[0].shape[-1], leaves[0].dtype, "cpu"))
        return torch.autograd.grad(y, leaves, grads[0])


@pytest.mark.parametrize("kernel", ["sdpa", "python"])
def test_hooks_for_saved_tensors_put_all_of_attention_away(
    monkeypatch: pytest.MonkeyPatch, storages: list[StorageWeakRef], kernel: str
) -> None:
    if kernel == "python":
        run = lambda q, k, v, case: _Core.apply(q, k, v)  # type: ignore[no-untyped-call]  # noqa: E731
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
    torch.testing.assert_close(*results, rtol=0, atol=0)


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


def test_a_computed_weight_may_serve_two_calls_while_weight_gradients_are_deferred() -> None:
    results = []
    for deferred in (False, True):
        scheduler = WeightGradScheduler()
        scheduler.enabled = deferred
        layer, x = _layer(scheduler=scheduler), _input()
        computed = {name: 2 * param for name, param in layer.named_parameters()}
        y = functional_call(layer, computed, x) + functional_call(layer, computed, 3 * x)
        results.append(_gradients(layer, y, x))
    assert len(results[0]) == 3
    torch.testing.assert_close(*results)


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
    wrong: dict[str, Any] = {
        "qk_norm": "no", "causal": 0, "norm_eps": -1.0, "scale": 0.0, "window": 2.5, "rotary": 4,
        "dropout": None, "head_dim": -4, "kernel": None, "group": -100,
    }  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=f"^{name}: found {value!r}, allowed"):
            SelfAttention(16, 4, **{name: value})
    with pytest.raises(ConfigError, match="^hidden_size: found '16', allowed: an integer"):
        SelfAttention("16", "4")
    with pytest.raises(ConfigError, match="overlap=False"):
        SelfAttention(16, 4, head_groups=2, overlap=False)
    with pytest.raises(ConfigError, match=r"exchange: found 'symmetric'.*overlap=False"):
        _layer(exchange="symmetric", overlap=False)


def test_a_length_that_is_no_integer_is_refused_and_spoils_no_later_call() -> None:
    layer, x = _layer(), torch.randn(3, 1, 16, dtype=torch.float64)
    for length in (3.0, "3", True, torch.tensor(3)):
        with pytest.raises(ConfigError, match="sequence_length"):
            layer(x, length)
    torch.testing.assert_close(layer(x, 3), layer(x))


def _block(dtype: torch.dtype) -> TransformerLayer:
    return TransformerLayer(16, 4, 16, 4, 2, dtype=dtype)


def _attention(dtype: torch.dtype) -> SelfAttention:
    return _layer(dtype=dtype)


@pytest.mark.parametrize("make", [_attention, _block])
def test_an_input_of_the_dtype_before_parameters_were_assigned_is_named(
    make: Callable[[torch.dtype], nn.Module],
) -> None:
    layer, x = make(torch.float32), _input().detach()
    layer(x.float())
    layer.load_state_dict(make(torch.float64).state_dict(), assign=True)
    with pytest.raises(ConfigError, match=r"input.*: found torch.float32, allowed: torch.float64"):
        layer(x.float())
    assert layer(x).dtype == torch.float64


@pytest.mark.parametrize("name", ["linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"])
def test_a_module_that_is_wrapped_or_hooked_is_named_and_not_ignored(name: str) -> None:
    x = _input()
    for change in (
        lambda module: nn.Sequential(module),
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: module.register_forward_pre_hook(lambda *_: None),
        lambda module: module.register_full_backward_hook(lambda *_: None),
        lambda module: module.register_full_backward_pre_hook(lambda *_: None),
    ):
        layer = _layer(qk_norm=True)
        layer(x)
        changed = change(getattr(layer, name))
        if isinstance(changed, nn.Module):
            setattr(layer, name, changed)
        with pytest.raises(ConfigError, match=rf"attention\.{name}: found .*Merge"):
            layer(x)
        if not isinstance(changed, nn.Module):
            changed.remove()
            layer(x)
    computed = _layer(qk_norm=True)
    expected = computed(x)
    parametrizations.weight_norm(getattr(computed, name))
    torch.testing.assert_close(computed(x), expected)


def test_a_changed_epsilon_of_norms_or_configuration_takes_effect_in_the_next_call() -> None:
    layer, x = _layer(qk_norm=True), _input()
    layer(x)
    layer.q_layernorm.eps = 1.0  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"k_layernorm.eps: found 1e-06, allowed: 1.0"):
        layer(x)
    layer.k_layernorm.eps = 1.0  # type: ignore[union-attr]
    torch.testing.assert_close(layer(x), _layer(qk_norm=True, norm_eps=1.0)(x))
    layer.config = dataclasses.replace(layer.config, causal=False)
    torch.testing.assert_close(layer(x), _layer(qk_norm=True, norm_eps=1.0, causal=False)(x))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", [(0, 2, 16), (6, 0, 16)])
def test_nothing_has_gradients_of_nothing(shape: tuple[int, ...], overlap: bool) -> None:
    layer = _layer(overlap=overlap)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == shape == y.shape
    assert all(param.grad is None or not param.grad.any() for param in layer.parameters())


def test_head_groups_can_be_given_after_construction() -> None:
    layer, x = _layer(), _input()
    expected = layer(x)
    layer.head_groups = 2
    assert layer.call(x).exchange.heads.groups == 2
    torch.testing.assert_close(layer(x), expected)
    layer.exchange, layer.connection = "symmetric", head_buffers(SimulatedWorkspace(1).rank(0))
    assert layer.call(x).exchange.heads.groups == 2  # type: ignore[attr-defined]
    layer.head_groups = None
    assert layer.call(x).exchange.heads.groups == 1
    for wrong in (0, 3, True):
        layer.head_groups = wrong
        with pytest.raises(ConfigError, match="groups"):
            layer(x)


def test_head_groups_given_later_to_a_layer_without_overlap_are_named() -> None:
    layer, x = _layer(overlap=False), _input()
    layer.heads, layer.exchange = HeadLayout(4, 4, 4, 2), "collective"  # as on two ranks
    layer.head_groups = 2
    with pytest.raises(ConfigError, match="head_groups: found 2, allowed: 1 with overlap=False"):
        layer(x)


@pytest.mark.parametrize("rotary", [None, Rotary(4)])
def test_rows_that_are_not_contiguous_are_attended_like_others(rotary: Rotary | None) -> None:
    layer = _layer(rotary=rotary)
    y = layer(x := _input())
    dx, *expected = _gradients(layer, y, x)
    layer.zero_grad()
    leaf = _input().detach().transpose(0, 1).contiguous().requires_grad_()
    same = layer(leaf.transpose(0, 1))
    assert torch.equal(same, y)
    turned, *found = _gradients(layer, same, leaf)
    assert torch.equal(turned.transpose(0, 1), dx)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_call_is_made_again_only_where_something_changed() -> None:
    layer, x = _layer(dropout=0.5), _input()
    call = layer.call(x)
    assert layer.call(_input()) is call
    assert layer.call(_input(5)).exchange.sequence.length == 5
    assert layer.call(x.bfloat16()).case.dtype == torch.bfloat16
    assert layer.eval().call(x).case.dropout == 0.0
    assert layer.train().call(x).case.dropout == 0.5
    layer.dx_chunks = 3
    assert layer.call(x).dx_chunks == 3
