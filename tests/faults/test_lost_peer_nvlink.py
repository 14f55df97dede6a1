"""Ranks of an NVLink domain that wait for a peer which never comes: what a training step does then.

All ranks are simulated in this process, so each wait that is not met gives up after a few polls.
"""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_fluid import check_for_failed_waits
from megatron_fluid.comm import failed_waits
from megatron_fluid.comm.failed_waits import GRACE_S, look
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.moe.nvlink import buffers as steps
from megatron_fluid.moe.nvlink import sent_rows
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from tests.support.expert_calls import nvlink_moe
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = NEEDS_INTERPRETER

T, K, E, H, F = 10, 2, 4, 32, 24
SCHEDULES = [NO_OVERLAP, Schedule(sent_rows=True), Schedule(stream=True)]


class Domain:
    """Two simulated ranks, and the first one's layer."""

    def __init__(self, schedule: Schedule = NO_OVERLAP, watched: bool = False) -> None:
        g = torch.Generator().manual_seed(1)
        self.world = SimulatedWorkspace(2, "cpu", watched=watched)
        self.ranks = [
            NvlinkBuffers(self.world.rank(r), T, H, K, E, torch.float32, schedule=schedule)
            for r in range(2)
        ]
        # As symmetric memory is at birth: a peer that has not published says expert 0, no rows.
        for tensors in self.world._memory.values():
            for tensor in tensors:
                tensor.zero_()
        self.ids = torch.rand(T, E, generator=g).topk(K, -1).indices
        shapes = (T, H), (T, K), (E // 2, 2 * F, H), (E // 2, H, F)
        self.leaves = [torch.randn(*s, generator=g).requires_grad_() for s in shapes]

    def forward(self) -> Tensor:
        x, probs, w1, w2 = self.leaves
        return nvlink_moe(self.ranks[0], x, self.ids, probs, w1, w2)

    def close(self) -> None:
        for rank in range(2):
            failed_waits.forget(self.world.rank(rank).errors)


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread sees nothing: it would end the process of a slow test."""
    monkeypatch.setattr(failed_waits, "look", lambda now: 60.0)


@pytest.fixture
def watched() -> Iterator[Domain]:
    domain = Domain(watched=True)
    yield domain
    domain.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_without_a_peer_names_no_row_that_is_not_allocated(schedule: Schedule) -> None:
    rank = Domain(schedule).ranks[0]
    handle = steps.publish(rank, torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K))
    handle.inverse.fill_(1 << 20)  # what memory may hold
    steps.make_plan(rank, handle)
    assert rank.read_offsets()[-1] == 0
    assert int(handle.inverse.max()) < 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tables_of_a_plan_that_failed_are_not_followed(schedule: Schedule) -> None:
    """Programs of one plan may find different answers where a peer is late: its tables are moot."""
    rank = Domain(schedule).ranks[0]
    x = torch.randn(T, H)
    handle = steps.publish(rank, torch.zeros(T, K, dtype=torch.int64), torch.ones(T, K))
    steps.make_plan(rank, handle)
    handle.inverse.fill_(1 << 20)
    handle.origins.fill_(0x7FFFFFFF)
    handle.offsets.fill_(3)
    guarded = torch.full((5, H), 7.0)
    sent = [peer.clone() for peer in rank.workspace._find("moe combine", torch.float32).peers]
    steps.push(rank, handle, x, streamed=schedule.stream)
    steps.scatter(rank, handle, x, guarded, streamed=schedule.stream)
    assert guarded[:3].isnan().all()  # the rows that were allocated are marked
    assert (guarded[3:] == 7.0).all()
    if schedule.sent_rows:
        sent_rows.begin_combine(rank, handle)
        sent_rows.send_rows(rank, handle, guarded[:3])
    else:
        steps.reduce_push(rank, handle, guarded)
    peers = rank.workspace._find("moe combine", torch.float32).peers
    assert torch.equal(peers[1], sent[1])  # nothing is sent to a peer that may still come


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_results_are_marked_where_a_peer_never_came(schedule: Schedule) -> None:
    domain = Domain(schedule)
    y = domain.forward()
    assert y.isnan().all()
    y.sum().backward()
    for leaf in domain.leaves[:2]:
        assert leaf.grad is not None
        assert leaf.grad.isnan().all()
    with pytest.raises(PeerTimeoutError, match=r"rank 0: no answer from peer 1 in moe plan"):
        domain.ranks[0].workspace.check_errors()


def test_a_peer_that_comes_to_the_plan_alone_marks_rows_and_weight_gradients() -> None:
    """The forward's dispatch fails: dispatched rows are NaN, and so is what is made of them."""
    domain = Domain()
    first, second = domain.ranks
    x, probs = domain.leaves[0].detach(), domain.leaves[1].detach()
    handles = [steps.publish(rank, domain.ids, probs) for rank in (first, second)]
    domain.world.rank(0).flags("moe plan").flags.fill_(1)
    steps.make_plan(first, handles[0])
    rows = first.read_offsets()[-1]
    assert rows > 0
    steps.push(first, handles[0], x)
    out = steps.scatter(first, handles[0], x, torch.zeros(rows + 2, H))
    assert out[:rows].isnan().all()
    assert (out[rows:] == 0).all()


def test_a_rank_that_gave_up_signals_nobody() -> None:
    domain = Domain()
    domain.forward()
    before = domain.world.rank(1).flags("moe dispatch").flags.clone()
    x = domain.leaves[0].detach()
    handle = steps.publish(domain.ranks[0], domain.ids, domain.leaves[1].detach())
    steps.make_plan(domain.ranks[0], handle)
    steps.push(domain.ranks[0], handle, x)
    steps.scatter(domain.ranks[0], handle, x, torch.empty(0, H))
    assert torch.equal(domain.world.rank(1).flags("moe dispatch").flags, before)


def test_a_backward_that_raised_does_not_silence_the_next(watched: Domain) -> None:
    y = watched.forward()
    for _ in range(2):
        with pytest.raises(PeerTimeoutError, match="rank 0: no answer from peer 1 in moe plan"):
            y.sum().backward(retain_graph=True)


def test_no_optimizer_steps(watched: Domain) -> None:
    watched.forward()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    for make in (torch.optim.SGD, torch.optim.AdamW):
        with pytest.raises(PeerTimeoutError, match="moe plan"):
            make([weight], lr=0.1).step()
    assert torch.equal(weight.detach(), torch.ones(3))


def test_megatron_reduces_and_saves_nothing(watched: Domain) -> None:
    from megatron_fluid.patches import failed_waits as patched

    called: list[str] = []
    wrapped = [
        patched.finalize_model_grads(lambda model: called.append("reduced")),
        patched.save_checkpoint(lambda iteration: called.append("saved")),
        patched.graphed_step(lambda wrapper: called.append("stepped")),
    ]
    for function in wrapped:
        function(None)
    assert called == ["reduced", "saved", "stepped"]
    watched.forward()
    for function in wrapped:
        with pytest.raises(PeerTimeoutError):
            function(None)
    assert len(called) == 3


def test_a_record_outlives_its_workspace() -> None:
    domain = Domain(watched=True)
    domain.forward()
    errors = domain.world.rank(0).errors
    before = len(failed_waits._watched)
    del domain
    gc.collect()
    assert len(failed_waits._watched) == before - 1  # rank 1's, which has none
    with pytest.raises(PeerTimeoutError):
        check_for_failed_waits(synchronize=False)
    failed_waits.forget(errors)
    check_for_failed_waits(synchronize=False)


def test_what_nobody_raises_is_told_and_ends_the_process(
    watched: Domain, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[PeerTimeoutError] = []
    look(0.0, ended.append)
    watched.forward()
    look(1.0, ended.append)
    assert "rank 0: no answer from peer 1 in moe plan" in capfd.readouterr().err
    look(GRACE_S, ended.append)
    assert not ended
    look(GRACE_S + 2.0, ended.append)
    assert [error.peer for error in ended] == [1]
    with pytest.raises(PeerTimeoutError):
        check_for_failed_waits()
    look(GRACE_S + 3.0, ended.append)  # the main thread knows: it is left alone
    assert len(ended) == 1


def test_a_process_whose_device_is_stuck_ends_once_it_has_raised(
    watched: Domain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective in a CUDA graph waits for the lost peer for ever, and destructors for it."""
    watched.forward()
    with pytest.raises(PeerTimeoutError):
        check_for_failed_waits()
    ended: list[int] = []
    monkeypatch.setattr(failed_waits, "_is_stuck", lambda device, limit_s, **_: limit_s < GRACE_S)
    monkeypatch.setattr(failed_waits.os, "_exit", ended.append)
    failed_waits._at_exit()
    assert ended == [75]


LAST_ITERATION = """
import sys
import torch
from megatron_fluid.comm import failed_waits
from tests.faults.test_lost_peer_nvlink import Domain
domain = Domain(watched=True)
domain.forward()
del domain
failed_waits._synchronize = lambda device: None
for errors in failed_waits._watched:
    errors.device = torch.device(sys.argv[1])
print("training is over")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_failure_in_the_last_iteration_is_the_exit_status(device: str) -> None:
    """Python starts no threads at exit, and a GPU's work is waited for in another thread."""
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", LAST_ITERATION, device], cwd=root, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert "training is over" in ended.stdout
    assert ended.returncode == 75, ended.stderr
    assert "rank 0: no answer from peer 1 in moe plan" in ended.stderr


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s: found"):
        SimulatedWorkspace(2, timeout_s=timeout_s).rank(0)
