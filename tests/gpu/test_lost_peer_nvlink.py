"""Ranks over NVLink, which may share a GPU, whose peer never comes, comes late, or dies: what their
training steps do."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import FluidConfig, check_for_failed_waits, set_config
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from megatron_fluid.moe.nvlink.shared import shared_buffers
from tests.support.expert_calls import nvlink_moe
from tests.support.launch import run_ranks_outcomes
from tests.support.machine import RANKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(RANKS < 2, reason="needs two or more ranks on GPUs"),
]

T, K, E, H, F = 256, 4, 16, 256, 128
BOUND_S = 3.0
SCHEDULES = {"sums": NO_OVERLAP, "rows": Schedule(sent_rows=True), "stream": Schedule(stream=True)}


class Training:
    """One layer, its optimizer, and a guard behind what is allocated."""

    def __init__(self, rank: int, ranks: int, schedule: str) -> None:
        group = dist.group.WORLD
        assert group is not None
        set_config(FluidConfig(timeout_s=BOUND_S))
        g = torch.Generator("cuda").manual_seed(rank)
        made: NvlinkBuffers = shared_buffers(group, T, H, F, K, E, schedule=SCHEDULES[schedule])
        self.buffers = made
        shapes = (E // ranks, 2 * F, H), (E // ranks, H, F)
        self.weights = [
            torch.nn.Parameter(torch.randn(*s, generator=g, device="cuda").bfloat16() * 0.1)
            for s in shapes
        ]
        self.optimizer = torch.optim.SGD(self.weights, lr=0.1)
        self.x = torch.randn(T, H, generator=g, device="cuda").bfloat16()
        self.ids = torch.rand(T, E, generator=g, device="cuda").topk(K, -1).indices
        self.probs = torch.rand(T, K, generator=g, device="cuda")

    def forward(self) -> torch.Tensor:
        x = self.x.clone().requires_grad_()
        return nvlink_moe(self.buffers, x, self.ids, self.probs, *self.weights)

    def iteration(self) -> None:
        self.forward().float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _lose_a_peer(rank: int, ranks: int, how: str, schedule: str) -> tuple[str, bool, float]:
    """What the survivors raise, whether their weights are as they were, and the seconds it took."""
    training = Training(rank, ranks, schedule)
    training.iteration()
    torch.cuda.synchronize()
    dist.barrier()
    before = [weight.detach().clone() for weight in training.weights]
    if rank == ranks - 1:
        if how == "never":
            time.sleep(4 * BOUND_S)
            return "", True, 0.0
        if how == "late":
            time.sleep(2 * BOUND_S)
            try:
                training.iteration()
                check_for_failed_waits()
            except PeerTimeoutError as error:
                return str(error), True, 0.0
            return "", True, 0.0
        if how == "backward":
            training.forward()
            torch.cuda.synchronize()
        os._exit(0)
    start = time.monotonic()
    try:
        if how == "last":
            training.forward()
            check_for_failed_waits()
        else:
            training.iteration()
    except PeerTimeoutError as error:
        kept = all(map(torch.equal, before, (w.detach() for w in training.weights)))
        return str(error), kept, time.monotonic() - start
    return "", False, time.monotonic() - start


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("how", ["never", "late", "forward", "backward", "last"])
def test_survivors_raise_before_the_optimizer_steps(how: str, schedule: str) -> None:
    ranks = min(RANKS, 4)
    outcomes = run_ranks_outcomes(
        _lose_a_peer, ranks, how, schedule, timeout_s=60 + 5 * BOUND_S, backend="nccl"
    )
    for rank, outcome in enumerate(outcomes[:-1]):
        assert outcome.error is None, outcome.error
        text, kept, seconds = outcome.value
        assert f"rank {rank}: no answer from peer" in text
        assert "in moe " in text
        assert kept
        assert seconds < 3 * BOUND_S + 10
