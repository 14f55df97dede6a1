"""Megatron's loops over parameters around an optimizer's step, in C or for a few parameters that
stand for the rest: with hundreds of experts the GPU waits for them in every step.

What comes out is Megatron's, and it is Megatron that decides: whether a gradient counts for the
norm is asked of one parameter among those with the same marks. What is kept between steps is
compared with the parameters in each of them. Megatron's own loop runs where something else is asked
for: gradients under another name, tensors of other classes than torch's own.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.patches.optimizer_copies import same_objects

__all__ = ["grads_for_norm", "local_tensor", "post_param_sync"]

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_grad, _dict = operator.attrgetter("grad"), operator.attrgetter("__dict__")
# All of a parameter that Megatron's filter of gradients for the norm looks at.
_MARKS = (
    *("shared", "tensor_model_parallel", "allreduce", "is_gtp_weight_remat", "grad_norm_group"),
    "__fsdp_param__",
)
_MOST_KINDS = 16


def grads_for_norm(
    original: Callable[[Any, str | None], list[Tensor]],
) -> Callable[..., list[Tensor]]:
    """Wrap `MegatronOptimizer.get_grads_for_grad_norm`, which looks at eight attributes of every
    parameter."""

    @functools.wraps(original)
    def fluid_grads(self: Any, grad_norm_group: str | None = None) -> list[Tensor]:
        params = self.get_parameters()
        kept: _Marks | None = self.__dict__.get("_fluid_marks")
        if kept is None or not kept.current(params):
            kept = self._fluid_marks = _Marks(params)
        if kept.plain and _asks_for_grad(self):
            ours = kept.gradients(lambda few: original(_Few(self, few), grad_norm_group))
            if ours is not None:
                return ours
        return original(self, grad_norm_group)

    return fluid_grads


def _asks_for_grad(optimizer: Any) -> bool:
    """Whether it is Megatron's filter that chooses, among gradients called `grad`."""
    config, name = optimizer.config, "_filter_grads_for_norm"
    if config.use_precision_aware_optimizer or (
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    ):
        return False
    own = getattr(type(optimizer), name, None)
    megatrons = getattr(own, "__module__", None) == "megatron.core.optimizer.optimizer"
    return megatrons and name not in optimizer.__dict__


class _Few:
    """An optimizer of which Megatron sees a few parameters alone."""

    def __init__(self, optimizer: Any, params: list[Tensor]) -> None:
        self._optimizer, self._params = optimizer, params

    def get_parameters(self) -> list[Tensor]:
        return self._params

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _Marks:
    """The parameters of an optimizer by what Megatron's filter looks at.

    Attributes:
        plain: whether there are few kinds of them, all torch's own tensors.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self.plain = bool(params) and _PLAIN.issuperset(map(type, params))
        if not self.plain:
            return
        dicts = list(map(_dict, params))
        self._columns = [list(_looked_up(dicts, name)) for name in _MARKS]
        kinds: dict[tuple[int, ...], int] = {}
        self._examples: list[Tensor] = []
        self._kind_of: list[int] = []
        for param, row in zip(params, zip(*self._columns, strict=True), strict=True):
            kind = kinds.setdefault(tuple(map(id, row)), len(kinds))
            if kind == len(self._examples):
                self._examples.append(param)
            self._kind_of.append(kind)
        self.plain = len(kinds) <= _MOST_KINDS

    def current(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters still, with the marks that they had."""
        if not same_objects(params, self._params):
            return False
        if not self.plain:
            return True
        dicts = list(map(_dict, params))
        pairs = zip(_MARKS, self._columns, strict=True)
        return all(
            all(map(operator.is_, _looked_up(dicts, name), column)) for name, column in pairs
        )

    def gradients(self, megatrons: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor] | None:
        """The gradients that `megatrons` gives of all parameters, by what it gives of one of each
        kind. None: it must be asked of all."""
        grads = list(map(_grad, self._params))
        if any(map(operator.is_, grads, itertools.repeat(None))):
            return None
        counts = []
        for example in self._examples:
            given = megatrons([example])
            if given and not same_objects(given, [example.grad]):
                return None
            counts.append(bool(given))
        if all(counts):
            return grads
        return list(itertools.compress(grads, map(counts.__getitem__, self._kind_of)))


def _looked_up(dicts: Iterable[dict[str, Any]], name: str) -> Iterable[Any]:
    return map(dict.get, dicts, itertools.repeat(name))


def local_tensor(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `megatron.core.utils.to_local_if_dtensor`, which enters torch.no_grad for each tensor,
    DTensor or not."""

    @functools.wraps(original)
    def fluid_local_tensor(tensor: Any) -> Any:
        return tensor if type(tensor) in _PLAIN else original(tensor)

    return fluid_local_tensor


def post_param_sync(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap `_ParamAndGradBucketGroup._post_param_sync`, which asks each gathered parameter whether
    it is quantised: torch's own class never is."""

    @functools.wraps(original)
    def fluid_post_param_sync(self: Any) -> None:
        kinds = {kind for bucket in self.buckets for kind in set(map(type, bucket.params))}
        if kinds != {torch.nn.Parameter} or self.ddp_config.reuse_grad_buf_for_mxfp8_param_ag:
            original(self)

    return fluid_post_param_sync
