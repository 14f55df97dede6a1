"""The round-robin schedule: every pair once, nobody twice in a round, byes for odd counts, and
near pairs first."""

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fluid import topology
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.topology import partners, real_group, round_robin


def check(rounds: list[list[tuple[int, int]]], num_ranks: int) -> None:
    pairs = [pair for pairs_of_round in rounds for pair in pairs_of_round]
    assert sorted(pairs) == list(combinations(range(num_ranks), 2))
    for pairs_of_round in rounds:
        assert pairs_of_round, "a round without any pair costs time and moves nothing"
        busy = [rank for pair in pairs_of_round for rank in pair]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize("num_ranks", range(1, 20))
def test_every_pair_meets_once(num_ranks: int) -> None:
    rounds = round_robin(num_ranks)
    check(rounds, num_ranks)
    assert len(rounds) == (0 if num_ranks == 1 else num_ranks - 1 + num_ranks % 2)


def test_four_ranks_as_in_the_picture() -> None:
    assert round_robin(4) == [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=17))
def test_domains(domains: list[int]) -> None:
    rounds = round_robin(len(domains), domains)
    check(rounds, len(domains))
    near = [all(domains[a] == domains[b] for a, b in pairs) for pairs in rounds]
    if 1 < len(set(domains)) < len(domains):
        assert near == sorted(near, reverse=True), (
            "a pair across domains came before the last pair within one"
        )
        for pairs in rounds:
            assert len({domains[a] == domains[b] for a, b in pairs}) == 1


def test_two_hosts_of_four_take_seven_rounds() -> None:
    rounds = round_robin(8, [0, 0, 0, 0, 1, 1, 1, 1])
    assert len(rounds) == 7
    assert all((a < 4) == (b < 4) for pairs in rounds[:3] for a, b in pairs)


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 4))
def test_partners_agree(num_ranks: int, num_domains: int) -> None:
    domains = [rank % num_domains for rank in range(num_ranks)]
    table = [partners(rank, num_ranks, domains) for rank in range(num_ranks)]
    for rank, own in enumerate(table):
        assert sorted(peer for peer in own if peer is not None) == [
            r for r in range(num_ranks) if r != rank
        ]
        for round_index, peer in enumerate(own):
            assert peer is None or table[peer][round_index] == rank


def test_errors_name_the_setting() -> None:
    with pytest.raises(ConfigError, match="num_ranks: found 0"):
        round_robin(0)
    with pytest.raises(ConfigError, match="domains"):
        round_robin(3, [0, 1])
    with pytest.raises(ConfigError, match="rank: found 4"):
        partners(4, 4)


def test_hosts_of_one_name_differ_by_their_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "container")
    monkeypatch.delenv("MEGATRON_FLUID_NVLINK_DOMAIN", raising=False)
    found, domains = set(), set()
    for boot in ("one", "two"):
        (tmp_path / "boot_id").write_text(f"{boot}\n")
        monkeypatch.setattr(topology, "BOOT_ID", str(tmp_path / "boot_id"))
        found.add(topology.host_identity())
        domains.add(topology.domain_name())
    assert found == {"container (boot one)", "container (boot two)"}
    assert len(domains) == 2, "containers of one name are no NVLink domain"
    monkeypatch.setattr(topology, "BOOT_ID", str(tmp_path / "absent"))
    assert topology.host_identity() == "container"


class _Wrapped(dist.ProcessGroup):
    def __init__(self, **held: object) -> None:
        super().__init__(0, 1)
        vars(self).update(held)


def test_the_group_that_a_wrapper_holds_is_found() -> None:
    """Also in a wrapper that is no process group itself; what wraps nothing stays what it is."""
    plain = dist.ProcessGroup(dist.HashStore(), 0, 1)
    other = SimpleNamespace(size=lambda: 1)
    assert real_group(plain) is plain
    assert real_group(_Wrapped(inner=plain, ranks=[0])) is plain
    assert real_group(SimpleNamespace(group=plain)) is plain
    assert real_group(other) is other
    for held in ({"inner": None}, {"inner": plain, "spare": plain}):
        with pytest.raises(FluidError, match=r"^process group: found a _Wrapped .* allowed: one"):
            real_group(_Wrapped(**held))
