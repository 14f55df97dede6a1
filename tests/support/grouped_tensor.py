"""Stands in for Transformer Engine's GroupedTensor, whose library needs a GPU: the parameter that
`moe_single_grouped_weight` makes of an expert linear's weights, and Megatron's fused operation.
As in Transformer Engine 2.14 to 2.20: a tensor subclass of shape [El, ...] with its values flat in
`rowwise_data`. `view(-1)` is the one shape operation; those in place write into the members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

_ATEN = torch.ops.aten
_REFUSED = {
    _ATEN.reshape.default, _ATEN.unsqueeze.default, _ATEN.transpose.int, _ATEN.permute.default,
    _ATEN.t.default, _ATEN.slice.Tensor, _ATEN.narrow.default, _ATEN.select.int, _ATEN.split.Tensor,
    _ATEN.cat.default, _ATEN.stack.default,
}  # fmt: skip


class _Identity(torch.autograd.Function):
    """The node by which Megatron finds a parameter's AccumulateGrad."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class GroupedTensor(torch.Tensor):
    """Args: values [El, ...], whose memory it takes."""

    copies = 0  # how often one was stacked for an operation that has no form of its own

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> GroupedTensor:
        made = cls._wrapper(values.shape, values.stride(), values.dtype, values.device)
        made.rowwise_data, made.columnwise_data = values.view(-1), None
        made.quantizer, made.quantized_tensors = None, None
        made.num_tensors = len(values)
        made.tensor_shapes = [tuple(values.shape[1:])] * len(values)
        return made

    @classmethod
    def _wrapper(cls, shape: Any, strides: Any, dtype: Any, device: Any, **settings: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), strides=tuple(strides), dtype=dtype, device=device, **settings
        )

    def _same(self, requires_grad: bool) -> GroupedTensor:
        given = self.shape, self.stride(), self.dtype, self.device
        made = self._wrapper(*given, requires_grad=requires_grad)
        vars(made).update(vars(self))
        return made

    def all_same_shape(self) -> bool:
        return True

    def split_into_quantized_tensors(self) -> list[torch.Tensor]:
        """The members, views of the values."""
        return list(self.rowwise_data.view(self.shape).unbind(0))

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        return _Identity.apply(self) if other is self else super().expand_as(other)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GroupedTensor(num_tensors={self.num_tensors}, shapes={self.tensor_shapes})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0]
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return first._same(func is _ATEN.alias.default and first.requires_grad)
        if func is _ATEN.view.default:
            if tuple(args[1]) in ((-1,), (first.numel(),)):
                return first.rowwise_data.view(-1)
            raise RuntimeError("GroupedTensor has no view but view(-1)")
        if func in _REFUSED:
            raise RuntimeError(f"GroupedTensor refuses {func}")

        def plain(value: Any) -> Any:
            if not isinstance(value, GroupedTensor):
                return value
            GroupedTensor.copies += 1
            return torch.stack(value.split_into_quantized_tensors())

        passed, named = pytree.tree_map(plain, (args, kwargs or {}))
        result = func(*passed, **named)
        if not func._schema.is_mutable:
            return result
        for own, new in zip(args, passed, strict=True):
            if isinstance(own, GroupedTensor):
                for member, value in zip(own.split_into_quantized_tensors(), new, strict=True):
                    member.copy_(value)
        return None


def pack(linear: torch.nn.Module, kind: str) -> None:
    """Make one parameter `kind` of a linear's parameters `kind`0, `kind`1, ..."""
    names = [name for name in linear._parameters if name.startswith(kind)]
    members = [linear.get_parameter(name).detach() for name in names]
    parameter = torch.nn.Parameter(GroupedTensor(torch.stack(members)))
    for name in names:
        linear.register_parameter(name, None)
    linear.register_parameter(kind, parameter)


class _Values(torch.autograd.Function):
    """The values of a packed parameter, whose gradient is a plain tensor."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        return parameter.rowwise_data.view(parameter.shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class _FusedExperts(torch.nn.Module):
    """fc1, SwiGLU * probability and fc2 in one operation."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._experts = (experts,)  # no child of it

    def forward(
        self, rows: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor, *_: torch.Tensor
    ) -> torch.Tensor:
        (experts,) = self._experts
        scale = probs.reshape(-1, 1)
        h = torch.cat(self._product(experts.linear_fc1, rows, counts, None))
        gate, up = h.chunk(2, dim=-1)
        activated = (torch.nn.functional.silu(gate) * up * scale).to(h.dtype)
        return torch.cat(self._product(experts.linear_fc2, activated, counts, scale))

    @staticmethod
    def _product(linear: Any, rows: Any, counts: Any, scale: Any) -> list[torch.Tensor]:
        splits = counts.tolist()
        weights, biases = (members(linear, kind) for kind in ("weight", "bias"))
        parts = [x @ w.t() for x, w in zip(rows.split(splits), weights, strict=True)]
        if not linear.use_bias:
            return parts
        scales = [1.0] * len(parts) if scale is None else scale.split(splits)
        return [part + b * s for part, b, s in zip(parts, biases, scales, strict=True)]


def members(linear: torch.nn.Module, kind: str) -> list[torch.Tensor]:
    """What a linear multiplies with or adds, for each expert."""
    packed = linear._parameters.get(kind)
    if packed is not None:
        plain = type(packed) is torch.nn.Parameter
        return list((packed if plain else _Values.apply(packed)).unbind(0))
    return [p for name, p in linear._parameters.items() if name.startswith(kind) and p is not None]


def _make_fused_ops(experts: Any) -> torch.nn.Module:
    made = _FusedExperts(experts)
    made.register_forward_pre_hook(experts._make_fused_impl_pre_forward_hook())
    return made


@contextlib.contextmanager
def megatron_with_grouped_tensors() -> Iterator[None]:
    """Inside, Megatron takes GroupedTensor for Transformer Engine's, in its buffers and its
    optimizer, too, and believes in a Transformer Engine that is new enough."""
    experts = "megatron.core.transformer.moe.experts.TEGroupedMLP."
    with (
        mock.patch("megatron.core.fp8_utils.GroupedTensor", GroupedTensor),
        mock.patch("megatron.core.fp8_utils.HAVE_TE_GROUPED_TENSOR_CLASS", True),
        mock.patch(
            "megatron.core.transformer.transformer_config.is_te_min_version", return_value=True
        ),
        mock.patch(f"{experts}_is_fused_impl_supported", return_value=True),
        mock.patch(f"{experts}_make_fused_ops", _make_fused_ops),
    ):
        yield
