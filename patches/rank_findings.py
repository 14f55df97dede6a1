"""What the ranks of a group have found about a layer, exchanged through the group's store: bounded,
with settings compared first, and with a named error where a rank does not come."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.same_settings import settings_difference
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError

__all__ = ["Finding", "exchange", "left_out_word"]


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


def left_out_word(feature: str) -> str:
    """The word under which a rank says why it takes no part in a feature."""
    return f"{feature} left out"


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
        config: this rank's settings, which must be those of all ranks (FluidConfig.shared).
        feature: what is decided about.
        layer: which layer it is, alike on all ranks.
        sizes: of the layer, alike on all ranks.

    Raises:
        ConfigError: on every rank: their settings or sizes differ.
        PeerTimeoutError: a rank has not come within the timeout.
        FluidError: the ranks are at different layers, or one of them has failed.
    """
    words = agreement(group)
    if words.alone:
        return [mine] * group.size()
    ranks = words.ranks
    settings = config.shared() | dict(sizes)
    limit_s = wait_timeout_s(group, config.timeout_s)
    try:
        reports = words.gather(feature, (layer, settings, mine), limit_s)
    except PeerTimeoutError as error:
        reason = (
            "A rank that is lost, runs without megatron_fluid or leaves this patch out does not "
            "come to the same layer"
        )
        told = words.read(left_out_word(feature), range(words.size))
        reason = "; ".join([reason, *(f"rank {ranks[rank]}: {why}" for rank, why in told.items())])
        raise error.with_detail(reason) from None
    if text := settings_difference([{"layer": name} for name, _, _ in reports], ranks):
        raise FluidError(f"{feature}: the ranks of a group are at different layers: {text}")
    if text := settings_difference([settings for _, settings, _ in reports], ranks):
        raise ConfigError(f"{feature}: {text}; allowed: the same on all ranks of a group")
    found = [finding for _, _, finding in reports]
    for number, finding in enumerate(found):
        if finding.error is not None and number != group.rank():
            raise FluidError(f"{feature}: rank {ranks[number]} failed: {finding.error}")
    return found
