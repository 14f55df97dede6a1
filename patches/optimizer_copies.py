"""What Megatron's distributed optimizer moves between DDP's buffers and its fp32 shards: for all
parameters at once, where Megatron asks, slices and copies for each in every step.

With hundreds of experts these loops are much of the host's time of an optimizer step. The slices
are the same in every step, and the values that a copy writes are Megatron's own, bit for bit.

Both patches call Megatron's own where it does something else: Megatron-FSDP, the precision-aware
optimizer, quantised parameters, gradients that are not reduced in fp32.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.backward.fresh_grads import settle_all

__all__ = ["copy_main_params", "copy_model_grads", "copy_slices", "is_plain", "same_objects"]

_main_grad = operator.attrgetter("main_grad")


def copy_main_params(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DistributedOptimizer._copy_main_params_to_model_params`, which copies fp32 shards into
    the parameters' buffers: one call for each pair of dtypes."""
    return _served(original, "_fluid_param_copies", lambda optimizer: _ParamCopies(optimizer))


def copy_model_grads(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DistributedOptimizer._copy_model_grads_to_main_grads`, which gives each shard its part
    of main_grad: no value is copied where both are fp32."""
    copy = _served(original, "_fluid_grad_views", lambda optimizer: _GradViews(optimizer))

    @functools.wraps(original)
    def fluid_copy_grads(self: Any) -> None:
        settle_all()  # where no reduction of the gradients was asked for
        copy(self)

    return fluid_copy_grads


def _served(
    original: Callable[..., None], attribute: str, make: Callable[[Any], _ParamCopies | _GradViews]
) -> Callable[..., None]:
    """What runs in place of `original`: the slices that are kept in an attribute of the optimizer,
    made anew when they are no longer its own; `original` where they are not the whole."""

    @functools.wraps(original)
    def fluid_copy(self: Any) -> None:
        if not is_plain(self):
            original(self)
            return
        kept = self.__dict__.get(attribute)
        if kept is None or not kept.current(self):
            kept = make(self)
            setattr(self, attribute, kept)
        if kept.whole:
            kept.run()
        else:
            original(self)

    return fluid_copy


def is_plain(optimizer: Any) -> bool:
    """Whether the optimizer copies between its fp32 shards and DDP's buffers, and nothing else."""
    config, ddp = optimizer.config, getattr(optimizer, "ddp_config", None)
    return not (
        optimizer.is_stub_optimizer
        or ddp is None
        or ddp.use_megatron_fsdp
        or ddp.fp8_param_gather
        or ddp.fp4_param_gather
        or config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    )


def _shards(optimizer: Any) -> Iterator[Tensor]:
    chain = itertools.chain.from_iterable
    groups = optimizer.shard_fp32_from_float16_groups, optimizer.shard_fp32_groups
    return chain(map(chain, groups))


def _models(optimizer: Any) -> Iterator[Tensor]:
    chain = itertools.chain.from_iterable
    return chain(map(chain, (optimizer.model_float16_groups, optimizer.model_fp32_groups)))


def same_objects(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether both hold the same objects. Of a thousand in every step: map, whose loop is in C."""
    return len(found) == len(known) and all(map(operator.is_, found, known))


def copy_slices(optimizer: Any) -> _ParamCopies:
    """Where each of the optimizer's shards is copied to."""
    return _ParamCopies(optimizer)


class _Parameters:
    """The shards of an optimizer and the parameters that they are of, as they were when the slices
    were made."""

    def __init__(self, optimizer: Any) -> None:
        self.shards = list(_shards(optimizer))
        self.models = list(_models(optimizer))

    def current(self, optimizer: Any) -> bool:
        """Whether these are the optimizer's still, and lie where they did."""
        shards, models = list(_shards(optimizer)), list(_models(optimizer))
        return same_objects(shards, self.shards) and same_objects(models, self.models)


class _ParamCopies(_Parameters):
    """Slices of DDP's parameter buffers, with the shards that belong there.

    Attributes:
        whole: whether they are all that Megatron would copy.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        from megatron.core.fp4_utils import is_nvfp4tensor

        self._buffers, self._places = optimizer.buffers, optimizer.model_param_gbuf_map
        self._data: dict[tuple[int, int], tuple[Tensor, int]] = {}
        pairs: dict[tuple[Any, ...], tuple[list[Tensor], list[Tensor]]] = {}
        self.whole = len(self.shards) == len(self.models)
        for shard, model in zip(self.shards, self.models, strict=False):
            if optimizer._is_distopt_quantized_param(model) or is_nvfp4tensor(model):
                self.whole = False
                break
            number, _, bucket = self._places[model]
            data = self._buffers[number].buckets[bucket].param_data
            self._data[number, bucket] = data, data.data_ptr()
            span = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            assert span.size == shard.nelement()
            part = data.view(-1)[span.start : span.end].data
            of_kind = pairs.setdefault((part.dtype, shard.dtype, shard.device), ([], []))
            of_kind[0].append(part)
            of_kind[1].append(shard)
        self._pairs = list(pairs.values())

    def current(self, optimizer: Any) -> bool:
        if optimizer.buffers is not self._buffers:
            return False
        if optimizer.model_param_gbuf_map is not self._places or not super().current(optimizer):
            return False
        for (number, bucket), (known, address) in self._data.items():
            data = self._buffers[number].buckets[bucket].param_data
            if data is not known or data.data_ptr() != address:
                return False
        return True

    def slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every shard, and the slice that it is copied to."""
        for parts, shards in self._pairs:
            yield from zip(shards, parts, strict=True)

    @torch.no_grad()
    def run(self) -> None:
        """Copy all."""
        for parts, shards in self._pairs:
            torch._foreach_copy_(parts, shards)


class _GradViews(_Parameters):
    """Slices of the parameters' main_grad, which are the gradients of the shards.

    Attributes:
        whole: whether they are all that Megatron would give.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._grads = list(map(_main_grad, self.models))
        self._addresses = list(map(Tensor.data_ptr, self._grads))
        self._views: list[Tensor] = []
        self.whole = len(self.shards) == len(self.models)
        self.whole &= all(grad.dtype == torch.float32 for grad in self._grads)
        if not self.whole:
            return
        for shard, model, grad in zip(self.shards, self.models, self._grads, strict=True):
            span = optimizer._get_model_param_range_map(model)["param"]
            assert span.size == shard.nelement()
            self._views.append(grad.view(-1)[span.start : span.end])

    def current(self, optimizer: Any) -> bool:
        if not super().current(optimizer):
            return False
        if not same_objects(list(map(_main_grad, self.models)), self._grads):
            return False
        return list(map(Tensor.data_ptr, self._grads)) == self._addresses

    def run(self) -> None:
        """Give each shard its gradient."""
        for shard, view in zip(self.shards, self._views, strict=True):
            shard.grad = view
