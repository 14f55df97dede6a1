"""Long-lived gloo ranks that train one small GPT-MoE twice, side by side: with megatron_fluid, and
by Megatron's own path (every patch but CPU mode off). A test tells all of them what to do next
(training_rank.py) and compares what they hand back. Of 2N ranks the first N have megatron_fluid.
"""

import dataclasses
import pickle
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.launch import RankOutcome, run_ranks_outcomes

_ANSWER_S = 600.0
_CLOSE = 1e-5  # of losses, norms and parameters; what is found without a defect is below 1e-6

PARTS = {
    "experts": (".experts.",), "one expert": ("layers.1.", ".local_experts.0."),
    "router": (".router.",), "attention": (".self_attention.",), "embedding": ("embedding.",),
}  # fmt: skip
"""Groups of parameters by what their names hold, all of a tuple."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A distributed optimizer has a loss scaler and skips steps not finite. Its overlap may
    also be "reduce and gather": of parameters, too. Experts tied "in parts" share one of them.
    """

    expert_ranks: int = 1  # size of the expert-parallel groups
    optimizer: str = "plain"  # or "distributed"
    overlap: str = "none"  # or "reduce": of gradients
    backend: str = "own"  # `moe_backend`; "own": rounds, or local with one expert-parallel rank
    recompute: tuple[str, ...] = ()  # selectively, of these modules
    tied: bool | str = False  # both layers have the same experts
    mtp: bool = False  # a multi-token-prediction layer, called twice with the same weights
    fused: bool = False  # gradient accumulation fusion
    fluid: tuple[tuple[str, Any], ...] = ()  # further settings of megatron_fluid

    @property
    def distributed(self) -> bool:
        return self.optimizer == "distributed"


Shape = tuple[int, int]
"""Of a microbatch: sequences, their length."""


@dataclasses.dataclass
class Done:
    """What one rank hands back: losses, the gradient norm, parameters; or a traceback."""

    losses: list[float] = dataclasses.field(default_factory=list)
    stepped: bool | None = None
    norm: float | None = None
    params: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    error: str = ""
    started: int = 0  # reductions of gradients when the last backward returned
    served: bool = False  # all MoE layers were overlapped


class TrainingWorld:
    """The test's end of both halves, each of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self._number = ranks, 0
        bound = timedelta(seconds=_ANSWER_S)
        self._stores = [
            dist.TCPStore("127.0.0.1", 0, None, True, bound, wait_for_workers=False)
            for _ in range(3)
        ]
        self._store = self._stores[-1]
        self._outcomes: list[RankOutcome] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from tests.support.training_rank import serve

        ports = tuple(store.port for store in self._stores)
        self._outcomes = run_ranks_outcomes(
            serve, 2 * self.ranks, ports, backend="", timeout_s=7200.0
        )

    def ask(self, *actions: tuple[str, dict[str, Any]]) -> tuple[list[Done], list[Done]]:
        """Let every rank do `actions` in turn, each a method of _Trainer and its arguments; what
        megatron_fluid's ranks and what Megatron's hand back for the last of them."""
        number, self._number = self._number, self._number + 1
        keys = [f"done {number} {rank}" for rank in range(2 * self.ranks)]
        self._store.set(f"ask {number}", pickle.dumps(actions))
        deadline = time.monotonic() + _ANSWER_S
        while not self._store.check(keys):
            if not self._thread.is_alive() or time.monotonic() > deadline:
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                errors = [f"{o.rank}: {o.error}\n{o.stacks}" for o in self._outcomes]
                raise AssertionError(
                    f"{actions}: no answer of ranks {missing}\n" + "\n".join(errors)
                )
            time.sleep(0.003)
        done = [pickle.loads(self._store.get(key)) for key in keys]
        for key in (f"ask {number}", *keys):
            self._store.delete_key(key)
        return done[: self.ranks], done[self.ranks :]

    def same(self, *actions: tuple[str, dict[str, Any]]) -> list[tuple[Done, Done]]:
        """`ask`, and raise AssertionError where a rank's halves differ: one failed or skipped its
        step, or numbers are too far apart. What both halves of each rank hand back."""
        pairs = list(zip(*self.ask(*actions), strict=True))
        for rank, (ours, megatrons) in enumerate(pairs):
            assert not megatrons.error, megatrons.error
            assert not ours.error, ours.error
            found = _differences(ours, megatrons)
            far = {name: off for name, off in found.items() if not off <= _CLOSE}
            assert not far, f"rank {rank}: {far}"
        return pairs

    def close(self) -> None:
        self._store.set(f"ask {self._number}", pickle.dumps(None))
        self._thread.join(60)


def _differences(ours: Done, theirs: Done) -> dict[str, float]:
    """By what differs, relative to the larger of 1 and the value."""
    assert ours.stepped == theirs.stepped
    assert ours.params.keys() == theirs.params.keys()
    assert (ours.norm is None) == (theirs.norm is None)
    return {
        "loss": _off(torch.tensor(ours.losses), torch.tensor(theirs.losses)),
        "norm": _off(torch.tensor(ours.norm or 0.0), torch.tensor(theirs.norm or 0.0)),
        **{name: _off(value, theirs.params[name]) for name, value in ours.params.items()},
    }


def _off(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    if not a.numel():
        return 0.0
    off = (a.double() - b.double()).abs() / b.double().abs().clamp(min=1.0)
    return float("inf") if off.isnan().any() else float(off.max())
