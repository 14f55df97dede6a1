"""Cosines and sines of a whole sequence, from the rows that Megatron gives each context-parallel
rank.

Megatron computes the angles once for a length and hands every layer this rank's rows of them
(`RotaryEmbedding.forward` caches them). Heads are rotated where the whole sequence is, which needs
all rows: one all-gather in each forward of the model, whose table all its layers share.

A table is never kept on the evidence of an address or a version counter: neither tells that angles
were rewritten in place (in inference mode, through `.data`, by a collective). Each layer reads a
table once; the first layer to come back, in the next forward or to recompute, has it made again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.packed import RotaryTable
from megatron_fluid.attention.tables import position_order
from megatron_fluid.comm.waits import group_waits

__all__ = ["rotary_table"]

_MOST = 32  # lengths, as many as Megatron keeps


@dataclass
class _Entry:
    part: Tensor  # keeps its memory, so that no other angles can come to lie at its address
    table: RotaryTable | None
    readers: WeakSet[Any]


# By address, as recomputation hands over detached copies of the angles.
_tables: OrderedDict[tuple[Any, ...], _Entry] = OrderedDict()


def rotary_table(
    part: Tensor,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    interleaved: bool,
    exact: bool,
    scale: float = 1.0,
    *,
    reader: object,
) -> RotaryTable | None:
    """Cosines and sines of all positions, float32 (float64 for float64).

    Collective over ``group`` unless the table of these angles is new to ``reader``; every rank
    gives its own rows.

    Args:
        part: angles of this rank's rows under Megatron's zig-zag layout, [s, 1, 1, dim]: each
            twice, in halves or in pairs.
        dtype: of the activations.
        group: the context-parallel group; None: the part is of all positions.
        interleaved: angles are in pairs.
        exact: keep float32 values; False rounds them to ``dtype``, as Megatron's own unfused
            rotation does.
        scale: of cosines and sines (YaRN's concentration factor).
        reader: the layer that asks, or what stands for it: hashable by identity.

    Returns:
        The table; None where the two of a pair differ, on every rank alike.

    Raises:
        RuntimeError: angles that were in pairs have been rewritten so that the two of a pair
            differ (on a GPU, a device-side assertion).
    """
    how = dtype, group, interleaved, exact, scale
    key = part.data_ptr(), part.shape, part.stride(), *how
    entry = _tables.get(key)
    if entry is None or reader in entry.readers:
        with torch.inference_mode(False), torch.no_grad():
            in_pairs = entry is not None and entry.table is not None
            entry = _Entry(part, _make(part, *how, in_pairs=in_pairs), WeakSet())
        _tables[key] = entry
    _tables.move_to_end(key)
    if len(_tables) > _MOST:
        _tables.popitem(last=False)
    entry.readers.add(reader)
    return entry.table


def _make(
    part: Tensor,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    interleaved: bool,
    exact: bool,
    scale: float,
    in_pairs: bool,
) -> RotaryTable | None:
    """``in_pairs``: angles at this address were. The host reads whether they are only once."""
    rows, dim = part.shape[0], part.shape[3]
    angles = part.reshape(rows, dim)
    if group is not None:
        world = group.size()
        gathered = part.new_empty((world * rows, dim))
        mine = angles.contiguous()
        group_waits(group).collective(
            "rotary table",
            lambda: dist.all_gather_into_tensor(gathered, mine, group=group, async_op=True),
        )
        angles = torch.empty_like(gathered)
        layout = SequenceLayout(world * rows, world, "zigzag")
        angles[position_order(layout, part.device)] = gathered
    first, second = (angles[:, 0::2], angles[:, 1::2]) if interleaved else angles.chunk(2, dim=1)
    if in_pairs:
        torch._assert_async((first == second).all(), "rotary angles are no longer in pairs")
    elif dim % 2 or not torch.equal(first, second):
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = (first.cos() * scale, first.sin() * scale)
    cos, sin = ((value if exact else value.to(dtype)).to(wide).contiguous() for value in values)
    return RotaryTable(cos, sin, interleaved)
