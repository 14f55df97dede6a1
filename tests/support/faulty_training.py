"""A real training (tests/support/pretrain_program.py) on gloo ranks, in which one rank is killed or
frozen at a given moment.

A `Fault` says who, how, where and when; `draw` makes one from a seed. `train` runs the ranks,
`survivors_errors` takes their last words.
"""

from __future__ import annotations

import os
import queue
import random
import re
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked_program import run_here
from tests.support.launch import RankOutcome, run_ranks_outcomes

__all__ = [
    "ARGUMENTS",
    "FIRST_SAVE",
    "ITERATIONS",
    "PHASES",
    "PROGRAM",
    "RANKS",
    "SHARDED",
    "Fault",
    "Training",
    "begin_from",
    "draw",
    "losses",
    "named_error",
    "train",
]

PROGRAM = Path(__file__).resolve().parent / "pretrain_program.py"
# Flags of a small training with Megatron's own loop.
ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --disable-bias-linear --swiglu "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-iters 4 --eval-iters 1 --eval-interval 100 --log-interval 1 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 "
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
).split()
PHASES = ("start", "forward", "backward", "optimizer", "save", "save, files written", "last")
RANKS, ITERATIONS, FIRST_SAVE, BOUND_S = 4, 5, 2, 10.0
_TRAINING = (
    *ARGUMENTS,
    *("--expert-model-parallel-size", "2"),
    *("--train-iters", str(ITERATIONS), "--save-interval", str(FIRST_SAVE)),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--ckpt-assume-constant-structure"),
    *("--fluid-timeout", str(BOUND_S), "--fluid-end-on-timeout"),
)


def losses(log: str) -> list[float]:
    """Every loss that the log names, in order: one an iteration, then validation and test."""
    found = re.findall(r"lm loss(?: value)?: ([0-9.E+-]+|nan|inf)", log)
    return [float(text) for text in found]


@dataclass(frozen=True)
class Fault:
    """One rank that is lost.

    Attributes:
        phase: one of PHASES; "last" is the forward of the last iteration.
        rank: who.
        frozen: stopped (SIGSTOP) in place of killed (SIGKILL).
        iteration: counted from 1; without a meaning for the start and the last.
        rank_holds_store: rank 0 holds the job's store, as without torchrun.
    """

    phase: str
    rank: int
    frozen: bool = False
    iteration: int = FIRST_SAVE + 1
    rank_holds_store: bool = False


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


@dataclass(frozen=True)
class Training:
    """What became of it: of every rank the outcome and its output."""

    outcomes: list[RankOutcome]
    logs: list[str]

    @property
    def losses(self) -> list[float]:
        return losses(self.logs[-1])

    def require_success(self) -> Training:
        for outcome, log in zip(self.outcomes, self.logs, strict=True):
            assert outcome.ok, f"{outcome.error}\n{log[-3000:]}"
        return self


SHARDED = "--use-distributed-optimizer"


def _nothing_more(rank: int) -> Sequence[str]:
    return ()


def train(
    folder: Path, name: str, *arguments: str, fault: Fault | None = None, ranks: int = RANKS,
    prepare: Callable[[int], Sequence[str]] = _nothing_more,
) -> Training:  # fmt: skip
    """Train on gloo ranks; with a fault wait for the survivors alone.

    Args:
        folder, name: where the output of each rank goes.
        arguments: added to those of the program.
        fault: what happens to a rank.
        ranks: how many.
        prepare: called on every rank first, with its number; returns more arguments of that rank.
    """
    env = {}
    if fault is not None and fault.rank_holds_store:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    survivors = [r for r in range(ranks) if fault is None or r != fault.rank]
    outcomes = run_ranks_outcomes(
        *(_rank, ranks, list(arguments), str(folder / name), fault, prepare),
        backend="", timeout_s=150.0, grace_s=60.0, awaited=survivors, env=env,
    )  # fmt: skip
    return Training(outcomes, [_log(folder / f"{name}-{r}") for r in range(ranks)])


def _log(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def begin_from(source: Path, target: Path) -> Path:
    """A folder of checkpoints that holds the first alone."""
    name = f"iter_{FIRST_SAVE:07d}"
    shutil.copytree(source / name, target / name)
    (target / "latest_checkpointed_iteration.txt").write_text(str(FIRST_SAVE))
    return target


_OURS = re.compile(r"rank \d+: no answer from (peer (\d+)|its group)[^\n]*")


def named_error(outcome: RankOutcome, log: str) -> str:
    """The line that names the lost rank and the operation, "" if there is none."""
    found = [match[0] for match in _OURS.finditer(f"{log}\n{outcome.error}")]
    return found[-1] if found else ""


def _rank(
    rank: int, ranks: int, arguments: Sequence[str], log: str, fault: Fault | None,
    prepare: Callable[[int], Sequence[str]],
) -> None:  # fmt: skip
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Written in this process all the same; Megatron's own queue starts an interpreter a rank.
    filesystem_async._results_queue = queue.Queue()
    if fault is not None and fault.rank == rank:
        _arm(fault)
    flags = [*_TRAINING, *arguments, *prepare(rank)]
    status = run_here(rank, ranks, str(PROGRAM), flags, os.getcwd(), f"{log}-{rank}")
    if status:
        raise RuntimeError(f"exit status {status}")


def _arm(fault: Fault) -> None:
    """Let this process end, or stop, at the moment that `fault` names."""
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

    def written(original: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            strike()
            return result

        return write

    TransformerLayer.forward = forward  # type: ignore[method-assign]
    checkpointing.dist_checkpointing.save = saving
    if fault.phase == "save, files written":
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        writer = filesystem_async.FileSystemWriterAsync
        writer.retrieve_write_results = written(writer.retrieve_write_results)
    if fault.phase == "start":
        training.setup_model_and_optimizer = lambda *args, **kwargs: strike()
    if fault.phase == "optimizer":
        register_optimizer_step_pre_hook(lambda *_: strike() if now() else None)
