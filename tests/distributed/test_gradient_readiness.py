"""Overlapped reductions start when gradients are complete, whatever ran the layers: as early as in
Megatron without this package, with the same parameters, through its own DistributedDataParallel and
optimizer. What the drawn sequences of test_training_sequences.py leave out, and one case of theirs.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.support.training_world import Setup, TrainingWorld

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a GPU"
)

ITERATIONS, SHAPES = 4, [(2, 16)] * 2
type Action = tuple[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A training. `before` and `after` are actions around each iteration of `when`."""

    when: tuple[int, ...] = ()
    before: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    train: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments of that iteration
    setup: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the model
    alone: bool = False  # also on one expert-parallel rank: two replicas of all experts
    late: tuple[int, ...] = ()  # iterations whose reductions start after their backward


def _regularised(when: str = "always") -> Action:
    """A term of every second weight of the experts."""
    return "regularise", {"part": (".experts.", "linear_fc1"), "scale": 0.1, "when": when}


def _use(how: str) -> tuple[Action, ...]:
    return tuple(("use", {"layer": layer, "how": how}) for layer in (0, 1))


_PLAIN: Action = ("regularise", {"part": None})
_DEFERRED = {"fluid": (("defer_weight_grads", True),)}
_REPEATED = {"mtp": True}
CASES = {
    "regularised every second": Case((1, 3), (_regularised(),), (_PLAIN,), alone=True),
    "regularised behind the layers, deferred": Case(
        (1, 2), (_regularised("before"),), (_PLAIN,), setup=_DEFERRED, alone=True
    ),
    "repeated layer": Case((1, 3), _use("megatron"), _use("once"), setup=_REPEATED, alone=True),
    "tied in parts": Case(
        (1, 2), (_regularised(),), (_PLAIN,), setup=_DEFERRED | {"tied": "in parts"}
    ),
    "called twice": Case(
        (0, 3), (*_use("twice"), _regularised()), (*_use("once"), _PLAIN), setup=_DEFERRED
    ),
    # Megatron's recomputation has a backward pass for each call of a layer, ours has none.
    "logged, recomputed and repeated": Case(
        (1,),
        (("log_activations", {"on": True}),),
        (("log_activations", {"on": False}),),
        setup=_REPEATED | {"recompute": ("moe",)},
        late=(1, 2),
    ),
    "left out in a microbatch": Case((0, 2), _use("skip first")[:1], _use("once")),
    "recompute of a repeated layer": Case((0,), (("recompute", {"on": True}),), setup=_REPEATED),
    "aborted": Case((0, 2), train={"aborted": True}, setup=_DEFERRED),
}
RUNS = [(name, size) for name, case in CASES.items() for size in (1, 2) if size == 2 or case.alone]


@pytest.fixture(scope="module")
def worlds() -> Iterator[list[TrainingWorld]]:
    """The world of all cases; one in which a case failed is left, as its ranks may be apart."""
    found: list[TrainingWorld] = []
    yield found
    for world in found:
        world.close()


def _run(world: TrainingWorld, case: Case, expert_ranks: int) -> None:
    setup = Setup(expert_ranks, "distributed", "reduce and gather", **case.setup)
    world.same(("begin", {"setup": setup}))
    for iteration in range(ITERATIONS):
        special = iteration in case.when
        arguments = {"shapes": SHAPES, **(case.train if special else {})}
        before, after = (case.before, case.after) if special else ((), ())
        for ours, stock in world.same(*before, ("train", arguments)):
            late = iteration in case.late
            assert ours.started == (0 if late else stock.started), "as early as Megatron's"
            assert ours.served
        if after:
            world.same(*after)
    assert stock.started
    world.same(("parameters", {}))


@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_parameters_are_megatrons(worlds: list[TrainingWorld], name: str, ranks: int) -> None:
    if not worlds:
        worlds.append(TrainingWorld(2))
    try:
        _run(worlds[0], CASES[name], ranks)
    except BaseException:
        worlds.pop().close()
        raise
