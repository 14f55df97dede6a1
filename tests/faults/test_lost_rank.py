"""A rank of a real training is killed or frozen: all others end in bounded time with an error that
names it, the last checkpoint loads, and the loss goes on as if nothing had happened. A few faults
always; `MEGATRON_FLUID_TEST_DRAWS=20` (or FIRST:LAST) adds as many drawn by seed.
"""

import functools
import os
import random
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.graph_jobs import free_port
from tests.support.launch import RankOutcome
from tests.support.small_training import FIRST_SAVE, ITERATIONS, RANKS, SHARDED, Training, train

pytest.importorskip("megatron.training")
pytestmark = [
    *(pytest.mark.world, pytest.mark.slow),
    pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode"),
]

PHASES = ("start", "forward", "backward", "optimizer", "save", "save, files written", "last")
_OURS = re.compile(r"rank \d+: no answer from (peer (\d+)|its group)[^\n]*")


@dataclass(frozen=True)
class Fault:
    """One rank that is lost."""

    phase: str  # of PHASES; "last" is the forward of the last iteration
    rank: int
    frozen: bool = False  # by SIGSTOP, else killed by SIGKILL
    iteration: int = FIRST_SAVE + 1  # from 1; unused at the start and the last
    rank_holds_store: bool = False  # rank 0 holds the job's store, as without torchrun


def draw(seed: int) -> Fault:
    """A fault of that seed. Those of a run of seeds go through all phases."""
    chance = random.Random(seed)
    return Fault(
        phase=PHASES[seed % len(PHASES)],
        rank=chance.randrange(RANKS),
        frozen=chance.random() < 0.5,
        iteration=chance.randint(FIRST_SAVE + 1, ITERATIONS - 1),
        rank_holds_store=chance.random() < 0.5,
    )


def arm(fault: Fault, rank: int) -> None:
    """Let the process of the rank that is lost end, or stop, at the moment that `fault` names."""
    if rank != fault.rank:
        return
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training import checkpointing, training
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def strike() -> None:
        print(f"{fault} strikes", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP if fault.frozen else signal.SIGKILL)

    def now() -> bool:
        from megatron.training import get_args

        iteration = ITERATIONS if fault.phase == "last" else fault.iteration
        return bool(get_args().curr_iteration + 1 == iteration)

    layer_forward, save = TransformerLayer.forward, checkpointing.dist_checkpointing.save

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.layer_number == 2 and self.training and now():
            if fault.phase in ("forward", "last"):
                strike()
            elif fault.phase == "backward":
                hidden = args[0] if args else kwargs["hidden_states"]
                hidden.register_hook(lambda gradient: strike())
        return layer_forward(self, *args, **kwargs)

    def saving(*args: Any, **kwargs: Any) -> Any:
        if fault.phase == "save":
            strike()
        return save(*args, **kwargs)

    TransformerLayer.forward = forward  # type: ignore[method-assign]
    checkpointing.dist_checkpointing.save = saving
    if fault.phase == "save, files written":
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        writer = filesystem_async.FileSystemWriterAsync
        retrieve = writer.retrieve_write_results
        writer.retrieve_write_results = lambda *args: (retrieve(*args), strike())[0]
    if fault.phase == "start":
        training.setup_model_and_optimizer = lambda *args, **kwargs: strike()
    if fault.phase == "optimizer":
        register_optimizer_step_pre_hook(lambda *_: strike() if now() else None)


