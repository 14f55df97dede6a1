"""One table of rotations for a whole sequence, made of the part that Megatron gives each
context-parallel rank.

Megatron computes angles once for a length and hands every layer this rank's rows of them
(`RotaryEmbedding.forward` keeps them in a cache). Heads are rotated where the whole sequence is, so
that all rows are needed: they are gathered once, the first time a rank's part is seen, and all
layers and microbatches share what was made of them. Whatever scaling made the angles is theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.packed import RotaryTable
from megatron_fluid.comm.waits import group_waits

__all__ = ["rotary_table"]

_MOST = 32  # lengths, as many as Megatron keeps
# By where the part lies: recomputation hands over detached copies of it. The part itself is kept,
# so that no other can come to lie there.
_tables: OrderedDict[tuple[Any, ...], tuple[Tensor, RotaryTable | None]] = OrderedDict()


def rotary_table(
    part: Tensor,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    interleaved: bool,
    exact: bool,
    scale: float = 1.0,
) -> RotaryTable | None:
    """Cosines and sines of all positions, float32 (float64 for float64).

    Collective over ``group`` the first time that a part is given; every rank gives its own.

    Args:
        part: angles of this rank's rows under Megatron's zig-zag layout, [s, 1, 1, dim]: each
            twice, in halves or in pairs.
        dtype: of the activations.
        group: the context-parallel group; None: the part is of all positions.
        interleaved: angles are in pairs.
        exact: keep float32 values; False rounds them to ``dtype``, as Megatron's own unfused
            rotation does.
        scale: of cosines and sines (YaRN's concentration factor).

    Returns:
        The table; None where the two of a pair differ, on every rank alike.
    """
    version = 0 if part.is_inference() else part._version
    of_part = part.data_ptr(), part.shape, part.stride(), version
    key = (*of_part, dtype, group, interleaved, exact, scale)
    found = _tables.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():
            found = part, _make(part, dtype, group, interleaved, exact, scale)
        _tables[key] = found
        if len(_tables) > _MOST:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return found[1]


def _make(
    part: Tensor,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    interleaved: bool,
    exact: bool,
    scale: float,
) -> RotaryTable | None:
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
        angles[SequenceLayout(world * rows, world, "zigzag").order(part.device)] = gathered
    first, second = (angles[:, 0::2], angles[:, 1::2]) if interleaved else angles.chunk(2, dim=1)
    if dim % 2 or not torch.equal(first, second):
        return None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = (first.cos() * scale, first.sin() * scale)
    cos, sin = ((value if exact else value.to(dtype)).to(wide).contiguous() for value in values)
    return RotaryTable(cos, sin, interleaved)
