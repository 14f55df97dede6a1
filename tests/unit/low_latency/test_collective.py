"""The fallback over collectives: waits that take too long, and odd tensors."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency import AllToAll, all_to_all
from tests.support.launch import run_ranks


def _late(rank: int, world: int) -> list[str]:
    ata = AllToAll.intranode(4, 2, 1, rank, world, 1, 16, 32, 0, timeout_s=1.0)
    ids, counts = torch.full((4, 1), 1 - rank, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    out, x = torch.zeros(1, 8, 16, dtype=torch.bfloat16), torch.ones(4, 16, dtype=torch.bfloat16)
    if rank == 1:
        time.sleep(2)
    said = []
    for _ in range(2):
        try:
            ata.dispatch(counts, out, None, x, None, ids, weights=torch.ones(4, 1))
        except PeerTimeoutError as error:
            said.append(str(error))
    with pytest.raises(PeerTimeoutError, match="dispatch"):
        ata.check_errors()
    return said


def test_after_a_timeout_over_gloo_every_call_raises_it_again() -> None:
    first, second = run_ranks(_late, 2)[0]
    assert first == second


def _odd(rank: int, world: int) -> None:
    ids = torch.zeros(4, 1, dtype=torch.int32)
    counts, weights = torch.zeros(1, dtype=torch.int32), torch.ones(4, 1)
    # One scale a row: of a column's strides, and of no tokens at all.
    ata = AllToAll.intranode(4, 2, 1, rank, world, 1, 16, 32, 4, timeout_s=10.0)
    x, scale = torch.ones(4, 16, dtype=torch.bfloat16), torch.arange(1.0, 5.0)[None].t()
    out, out_scale = torch.zeros(1, 8, 16, dtype=torch.bfloat16), torch.zeros(1, 8, 1)
    ata.dispatch(counts, out, out_scale, x, scale, ids, weights=weights)
    if rank == 0:
        assert out_scale.flatten().tolist() == [1.0, 2.0, 3.0, 4.0] * 2
    ata = AllToAll.intranode(4, 2, 1, rank, world, 1, 128, 128, 4, timeout_s=10.0)
    m = 3 * rank
    out, out_scale = torch.zeros(1, 8, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 8, 1)
    x = torch.full((m, 128), 448.0).to(torch.bfloat16)
    ata.dispatch(counts, out, out_scale, x, None, ids[:m], weights=weights[:m], quantize=True)
    assert int(counts) == (3 if rank == 0 else 0)
    if rank == 0:
        assert torch.equal(out.float()[0, :3] * out_scale[0, :3], torch.full((3, 128), 448.0))


def test_one_scale_a_row_travels_from_a_column_and_from_no_tokens() -> None:
    run_ranks(_odd, 2)


def _wide_ids(rank: int, world: int) -> None:
    ata = AllToAll.intranode(4, 2, 1, rank, world, 1, 16, 32, 0, timeout_s=10.0)
    x, ids = (
        torch.ones(4, 16, dtype=torch.bfloat16),
        torch.tensor([[1], [1 << 40], [-(1 << 40)], [-1]]),
    )
    counts, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 8, 16, dtype=torch.bfloat16)
    ata.dispatch(counts, out, None, x, None, ids, weights=torch.ones(4, 1))
    assert int(counts) == (0 if rank == 0 else 2)


def test_ids_beyond_32_bits_are_no_expert() -> None:
    run_ranks(_wide_ids, 2)


def _outside(rank: int, world: int, transport: str) -> None:
    build = AllToAll.internode if "+" in transport else AllToAll.intranode
    with torch.inference_mode():
        ata = build(
            4,
            2,
            1,
            rank,
            world,
            1,
            16,
            32,
            0,
            transport=transport,
            timeout_s=10.0,
            **_SIZES[transport],
        )
    x, ids = (
        torch.full((2, 16), 1.0 + rank).to(torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.int32),
    )
    counts, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 8, 16, dtype=torch.bfloat16)
    ata.dispatch(counts, out, None, x, None, ids, weights=torch.ones(2, 1))
    result = torch.zeros_like(x)
    ata.combine(result, ids, None, out)
    assert torch.equal(result, x)


_SIZES: dict[str, dict[str, Any]] = {"gloo": {}, "gloo+gloo": {"domain_size": 1}}


@pytest.mark.parametrize("transport", list(_SIZES))
def test_what_is_built_in_inference_mode_works_outside_it(transport: str) -> None:
    run_ranks(_outside, 2, transport)


def _second_wait(rank: int, world: int) -> None:
    from megatron_fluid.comm.p2p_rounds import P2PRounds

    rounds = P2PRounds(dist.group.WORLD, timeout_s=1.0)
    if rank == 1:
        time.sleep(4)
        return
    pending = rounds.start("rows", 0, [torch.ones(4)], [torch.full((4,), -1.0)])
    for _ in range(2):
        with pytest.raises(PeerTimeoutError):
            pending.wait()
        assert not pending.done()


def test_a_round_that_timed_out_is_not_done_and_fails_again() -> None:
    run_ranks(_second_wait, 2)


def _two_in_flight(rank: int, world: int) -> None:
    """Each half of the one object's calls runs between the halves of the other's."""
    sizes = ((16, 4), (48, 3))
    objects = [
        AllToAll.intranode(
            most, 2, 1, rank, world, 1, hidden, 2 * hidden, 0, transport="gloo", timeout_s=30.0
        )
        for hidden, most in sizes
    ]
    ids = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    ones = torch.ones(3, 1)
    for turn in range(2):
        x = [
            torch.full((3, hidden), 1.0 + rank + 2 * turn + 4 * number).to(torch.bfloat16)
            for number, (hidden, _) in enumerate(sizes)
        ]
        rows = [
            torch.zeros(1, most * world, hidden, dtype=torch.bfloat16) for hidden, most in sizes
        ]
        for ata, sent in zip(objects, x, strict=True):
            ata.dispatch(None, None, None, sent, None, ids, do_recv=False, weights=ones)
        for ata, got in zip(objects, rows, strict=True):
            counts = torch.zeros(1, dtype=torch.int32)
            ata.dispatch(counts, got, None, None, None, None, do_send=False)
            assert counts.tolist() == [world * (1 + rank)]
        for ata, got in zip(objects, rows, strict=True):
            ata.combine(None, None, None, got, do_recv=False)
        for ata, sent in zip(objects, x, strict=True):
            out = torch.zeros_like(sent)
            ata.combine(out, ids, None, None, do_send=False)
            assert torch.equal(out, sent)


def test_two_objects_of_one_group_are_in_flight_at_a_time() -> None:
    run_ranks(_two_in_flight, 2)


def _another_gpu(rank: int, world: int) -> str:
    all_to_all._multiprocessors = lambda: 132 - 18 * rank
    try:
        AllToAll.intranode(4, 2, 1, rank, world, 1, 16, 32, 0, transport="gloo", timeout_s=30.0)
    except ConfigError as error:
        return str(error)
    return "built"


def test_gpus_of_other_sizes_are_told_apart() -> None:
    """Ranks count the flags of each other's sending programs, of which there is one a processor."""
    for said in run_ranks(_another_gpu, 2):
        assert "multiprocessors: found '132' on rank 0, '114' on rank 1" in said


def _another_dtype(rank: int, world: int) -> str:
    dtype = (torch.bfloat16, torch.float16)[rank]
    sizes = (4, 2, 1, rank, world, 1, 16, 32, 0)
    try:
        AllToAll.intranode(*sizes, combine_dtype=dtype, transport="gloo", timeout_s=30.0)
    except ConfigError as error:
        return str(error)
    return "built"


def test_rows_that_return_in_other_dtypes_are_told_apart() -> None:
    for said in run_ranks(_another_dtype, 2):
        assert "combine_dtype: found 'torch.bfloat16' on rank 0, 'torch.float16' on rank 1" in said
