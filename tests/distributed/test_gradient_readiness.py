"""Overlapped reductions start when gradients are complete, whatever ran the layers: parameters are
those of Megatron without this package, through its own DistributedDataParallel and optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from tests.support import tiny_gpt

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a GPU"
)

ITERATIONS, MICROBATCHES = 4, 2
READINESS = ("gradient-readiness", "gradient-readiness-count")


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and what is done in iterations `when`.

    Attributes:
        forward: the loss of a microbatch in these iterations, from the model, the usual forward and
            the microbatch.
        around: entered for the time of such an iteration.
        build: changes the model before it is wrapped.
        alone: whether it is run on one expert-parallel rank, too: two replicas of all experts.
        late: iterations whose reductions start after their backward.
    """

    when: tuple[int, ...] = ()
    forward: Callable[[Any, Callable[[], Tensor], int], Tensor] | None = None
    around: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None
    build: Callable[[Any], None] | None = None
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    fluid: dict[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False
    late: tuple[int, ...] = ()


def _layers(module: Any) -> list[Any]:
    return [m for m in module.modules() if isinstance(m, tiny_gpt.MoELayer)]


def _penalty(ddp: Any) -> Tensor:
    """A regulariser on routers and on every second weight of the experts."""
    chosen = [p for layer in _layers(ddp) for p in list(layer.experts.parameters())[::2]]
    chosen += [layer.router.weight for layer in _layers(ddp)]
    return 1e-2 * torch.stack([param.square().sum() for param in chosen]).sum()


def _regularised(ddp: Any, forward: Callable[[], Tensor], microbatch: int) -> Tensor:
    return forward() + _penalty(ddp)


def _regularised_before(ddp: Any, forward: Callable[[], Tensor], microbatch: int) -> Tensor:
    """The penalty's backward comes last."""
    penalty = _penalty(ddp)
    return forward() + penalty


def _aborted(ddp: Any, forward: Callable[[], Tensor], microbatch: int) -> Tensor:
    """Forwards whose backward never runs, of which one lives on."""
    ddp.aborted = forward()
    forward()
    return forward()


def _in_one_microbatch(ddp: Any, forward: Callable[[], Tensor], microbatch: int) -> Tensor:
    """The first layer's experts are not called in the first microbatch."""
    if microbatch:
        return forward()
    layer = _layers(ddp)[0]
    layer.forward = lambda hidden, **kwargs: (hidden * 0.5, None)
    try:
        return forward()
    finally:
        del layer.forward


@contextlib.contextmanager
def _called_twice(ddp: Any) -> Iterator[None]:
    for layer in _layers(ddp):
        call = layer.forward
        layer.forward = lambda hidden, call=call, **kwargs: call(
            call(hidden, **kwargs)[0], **kwargs
        )
    yield
    for layer in _layers(ddp):
        del layer.forward


@contextlib.contextmanager
def _left_to_megatron(ddp: Any) -> Iterator[None]:
    """Megatron's own forward of the layers, as where their activations are logged."""
    names = ("forward", "routed_experts_compute")
    for layer in _layers(ddp):
        for name in names:
            original = getattr(type(layer), name)
            while hasattr(original, "__wrapped__"):
                original = original.__wrapped__
            setattr(layer, name, functools.partial(original, layer))
    yield
    for layer in _layers(ddp):
        for name in names:
            delattr(layer, name)


@contextlib.contextmanager
def _logged(ddp: Any) -> Iterator[None]:
    """--save-activations-interval in these iterations: by the hooks of Megatron's logger."""
    from megatron.training.activation_logging import ActivationLogger

    hook = ActivationLogger("")._make_activation_hook("", "experts")
    modules = [module for layer in _layers(ddp) for module in layer.experts.modules()]
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in modules]
    yield
    for handle in handles:
        handle.remove()


def _tie_in_parts(model: Any) -> None:
    """Two layers share one of their experts."""
    first, second = _layers(model)
    second.experts.local_experts[0] = first.experts.local_experts[0]


# What the drawn sequences of test_training_sequences.py do not do, and one case of what they do.
_DEFERRED = {"defer_weight_grads": True}
# Megatron's record of auxiliary losses is as long as the first model of a process is deep.
_REPEATED = {
    "mtp_num_layers": 2, "mtp_use_repeated_layer": True, "moe_router_load_balancing_type": "none",
}  # fmt: skip
_FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
_SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES = {
    "regularised every second": Case((1, 3), _regularised, alone=True),
    "regularised behind the layers, deferred": Case(
        (1, 2), _regularised_before, fluid=_DEFERRED, alone=True
    ),
    "repeated layer": Case((1, 3), around=_left_to_megatron, model=_REPEATED, alone=True),
    "tied in parts": Case((1, 2), _regularised, build=_tie_in_parts, fluid=_DEFERRED),
    "called twice": Case((0, 3), _regularised, around=_called_twice, fluid=_DEFERRED),
    # Megatron's recomputation has a backward pass for each call of a layer, ours has none.
    "logged, recomputed and repeated": Case(
        (1,), around=_logged, model=_REPEATED | _SELECTIVE, late=(1, 2)
    ),
    "left out in a microbatch": Case((0, 2), _in_one_microbatch),
    "recompute of a repeated layer": Case(model=_REPEATED | _FULL),
    "aborted": Case((0, 2), _aborted, fluid=_DEFERRED),
}


