"""What layers that communicate share: the comparison of their settings over the ranks when they are
built, and of the shapes that they send; deep copies; the check of an input's dtype and device.

Settings are compared so that a rank with others is named before the first exchange could hang or
mix up data. Every distinct set is compared once for each group: layers that are built alike cost
nothing after the first. A rank that builds a layer unlike any before waits for its peers, bounded
in time; a peer that builds none, and is in another operation or has ended, is named.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.groups import group_resource
from megatron_fluid.comm.waits import group_waits
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError, FluidError, ranks_text

__all__ = [
    "Form",
    "check_input",
    "compare_settings",
    "compare_shapes",
    "copy_sharing",
    "settings_difference",
]

_MANY_STEPS = 64  # from one shape to another; a model with fixed lengths has a few
_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
type Form = tuple[torch.dtype, torch.device]
type _Settings = tuple[tuple[str, str], ...]


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
        FluidError: a rank is in another operation.
    """
    if not isinstance(group, dist.ProcessGroup) or (channel := agreement(group)).alone:
        return
    general = {f"FluidConfig.{name}": value for name, value in current_config().shared().items()}
    mine = {"layer": what} | {n: _text(v) for n, v in {**general, **settings}.items()}
    alike: set[_Settings] = group_resource(group, "compared settings", set)
    key = tuple(mine.items())
    if key in alike:
        return
    # One name for all kinds of layers: which kinds differ is among the settings.
    by_rank = channel.gather("comparison of the settings of a new layer", mine)
    if differences := settings_difference(by_rank, channel.ranks):
        raise ConfigError(f"{what}: {differences}; allowed: the same on all ranks of a group")
    alike.add(key)


def _text(value: object) -> str:
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if isinstance(value, set | frozenset):
        return repr(sorted(value))
    return value if isinstance(value, str) else repr(value)


def settings_difference(settings: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> str:
    """Name every setting whose values are not alike: its values, and the ranks of each; "" where
    all are alike. `timeout_s` may differ."""
    texts = []
    for name in dict.fromkeys(name for mine in settings for name in mine):
        owners: dict[Any, list[int]] = {}
        for rank, mine in zip(ranks, settings, strict=True):
            owners.setdefault(mine.get(name), []).append(rank)
        if len(owners) > 1 and name != "timeout_s":
            values = (f"{value!r} on {ranks_text(owner)}" for value, owner in owners.items())
            texts.append(f"{name}: found {', '.join(values)}")
    return "; ".join(texts)


def copy_sharing[Layer](layer: Layer, memo: dict[int, Any], *shared: object) -> Layer:
    """Return the copy for a layer's __deepcopy__: new parameters; the `shared` objects (process
    groups, transports) are not copied."""
    memo.update({id(each): each for each in shared})
    copied = memo[id(layer)] = layer.__new__(type(layer))
    copied.__dict__.update(copy.deepcopy(layer.__dict__, memo))
    return copied


def check_input(name: str, x: Tensor, parameter: Tensor) -> Form | None:
    """Refuse an input that a layer's parameters cannot be multiplied with.

    Args:
        name: of the input, for the message.
        x: the input.
        parameter: one of the layer's.

    Returns:
        dtype and device of x, which need no other look while the parameters stay as they are; None
        under autocast, which takes any floating dtype.

    Raises:
        ConfigError: x is on another device or, without autocast, of another dtype.
    """
    if x.device != parameter.device:
        allowed = f"{parameter.device}, where the layer's parameters are"
        raise ConfigError(f"{name}: found a tensor on {x.device}, allowed: {allowed}")
    autocast = torch.is_autocast_enabled(x.device.type)
    if x.dtype != parameter.dtype and not (autocast and x.is_floating_point()):
        allowed = f"{parameter.dtype}, as the layer's parameters, or any under torch.autocast"
        raise ConfigError(f"{name}: found {x.dtype}, allowed: {allowed}")
    return None if autocast else (x.dtype, x.device)


def compare_shapes(
    operation: str, group: dist.ProcessGroup, what: str, shape: Sequence[int], a: Tensor
) -> None:
    """Raise ConfigError on every rank where what is sent is not of one shape and dtype: else a rank
    would read rows that nobody wrote. Collective.

    On a CPU every call compares, by an all-gather of three numbers. On a GPU that would hold up the
    host, so ranks compare when a shape follows one that it has not followed yet, and a later call
    costs a look into a set. After _MANY_STEPS lengths are taken to vary: each shape is compared
    once. See `all_gather_matmul` for what that leaves open.
    """
    if agreement(group).alone:
        return
    name, mine = f"compare the shapes of {operation}", (tuple(shape), a.dtype)
    if _compares_each_call(a):
        _refuse_others(what, _in_a_collective(name, group, *mine), group)
        return
    last, alike = group_resource(group, "shapes alike", lambda: _Compared({}, set()))
    before = last.get(operation) if len(alike) < _MANY_STEPS else None
    step = operation, before, mine
    if step not in alike:
        try:
            shapes = agreement(group).gather(name, mine)
        except FluidError as error:
            was = last.get(operation)
            error.add_note(f"{what} of this rank is {mine}, and was {was} in its last call")
            raise
        _refuse_others(what, shapes, group)
        alike.add(step)
    last[operation] = mine


type _Sent = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of what a rank sends


class _Compared(NamedTuple):
    """What the ranks of a group have found alike: `last` sent by each operation, and which shapes
    followed which. Ranks that send the same have the same here, so they compare in the same calls.
    """

    last: dict[str, _Sent]
    alike: set[tuple[str, _Sent | None, _Sent]]


def _compares_each_call(a: Tensor) -> bool:
    return a.device.type == "cpu"


def _in_a_collective(
    name: str, group: dist.ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype
) -> list[_Sent]:
    """What each rank sends, by rank."""
    mine = torch.tensor([[*shape, _DTYPES.index(dtype)]], device="cpu")
    every = mine.new_empty((group.size(), mine.shape[1]))
    gather = functools.partial(dist.all_gather_into_tensor, every, mine, group=group, async_op=True)
    group_waits(group).start(name, gather)()
    return [(tuple(row[:-1]), _DTYPES[row[-1]]) for row in every.tolist()]


def _refuse_others(what: str, shapes: Sequence[_Sent], group: dist.ProcessGroup) -> None:
    if len(set(shapes)) > 1:
        ranks = agreement(group).ranks
        each = (f"{s} {d} on rank {rank}" for rank, (s, d) in zip(ranks, shapes, strict=True))
        allowed = "one shape and dtype on all ranks of the group"
        raise ConfigError(f"{what}: found {', '.join(each)}, allowed: {allowed}")
