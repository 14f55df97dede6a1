"""What the ranks of a group have found about a layer, exchanged through the group's store: bounded,
with settings compared first, and with a named error where a rank does not come."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.rank_reports import (
    gather_reports,
    publish_report,
    ranks_text,
    settings_difference,
)
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError

__all__ = ["Finding", "exchange"]


@dataclass(frozen=True)
class Finding:
    """What one rank reports to the others of its group.

    Attributes:
        reason: why its layer has to keep Megatron's own path, or None.
        details: what else the choice of a path needs to know of every rank.
        error: what ended its look at the layer, or None.
    """

    reason: str | None
    details: Any = None
    error: str | None = None


def exchange(
    mine: Finding,
    group: dist.ProcessGroup,
    config: FluidConfig,
    feature: str,
    layer: str = "",
    sizes: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[Finding]:
    """What every rank of a group has found about a layer. Collective, through the group's store.

    Args:
        mine: this rank's finding.
        group: the ranks that have to agree.
        config: this rank's settings, which must be those of all ranks; only timeouts may differ.
        feature: what is decided about.
        layer: which layer it is, alike on all ranks.
        sizes: of the layer, alike on all ranks.

    Raises:
        ConfigError: on every rank: their settings or sizes differ.
        PeerTimeoutError: a rank has not come within the timeout.
        FluidError: the ranks are at different layers, or one of them has failed.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":  # of one process
        return [mine] * group.size()
    count = group_resource(group, ("patches", feature), itertools.count)
    key, store = f"megatron_fluid/{feature}", group.get_group_store()
    asked = f"{key}/{next(count)}"
    publish_report(
        store, asked, group.rank(), (layer, dataclasses.asdict(config) | dict(sizes), mine)
    )
    limit_s = wait_timeout_s(group, config.timeout_s)
    ranks = dist.get_process_group_ranks(group)
    reports = gather_reports(store, asked, range(group.size()), limit_s)
    if absent := [rank for rank in range(group.size()) if rank not in reports]:
        raise _absence(store, key, group, absent, limit_s, feature)
    if text := settings_difference([{"layer": name} for name, _, _ in reports.values()], ranks):
        raise FluidError(f"{feature}: the ranks of a group are at different layers: {text}")
    if text := settings_difference([settings for _, settings, _ in reports.values()], ranks):
        raise ConfigError(f"{feature}: {text}; allowed: the same on all ranks of a group")
    found = [finding for _, _, finding in reports.values()]
    for number, finding in enumerate(found):
        if finding.error is not None and number != group.rank():
            raise FluidError(f"{feature}: rank {ranks[number]} failed: {finding.error}")
    return found


def _absence(
    store: dist.Store,
    key: str,
    group: dist.ProcessGroup,
    absent: Sequence[int],
    limit_s: float,
    feature: str,
) -> PeerTimeoutError:
    """The error for ranks that did not come. It is printed before the store is asked why."""
    missing = ranks_text(dist.get_process_group_ranks(group)[rank] for rank in absent)
    detail = (
        f"{missing} did not come to the same layer. A rank that is lost, runs without "
        "megatron_fluid or leaves this patch out does not"
    )
    error = PeerTimeoutError(group.rank(), absent[0], feature, timeout_s=limit_s, detail=detail)
    print(f"megatron_fluid: {error}", file=sys.stderr, flush=True)
    reasons = gather_reports(store, f"{key}/left out", absent, 0)
    for rank, reason in reasons.items():
        detail += f"; rank {dist.get_process_group_ranks(group)[rank]}: {reason}"
    return PeerTimeoutError(group.rank(), absent[0], feature, timeout_s=limit_s, detail=detail)
