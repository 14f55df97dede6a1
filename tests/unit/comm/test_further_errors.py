"""Errors of kernels that are no timed-out waits (ErrorWords.further): raised and told wherever a
failed wait is."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron_fluid import check_for_failed_waits
from megatron_fluid.comm import failed_waits
from megatron_fluid.comm.failed_waits import GRACE_S, ErrorWords, look, raise_if_failed
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from tests.support.simulated_workspace import SimulatedWorkspace

LACK = ConfigError.of("moe_capacity_factor", 1.5, "at least 2")


class Space:
    """What owns the records of one rank."""

    def __init__(self) -> None:
        self.errors = ErrorWords(0, 2, torch.device("cpu"), 5.0, ["moe plan"])
        self.found: list[ConfigError] = []
        self.errors.further += [lambda: None, first_of(self.found)]
        failed_waits.watch(self.errors, self)

    def time_out(self) -> None:
        """As a kernel that waited for peer 1 does."""
        self.errors.words[1, 0] = failed_waits._RECORD


def first_of(found: list[ConfigError]) -> Callable[[], ConfigError | None]:
    return lambda: found[0] if found else None


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_waits, "look", lambda now: None)


@pytest.fixture
def space() -> Iterator[Space]:
    space = Space()
    yield space
    failed_waits.forget(space.errors)


def test_it_is_raised_wherever_a_failed_wait_is(space: Space) -> None:
    space.found.append(LACK)
    for raises in (space.errors.check, raise_if_failed, check_for_failed_waits):
        with pytest.raises(ConfigError, match="moe_capacity_factor: found 1.5"):
            raises()
    assert space.errors.raised


def test_no_optimizer_steps(space: Space) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    before = weight.detach().clone()
    space.found.append(LACK)
    with pytest.raises(ConfigError, match="moe_capacity_factor"):
        optimizer.step()
    assert torch.equal(weight.detach(), before)


def test_a_wait_that_timed_out_comes_first(space: Space) -> None:
    """Of a call whose peer never came, what else it found may follow from that."""
    space.found.append(LACK)
    space.time_out()
    with pytest.raises(PeerTimeoutError, match="rank 0: no answer from peer 1 in moe plan"):
        raise_if_failed()


def test_what_nobody_raises_is_told_once_and_waits_for_the_host_to_raise_it(
    space: Space, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[Exception] = []
    look(0.0, ended.append)
    space.found.append(LACK)
    look(1.0, ended.append)
    look(GRACE_S, ended.append)
    assert capfd.readouterr().err == f"megatron_fluid: {LACK}\n" and not ended
    look(GRACE_S + 2.0, ended.append)
    assert not ended and not capfd.readouterr().err
    with pytest.raises(ConfigError):
        raise_if_failed()


@pytest.mark.parametrize("lacks", [False, True])
def test_records_outlive_their_owner_only_with_an_error_in_them(lacks: bool) -> None:
    space, watched = Space(), len(failed_waits._watched)
    errors, gone = space.errors, weakref.ref(space)
    if lacks:
        space.found.append(LACK)
    del space
    gc.collect()
    assert gone() is None
    assert len(failed_waits._watched) == (watched if lacks else watched - 1)
    failed_waits.forget(errors)


@pytest.mark.parametrize("raised", [False, True])
def test_a_workspace_that_is_closed_leaves_an_error_that_nobody_has_raised(raised: bool) -> None:
    space, before = SimulatedWorkspace(1, watched=True).rank(0), len(failed_waits._watched)
    space.errors.further.append(lambda: LACK)
    if raised:
        with pytest.raises(ConfigError):
            space.check_errors()
    space.close()
    assert len(failed_waits._watched) == before - raised
    if not raised:
        with pytest.raises(ConfigError, match="moe_capacity_factor"):
            check_for_failed_waits()
    failed_waits.forget(space.errors)


LAST_ITERATION = """
from tests.unit.comm.test_further_errors import LACK, Space
space = Space()
space.found.append(LACK)
del space
print("training is over")
"""


def test_one_of_the_last_iteration_is_the_exit_status() -> None:
    command, root = [sys.executable, "-c", LAST_ITERATION], Path(__file__).parents[3]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert "training is over" in ended.stdout
    assert ended.returncode == 75, ended.stderr
    assert f"megatron_fluid: {LACK}" in ended.stderr


class Peers:
    """What the ranks of a workspace have told each other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)

    def failed(self) -> str:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.mark.parametrize(
    ("answers", "stuck", "ended"),
    [
        (["rank 1 raised ConfigError: x"], True, True),
        (["rank 1 raised ConfigError: x"], False, False),  # no kernel of this rank waits
        (["rank 1 raised ConfigError: x", ""], True, False),  # it was taken back
        ([""], True, False),
    ],
)
def test_a_rank_whose_kernels_wait_for_one_that_failed_ends_with_its_message(
    space: Space, answers: list[str], stuck: bool, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_waits, "_asked_at", 0.0)
    space.errors.peers = Peers(*answers)  # type: ignore[assignment]
    ends: list[Exception] = []
    look(100.0, ends.append, lambda device: stuck)
    assert ["rank 1 raised ConfigError: x" in str(end) for end in ends] == [True] * ended
    look(100.1, ends.append, lambda device: True)  # asked once a second
    assert len(ends) == ended
