"""The fallback over collectives: waits that take too long, and odd tensors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency import AllToAll, all_to_all
from megatron_fluid.low_latency.layout import Layout
from tests.support.all_to_all_calls import build, receive, receive_back, send, send_back
from tests.support.launch import on_ranks
from tests.support.machine import NEEDS_INTERPRETER

ONES = torch.ones(4, 1)


def _open(
    rank: int, world: int, hidden: int = 16, scale_bytes: int = 0, itemsize: int = 2, **named: Any
) -> AllToAll:
    """Of 4 tokens, 2 experts, top-1."""
    named = {"transport": "gloo", **named}
    build = AllToAll.internode if "+" in named["transport"] else AllToAll.intranode
    return build(4, 2, 1, rank, world, 1, hidden, hidden * itemsize, scale_bytes, **named)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


@on_ranks(2)
def test_after_a_timeout_over_gloo_every_call_raises_it_again(rank: int, world: int) -> None:
    dist.barrier()  # the bound is for a late call, not for a process that starts late
    ata = _open(rank, world, timeout_s=1.0)
    ids, x = torch.full((4, 1), 1 - rank, dtype=torch.int32), torch.ones(4, 16)
    if rank == 1:
        _store().wait(["rank 0 has failed"])
    said = []
    for _ in range(2):
        try:
            send(ata, x.to(torch.bfloat16), ids, ONES)
            receive(ata)
        except PeerTimeoutError as error:
            said.append(str(error))
    _store().set("rank 0 has failed", "")
    with pytest.raises(PeerTimeoutError, match="dispatch"):
        ata.check_errors()
    assert rank == 1 or (len(said) == 2 and said[0] == said[1])


@on_ranks(2)
def test_scales_of_a_column_and_of_no_tokens_travel(rank: int, world: int) -> None:
    ids, x = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 16, dtype=torch.bfloat16)
    ata = _open(rank, world, scale_bytes=4)
    scale = torch.arange(1.0, 5.0)[None].t()  # one scale a row, in a column's strides
    for counts in ((4, 4), (0, 3)):
        m = counts[rank]
        send(ata, x[:m], ids[:m], ONES[:m], scale=scale[:m])
        received, _, out_scale = receive(ata)
        assert int(received) == (sum(counts) if rank == 0 else 0)
        if rank == 0 and out_scale is not None:
            expected = [value for n in counts for value in scale[:n].flatten().tolist()]
            assert out_scale.flatten().tolist()[: len(expected)] == expected


@on_ranks(2)
def test_ids_beyond_32_bits_are_no_expert(rank: int, world: int) -> None:
    ata, ids = _open(rank, world), torch.tensor([[1], [1 << 40], [-(1 << 40)], [-1]])
    send(ata, torch.ones(4, 16, dtype=torch.bfloat16), ids, ONES)
    assert int(receive(ata)[0]) == (0 if rank == 0 else 2)


@pytest.mark.parametrize("named", [{}, {"transport": "gloo+gloo", "domain_size": 1}])
@on_ranks(2)
def test_what_is_built_in_inference_mode_works_outside_it(
    rank: int, world: int, named: dict[str, Any]
) -> None:
    with torch.inference_mode():
        ata = _open(rank, world, **named)
    states = []
    for m in (2, 1):
        x, ids = torch.full((m, 16), 1.0 + rank + m).bfloat16(), torch.zeros(m, 1).int()
        send(ata, x, ids, ONES[:m])
        send_back(ata, receive(ata)[1])
        assert torch.equal(receive_back(ata, torch.zeros_like(x), ids), x)
        kept = vars(ata._transport).items()
        states.append({name: t.data_ptr() for name, t in kept if isinstance(t, torch.Tensor)})
    assert states[0] == states[1]  # as CUDA graphs, of which one may hold half a call, read it


@on_ranks(2)
def test_a_round_that_timed_out_is_not_done_and_fails_again(rank: int, world: int) -> None:
    rounds = P2PRounds(dist.group.WORLD)
    rounds.timeout_s = 1.0  # not for a process that starts late
    if rank == 1:
        return _store().wait(["rank 0 has failed"])
    pending = rounds.start("rows", 0, [torch.ones(4)], [torch.full((4,), -1.0)])
    for _ in range(2):
        with pytest.raises(PeerTimeoutError):
            pending.wait()
        assert not pending.done()
    _store().set("rank 0 has failed", "")


@on_ranks(2)
def test_two_objects_of_one_group_are_in_flight_at_a_time(rank: int, world: int) -> None:
    """Each half of the one object's calls runs between the halves of the other's."""
    objects = [_open(rank, world, hidden) for hidden in (16, 48)]
    ids = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    for turn in range(2):
        x = [torch.full((3, width), 1.0 + rank + 2 * turn + width).bfloat16() for width in (16, 48)]
        for ata, sent in zip(objects, x, strict=True):
            send(ata, sent, ids, ONES[:3])
        rows = [receive(ata)[1] for ata in objects]
        for ata, got in zip(objects, rows, strict=True):
            send_back(ata, got)
        for ata, sent in zip(objects, x, strict=True):
            assert torch.equal(receive_back(ata, torch.zeros_like(sent), ids), sent)


@pytest.mark.parametrize(("what", "found"), [
    # Ranks count the flags of each other's sending programs, one a processor.
    ("multiprocessors", "'132' on rank 0, '114' on rank 1"),
    ("combine_dtype", "'torch.bfloat16' on rank 0, 'torch.float16' on rank 1"),
])  # fmt: skip
@on_ranks(2)
def test_ranks_that_would_misread_each_other_are_told_apart(
    rank: int, world: int, what: str, found: str
) -> None:
    all_to_all._multiprocessors = lambda: 132 - 18 * rank if what == "multiprocessors" else 132
    dtype = (torch.bfloat16, torch.float16)[rank if what == "combine_dtype" else 0]
    with pytest.raises(ConfigError, match=f"{what}: found {found}"):
        _open(rank, world, combine_dtype=dtype)


# Tokens of 20 and more are many: without batch_invariant their rows come back as sums.
_SIZES = {"max_num_tokens": 20, "num_experts": 4, "experts_per_token": 3, "hidden_dim": 16}
_BYTES = {"hidden_dim_bytes": 32, "hidden_dim_scale_bytes": 0, "batch_invariant": True}


def _tokens_of(group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a data-parallel group: tokens, ids with masks and an expert named twice, weights."""
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(20, 16, generator=generator).bfloat16()
    ids = torch.rand(20, 4, generator=generator).argsort(1)[:, :3].int()
    ids[3, 1] = ids[5] = -1
    ids[7, 2] = ids[7, 0]
    return x, ids, torch.rand(20, 3, generator=generator)


