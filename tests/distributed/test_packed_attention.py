"""Megatron's SelfAttention on packed sequences (THD) under context parallelism by a2a: outputs and
every gradient against the same module on the whole pack, for packs whose sequences are padded, and
shorter than there are ranks. Core attention is Transformer Engine's stand-in (te_attention.py).
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_fluid.attention.packed import RotaryTable
from megatron_fluid.patches.attention.core import REPORT
from megatron_fluid.patches.attention.packed_sequences import pack_order, pack_table
from tests.support.launch import on_ranks
from tests.support.self_attention_world import (
    Case,
    angles_of,
    build,
    check_shares,
    count_calls,
    start,
    step,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

LENGTHS = (5, 1, 11, 3)
CASES = [
    Case(te=True, groups=2, norms=True),
    Case(te=True, groups=8, settings=(("softmax_type", "learnable"),)),
    Case(te=True, groups=4, rotated=4, settings=(("window_size", (3, 0)),)),
    Case(te=True, groups=1, causal=False, bias=False, rotated=0),
]


def padded_rows(ranks: int, lengths: Sequence[int] = LENGTHS) -> list[int]:
    """Rows of each sequence in the pack: the next multiple of twice the ranks."""
    return [-(-length // (2 * ranks)) * 2 * ranks for length in lengths]


def pack(ranks: int, lengths: Sequence[int] = LENGTHS, device: str = "cpu") -> Any:
    """Megatron's PackedSeqParams of padded sequences."""

    def bounds(rows: Sequence[int]) -> Tensor:
        return torch.tensor([0, *rows], device=device).cumsum(0).int()

    real, padded = bounds(lengths), bounds(padded_rows(ranks, lengths))
    most = max(padded_rows(ranks, lengths))
    return PackedSeqParams("thd", real, real, padded, padded, most, most)


def rows_of(rank: int, ranks: int, lengths: Sequence[int] = LENGTHS) -> Tensor:
    """A rank's rows of the pack: of each sequence two chunks."""
    found, begin = [], 0
    for rows in padded_rows(ranks, lengths):
        chunks = torch.arange(begin, begin + rows).chunk(2 * ranks)
        found += [chunks[rank], chunks[2 * ranks - 1 - rank]]
        begin += rows
    return torch.cat(found)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "collective"), (4, "rounds")])
@on_ranks()
def test_it_is_that_of_the_whole_pack(rank: int, ranks: int, backend: str) -> None:
    """Of projections that are overlapped ("rounds"), or around the exchange of heads."""
    alone = start(ranks)
    total, rows = sum(padded_rows(ranks)), rows_of(rank, ranks)
    for case in CASES:
        whole = build(case, 1, "auto", alone)
        packed = pack(ranks)
        angles = angles_of(case, packed.max_seqlen_q)
        expected = step(whole, case, torch.arange(total), angles, total, packed=packed)
        ours = build(case, ranks, backend)
        count = count_calls()
        found = step(ours, case, rows, angles, total, packed=pack(ranks))
        assert count() == (1 if backend == "rounds" else 0), case
        assert len(found) > 4
        check_shares(found, expected, rows, case.dtype, case)
        assert not REPORT.said, "nothing keeps Transformer Engine's exchange"
    hybrid = pack(ranks)
    hybrid.local_cp_size = 1
    heads = ours.core_attention.exchanges.heads
    q, k = (torch.randn(rows.numel(), n, 8) for n in (heads.num_heads, heads.num_kv_heads))
    ours.core_attention(q, k, k, None, ours.attn_mask_type, None, hybrid)
    [said] = REPORT.said
    assert said.endswith(": packed_seq_params has a context-parallel group of its own (hybrid)")


def test_rows_behind_the_last_sequence_are_kept_in_order() -> None:
    bounds = torch.tensor([0, 8, 8, 16], dtype=torch.int32)  # one of no rows
    packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None)
    order, inverse = pack_order(packed, 11, 2)
    assert order.tolist() == [
        *(0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 18),
        *(2, 3, 4, 5, 10, 11, 12, 13, 19, 20, 21),
    ]
    assert torch.equal(order[inverse], torch.arange(22))


@pytest.mark.parametrize("way", ["data", "inference mode", "numpy"])
def test_lengths_that_are_written_in_place_are_read_again(way: str) -> None:
    """No version counter counts these."""
    new = torch.tensor([0, 4, 16], dtype=torch.int32)
    angles = torch.arange(16.0).view(16, 1)
    table = RotaryTable(angles, angles, False)
    with torch.inference_mode(way == "inference mode"):
        bounds = torch.tensor([0, 8, 16], dtype=torch.int32)
        packed = SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None)
        pack_order(packed, 8, 2)
        pack_table(packed, 8, 2, table)
        if way == "numpy":
            bounds.numpy()[:] = new.numpy()
        else:
            (bounds.data if way == "data" else bounds).copy_(new)
        order, _ = pack_order(packed, 8, 2)
        places = pack_table(packed, 8, 2, table).cos
    expected = [0, 3, 4, 5, 6, 13, 14, 15, 1, 2, 7, 8, 9, 10, 11, 12]
    assert order.tolist() == expected
    assert places.flatten().tolist() == [at - 4 * (at >= 4) for at in expected]