ALWAYS = [Fault("optimizer", 0, rank_holds_store=True), Fault("save", 1, frozen=True)]
_DRAWS = os.environ.get("MEGATRON_FLUID_TEST_DRAWS", "0")
SEEDS = range(*map(int, _DRAWS.split(":"))) if ":" in _DRAWS else range(int(_DRAWS))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Training]:
    """A training that nothing happens to, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("sound")
    training = train(folder, "log", SHARDED, "--save", str(folder / "saved")).require_success()
    assert len(training.losses) == ITERATIONS + 2  # then validation and test
    return folder / "saved", training


def begin_from(source: Path, target: Path) -> Path:
    """A folder of checkpoints that holds the first alone."""
    name = f"iter_{FIRST_SAVE:07d}"
    shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(FIRST_SAVE))
    return target


def named_error(outcome: RankOutcome, log: str) -> str:
    """The line that names the lost rank and the operation, "" if there is none."""
    found = [match[0] for match in _OURS.finditer(f"{log}\n{outcome.error}")]
    return found[-1] if found else ""


def check(fault: Fault, sound: tuple[Path, Training], tmp_path: Path, resumed: bool = True) -> None:
    saved = begin_from(sound[0], tmp_path / "saved")
    place = ("--load", str(saved), "--save", str(saved), SHARDED)
    env = {}
    if fault.rank_holds_store:
        env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    lost = train(
        *(tmp_path, "lost", *place), env=env, prepare=functools.partial(arm, fault),
        awaited=[rank for rank in range(RANKS) if rank != fault.rank],
    )  # fmt: skip
    assert "strikes" in lost.logs[fault.rank], lost.logs[fault.rank][-3000:]
    errors = {}
    for outcome, log in zip(lost.outcomes, lost.logs, strict=True):
        if outcome.rank != fault.rank:
            assert outcome.finished, f"{outcome.rank} did not end\n{outcome.stacks}\n{log[-3000:]}"
            errors[outcome.rank] = named_error(outcome, log)
            print(f"rank {outcome.rank} ({outcome.exitcode}): {errors[outcome.rank]}")
            assert errors[outcome.rank], f"{outcome.error}\n{log[-4000:]}"
    assert all(names(error, fault) for error in errors.values()), errors

    at = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert at >= FIRST_SAVE
    if resumed:
        losses = train(tmp_path, "resumed", *place).require_success().losses
        assert losses[-2:] == pytest.approx(sound[1].losses[-2:], rel=1e-6)


def names(error: str, fault: Fault) -> bool:
    """Whether the error names the lost rank."""
    return f"peer {fault.rank}" in error or f"rank {fault.rank}" in error.partition(":")[2]


@pytest.mark.parametrize("fault", ALWAYS, ids=lambda f: f"{f.phase}, rank {f.rank}")
def test_a_lost_rank_is_named_by_all_and_the_training_goes_on(
    fault: Fault, sound: tuple[Path, Training], tmp_path: Path
) -> None:
    # What is lost outside of a save leaves the checkpoint as a sound training wrote it.
    check(fault, sound, tmp_path, resumed=fault.phase == "save")


@pytest.mark.skipif(not SEEDS, reason="MEGATRON_FLUID_TEST_DRAWS asks for none")
@pytest.mark.parametrize("seed", SEEDS or [0])
def test_a_drawn_fault(seed: int, sound: tuple[Path, Training], tmp_path: Path) -> None:
    print(draw(seed))
    check(draw(seed), sound, tmp_path)


def poison(what: str, value: float, rank: int) -> None:
    """Put a number that is none into the second layer of rank 1, in its third iteration."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.training import get_args

    from megatron_fluid.patches.moe import layer as patched

    real = patched.moe_forward

    def forward(
        layer: MoELayer, original: Any, tokens: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if rank == 1 and layer.layer_number == 2 and get_args().curr_iteration == 2:
            with torch.no_grad():
                if what == "tokens":
                    tokens = tokens.clone()
                    tokens[0, 0] = value
                else:
                    next(layer.experts.parameters()).fill_(value)
        return real(layer, original, tokens, *args, **kwargs)

    patched.moe_forward = forward


@pytest.mark.parametrize(("what", "value"), [("tokens", float("nan")), ("weights", float("inf"))])
def test_numbers_that_are_not_finite_end_the_training_by_name(
    what: str, value: float, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    place = ("--save", str(saved), SHARDED)
    prepare = functools.partial(poison, what, value)
    poisoned = train(tmp_path, "log", *place, ranks=2, prepare=prepare)
    for outcome, log in zip(poisoned.outcomes, poisoned.logs, strict=True):
        assert outcome.finished, f"{outcome.stacks}\n{log[-3000:]}"
        assert "found NaN in local grad norm" in log
        # Megatron's own: it ran the iteration twice, alike
        assert "exit status 16" in f"{log}\n{outcome.error}" and not outcome.ok
    assert len(poisoned.losses) == FIRST_SAVE, "no step after it"
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(FIRST_SAVE)
