"""The head exchanges by name. A new transport is its file and a row here."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from megatron_fluid.attention.exchange.collective import CollectiveExchange
from megatron_fluid.attention.exchange.protocol import HeadExchange
from megatron_fluid.attention.exchange.rounds import RoundsExchange
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout

__all__ = ["EXCHANGES", "open_exchange"]

EXCHANGES: dict[str, type[HeadExchange]] = {
    "symmetric": SymmetricExchange,
    "rounds": RoundsExchange,
    "collective": CollectiveExchange,
}
_symmetric = functools.lru_cache(maxsize=64)(SymmetricExchange)  # its tables are looked up once


def open_exchange(
    name: str,
    connection: Any,
    heads: HeadLayout,
    sequence: SequenceLayout,
    batch: int,
    itemsize: int,
    groups: int | None = None,
    **settings: Any,
) -> HeadExchange:
    """Return an exchange.

    Args:
        name: of EXCHANGES.
        connection: what its ``connect`` returned.
        heads, sequence: the layouts.
        batch, itemsize: B, and the bytes of a value.
        groups: head groups; None: as many as pay for such a sequence.
        settings: further arguments of the exchange.
    """
    kind = EXCHANGES[name]
    if groups is None:
        groups = kind.head_groups(connection, heads, sequence.length, batch, itemsize)
    make = _symmetric if name == "symmetric" else kind
    return make(connection, dataclasses.replace(heads, groups=groups), sequence, **settings)
