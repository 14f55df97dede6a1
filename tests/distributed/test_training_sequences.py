"""What people do in and between training steps, in drawn order, with Megatron's numbers in fp32.

Hypothesis asks long-lived ranks (training_world.py) and shrinks a failing sequence: ten, of two
and four ranks (two expert-parallel groups of two), `MEGATRON_FLUID_TEST_DRAWS=200` or FIRST:LAST.
"""

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip("megatron.core")

from tests.support.training_world import PARTS, Setup, TrainingWorld

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode"),
]

SEQUENCES = {2: 7, 4: 3}  # of a seed, by the number of ranks
_DRAWS = os.environ.get("MEGATRON_FLUID_TEST_DRAWS", "")
PER_SEED, STEPS = sum(SEQUENCES.values()), 8 if _DRAWS else 6
if ":" in _DRAWS:
    SEEDS = range(*map(int, _DRAWS.split(":")))
else:
    SEEDS = range(max(1, int(_DRAWS or 0) // PER_SEED))

shapes = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([4, 8, 16])), min_size=1, max_size=3)
parts = st.sampled_from(sorted(PARTS))
setups = st.builds(
    Setup,
    expert_ranks=st.sampled_from([1, 2]),
    optimizer=st.sampled_from(["plain", "distributed"]),
    overlap=st.sampled_from(["none", "reduce", "reduce and gather"]),
    backend=st.sampled_from(["own", "own", "experts", "auto"]),
    recompute=st.sampled_from([(), (), ("moe",)]),
    tied=st.booleans(),
    mtp=st.booleans(),
    fused=st.booleans(),
    fluid=st.fixed_dictionaries(
        {
            "defer_weight_grads": st.booleans(),
            "dx_chunks": st.integers(1, 2),
            "moe_recompute": st.sampled_from(["none", "rows", "hidden", "both"]),
        }
    ).map(lambda found: tuple(found.items())),
).filter(lambda setup: setup.distributed or setup.overlap != "reduce and gather")


class Training(RuleBasedStateMachine):
    """Every rule changes something and trains one iteration, but for those that train none."""

    world: ClassVar[TrainingWorld | None] = None
    ranks: ClassVar[int] = 2
    setup: Setup
    regularised: bool
    recomputing: bool

    @initialize(setup=setups)
    def begin(self, setup: Setup) -> None:
        if Training.world is None:
            Training.world = TrainingWorld(Training.ranks)
        self.setup, self.regularised, self.recomputing = setup, False, bool(setup.recompute)
        self._check(("begin", {"setup": setup}))

    @rule(shapes=shapes, uneven=st.booleans())
    def train(self, shapes: Any, uneven: bool) -> None:
        self._train(shapes, uneven=uneven)

    @rule(shapes=shapes)
    def skip_a_step(self, shapes: Any) -> None:
        self._check(("train", {"shapes": shapes, "spoiled": True}))

    @rule(first=shapes, shapes=shapes)
    def accumulate(self, first: Any, shapes: Any) -> None:
        self._train(shapes, ("accumulate", {"shapes": first}))

    @rule(shape=shapes.map(lambda found: found[0]), inference=st.booleans(), shapes=shapes)
    def evaluate(self, shape: Any, inference: bool, shapes: Any) -> None:
        self._check(("evaluate", {"shape": shape, "inference": inference}))
        self._train(shapes)

    @rule(
        part=parts, scale=st.sampled_from([0.1, 3.0]),
        when=st.sampled_from(["always", "first", "last"]), shapes=shapes,
    )  # fmt: skip
    def add_a_regulariser(self, part: str, scale: float, when: str, shapes: Any) -> None:
        if self.recomputing and self.setup.overlap != "none":
            return  # a backward within the backward: Megatron itself counts the parameter twice
        if self.setup.fused and part not in ("embedding", "router"):
            part = "router"  # the gradient of such a term is lost in Megatron's fused accumulation
        self.regularised = True
        self._train(shapes, ("regularise", {"part": part, "scale": scale, "when": when}))

    @rule(shapes=shapes)
    def drop_the_regulariser(self, shapes: Any) -> None:
        self.regularised = False
        self._train(shapes, ("regularise", {"part": None}))

    @rule(part=parts, shapes=shapes)
    def freeze(self, part: str, shapes: Any) -> None:
        self._train(shapes, ("freeze", {"part": part}))

    @rule(shapes=shapes)
    def thaw(self, shapes: Any) -> None:
        self._train(shapes, ("thaw", {}))

    @rule(norm=st.sampled_from([0.0, 0.1, 1.0]), shapes=shapes)
    def clip(self, norm: float, shapes: Any) -> None:
        self._train(shapes, ("clip", {"norm": norm}))

    @precondition(
        lambda self: (
            not self.setup.recompute
            and (
                self.setup.overlap == "none"
                or not (self.regularised or self.setup.tied or self.setup.mtp)
            )
        )
    )
    @rule(on=st.booleans(), shapes=shapes)
    def recompute(self, on: bool, shapes: Any) -> None:
        self.recomputing = on
        self._train(shapes, ("recompute", {"on": on}))

    @rule(layer=st.integers(0, 1), how=st.sampled_from(["once", "twice", "skip"]), shapes=shapes)
    def use_a_layer(self, layer: int, how: str, shapes: Any) -> None:
        if how == "skip" and self.setup.overlap != "none":
            how = "twice"  # Megatron waits for the gradients of every parameter
        if how == "twice" and self.setup.overlap != "none" and self.setup.recompute:
            how = "once"  # and counts as many as there are recomputed calls
        self._train(shapes, ("use", {"layer": layer, "how": how}))

    @rule(shapes=shapes)
    def log_activations(self, shapes: Any) -> None:
        """In this iteration only, which Megatron's own layers then compute."""
        self._train(shapes, ("log_activations", {"on": True}))
        self._check(("log_activations", {"on": False}))

    @rule(shapes=shapes)
    def save(self, shapes: Any) -> None:
        self._train(shapes, ("save", {}))

    @rule(shapes=shapes)
    def load(self, shapes: Any) -> None:
        self._train(shapes, ("load", {}))

    @rule(kind=st.sampled_from(["resources", "model parallel", "all"]), shapes=shapes)
    def make_groups_again(self, kind: str, shapes: Any) -> None:
        self._train(shapes, ("restart", {"kind": kind}))

    def teardown(self) -> None:
        if Training.world is not None:
            self._check(("parameters", {}))

    def _train(
        self, shapes: Any, *before: tuple[str, dict[str, Any]], uneven: bool = False
    ) -> None:
        self._check(*before, ("train", {"shapes": shapes, "uneven": uneven}))

    def _check(self, *actions: tuple[str, dict[str, Any]]) -> None:
        world = Training.world
        assert world is not None
        try:
            world.same(*actions)
        except BaseException:  # the next sequence begins with new ranks
            Training.world = None
            world.close()
            raise


@pytest.fixture(params=SEQUENCES, ids=lambda ranks: f"{ranks} ranks", scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of each half; they live as long as nothing fails."""
    Training.ranks = request.param
    yield request.param
    if Training.world is not None:
        Training.world.close()
        Training.world = None


@pytest.mark.parametrize("drawn", SEEDS)
def test_every_step_is_megatrons(drawn: int, ranks: int) -> None:
    run_state_machine_as_test(
        seed(drawn)(Training),
        settings=settings(
            max_examples=SEQUENCES[ranks],
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        ),
    )
