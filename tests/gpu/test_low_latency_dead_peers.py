"""The decode-time all-to-all on GPUs: a peer that is late, dead or killed."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.transport import DispatchReceive, DispatchSend
from tests.gpu.test_low_latency_gpu import _Routing
from tests.support.launch import run_ranks, run_ranks_outcomes
from tests.support.machine import RANKS
from tests.support.simulated_workspace import SimulatedWorkspace

_RANKS = min(RANKS, 4)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_RANKS < 2, reason="needs at least 2 ranks on GPUs"),
]


def _dead_peer(rank: int, world: int, operation: str) -> str:
    routing = _Routing(rank, world, 8, 4 * world, 2, 128)
    ata = routing.open(timeout_s=1.0)
    routing.draw(0)
    routing.run(ata, True, True)
    torch.cuda.synchronize()
    dist.barrier()
    weights, bound = routing.weights, routing.bound
    if rank == world - 1 and operation == "dispatch":
        time.sleep(4.0)  # it is late for everybody
        return "late"
    ata.dispatch(
        None, None, None, routing.x, None, routing.ids, bound, do_recv=False, weights=weights
    )
    ata.dispatch(routing.counts, routing.out_x, None, None, None, None, do_send=False)
    if rank == world - 1:
        torch.cuda.synchronize()
        time.sleep(4.0)
        return "late"
    started = time.monotonic()
    ata.combine(None, None, None, routing.out_x, bound, do_recv=False)
    ata.combine(routing.out, routing.ids, None, None, bound, do_send=False)
    torch.cuda.synchronize()  # the GPU is not left spinning
    assert time.monotonic() - started < 3.0
    with pytest.raises(PeerTimeoutError) as caught:
        ata.check_errors()
    with pytest.raises(PeerTimeoutError):
        ata.dispatch(None, None, None, routing.x, None, routing.ids, do_recv=False)
    ata.destroy()  # waits for nobody
    return str(caught.value)


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_dead_peer_is_named(operation: str) -> None:
    messages = run_ranks(_dead_peer, _RANKS, operation, backend="nccl", timeout_s=60)
    for rank, message in enumerate(messages[:-1]):
        assert (
            f"rank {rank}: no answer from peer {_RANKS - 1} in low_latency.{operation}" in message
        )


def _always_the_same(rank: int, world: int, device: str, turns: int) -> None:
    from megatron_fluid.low_latency.peer_memory import PeerMemory

    layout = Layout(128, 64, 6, 4, 1, 512, 1024, 0)
    simulated = SimulatedWorkspace(4, device, timeout_s=3e-4)
    ranks = [PeerMemory(layout, simulated.rank(r)) for r in range(4)]
    x = torch.randn(128, 512, device=device).to(torch.bfloat16)
    ids = torch.rand(128, 64, device=device).topk(6, -1).indices.int()
    weights = torch.ones(128, 6, device=device)
    counts = torch.zeros(16, dtype=torch.int32, device=device)
    out = torch.zeros(16, layout.max_rows, 512, dtype=torch.bfloat16, device=device)
    for turn in range(turns):
        for sender in ranks[:3]:
            sender.dispatch_send(DispatchSend(x, ids, weights))
        ranks[0].dispatch_receive(DispatchReceive(counts, out))
        if device == "cuda":
            torch.cuda.synchronize()
        with pytest.raises(PeerTimeoutError, match=r"no answer from peer 3 in .*dispatch.*seen 0$"):
            ranks[0].check_errors()
        errors = ranks[0].workspace.errors
        assert not errors.words[:3].any(), (turn, errors.words)
        errors.words.zero_()
        errors.abort.zero_()
        for sender in ranks[:3]:
            sender.counters[1:2].copy_(sender.counters[:1])


def test_a_wait_that_gives_up_names_the_peer_that_is_late_and_no_other() -> None:
    """Warps come to the bound at different times: what they then do must be one decision."""
    run_ranks(_always_the_same, 1, "cuda", 5000, backend="nccl", timeout_s=100)


def _killed(rank: int, world: int) -> str:
    routing = _Routing(rank, world, 8, 4 * world, 2, 128)
    ata = routing.open(timeout_s=1.0)
    routing.draw(0)
    routing.run(ata, True, True)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        os._exit(0)
    try:
        routing.run(ata, True, True)
        torch.cuda.synchronize()
        ata.check_errors()
    except PeerTimeoutError as error:
        return str(error)
    raise AssertionError("nobody was missed")


def test_survivors_of_a_killed_rank_end_cleanly() -> None:
    outcomes = run_ranks_outcomes(_killed, _RANKS, backend="nccl", timeout_s=40)
    for rank, outcome in enumerate(outcomes[:-1]):
        assert outcome.ok, outcome.error
        assert f"rank {rank}: no answer from peer {_RANKS - 1}" in outcome.value
