"""Who talks to whom, and in which order: the round-robin tournament and the NVLink domains.

In a tournament of W ranks every pair meets exactly once and no rank has two partners in one round.
Four ranks::

    round 0: (0, 3) (1, 2)
    round 1: (0, 2) (1, 3)
    round 2: (0, 1) (2, 3)

With an odd number of ranks one of them rests in each round (a bye). When the ranks live in several
NVLink domains (usually: hosts), the pairs within a domain meet first and the pairs across domains
afterwards, so that the rounds over fast links come early and can hide behind the least computation.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from megatron_fluid.errors import ConfigError, PeerTimeoutError

__all__ = ["detect_domains", "partners", "tournament"]

Round = list[tuple[int, int]]


def _circle(players: Sequence[int]) -> list[Round]:
    """The circle method: the first player stands still and the others rotate. Odd counts get a bye
    for a partner."""
    seats: list[int | None] = list(players)
    if len(seats) % 2:
        seats.append(None)
    rounds: list[Round] = []
    for _ in range(len(seats) - 1):
        pairs = []
        for left, right in zip(
            seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True
        ):
            if left is not None and right is not None:
                pairs.append((min(left, right), max(left, right)))
        rounds.append(sorted(pairs))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _cross(left: Sequence[int], right: Sequence[int]) -> list[Round]:
    """Rounds in which every rank of one domain meets every rank of another: cyclic shifts of the
    longer side."""
    if len(left) < len(right):
        left, right = right, left
    return [
        [
            (min(pair), max(pair))
            for pair in ((left[(i + shift) % len(left)], b) for i, b in enumerate(right))
        ]
        for shift in range(len(left))
    ]


def _side_by_side(schedules: Sequence[list[Round]]) -> list[Round]:
    """Run schedules of disjoint ranks at the same time: round i of each of them forms round i of
    the whole."""
    longest = max((len(schedule) for schedule in schedules), default=0)
    return [
        sorted(pair for schedule in schedules if i < len(schedule) for pair in schedule[i])
        for i in range(longest)
    ]


def tournament(num_ranks: int, domains: Sequence[int] | None = None) -> list[Round]:
    """Rounds of pairs in which every pair of ranks meets exactly once.

    Args:
        num_ranks: W, the number of ranks, 1 or more.
        domains: domain id of every rank (any integers), or None for one domain. Pairs inside a
            domain come first.

    Returns:
        A list of rounds, each a sorted list of pairs (a, b) with a < b. One domain takes W - 1
        rounds, or W where W is odd; so does an even number of equal domains. An odd number of
        domains, or unequal ones, cost some idle places.

    Raises:
        ConfigError: num_ranks below 1, or domains of another length.
    """
    if num_ranks < 1:
        raise ConfigError.of("num_ranks", num_ranks, "1 or more")
    if domains is None:
        return _circle(range(num_ranks))
    if len(domains) != num_ranks:
        raise ConfigError.of("domains", list(domains), f"one entry for each of {num_ranks} ranks")
    members: dict[int, list[int]] = {}
    for rank, domain in enumerate(domains):
        members.setdefault(domain, []).append(rank)
    groups = list(members.values())
    if len(groups) in (1, num_ranks):
        return _circle(range(num_ranks))
    rounds = _side_by_side([_circle(group) for group in groups])
    for pairs_of_groups in _circle(range(len(groups))):
        rounds += _side_by_side([_cross(groups[a], groups[b]) for a, b in pairs_of_groups])
    return rounds


def partners(rank: int, num_ranks: int, domains: Sequence[int] | None = None) -> list[int | None]:
    """This rank's partner in each round of :func:`tournament`; None where it has a bye.

    Raises:
        ConfigError: rank outside 0 .. num_ranks - 1, and what tournament raises.
    """
    rounds = tournament(num_ranks, domains)
    if not 0 <= rank < num_ranks:
        raise ConfigError.of("rank", rank, f"0 to {num_ranks - 1}")
    own: list[int | None] = []
    for pairs in rounds:
        own.append(next((b if a == rank else a for a, b in pairs if rank in (a, b)), None))
    return own


def _domain_name() -> str:
    """What ranks of one NVLink domain have in common.

    That is the host, unless MEGATRON_FLUID_NVLINK_DOMAIN names the domain: set it (to the same text
    on all hosts of a rack) where NVLink reaches over several hosts.
    """
    named = os.environ.get("MEGATRON_FLUID_NVLINK_DOMAIN")
    if named:
        return f"named:{named}"
    try:
        # Two containers of one machine may share a hostname with a third on another machine; the
        # boot id tells.
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"host:{boot or socket.gethostname()}"


def detect_domains(group: dist.ProcessGroup | None, timeout_s: float = 300.0) -> list[int]:
    """Domain id of every rank of a group, the same list on all of them. Collective over the group.

    Ranks of one host form a domain (MEGATRON_FLUID_NVLINK_DOMAIN overrides it). The names travel
    through the group's store and not through a collective, so that this works before the first use
    of the group's devices, and its wait for a rank that never comes is bounded.

    Returns:
        W integers; domains are numbered by their first rank, from 0.

    Raises:
        ConfigError: no group.
        PeerTimeoutError: a rank did not publish its name within timeout_s.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError.of("group", group, "an initialised torch.distributed process group")
    world, rank = group.size(), group.rank()
    if world == 1:
        return [0]
    store = dist.PrefixStore("megatron_fluid/domains", group.get_group_store())
    store.set(str(rank), _domain_name())
    ids: dict[str, int] = {}
    found = []
    for peer in range(world):
        try:
            store.wait([str(peer)], timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise PeerTimeoutError(rank, peer, "detect_domains", timeout_s=timeout_s) from error
        found.append(ids.setdefault(store.get(str(peer)).decode(), len(ids)))
    return found
