"""Checks of the arguments of AllToAll. Errors name the argument, what was found and what
is allowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import aligned
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.transport import (
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
)

__all__ = ["Checks", "form", "refuse_unaligned", "same_forms"]

_INDEX_TYPES = (torch.uint32, torch.int32, torch.int64)
_OUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_PROBABILITY_TYPES = (*_OUT_TYPES, torch.float64)
_FP32 = (torch.float32,)
_INT32 = (torch.int32,)


def form(tensor: Tensor | None) -> object:
    """All that a check looks at, except the address: two tensors of one form pass or fail
    together."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


def same_forms(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return what tells whether as many others have these forms."""
    if guards := getattr(torch._C._dynamo.guards, "TensorGuards", None):  # an eighth of the time
        return guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    forms = [form(tensor) for tensor in tensors]
    return lambda *others: [form(other) for other in others] == forms


def refuse_unaligned(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    """Raise ConfigError for a tensor that does not begin at a multiple of 16 bytes."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    if not bits & 15:
        return
    for name, tensor in zip(names, tensors, strict=True):
        above = 0 if tensor is None or not tensor.numel() else tensor.data_ptr() & 15
        if above:
            found, allowed = f"{above} above a multiple of 16", "a multiple of 16, as of a copy"
            raise ConfigError.of(f"address of {name}", found, allowed)


def _rows_of(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() == 2 else -1


class Checks:
    """Checks for one layout. They cost more than a launch: AllToAll runs them once for each
    combination of forms."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device

    def layer_call(
        self, tokens: Tensor, routing: object, bound_m: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Check the arguments of a call of InferenceMoELayer, whose weights are of `dtype`."""
        layout, tokens = self.layout, self._present("tokens", tokens)
        m, most, hidden = _rows_of(tokens), layout.max_num_tokens, layout.hidden_dim
        if not 0 <= m <= most or tokens.shape[1] != hidden or tokens.dtype != dtype:
            raise ConfigError.of("tokens", form(tokens), f"[m <= {most}, {hidden}] of {dtype}")
        self._rows("tokens", tokens, 16)
        if routing is not None:
            if not isinstance(routing, tuple | list) or len(routing) != 2:
                raise ConfigError.of("routing", type(routing), "a pair of ids and probs, or None")
            types = {"ids": _INDEX_TYPES, "probs": _PROBABILITY_TYPES}
            for (what, allowed), tensor in zip(types.items(), routing, strict=True):
                name = f"routing: {what}"
                tensor = aligned(self._present(name, tensor))  # as the layer makes them
                self._fits(name, tensor, (m, layout.experts_per_token), allowed)
        self._bound(bound_m)

    def dispatch_send(self, q: DispatchSend) -> None:
        """Check the send half of a dispatch."""
        layout, x = self.layout, self._present("dp_x", q.x)
        tokens, width = _rows_of(x), layout.hidden_dim_bytes // x.element_size()
        if x.dim() != 2 or tokens > layout.max_num_tokens or x.shape[1] != width:
            raise ConfigError.of("dp_x", form(x), f"[m <= {layout.max_num_tokens}, {width}]")
        self._rows("dp_x", x, 16)
        if layout.scale_words:
            self._fits("dp_x_scale", q.x_scale, (tokens, layout.scale_words), _FP32, unit=4)
        elif q.x_scale is not None:
            found, reason = form(q.x_scale), "None, for hidden_dim_scale_bytes is 0"
            raise ConfigError.of("dp_x_scale", found, reason)
        shape = (tokens, layout.experts_per_token)
        self._fits("indices", q.indices, shape, _INDEX_TYPES)
        if q.weights is not None:
            if layout.batch_invariant:
                reason = "dispatch got some, but with batch_invariant combine takes them"
                raise ConfigError(f"weights: {reason}; pass None here")
            self._fits("weights", q.weights, shape, _FP32)
        self._bound(q.bound_m)

    def dispatch_receive(self, q: DispatchReceive, sent_type: torch.dtype | None) -> None:
        """Check the receive half of a dispatch, which will find rows of `sent_type`."""
        layout, row = self.layout, self.layout.hidden_dim_bytes
        self._fits("out_expert_num_tokens", q.counts, (layout.local_experts,), _INT32)
        x = self._present("out_expert_x", q.x)
        if x.dim() not in (2, 3) or x.shape[-1] * x.element_size() != row:
            allowed = f"[L, R, H] or [rows, H] with rows of {row} bytes"
            raise ConfigError.of("out_expert_x", form(x), allowed)
        floats = sent_type is not None and sent_type.is_floating_point and x.is_floating_point()
        if floats and sent_type != x.dtype:
            allowed = f"{sent_type}, the type sent, or an integer type for its bytes"
            raise ConfigError.of("out_expert_x", x.dtype, allowed)
        lead = (x.shape[0],) if q.packed else (layout.local_experts, layout.max_rows)
        if tuple(x.shape[:-1]) != lead:
            raise ConfigError.of("out_expert_x", tuple(x.shape), f"{lead} rows")
        if q.packed and x.shape[0] < layout.packed_rows(q.alignment):
            allowed = f"packed_rows({q.alignment}) = {layout.packed_rows(q.alignment)}"
            raise ConfigError.of("out_expert_x", f"{x.shape[0]} packed rows", allowed)
        self._rows("out_expert_x", x, 16)
        if layout.scale_words:
            shape = (*lead, layout.scale_words)
            self._fits("out_expert_x_scale", q.scale, shape, _FP32, unit=4)
        if q.packed:
            self._fits("out_expert_offsets", q.offsets, (layout.local_experts,), _INT32)
        elif q.offsets is not None or q.alignment != 1:
            belong = "belong to the packed layout, out_expert_x [rows, H]"
            raise ConfigError(f"out_expert_offsets and alignment {belong}")

    def combine_send(self, q: CombineSend, packed_rows: int | None, late: bool) -> None:
        """Check the send half of a combine, after a dispatch that was received in the packed layout
        of `packed_rows`, or not packed (None). `late`: combine takes the weights."""
        layout, y = self.layout, self._present("expert_y", q.expert_y)
        padded = (layout.local_experts, layout.max_rows)
        shape = (*(padded if packed_rows is None else y.shape[:1]), layout.hidden_dim)
        self._fits("expert_y", y, shape, (layout.combine_dtype,), unit=16)
        if packed_rows is not None and y.shape[0] < packed_rows:
            allowed = f"at least {packed_rows}, the packed_rows of the dispatch"
            raise ConfigError.of("expert_y", f"{y.shape[0]} packed rows", allowed)
        tokens = -1 if q.weights is None else _rows_of(q.weights)
        self._weights(q.weights, tokens, late)
        if tokens > layout.max_num_tokens:
            raise ConfigError.of("weights", f"{tokens} tokens", f"at most {layout.max_num_tokens}")
        self._bound(q.bound_m)

    def combine_receive(self, q: CombineReceive, sent_tokens: int, late: bool) -> None:
        """Check the receive half of a combine, after a dispatch of `sent_tokens`."""
        layout, out = self.layout, self._present("out_tokens", q.out)
        tokens = _rows_of(out)
        if tokens > sent_tokens:
            allowed = f"at most the {sent_tokens} that were dispatched"
            raise ConfigError.of("out_tokens", f"{tokens} tokens", allowed)
        self._fits("out_tokens", out, (tokens, layout.hidden_dim), _OUT_TYPES, unit=16)
        self._fits("indices", q.indices, (tokens, layout.experts_per_token), _INDEX_TYPES)
        self._weights(q.weights, tokens, late)
        self._bound(q.bound_m)

    def _weights(self, weights: Tensor | None, tokens: int, late: bool) -> None:
        if late:
            self._fits("weights", weights, (tokens, self.layout.experts_per_token), _FP32)
        elif weights is not None:
            reason = "combine got some, but they already went with the dispatch; pass None"
            raise ConfigError(f"weights: {reason}")

    def _bound(self, bound_m: Tensor | None) -> None:
        if bound_m is not None:
            types = (torch.uint32, torch.int32)
            self._fits("bound_m", bound_m, (1,), types, anywhere=True)

    def _present(self, name: str, tensor: Tensor | None) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor.device != self.device:
            found = str(tensor.device) if isinstance(tensor, Tensor) else tensor
            raise ConfigError.of(name, found, f"a tensor on {self.device}")
        return tensor

    def _fits(
        self,
        name: str,
        tensor: Tensor | None,
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, ...],
        unit: int = 0,
        anywhere: bool = False,
    ) -> None:
        """Whether `tensor` is on the device, of this shape and of one of these dtypes; and
        contiguous, or with `unit` of contiguous rows that begin at multiples of so many bytes; and
        at a multiple of 16 bytes, unless it may lie `anywhere`."""
        tensor = self._present(name, tensor)
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            found = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ConfigError.of(name, found, f"{shape} of {', '.join(map(str, dtypes))}")
        if unit:
            self._rows(name, tensor, unit)
        elif not tensor.is_contiguous():
            raise ConfigError.of(name, f"strides {tensor.stride()}", "a contiguous tensor")
        elif not anywhere:
            refuse_unaligned([name], [tensor])

    def _rows(self, name: str, tensor: Tensor, unit: int) -> None:
        """Contiguous rows that begin at multiples of `unit` bytes."""
        leading = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        steps = [stride * tensor.element_size() for stride, size in leading if size > 1]
        dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        if tensor.numel() and (not dense or any(step % unit for step in steps)):
            allowed = f"contiguous rows at multiples of {unit} bytes"
            raise ConfigError.of(name, f"strides {tensor.stride()}", allowed)
        refuse_unaligned([name], [tensor])
