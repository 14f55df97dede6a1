"""Megatron's clipping, Adam and copies in one launch: the same training, whatever happens to the
tensors between, and left to Megatron where it is something else."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.core.optimizer as optimizers
import pytest
import torch
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megatron_fluid import patches
from megatron_fluid.patches import optimizer_step
from tests.support import tiny_gpt
from tests.support.fused_adam import FusedAdam, ShardedOptimizer, copies
from tests.support.kernel_references import stored
from tests.support.launch import on_ranks

PATCHES = ("optimizer-step", "optimizer-clipping")

SWITCH = {"MEGATRON_FLUID_FUSED_OPTIMIZER": "1"}


@contextmanager
def _with_fused_adam() -> Iterator[Any]:
    """Megatron's optimizers have the stand-in for Adam, and ours takes tensors on a CPU."""
    made: list[Any] = []

    class Kept(optimizer_step._OnePass):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            made.append(self)

    with ExitStack() as stack:
        change = stack.enter_context
        change(mock.patch.object(optimizers, "Adam", FusedAdam))
        change(mock.patch.object(optimizers, "USING_PYTORCH_OPTIMIZER", False))
        change(mock.patch.object(optimizer_step, "_runs_on", return_value=True))
        change(mock.patch.object(optimizer_step, "_OnePass", Kept))
        yield made


def _trained(dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    half = {"bf16": True} if dtype == torch.bfloat16 else {}
    with tiny_gpt.plug_in(False):
        model = tiny_gpt.gpt(tiny_gpt.config_of(params_dtype=dtype, **half), seed=3)
        run = tiny_gpt.train(model, iterations=4, microbatches=2, distributed_optimizer=True)
    return run, [parameter.detach().clone() for parameter in model.parameters()]


@on_ranks(2, env=SWITCH)  # before the package arms its patches
def test_training_is_megatrons_and_every_step_but_the_first_is_one_launch(
    rank: int, world: int
) -> None:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    tiny_gpt.parallel()
    patches.revert(*PATCHES)
    # In bf16 Triton's interpreter cuts bits off where a GPU rounds.
    for dtype, loss, parameter in ((torch.float32, 1e-6, 1e-6), (torch.bfloat16, 0.02, 0.03)):
        with _with_fused_adam() as made:
            plain, theirs = _trained(dtype)
            assert not made
            with patches.patched(*PATCHES):
                ours, mine = _trained(dtype)
        assert max(plain.gradient_norms) > 1.0, "no gradient was clipped"
        assert made and all(kept.whole for kept in made)
        for inner in (kept._inner for kept in made):
            assert inner.steps == 1, "Megatron's own step ran more than once"
            assert all(group["step"] == 4 for group in inner.param_groups)
        assert ours.losses == pytest.approx(plain.losses, abs=loss)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=parameter)


def _clip(parameters: Any, max_norm: float, total_norm: Any, decoupled: bool = False) -> None:
    """Megatron's: by a factor on the host, or by one of the device, which it does not read."""
    factor = max_norm / (total_norm + 1.0e-6)
    if isinstance(factor, torch.Tensor):
        factor.clamp_max_(1.0)
    elif factor < 1.0:
        factor = torch.tensor(factor, dtype=torch.float32)
    else:
        return
    for parameter in parameters:
        parameter.grad.mul_(factor)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(optimizer_step, "_runs_on", lambda tensor: True)
    monkeypatch.setattr(optimizer_step, "is_plain", lambda optimizer: True)
    monkeypatch.setattr(optimizer_step, "model_slices", copies)
    return optimizer_step


def _runs(module: Any, kind: torch.dtype, between: Any, **settings: Any) -> tuple[Any, Any]:
    """Six steps of two alike optimizers, Megatron's way and ours; `between` is told each one's
    optimizer and the number of the step, after gradients are there."""
    sizes = [1, 33, 2048, 2049, 20000, 7, 7]
    theirs, ours = (ShardedOptimizer(sizes, kind, **settings) for _ in range(2))
    step, clip = module.step_in_one_pass(ShardedOptimizer.step), module.clip_later(_clip)
    for number in range(6):
        for optimizer, one, other in ((theirs, ShardedOptimizer.step, _clip), (ours, step, clip)):
            optimizer.fill()
            norm = float(torch.cat([shard.grad for shard in optimizer.shards]).norm())
            if between is not None:
                between(optimizer, number)
            given = torch.tensor([norm]) if number % 2 else norm
            # The norms of two steps are below the bound.
            other(list(optimizer.shards), 1.0 if number < 4 else 2 * norm, given)
            assert one(optimizer)
    return theirs, ours