def _in_order(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sums, of experts that multiply tokens with their number plus one."""
    total = torch.zeros(20, 16)
    for k in range(3):
        rows = (x * (ids[:, k, None] + 1)).to(torch.bfloat16)
        total += torch.where(ids[:, k, None] >= 0, rows.float() * weights[:, k, None], 0.0)
    return total


def _experts(ata: AllToAll, rank: int) -> torch.Tensor:
    rows, local = receive(ata)[1], ata.layout.local_experts
    return rows * torch.arange(rank * local + 1, (rank + 1) * local + 1)[:, None, None].bfloat16()


@pytest.mark.parametrize(("world", "dp_size"), [(2, 1), (4, 2)])
@on_ranks()
def test_with_batch_invariant_rows_are_summed_in_the_order_of_k(
    rank: int, world: int, dp_size: int
) -> None:
    sizes = _SIZES | _BYTES | {"rank": rank, "world_size": world, "dp_size": dp_size}
    ata = AllToAll.intranode(**sizes, transport="gloo")
    x, ids, weights = _tokens_of(rank // dp_size)
    with pytest.raises(ConfigError, match="weights: dispatch got some, but with batch_invariant"):
        send(ata, x, ids, weights)
    send(ata, x, ids)
    send_back(ata, _experts(ata, rank), weights)
    out = receive_back(ata, torch.zeros(20, 16), ids, weights)
    assert torch.equal(out, _in_order(x, ids, weights))


@NEEDS_INTERPRETER
def test_over_peer_memory_they_are_too() -> None:
    _, ranks = build(Layout(world_size=2, dp_size=1, **_SIZES, **_BYTES))  # type: ignore[arg-type]
    given = [_tokens_of(rank) for rank in range(2)]
    for ata, (x, ids, _) in zip(ranks, given, strict=True):
        send(ata, x, ids)
    rows = [_experts(ata, rank) for rank, ata in enumerate(ranks)]
    for ata, y, (*_, weights) in zip(ranks, rows, given, strict=True):
        send_back(ata, y, weights)
    for ata, (x, ids, weights) in zip(ranks, given, strict=True):
        out = receive_back(ata, torch.zeros(20, 16), ids, weights)
        assert torch.equal(out, _in_order(x, ids, weights))
