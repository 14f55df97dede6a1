"""Peer rounds over gloo: the right bytes, nothing mixed, and a named error when a peer is gone."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm.p2p_rounds import (
    MultiCardOverlapContext,
    P2PRounds,
    detect_hosts,
    shared_rounds,
)
from megatron_fluid.comm.waits import WaitName
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from tests.support.launch import on_ranks, run_ranks_outcomes, world_group


def payload(source: int, target: int, salt: int = 0) -> torch.Tensor:
    """What source sends to target, told apart by size and values; nothing in every third pair."""
    rows = (source * 5 + target * 3 + salt) % 4
    return torch.full((rows, 3), float(100 * source + target + 1000 * salt))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@on_ranks()
def test_every_pair_gets_its_bytes(rank: int, world: int) -> None:
    rounds = P2PRounds(dist.group.WORLD)
    for repeat in range(3):
        pending, received = [], []
        # Two operations in flight at the same time; odd ranks start them the other way round.
        for operation in ("a", "b") if rank % 2 == repeat % 2 else ("b", "a"):
            salt = {"a": 1, "b": 2}[operation] + repeat
            for index, peer in enumerate(rounds.partners):
                if peer is None:
                    assert rounds.start(operation, index, [], []).done()
                    continue
                buffer = torch.full_like(payload(peer, rank, salt), -1.0)
                pending.append(
                    rounds.start(operation, index, [payload(rank, peer, salt)], [buffer])
                )
                received.append((peer, salt, buffer))
        for one in reversed(pending):
            one.wait()
            one.wait()  # a second wait is free
            assert one.done()
        for peer, salt, buffer in received:
            assert torch.equal(buffer, payload(peer, rank, salt))


@on_ranks(2)
def test_several_tensors_and_types_in_one_round(rank: int, world: int) -> None:
    rounds = shared_rounds(dist.group.WORLD)
    assert shared_rounds(dist.group.WORLD) is rounds
    set_config(FluidConfig(timeout_s=5.0))
    assert rounds.timeout_s == 5.0, "as the configuration has it now"
    shared_rounds(dist.group.WORLD, 7.0)
    assert rounds.timeout_s == 7.0
    peer = rounds.partners[0]
    assert peer is not None
    mine = [torch.full((4,), rank, dtype=d) for d in (torch.bfloat16, torch.float64, torch.int64)]
    theirs = [torch.zeros_like(t) for t in mine]
    empty = torch.empty(0, 7)
    rounds.start("mixed", 0, [mine[0], empty, *mine[1:]], [theirs[0], empty, *theirs[1:]]).wait()
    assert all(torch.equal(t, torch.full_like(t, peer)) for t in theirs)


@on_ranks(4)
def test_subgroups_name_global_ranks(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rounds = P2PRounds(groups[rank % 2])
    assert rounds.world_size == 2 and rounds.rank == rank // 2
    one = torch.full((2,), float(rank))
    other = torch.zeros(2)
    rounds.start("x", 0, [one], [other]).wait()
    assert other.tolist() == [float((rank + 2) % 4)] * 2
    failure = str(rounds.waits.failure(WaitName("x", 0, 1 - rounds.rank), 1.0))
    said = f"rank {rounds.rank}: no answer from peer {1 - rounds.rank} in x, round 0 after 1 s: "
    assert f"{said}global ranks {rank} and {(rank + 2) % 4}" in failure


@on_ranks(3)
def test_refusals_name_what_is_wrong(rank: int, world: int) -> None:
    rounds = P2PRounds(dist.group.WORLD)
    bye = rounds.partners.index(None)
    with pytest.raises(ConfigError, match=f"rank {rank} has a bye"):
        rounds.start("x", bye, [torch.ones(1)], [])
    with pytest.raises(ConfigError, match="contiguous"):
        rounds.start("x", (bye + 1) % 3, [torch.ones(2, 2).t()], [])
    with pytest.raises(ConfigError, match="round_index: found 3"):
        rounds.start("x", 3, [], [])
    with pytest.raises(ConfigError, match="group: found None"):
        P2PRounds(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s: found 0"):
        P2PRounds(dist.group.WORLD, timeout_s=0)
    with pytest.raises(ConfigError, match="ep_size: found 4, allowed: 3"):
        MultiCardOverlapContext("cpu", ep_size=4).rounds(dist.group.WORLD)


@on_ranks(3)
def test_a_context_takes_the_rounds_of_its_group(rank: int, world: int) -> None:
    context = MultiCardOverlapContext(torch.device("cpu"), ep_size=world)
    with pytest.raises(ConfigError, match="no process group"):
        context.rounds()
    rounds = context.rounds(dist.group.WORLD)
    assert context.rounds() is rounds
    assert MultiCardOverlapContext("cpu", group=dist.group.WORLD).rounds() is rounds

    with pytest.raises(ConfigError, match="neither ep_size nor group"):
        MultiCardOverlapContext("cpu")


@on_ranks(4)
def test_domains_are_agreed_and_near_pairs_come_first(rank: int, world: int) -> None:
    os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = "even" if rank % 2 == 0 else "odd"
    rounds = P2PRounds(dist.group.WORLD)
    assert detect_hosts(dist.group.WORLD)[0] == [0, 1, 0, 1]
    assert rounds.partners[0] == (rank + 2) % 4


def stay_silent(survivors: int) -> int:
    """Answer nobody until all survivors have noticed. Returns how many have (in two minutes, far
    beyond their timeout)."""
    store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + 120
    while time.monotonic() < deadline and store.add("noticed", 0) < survivors:
        time.sleep(0.1)
    return store.add("noticed", 0)


def noticed(error: PeerTimeoutError) -> str:
    dist.distributed_c10d._get_default_store().add("noticed", 1)
    return str(error)


def lost_rank(rank: int, world: int, silent: bool) -> str | int:
    """Rank 2 leaves, or falls silent, before the second round; the others report it."""
    rounds = P2PRounds(dist.group.WORLD, timeout_s=10.0)
    dist.barrier()  # the bound is for a lost rank, not for one whose process starts late
    try:
        # Whoever was not the lost rank's partner meets the broken ones in a later turn.
        for turn in range(3):
            for index, peer in enumerate(rounds.partners):
                if rank == 2 and (turn, index) == (0, 1):
                    if silent:
                        return stay_silent(3)
                    os._exit(0)
                if peer is not None:
                    operation = "token dispatch" if turn == 0 else "token combine"
                    rounds.start(operation, index, [torch.ones(4)], [torch.empty(4)]).wait()
    except PeerTimeoutError as error:
        if error.rank == rank and error.peer is not None and error.round_index is not None:
            return noticed(error)
        raise AssertionError(f"rank {rank}: the error lacks a rank, peer or round") from error
    raise AssertionError(f"rank {rank} noticed nothing")


@pytest.mark.parametrize("silent", [False, True], ids=["dead", "silent"])
def test_a_lost_rank_is_named_on_every_rank(silent: bool) -> None:
    outcomes = run_ranks_outcomes(lost_rank, 4, silent)
    for outcome in (outcomes[r] for r in (0, 1, 3)):
        assert outcome.ok, outcome.error
        assert f"rank {outcome.rank}: no answer from peer" in outcome.value
        # Its direct partner names rank 2; the others name the one that they waited for, and the
        # root cause.
        assert "peer 2 in token" in outcome.value, outcome.value
    if silent:
        assert outcomes[2].value == 3, "not all noticed while the lost rank was still there"


def silent_in_collective(rank: int, world: int, earlier: int) -> str | int:
    """Rank 1 never comes to the first all-to-all, or to a later one."""
    rounds, rows = P2PRounds(dist.group.WORLD), torch.ones(world, 2)

    def all_to_all() -> None:
        rounds.collective(
            "token dispatch",
            lambda: dist.all_to_all_single(rows.clone(), rows, group=rounds.group, async_op=True),
        )

    for _ in range(earlier):
        all_to_all()
    dist.barrier()  # the bound is for a lost rank, not for one whose process starts late
    rounds.timeout_s = 3.0
    if rank == 1:
        return stay_silent(2)
    with pytest.raises(PeerTimeoutError) as caught:
        all_to_all()
    return noticed(caught.value)


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_collective_is_bounded_and_names_the_rank_that_stays_away(earlier: int) -> None:
    outcomes = run_ranks_outcomes(silent_in_collective, 3, earlier)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank].error
        whom = "its group" if earlier else "peer 1"
        assert f"rank {rank}: no answer from {whom} in token dispatch" in outcomes[rank].value
        told = "rank 1 reported no wait" if earlier else "rank 1 did not come"
        assert told in outcomes[rank].value
    assert outcomes[1].value == 2


@on_ranks(2)
def test_a_receive_that_an_error_has_left_does_not_hold_up_what_follows(
    rank: int, world: int
) -> None:
    rounds = P2PRounds(world_group())
    if rank == 0:
        rounds.start("left", 0, [], [torch.empty(4)])  # nobody waits for it
    rounds.waits.channel.barrier("a receive was left")
    if rank == 1:
        rounds.start("left", 0, [torch.ones(4)], []).wait()
    dist.barrier()
