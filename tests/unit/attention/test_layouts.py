"""Which rank has which heads and positions, and how many head groups cross between hosts."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fluid.attention.exchange.rounds import RoundsExchange
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.packed import split
from megatron_fluid.errors import ConfigError


@st.composite
def _head_layouts(draw: st.DrawFn) -> HeadLayout:
    kv = draw(st.integers(1, 8))
    per = draw(st.integers(1, 6))
    heads = kv * per
    world = draw(
        st.sampled_from(
            [w for w in range(1, heads + 1) if heads % w == 0 and not (kv % w and w % kv)]
        )
    )
    most = kv // world if kv % world == 0 else 1
    return HeadLayout(heads, kv, draw(st.integers(1, 3)), world, draw(st.integers(1, max(1, most))))


@settings(max_examples=200, deadline=None)
@given(_head_layouts())
def test_every_head_is_attended_once_with_its_own_key_and_value(layout: HeadLayout) -> None:
    n, dim = layout.num_heads // layout.num_kv_heads, layout.head_dim
    # Label each row of a fused weight in Megatron's order with (kind, head).
    labels = []
    for kv in range(layout.num_kv_heads):
        labels += [(0, kv * n + i) for i in range(n)] + [(1, kv), (2, kv)]
    fused = torch.tensor([label for label in labels for _ in range(dim)])
    seen: list[int] = []
    for rank, group in itertools.product(range(layout.world), range(layout.groups)):
        part = layout.part(rank, group)
        rows = part.weight(fused)
        assert rows.shape[0] == part.width
        q, k, v = split(rows.t().reshape(2, 1, part.width).contiguous(), part)
        kinds, ids = (torch.cat([t[i].flatten() for t in (q, k, v)]) for i in range(2))
        sizes = [len(part.q_heads) * dim, len(part.kv_heads) * dim, len(part.kv_heads) * dim]
        assert kinds.tolist() == [kind for kind, size in enumerate(sizes) for _ in range(size)]
        queries, keys, values = ids.split(sizes)
        assert queries.tolist() == [h for h in part.q_heads for _ in range(dim)]
        assert keys.tolist() == values.tolist() == [h for h in part.kv_heads for _ in range(dim)]
        assert list(part.kv_heads) == sorted({h // n for h in part.q_heads})
        assert part.output_columns == slice(part.q_heads.start * dim, part.q_heads.stop * dim)
        if layout.disjoint:
            assert len(part.qkv_rows) == 1, "a view, so that the part's projection is one product"
        seen += part.q_heads
    assert sorted(seen) == list(range(layout.num_heads))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 70),
    st.integers(1, 9),
    st.sampled_from(["contiguous", "zigzag"]),
    st.integers(1, 9),
)
def test_every_position_lies_on_one_rank_and_chunks_cut_the_rows(
    length: int, world: int, kind: str, count: int
) -> None:
    layout = SequenceLayout(length, world, kind)
    everywhere = layout.order().tolist()
    assert sorted(everywhere) == list(range(length))
    sizes = [layout.local_length(rank) for rank in range(world)]
    assert max(sizes) - min(sizes) <= (1 if kind == "contiguous" else 2)
    for rank in range(world):
        positions = layout.positions(rank).tolist()
        assert len(positions) == sizes[rank]
        rows: list[int] = []
        for index in range(count):
            chunk = layout.chunk(rank, index, count)
            for local, place in layout.pieces(rank, chunk):
                assert chunk.start <= local.start < local.stop <= chunk.stop
                assert positions[local] == list(range(place.start, place.stop))
                rows += range(local.start, local.stop)
        assert rows == list(range(sizes[rank]))


def test_zigzag_is_megatrons_layout() -> None:
    layout = SequenceLayout(16, 2, "zigzag")
    assert layout.positions(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert layout.positions(1).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(("arguments", "named"), [
    ((6, 4, 8, 1), "num_kv_heads"),
    ((6, 3, 8, 4), "num_heads"),
    ((0, 1, 8, 1), "num_heads"),
    ((12, 6, 8, 4), "num_kv_heads"),
    ((4, 4, 8, True), "world"),
    ((8, 4, 8, 2, 3), "head_groups"),
    ((8, 2, 8, 4, 2), "head_groups"),
])  # fmt: skip
def test_head_layouts_that_cannot_be_are_refused(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HeadLayout(*arguments)


ONE_HOST, TWO_HOSTS, FOUR_HOSTS = (0, 0), (0, 1), (0, 1, 2, 3)


@pytest.mark.parametrize(("hosts", "device", "heads", "length", "groups"), [
    (None, "cuda", (32, 16), 1 << 20, 1),
    (ONE_HOST, "cuda", (32, 16), 1 << 20, 1),
    (TWO_HOSTS, "cuda", (32, 16), 1024, 1),
    (TWO_HOSTS, "cuda", (32, 16), 4096, 2),  # 8 MiB of output to each peer, 4 in a message
    (TWO_HOSTS, "cuda", (32, 16), 1 << 20, 8),
    (TWO_HOSTS, "cpu", (32, 16), 1024, 8),
    # They divide the key/value heads of a rank.
    (TWO_HOSTS, "cuda", (36, 12), 1 << 20, 2),
    (TWO_HOSTS, "cuda", (32, 2), 1 << 20, 1),
    (FOUR_HOSTS, "cuda", (32, 2), 1 << 20, 1),
])  # fmt: skip
def test_heads_cross_in_groups_where_messages_stay_long(
    hosts: tuple[int, ...] | None, device: str, heads: tuple[int, int], length: int, groups: int
) -> None:
    layout = HeadLayout(*heads, 128, 2 if hosts is None else len(hosts))
    rounds: Any = None
    if hosts is not None:
        rounds = SimpleNamespace(domains=list(hosts), device=torch.device(device))
    assert RoundsExchange.head_groups(rounds, layout, length, 1, 2) == groups
