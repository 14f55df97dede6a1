"""Who talks to whom, and in which order: the round-robin schedule and the NVLink domains.

In the rounds of W ranks every pair is matched exactly once, and no rank has two partners in one
round. Four ranks::

    round 0: (0, 3) (1, 2)
    round 1: (0, 2) (1, 3)
    round 2: (0, 1) (2, 3)

With an odd number of ranks one of them has no partner in each round (a bye). With several NVLink
domains (usually: hosts), pairs within a domain come first and pairs across domains last: the rounds
over fast links are early, where the least computation hides them.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_fluid.errors import ConfigError, FluidError

__all__ = [
    "HostLayout",
    "check_group",
    "domain_name",
    "host_identity",
    "partners",
    "real_group",
    "round_robin",
]

Round = list[tuple[int, int]]
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def _circle(players: Sequence[int]) -> list[Round]:
    """The circle method: the first player stays and the others rotate; odd counts have byes."""
    seats: list[int | None] = list(players)
    if len(seats) % 2:
        seats.append(None)
    rounds: list[Round] = []
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        full = ((a, b) for a, b in pairs if a is not None and b is not None)
        rounds.append(sorted((min(pair), max(pair)) for pair in full))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [pairs for pairs in rounds if pairs]


def _cross(left: Sequence[int], right: Sequence[int]) -> list[Round]:
    """Rounds that match every rank of one domain with every rank of another: cyclic shifts of the
    longer side."""
    if len(left) < len(right):
        left, right = right, left
    rounds = []
    for shift in range(len(left)):
        pairs = [(left[(i + shift) % len(left)], b) for i, b in enumerate(right)]
        rounds.append([(min(pair), max(pair)) for pair in pairs])
    return rounds


def _side_by_side(schedules: Sequence[list[Round]]) -> list[Round]:
    """Run schedules of disjoint ranks at the same time: round i of the result is all rounds i."""
    longest = max((len(schedule) for schedule in schedules), default=0)
    return [
        sorted(pair for schedule in schedules if i < len(schedule) for pair in schedule[i])
        for i in range(longest)
    ]


def round_robin(num_ranks: int, domains: Sequence[int] | None = None) -> list[Round]:
    """Return rounds of pairs in which every pair of ranks occurs exactly once.

    Args:
        num_ranks: W, the number of ranks, 1 or more.
        domains: domain id of every rank (any integers), or None for one domain. Pairs inside a
            domain come first.

    Returns:
        A list of rounds, each a sorted list of pairs (a, b) with a < b. One domain takes W - 1
        rounds, or W where W is odd; so does an even number of equal domains. With an odd number of
        domains, or unequal ones, some ranks idle in some rounds.

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
    """Return this rank's partner in each round of `round_robin`; None where it has a bye.

    Raises:
        ConfigError: rank outside 0 .. num_ranks - 1, and what round_robin raises.
    """
    rounds = round_robin(num_ranks, domains)
    if not 0 <= rank < num_ranks:
        raise ConfigError.of("rank", rank, f"0 to {num_ranks - 1}")
    return [next((b if a == rank else a for a, b in p if rank in (a, b)), None) for p in rounds]


@dataclass(frozen=True)
class HostLayout:
    """Which ranks are on which host (NVLink domain).

    Attributes:
        hosts: host of every rank, numbered from 0 without gaps. [W]
    """

    hosts: tuple[int, ...]

    @functools.cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, ascending."""
        hosts = range(max(self.hosts) + 1)
        return tuple(tuple(r for r, h in enumerate(self.hosts) if h == host) for host in hosts)

    @property
    def num_hosts(self) -> int:
        return len(self.members)

    def local_index(self, rank: int) -> int:
        """The rank's place among those of its host."""
        return self.members[self.hosts[rank]].index(rank)

    def gateway(self, source: int, host: int) -> int:
        """The rank of `host` that tokens of `source` cross to: of its own host the source itself,
        elsewhere the one with its local index, counted around where the host has fewer ranks."""
        members = self.members[host]
        return members[self.local_index(source) % len(members)]


def _boot() -> str:
    """Return the id of the kernel's boot, which no other host has; "" where the kernel has none.
    Host names alone collide: containers on two machines may share one."""
    try:
        return Path(BOOT_ID).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def host_identity() -> str:
    """Return the host name and the id of the kernel's boot if known: "node7 (boot 1f0c...)"."""
    boot = _boot()
    return f"{socket.gethostname()} (boot {boot})" if boot else socket.gethostname()


def domain_name() -> str:
    """Return what ranks of one NVLink domain have in common: the host's boot, unless
    MEGATRON_FLUID_NVLINK_DOMAIN (one text on all hosts that share NVLink) names the domain."""
    named = os.environ.get("MEGATRON_FLUID_NVLINK_DOMAIN")
    return f"named:{named}" if named else f"host:{_boot() or socket.gethostname()}"


def check_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group that `group` stands for (`real_group`); raise ConfigError where it is no
    process group."""
    group = real_group(group)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError.of("group", group, "an initialised torch.distributed process group")
    return group


def real_group[Group](group: Group) -> Group:
    """Return the process group that torch.distributed knows: `group`, or the one that it wraps.

    Frameworks for reinforcement learning wrap groups, so that they can destroy them while a rollout
    uses the GPUs and make them again; a wrapper has no name and no store. What it wraps then
    changes, so keep the wrapper and ask in every call.

    Raises:
        FluidError: a wrapper that holds no group now.
    """
    known = dist.distributed_c10d._world.pg_map
    if type(group) is dist.ProcessGroup or (isinstance(group, Hashable) and group in known):
        return group
    held = [x for x in getattr(group, "__dict__", {}).values() if isinstance(x, dist.ProcessGroup)]
    if len(held) == 1:
        return held[0]  # type: ignore[return-value]
    if isinstance(group, dist.ProcessGroup):
        raise FluidError(
            f"process group: found a {type(group).__name__} that torch.distributed does not know "
            f"and that holds {len(held)} process groups, allowed: one that holds one. If it was "
            "destroyed, make its group again before the next forward"
        )
    return group
