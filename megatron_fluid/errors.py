"""Errors that megatron_fluid raises.

A user's mistake is a `ValueError` (`ConfigError`), so that code which knows nothing of this package
can catch it; what goes wrong while running is a `FluidError`.
"""

from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "FluidError",
    "PatchError",
    "PeerTimeoutError",
    "first_line",
    "ranks_text",
]


class FluidError(RuntimeError):
    """Anything that goes wrong inside megatron_fluid at run time."""


class ConfigError(ValueError):
    """A setting that cannot be met. The message names the setting, the value found and the values
    allowed."""

    @classmethod
    def of(cls, setting: str, found: object, allowed: object) -> "ConfigError":
        """The usual wording: `setting: found X, allowed Y`."""
        return cls(f"{setting}: found {found!r}, allowed: {allowed}")


class PatchError(FluidError):
    """A patch does not fit the Megatron that is installed. Nothing stays patched when this is
    raised."""


class PeerTimeoutError(FluidError):
    """A peer did not answer within the timeout.

    Args:
        rank: the rank that waited (in the group of the exchange).
        peer: the rank it waited for, or None where the wait is for the whole group.
        operation: what was being moved, e.g. "moe dispatch".
        round_index: the round of the exchange, or None outside rounds.
        timeout_s: how long it waited, in seconds.
        detail: anything else that helps, e.g. the backend's own words.
    """

    def __init__(
        self,
        rank: int,
        peer: int | None,
        operation: str,
        round_index: int | None = None,
        timeout_s: float | None = None,
        detail: str = "",
    ) -> None:
        self.rank, self.peer, self.operation, self.round_index = rank, peer, operation, round_index
        self.timeout_s, self.detail = timeout_s, detail
        waited = "" if timeout_s is None else f" after {timeout_s:g} s"
        where = "" if round_index is None else f", round {round_index}"
        whom = "its group" if peer is None else f"peer {peer}"
        message = f"rank {rank}: no answer from {whom} in {operation}{where}{waited}"
        super().__init__(f"{message}: {detail}" if detail else message)

    def with_detail(self, text: str) -> "PeerTimeoutError":
        """The same error with `text` added to its detail."""
        detail = f"{self.detail}; {text}" if self.detail else text
        where = self.rank, self.peer, self.operation, self.round_index, self.timeout_s
        return PeerTimeoutError(*where, detail)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words, runs of them as ranges: "rank 3", "ranks 0, 4-7"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"
