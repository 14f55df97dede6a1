"""A call that raises on one rank alone: all others end soon, with the name of that rank and its
message, whatever moves the data."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_fluid import (
    MoELayer,
    MultiCardOverlapContext,
    SelfAttention,
    moe_multicard_p2p_overlap_forward,
)
from megatron_fluid.comm import failed_waits
from megatron_fluid.comm.agreement import Agreement
from megatron_fluid.comm.waits import explain
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from tests.support.agreements import FrozenStore, joined, on_all
from tests.support.launch import HANG_S, run_ranks, run_ranks_outcomes
from tests.support.moe_layers import CONFIG, F64, group

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks")

REFUSING = 1


class Broken(ValueError):
    """What an activation raises."""


def _moe(**settings: Any) -> Callable[[bool], Any]:
    layer = MoELayer({**CONFIG, **settings}, group(), dtype=F64)
    return lambda fits: layer(torch.ones(3, 8 if fits else 9, dtype=F64)).sum().backward()


def _hierarchical(rank: int) -> Callable[[bool], Any]:
    os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{rank // 2}"
    return _moe(backend="hierarchical", num_experts=8)


def _fail(grad: Tensor | None = None) -> None:
    raise Broken("9 tokens too many")


def _experts(at: str) -> Callable[[bool], Any]:
    ends = [""]

    def activation(x: Tensor) -> Tensor:
        y = x.clone()
        if ends[0] == "forward":
            _fail()
        if ends[0] == "backward":
            y.register_hook(_fail)
        return y

    layer = MoELayer({**CONFIG, "activation": activation}, group(), dtype=F64)

    def call(fits: bool) -> None:
        ends[0] = "" if fits else at
        layer(torch.ones(3, 8, dtype=F64)).sum().backward()

    return call


def _given_splits(rank: int) -> Callable[[bool], Any]:
    world = group().size()
    w = torch.ones(1, 8, 12, dtype=F64), torch.ones(1, 12, 8, dtype=F64)
    context = MultiCardOverlapContext("cpu", group=group())

    def call(fits: bool) -> None:
        x, ones = torch.ones(world, 8, dtype=F64), [1] * world
        splits = ones if fits else [9] + ones[1:]
        moe_multicard_p2p_overlap_forward(
            *(x, splits, ones, *w, group(), "gelu", context, 0, 1, ones, [[[1]] * world])
        )

    return call


def _attention(rank: int) -> Callable[[bool], Any]:
    layer = SelfAttention(16, 4, group=group(), dtype=F64)
    return lambda fits: layer(torch.ones(4, 1, 16 if fits else 9, dtype=F64)).sum().backward()


def _low_latency(rank: int) -> Callable[[bool], Any]:
    world = group().size()
    low = AllToAll.intranode(*(4, world, 1, rank, world, 1, 16, 32, 0))

    def call(fits: bool) -> None:
        ids = torch.full((4, 1), (rank + 1) % world, dtype=torch.int32)
        counts = torch.zeros(1, dtype=torch.int32)
        out = torch.zeros(1, 4 * world, 16, dtype=torch.bfloat16)
        rows = torch.ones(4 if fits else 9, 16).bfloat16()
        low.dispatch(counts, out, None, rows, None, ids, weights=torch.ones(4, 1))

    return call


def _gather_matmul(fits: bool) -> None:
    all_gather_matmul(torch.ones(*(2, 8) if fits else (2, 8, 9)), torch.ones(8, 4), group())


def _reduce_scatter(fits: bool) -> None:
    matmul_reduce_scatter(torch.ones(8, 4), torch.ones(4 if fits else 9, 2), group())


# On a rank: a call that raises unless it is told that it fits.
KINDS: dict[str, Callable[[int], Callable[[bool], Any]]] = {
    "rounds": lambda rank: _moe(backend="rounds"), "hierarchical": _hierarchical,
    "experts, forward": lambda rank: _experts("forward"),
    "experts, backward": lambda rank: _experts("backward"), "given splits": _given_splits,
    "attention": _attention, "low latency": _low_latency,
    "gather matmul": lambda rank: _gather_matmul, "reduce scatter": lambda rank: _reduce_scatter,
}  # fmt: skip
FIRST = ("rounds", "given splits", "low latency", "gather matmul")


def _body(rank: int, world: int, kind: str, first: bool) -> None:
    torch.set_num_threads(1)
    call = KINDS[kind](rank)
    if not first:
        call(True)
    call(rank != REFUSING)
    if rank != REFUSING and dist.is_initialized():
        call(True)  # sends may have been done already


@pytest.mark.parametrize(
    ("kind", "first"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in FIRST)],
    ids=lambda value: {True: "first call", False: "later call"}.get(value, value),
)
def test_all_others_end_with_the_message_of_the_rank_that_refused(kind: str, first: bool) -> None:
    world = 4 if kind == "hierarchical" else 2
    outcomes = run_ranks_outcomes(_body, world, kind, first, grace_s=HANG_S)
    refused = outcomes[REFUSING]
    assert refused.error is not None and "9" in refused.error, refused.error
    message = refused.error.strip().splitlines()[-1].partition(": ")[2]
    for other in outcomes:
        if other is refused:
            continue
        assert other.error is not None, f"rank {other.rank} went on\n{other.stacks}"
        last = other.error.strip().splitlines()[-1]
        assert f"rank {REFUSING} raised" in last and message in last, other.error


def _alone(rank: int, world: int) -> None:
    one = [dist.new_group([each]) for each in range(world)][rank]
    whole = MoELayer(CONFIG, dist.group.WORLD, dtype=F64)
    if rank == REFUSING:
        own = MoELayer(CONFIG, one, dtype=F64), SelfAttention(8, 2, group=one, dtype=F64)
        for call in (*own, lambda x: all_gather_matmul(x, torch.ones(8, 4, dtype=F64), one)):
            with pytest.raises(ConfigError, match="found.*9"):
                call(torch.ones(3, 9, dtype=F64))
        with pytest.raises(ConfigError, match="found 3"):
            SelfAttention(8, 3)
        for alone in (None, DeviceMesh.from_group(one, "cpu"), one):
            assert not failed_waits._reported, "the next call takes a report back"
            with pytest.raises(ConfigError, match="found 0"):
                MoELayer({**CONFIG, "hidden_size": 0}, alone)
        time.sleep(2.5)  # longer than between two looks for failures
    MoELayer(CONFIG, dist.group.WORLD, dtype=F64)
    whole(torch.ones(3, 8, dtype=F64))


def test_an_error_that_a_rank_catches_in_a_call_of_its_own_ends_no_other() -> None:
    run_ranks(_alone, 2)


# ---- what a report does, in one process


def test_the_own_error_is_told_in_bounded_time_where_the_store_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_fluid.comm.agreement.STORE_S", 0.05)
    channel = Agreement(FrozenStore(), "group", 1, range(3), lambda: 5.0)  # type: ignore[arg-type]
    start = time.monotonic()
    told = explain(PeerTimeoutError(1, 2, "moe dispatch", 3, 5.0), channel, grace_s=0.2)
    assert time.monotonic() - start < 20
    assert "the store of the job does not answer" in told


def test_a_refusal_ends_the_agreements_of_others_and_is_taken_back() -> None:
    channels = joined(3)
    channels[0].report_refusal("rank 0 raised another")
    channels[1].report_refusal("rank 1 raised ConfigError: x")
    channels[0].withdraw_refusal()  # late: its own report alone
    assert channels[2].failed() == "rank 1 raised ConfigError: x" and channels[1].failed() == ""
    assert channels[2].failures() == {1: (None, "rank 1 raised ConfigError: x")}
    channels[1].withdraw_refusal()
    assert channels[2].failed() == "" and channels[2].failures() == {}
    channels[0].report_refusal("rank 0 raised a third")
    assert channels[2].failed() == "rank 0 raised a third"


def test_ranks_that_all_refuse_a_call_do_not_hold_it_against_each_other() -> None:
    channels = joined(2)
    on_all(channels, lambda w: w.report_refusal(f"rank {w.rank} raised ConfigError"))
    assert [w.failed() for w in channels] == ["", ""]

    def next_call(w: Agreement) -> None:
        if w.rank:
            time.sleep(1.5)  # longer than between two looks for failures
        w.barrier("next call")

    assert on_all(channels, next_call) == [None, None]
    assert channels[0].failures() == {}, "a rank that comes to the next call takes its report back"
    channels[0].report_refusal("rank 0 raised another")
    assert channels[1].failed() == "rank 0 raised another"
