"""Ranks compare the settings of a layer when it is built, so that a rank with others is named
before the first exchange could hang or mix up data.

Every distinct set of settings is compared once for each group, through the group's store: layers
that are built alike cost nothing after the first. A rank that builds a layer unlike any before
waits for its peers, bounded in time. Peers that build no such layer find that out in the first
forward of their next layer (`refuse_uncompared`), and answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.group_resources import group_resource, held_resource
from megatron_fluid.comm.rank_reports import ranks_text, settings_difference
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError

__all__ = ["compare_settings", "refuse_uncompared"]

_BEGUN = "begun"  # in a report: how many layers had begun their first forward on its rank
_REST_S = 2.0  # for the ranks whose report is missing where the others already differ
_COUNT = "comparisons"  # word: how many comparisons a rank has begun


type _Settings = dict[str, str]


@dataclass
class _Compared:
    """What the ranks of a group have compared.

    Attributes:
        comparisons: how many were started; the next one's number.
        begun: how many layers have begun their first forward on this rank.
        alike: the settings that all ranks have.
        latest: the last settings of each kind of layer.
    """

    comparisons: int = 0
    begun: int = 0
    alike: set[tuple[tuple[str, str], ...]] = field(default_factory=set)
    latest: dict[str, _Settings] = field(default_factory=dict)

    def next_word(self) -> str:
        return f"settings {self.comparisons}"


def compare_settings(group: Any, what: str, settings: Mapping[str, object]) -> None:
    """Compare what a layer is built with over the ranks of a group. Collective for settings that
    are new to the group; free for others, and for a group of one rank.

    The settings of FluidConfig are compared too, but for those that may differ.

    Args:
        group: the ranks that build the layer.
        what: the kind of layer, for the message.
        settings: by name. Callables count by their names.

    Raises:
        ConfigError: on every rank, where settings differ: each such setting, its values and their
            ranks.
        PeerTimeoutError: a rank builds no such layer within the timeout.
    """
    if not isinstance(group, dist.ProcessGroup) or (words := agreement(group)).alone:
        return
    general = {f"FluidConfig.{name}": value for name, value in current_config().shared().items()}
    mine = {"layer": what} | {n: _text(v) for n, v in {**general, **settings}.items()}
    state = group_resource(group, "compared settings", _Compared)
    state.latest[what] = mine
    key = tuple(mine.items())
    if key in state.alike:
        return
    limit_s = wait_timeout_s(group)
    asked = state.next_word()
    state.comparisons += 1
    begun_at = time.monotonic()
    words.publish(asked, mine | {_BEGUN: str(state.begun)}, limit_s)
    words.publish(_COUNT, state.comparisons)
    left_s = max(0.0, limit_s - (time.monotonic() - begun_at))
    reports = _plain(words.read(asked, range(words.size), left_s, _differ))
    if len(reports) < words.size and _differ(reports):
        reports = _plain(words.read(asked, range(words.size), _REST_S))
    _refuse_differences(reports, what, group)
    if absent := [rank for rank in range(group.size()) if rank not in reports]:
        detail = f"{ranks_text(absent)} built no {what} with settings that are new to the group"
        operation = f"comparison of the settings of {what}"
        raise PeerTimeoutError(group.rank(), absent[0], operation, timeout_s=limit_s, detail=detail)
    state.alike.add(key)


def refuse_uncompared(group: Any) -> None:
    """Look whether a peer has built a layer unlike any of this rank's. One question to the store a
    peer; for the first forward of a layer.

    A peer that is past this forward may have built layers that this rank is yet to build: they are
    compared when it does.

    Raises:
        ConfigError: one has. The difference is to this rank's last layer of that kind.
    """
    state: _Compared | None = None
    if isinstance(group, dist.ProcessGroup):
        state = held_resource(group, "compared settings")
    if state is None:
        return
    words = agreement(group)
    state.begun += 1
    asked = state.next_word()
    ranks = [rank for rank in range(words.size) if rank != words.rank]
    if not any(count > state.comparisons for count in words.read(_COUNT, ranks).values()):
        return
    reports = words.read(asked, range(words.size), _REST_S)
    if min([int(report.pop(_BEGUN, "0")) for report in reports.values()], default=0) >= state.begun:
        return
    what = next((report["layer"] for report in reports.values()), "")
    mine = state.latest.get(what, {"layer": f"no {what}"})
    state.comparisons += 1
    words.publish(asked, mine)
    words.publish(_COUNT, state.comparisons)
    _refuse_differences(reports | {group.rank(): mine}, what, group)


def _plain(reports: Mapping[int, _Settings]) -> dict[int, _Settings]:
    return {
        rank: {name: value for name, value in report.items() if name != _BEGUN}
        for rank, report in reports.items()
    }


def _differ(reports: Mapping[int, _Settings]) -> bool:
    known = [*_plain(reports).values()]
    return any(report != known[0] for report in known)


def _refuse_differences(reports: Mapping[int, _Settings], what: str, group: Any) -> None:
    known = sorted(reports)
    ranks = dist.get_process_group_ranks(group)
    shown = settings_difference([reports[rank] for rank in known], [ranks[rank] for rank in known])
    if shown:
        raise ConfigError(f"{what}: {shown}; allowed: the same on all ranks of a group")


def _text(value: object) -> str:
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if isinstance(value, set | frozenset):
        return repr(sorted(value))
    return value if isinstance(value, str) else repr(value)
