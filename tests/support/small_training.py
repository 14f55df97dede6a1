"""A small real training (tests/support/pretrain_program.py) on gloo ranks of CPU mode."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked_program import run_here
from tests.support.launch import RankOutcome, run_ranks_outcomes

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
RANKS, ITERATIONS, FIRST_SAVE, BOUND_S = 4, 5, 2, 10.0
_TRAINING = (
    *ARGUMENTS,
    *("--expert-model-parallel-size", "2"),
    *("--train-iters", str(ITERATIONS), "--save-interval", str(FIRST_SAVE)),
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--ckpt-assume-constant-structure"),
    *("--fluid-timeout", str(BOUND_S), "--fluid-end-on-timeout"),
)
SHARDED = "--use-distributed-optimizer"


def losses(log: str) -> list[float]:
    """Every loss that the log names, in order: one an iteration, then validation and test."""
    found = re.findall(r"lm loss(?: value)?: ([0-9.E+-]+|nan|inf)", log)
    return [float(text) for text in found]


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


def train(
    folder: Path, name: str, *arguments: str, ranks: int = RANKS,
    prepare: Callable[[int], None] | None = None, env: Mapping[str, str] | None = None,
    awaited: Sequence[int] | None = None,
) -> Training:  # fmt: skip
    """Train on gloo ranks, with `arguments` added to the program's. Each rank's output goes to
    `folder`, by `name`. `prepare` is called on every rank first, with its number. `env` and
    `awaited` are as for run_ranks_outcomes."""
    outcomes = run_ranks_outcomes(
        *(_rank, ranks, list(arguments), str(folder / name), prepare),
        backend="", grace_s=60.0, awaited=awaited, env=env,
    )  # fmt: skip
    return Training(outcomes, [_log(folder / f"{name}-{r}") for r in range(ranks)])


def _log(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _rank(
    rank: int, ranks: int, arguments: Sequence[str], log: str,
    prepare: Callable[[int], None] | None,
) -> None:  # fmt: skip
    if prepare is not None:
        prepare(rank)
    flags = [*_TRAINING, *arguments]
    status = run_here(rank, ranks, str(PROGRAM), flags, os.getcwd(), f"{log}-{rank}")
    if status:
        raise RuntimeError(f"exit status {status}")
