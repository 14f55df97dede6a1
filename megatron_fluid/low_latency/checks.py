"""Checks of the tensors that AllToAll is given. Errors name the argument, what was found and what
is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency.layout import Layout

__all__ = ["Checks", "form"]

_INDEX_TYPES = (torch.uint32, torch.int32, torch.int64)
_OUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def form(tensor: Tensor | None) -> object:
    """All that a check looks at, except the address: two tensors of one form pass or fail
    together."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


class Checks:
    """Checks for one layout. They cost more than a launch: AllToAll runs them once for each
    combination of forms."""

    def __init__(self, layout: Layout, device: torch.device, combine_dtype: torch.dtype) -> None:
        self.layout = layout
        self.device = device
        self.combine_dtype = combine_dtype

    def dispatch_send(
        self,
        x: Tensor | None,
        scale: Tensor | None,
        indices: Tensor | None,
        weights: Tensor | None,
        bound_m: Tensor | None,
        quantize: bool,
    ) -> None:
        layout = self.layout
        x = self._present("dp_x", x)
        tokens = x.shape[0] if x.dim() == 2 else -1
        width = layout.hidden_dim_bytes // (1 if quantize else x.element_size())
        if x.dim() != 2 or tokens > layout.max_num_tokens or x.shape[1] != width:
            raise ConfigError.of("dp_x", form(x), f"[m <= {layout.max_num_tokens}, {width}]")
        self._rows("dp_x", x, 16)
        if quantize:
            if layout.hidden_dim_bytes % 128 or layout.scale_words * 128 != layout.hidden_dim_bytes:
                raise ConfigError.of(
                    "quantize",
                    f"{layout.hidden_dim_bytes} bytes of fp8 with {layout.scale_words} scales",
                    "one fp32 scale per 128 elements",
                )
            if x.dtype not in (torch.bfloat16, torch.float16):
                raise ConfigError.of("dp_x with quantize", x.dtype, "torch.bfloat16, torch.float16")
        elif layout.scale_words:
            scale = self._present("dp_x_scale", scale)
            self._exact("dp_x_scale", scale, (tokens, layout.scale_words), (torch.float32,))
            self._rows("dp_x_scale", scale, 4)
        if scale is not None and (quantize or not layout.scale_words):
            why = "quantize computes the scales" if quantize else "hidden_dim_scale_bytes is 0"
            raise ConfigError.of("dp_x_scale", form(scale), f"None, for {why}")
        shape = (tokens, layout.experts_per_token)
        self._dense(
            "indices",
            self._exact("indices", self._present("indices", indices), shape, _INDEX_TYPES),
        )
        if weights is not None:
            self._dense(
                "weights",
                self._exact("weights", self._present("weights", weights), shape, (torch.float32,)),
            )
        self._bound(bound_m)

    def dispatch_receive(
        self,
        counts: Tensor | None,
        x: Tensor | None,
        scale: Tensor | None,
        offsets: Tensor | None,
        alignment: int,
        sent: torch.dtype | None,
    ) -> None:
        layout = self.layout
        counts = self._present("out_expert_num_tokens", counts)
        self._dense(
            "out_expert_num_tokens",
            self._exact("out_expert_num_tokens", counts, (layout.local_experts,), (torch.int32,)),
        )
        x = self._present("out_expert_x", x)
        if x.dim() not in (2, 3) or x.shape[-1] * x.element_size() != layout.hidden_dim_bytes:
            raise ConfigError.of(
                "out_expert_x",
                form(x),
                f"[L, R, H] or [rows, H] with rows of {layout.hidden_dim_bytes} bytes",
            )
        if (
            sent is not None
            and sent != x.dtype
            and sent.is_floating_point
            and x.dtype.is_floating_point
        ):
            raise ConfigError.of(
                "out_expert_x", x.dtype, f"{sent}, the type sent, or an integer type for its bytes"
            )
        if alignment < 1:
            raise ConfigError.of("alignment", alignment, "at least 1 row")
        lead = (layout.local_experts, layout.max_rows) if x.dim() == 3 else (x.shape[0],)
        if tuple(x.shape[:-1]) != lead:
            raise ConfigError.of("out_expert_x", tuple(x.shape), f"{lead} rows")
        if x.dim() == 2 and x.shape[0] < layout.packed_rows(alignment):
            raise ConfigError.of(
                "out_expert_x",
                f"{x.shape[0]} packed rows",
                f"packed_rows({alignment}) = {layout.packed_rows(alignment)}",
            )
        self._rows("out_expert_x", x, 16)
        if layout.scale_words:
            scale = self._exact(
                "out_expert_x_scale",
                self._present("out_expert_x_scale", scale),
                (*lead, layout.scale_words),
                (torch.float32,),
            )
            self._rows("out_expert_x_scale", scale, 4)
        if x.dim() == 2:
            offsets = self._present("out_expert_offsets", offsets)
            self._exact("out_expert_offsets", offsets, (layout.local_experts,), (torch.int32,))
        elif offsets is not None or alignment != 1:
            raise ConfigError(
                "out_expert_offsets and alignment belong to the packed layout, out_expert_x [rows, "
                "H]"
            )

    def combine(
        self,
        out: Tensor | None,
        indices: Tensor | None,
        weights: Tensor | None,
        y: Tensor | None,
        bound_m: Tensor | None,
        do_send: bool,
        do_recv: bool,
        packed: bool,
        weights_came_with_dispatch: bool,
    ) -> None:
        layout = self.layout
        if do_recv:
            out = self._present("out_tokens", out)
            if (
                out.dim() != 2
                or out.shape[0] > layout.max_num_tokens
                or out.dtype not in _OUT_TYPES
            ):
                raise ConfigError.of(
                    "out_tokens",
                    form(out),
                    f"[m <= {layout.max_num_tokens}, H] of bf16, fp16 or fp32",
                )
            self._exact("out_tokens", out, (out.shape[0], layout.hidden_dim), _OUT_TYPES)
            self._rows("out_tokens", out, 16)
            shape = (out.shape[0], layout.experts_per_token)
            self._dense(
                "indices",
                self._exact("indices", self._present("indices", indices), shape, _INDEX_TYPES),
            )
        if do_send:
            y = self._present("expert_y", y)
            if packed:
                self._exact("expert_y", y, (y.shape[0], layout.hidden_dim), (self.combine_dtype,))
            else:
                lead = (layout.local_experts, layout.max_rows)
                self._exact("expert_y", y, (*lead, layout.hidden_dim), (self.combine_dtype,))
            self._rows("expert_y", y, 16)
        if weights_came_with_dispatch:
            if weights is not None:
                raise ConfigError(
                    "weights: given to combine, but they already went with the dispatch; pass None"
                )
        else:
            weights = self._present("weights", weights)
            tokens = weights.shape[0] if out is None else out.shape[0]
            self._dense(
                "weights",
                self._exact(
                    "weights", weights, (tokens, layout.experts_per_token), (torch.float32,)
                ),
            )
            if tokens > layout.max_num_tokens:
                raise ConfigError.of(
                    "weights", tuple(weights.shape), f"at most {layout.max_num_tokens} tokens"
                )
        self._bound(bound_m)

    def _bound(self, bound_m: Tensor | None) -> None:
        if bound_m is not None:
            self._exact(
                "bound_m", self._present("bound_m", bound_m), (1,), (torch.uint32, torch.int32)
            )

    def _present(self, name: str, tensor: Tensor | None) -> Tensor:
        if tensor is None:
            raise ConfigError(f"{name}: found None, allowed: a tensor on {self.device}")
        if tensor.device != self.device:
            raise ConfigError.of(name, str(tensor.device), f"a tensor on {self.device}")
        return tensor

    def _exact(
        self, name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> Tensor:
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
            raise ConfigError.of(
                name,
                f"{tensor.dtype} {tuple(tensor.shape)}",
                f"{shape} of {', '.join(map(str, dtypes))}",
            )
        return tensor

    def _dense(self, name: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ConfigError.of(name, f"strides {tensor.stride()}", "a contiguous tensor")

    def _rows(self, name: str, tensor: Tensor, unit: int) -> None:
        """Contiguous rows that begin at multiples of `unit` bytes."""
        steps = [
            s * tensor.element_size()
            for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
            if n > 1
        ]
        dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
        if tensor.numel() and (not dense or any(s % unit for s in steps) or tensor.data_ptr() % 16):
            raise ConfigError.of(
                name,
                f"strides {tensor.stride()}, address % 16 = {tensor.data_ptr() % 16}",
                f"contiguous rows at multiples of {unit} bytes, the first at a multiple of 16",
            )
