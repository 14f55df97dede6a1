"""The head exchanges by name. A new transport is its file and a row here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_fluid.attention.exchange.buffers import shared_head_buffers
from megatron_fluid.attention.exchange.collective import CollectiveExchange
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.exchange.rounds import RoundsExchange, groups_between_hosts
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange, choose_groups
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.comm.p2p_rounds import P2PRounds, shared_rounds
from megatron_fluid.comm.symmetric import symmetric_unsupported_reason

__all__ = ["EXCHANGES", "ExchangeKind", "open_exchange", "symmetric_heads_unsupported_reason"]


@dataclass(frozen=True)
class ExchangeKind:
    """One way to exchange heads."""

    unsupported_reason: Callable[[dist.ProcessGroup, int, str], str | None]
    """Why a group cannot use it for heads of this size on this type of device, or None.
    Collective."""
    connect: Callable[[dist.ProcessGroup], Any]
    """Makes what all layers of a group share. Collective the first time."""
    make: Callable[..., HeadExchange]
    """Takes what `connect` made, heads and sequence."""
    head_groups: Callable[[Any, HeadLayout, int, int, int], int]
    """How many head groups pay for (what `connect` made, heads, sequence length, batch, bytes of a
    value)."""


def symmetric_heads_unsupported_reason(
    group: dist.ProcessGroup, head_dim: int, device_type: str
) -> str | None:
    """Return why heads cannot move over symmetric memory, or None if they can. Collective on
    GPUs."""
    if device_type != "cuda":
        return f"symmetric memory is on CUDA devices, not on {device_type}"
    if head_dim % 8:
        return f"a head of {head_dim} 16-bit values is not a multiple of 16 bytes"
    return symmetric_unsupported_reason(group)


def open_exchange(
    name: str,
    group: dist.ProcessGroup,
    heads: HeadLayout,
    sequence: SequenceLayout,
    batch: int,
    itemsize: int,
    in_groups: bool = True,
    **settings: Any,
) -> HeadExchange:
    """Return the exchange of this name, with as many head groups as pay for a sequence.

    Args:
        name: of EXCHANGES.
        group: the context-parallel group; collective at its first exchange of this name.
        heads, sequence: the layouts, in one head group.
        batch, itemsize: B, and the bytes of a value.
        in_groups: False: one head group.
        settings: further arguments of the exchange.
    """
    kind = EXCHANGES[name]
    connection = kind.connect(group)
    if in_groups:
        groups = kind.head_groups(connection, heads, sequence.length, batch, itemsize)
        heads = dataclasses.replace(heads, groups=groups)
    return kind.make(connection, heads, sequence, **settings)


def _serves_all(*_: object) -> None:
    return None


def _over_rounds(
    rounds: P2PRounds | None, heads: HeadLayout, sequence: SequenceLayout
) -> HeadExchange:
    if heads.single:
        return CollectiveExchange(None, heads, sequence)
    return RoundsExchange(rounds, heads, sequence)


EXCHANGES: dict[str, ExchangeKind] = {
    "symmetric": ExchangeKind(
        symmetric_heads_unsupported_reason,
        shared_head_buffers,
        functools.lru_cache(maxsize=64)(SymmetricExchange),  # its tables are looked up once
        lambda _, *of: choose_groups(*of),
    ),
    "rounds": ExchangeKind(_serves_all, shared_rounds, _over_rounds, groups_between_hosts),
    "collective": ExchangeKind(_serves_all, lambda group: group, CollectiveExchange, lambda *_: 1),
}