def _agree(theirs: ShardedOptimizer, ours: ShardedOptimizer) -> None:
    for a, b in zip(theirs.shards, ours.shards, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for name in ("exp_avg", "exp_avg_sq"):
            states = theirs.optimizer.state[a][name], ours.optimizer.state[b][name]
            torch.testing.assert_close(*states, rtol=1e-5, atol=1e-7)
    for shard, model in zip(ours.shards, ours.models, strict=True):
        assert torch.equal(stored(shard.detach(), model.dtype), model)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_tensor_is_megatrons_over_several_sizes_and_groups(
    patched: Any, kind: torch.dtype, decoupled: bool
) -> None:
    theirs, ours = _runs(patched, kind, None, adam_w_mode=decoupled)
    _agree(theirs, ours)
    assert ours.optimizer.steps == 1 and theirs.optimizer.steps == 6
    assert [group["step"] for group in ours.optimizer.param_groups] == [6, 6]


def _lose_moments(optimizer: ShardedOptimizer, number: int) -> None:
    state = optimizer.optimizer.state
    if number == 2:
        state.clear()
    if number == 3:
        del state[optimizer.shards[1]]["exp_avg_sq"]


def _replace_moments(optimizer: ShardedOptimizer, number: int) -> None:
    state = optimizer.optimizer.state
    if number == 2:  # two of one size; the order of the moments stays as it was
        *others, last, first = state
        moments = list(state.values())
        state.clear()
        state.update(zip([*others, first, last], moments, strict=True))
    if number == 4:
        moment = state[optimizer.shards[2]]
        moment["exp_avg"] = moment["exp_avg"].clone()


@pytest.mark.interpreter
@pytest.mark.parametrize("between", [_lose_moments, _replace_moments])
def test_moments_that_are_gone_exchanged_or_replaced_are_seen(patched: Any, between: Any) -> None:
    theirs, ours = _runs(patched, torch.bfloat16, between)
    _agree(theirs, ours)
    assert ours.optimizer.steps == 3


@pytest.mark.interpreter
def test_hooks_of_the_optimizer_run_around_every_step(patched: Any) -> None:
    seen: list[str] = []

    def between(optimizer: ShardedOptimizer, number: int) -> None:
        if number == 0:
            optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
            optimizer.optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    _runs(patched, torch.bfloat16, between)
    assert seen == ["before", "after"] * 12


@pytest.mark.interpreter
def test_a_step_in_one_launch_starts_the_timers_of_megatrons(patched: Any) -> None:
    """Each start is a barrier of all ranks, and another rank's step may be Megatron's."""
    optimizer, timers = ShardedOptimizer([40], torch.bfloat16), mock.MagicMock()
    step = patched.step_in_one_pass(ShardedOptimizer.step)
    for _ in range(2):
        optimizer.config.timers = timers  # the first step is the stand-in's, without timers
        optimizer.fill()
        step(optimizer)
    assert optimizer.optimizer.steps == 1
    theirs = mock.MagicMock()
    stub = SimpleNamespace(
        config=SimpleNamespace(timers=theirs, barrier_with_L1_time=False), is_stub_optimizer=True
    )
    MixedPrecisionOptimizer.step_with_ready_grads(stub)
    assert timers.mock_calls == theirs.mock_calls != []


@pytest.mark.interpreter
@pytest.mark.parametrize("norm", [float("nan"), float("inf")])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_norm_that_is_no_number_does_what_it_does_in_megatron(
    patched: Any, norm: float, on_device: bool
) -> None:
    theirs, ours = (ShardedOptimizer([40], torch.bfloat16) for _ in range(2))
    step, clip = patched.step_in_one_pass(ShardedOptimizer.step), patched.clip_later(_clip)
    for optimizer, one, other in ((theirs, ShardedOptimizer.step, _clip), (ours, step, clip)):
        optimizer.fill()
        one(optimizer)
        optimizer.fill()
        other(list(optimizer.shards), 1.0, torch.tensor([norm]) if on_device else norm)
        one(optimizer)
    assert ours.optimizer.steps == 1
    torch.testing.assert_close(theirs.shards[0], ours.shards[0], equal_nan=True)
    # As in Megatron: only a factor on the device that is no number reaches the gradients.
    assert bool(ours.shards[0].isnan().all()) == (on_device and norm != norm)


def test_a_factor_is_not_used_in_a_later_step(patched: Any) -> None:
    optimizer = ShardedOptimizer([40], torch.bfloat16)
    step, clip = patched.step_in_one_pass(ShardedOptimizer.step), patched.clip_later(_clip)
    optimizer.fill()
    step(optimizer)
    kept = optimizer._fluid_one_pass  # type: ignore[attr-defined]
    clip(list(optimizer.shards), 1.0, 100.0)
    assert kept._scale is not None and float(kept._scale) == pytest.approx(0.01)
    optimizer.fill()  # the step between was left out
    clip(list(optimizer.shards), 1.0, 0.5)
    assert kept._scale is None
    for norm in (100.0, 0.5):  # gradients that were cast from bf16 are new tensors of version 0
        for shard in optimizer.shards:
            shard.grad = shard.grad.bfloat16().float()
        clip(list(optimizer.shards), 1.0, norm)
    assert kept._scale is None


@pytest.mark.interpreter
@pytest.mark.parametrize("bounds", [(1.0, 2.0), (2.0, 1.0), (1.0, 1e9)])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_gradients_that_are_clipped_twice_get_the_smaller_bound(
    patched: Any, bounds: tuple[float, float], on_device: bool, replaced: bool
) -> None:
    """As in Megatron, where the second norm is that of clipped gradients."""
    theirs, ours = (ShardedOptimizer([40], torch.bfloat16) for _ in range(2))
    step, clip = patched.step_in_one_pass(ShardedOptimizer.step), patched.clip_later(_clip)
    for optimizer, one, other in ((theirs, ShardedOptimizer.step, _clip), (ours, step, clip)):
        optimizer.fill()
        one(optimizer)
        optimizer.fill()
        for bound in bounds:
            norm = optimizer.shards[0].grad.norm()
            other(list(optimizer.shards), bound, norm if on_device else float(norm))
        if replaced:  # the step is left to Megatron
            optimizer.shards[0].grad = 1.0 * optimizer.shards[0].grad
        one(optimizer)
    torch.testing.assert_close(theirs.shards[0], ours.shards[0], rtol=1e-5, atol=1e-6)
    assert ours.optimizer.steps == (2 if replaced else 1)


def test_parameters_that_are_not_all_are_clipped_at_once(patched: Any) -> None:
    optimizer = ShardedOptimizer([40, 50], torch.bfloat16)
    step, clip = patched.step_in_one_pass(ShardedOptimizer.step), patched.clip_later(_clip)
    optimizer.fill()
    step(optimizer)
    optimizer.fill()
    before = [shard.grad.clone() for shard in optimizer.shards if shard.grad is not None]
    clip(optimizer.shards[:1], 1.0, 10.0)
    factor = torch.tensor(1 / (10.0 + 1e-6))
    assert torch.equal(optimizer.shards[0].grad, before[0] * factor)
    assert torch.equal(optimizer.shards[1].grad, before[1])


def _more_state(optimizer: ShardedOptimizer) -> None:
    optimizer.optimizer.state[torch.nn.Parameter(torch.zeros(3))] = {}


@pytest.mark.parametrize("other", [
    lambda optimizer: setattr(optimizer.optimizer, "capturable", True),
    lambda optimizer: setattr(optimizer.optimizer, "master_weights", True),
    lambda optimizer: setattr(optimizer.optimizer, "exp_avg_dtype", torch.bfloat16),
    _more_state,
])  # fmt: skip
def test_other_settings_and_states_of_adam_are_left_to_it(patched: Any, other: Any) -> None:
    optimizer = ShardedOptimizer([40], torch.bfloat16)
    other(optimizer)
    step = patched.step_in_one_pass(ShardedOptimizer.step)
    for _ in range(3):
        optimizer.fill()
        step(optimizer)
    assert optimizer._fluid_one_pass is None  # type: ignore[attr-defined]
    assert optimizer.optimizer.steps == 3