RUNS = [(name, size) for name, case in CASES.items() for size in (1, 2) if size == 2 or case.alone]


def _wrapped(model: Any) -> tuple[Any, Any]:
    how = {"distributed": True, "reduce": True, "gather": True}
    [ddp], optimizer = tiny_gpt.wrapped([model], model.config, **how)
    return ddp, optimizer


def _forward(ddp: Any, iteration: int, microbatch: int) -> Tensor:
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    tokens, labels, positions = tiny_gpt.batch(rank, iteration, microbatch)
    size = tiny_gpt.SEQUENCE
    mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), 1)
    loss: Tensor = ddp(tokens, positions, mask, labels=labels).float().mean()
    return loss / MICROBATCHES


def _train(case: Case) -> dict[str, Any]:
    """Losses, norms and parameters; and of each iteration how many reductions had started when its
    last backward returned."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    model = tiny_gpt.gpt(tiny_gpt.config_of(**case.model))
    if case.build is not None:
        case.build(model)
    ddp, optimizer = _wrapped(model)
    losses, norms, started = [], [], []
    for iteration in range(ITERATIONS):
        special = iteration in case.when
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        around = case.around(ddp) if special and case.around else contextlib.nullcontext()
        with around:
            for microbatch in range(MICROBATCHES):
                last = microbatch == MICROBATCHES - 1
                forward = functools.partial(_forward, ddp, iteration, microbatch)
                with contextlib.nullcontext() if last else ddp.no_sync():
                    if special and case.forward is not None:
                        loss = case.forward(ddp, forward, microbatch)
                    else:
                        loss = forward()
                    loss.backward()
        groups = ddp.bucket_groups + ddp.expert_parallel_bucket_groups
        started.append(sum(group.grad_reduce_handle is not None for group in groups))
        finalize_model_grads([ddp])
        _, norm, _ = optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    ddp.disable_forward_pre_hook()
    return {
        "losses": losses,
        "norms": norms,
        "params": [param.detach().clone() for param in model.parameters()],
        "started": started,
    }


def _both(case: Case, backend: str) -> dict[str, Any]:
    from megatron_fluid import patches

    with tiny_gpt.plug_in(True, moe_backend=backend, **case.fluid) as calls:
        ours = _train(case)
    patches.revert(*READINESS)
    try:
        with tiny_gpt.plug_in(False):
            stock = _train(case)
    finally:
        patches.apply_all(*READINESS)
    pairs = zip(ours["params"], stock["params"], strict=True)
    return {
        "apart": max((a - b).abs().max().item() for a, b in pairs),
        "calls": len(calls),
        **{name: (ours[name], stock[name]) for name in ("losses", "norms", "started")},
    }


def _world(rank: int, world_size: int) -> dict[str, Any]:
    from megatron_fluid import patches

    logging.getLogger("megatron").setLevel(logging.WARNING)
    patches.apply_all()
    found = {}
    for ranks in (1, 2):
        tiny_gpt.parallel(expert_model_parallel_size=ranks)
        for name, size in RUNS:
            if size == ranks:
                body = functools.partial(_both, CASES[name], "rounds" if size > 1 else "local")
                found[f"{name}, EP{ranks}"] = tiny_gpt.guarded(body)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_parameters_are_megatrons(results: list[dict[str, Any]], name: str, ranks: int) -> None:
    for rank, found in enumerate(results):
        case = found[f"{name}, EP{ranks}"]
        assert "error" not in case, f"rank {rank}:\n{case['error']}"
        assert case["calls"] > 0
        for what in ("losses", "norms"):
            ours, stock = case[what]
            assert ours == pytest.approx(stock, rel=2e-5, abs=0), what
        # Adam divides by a gradient's size, so that rounding of small ones counts more.
        assert case["apart"] < 1e-4
        ours, stock = case["started"]
        for late in CASES[name].late:
            assert ours[late] == 0
            stock[late] = 0
        assert ours == stock, "reductions start as early as Megatron's"
        assert all(stock[-1:])
