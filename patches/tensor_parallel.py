"""Megatron's own linear layers under tensor and sequence parallelism, their collectives hidden behind their GEMMs.

ColumnParallelLinear gathers the sequence before its GEMM and RowParallelLinear reduce-scatters it after; with sequence parallelism both are
served by megatron_fluid.tensor_parallel. Parameters, names and gradients stay Megatron's; with gradient accumulation fusion the weight
gradient goes straight into `main_grad`. Everything else (no sequence parallelism, frozen or gathered weights, deferred embedding gradients,
experts' own communication) keeps Megatron's path.

`--fluid-tp-overlap`: "off"; "on" sends every linear that fits through `all_gather_matmul` and `matmul_reduce_scatter`; "auto" only those
whose size and group a faster form than the collective serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_fluid.backward.weight_grads import add_product_to_main_grad, mark_added_to_main_grad
from megatron_fluid.config import current_config
from megatron_fluid.patches.startup import note_feature
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from megatron_fluid.tensor_parallel.choice import backend_for
from megatron_fluid.tensor_parallel.gemm import Gemm

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["column_forward_impl", "row_forward"]

FEATURE = "tensor-parallel overlap"


def column_forward_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `ColumnParallelLinear._forward_impl`: gather of the sequence and GEMM in one."""

    @functools.wraps(original)
    def fluid_forward_impl(
        self: ColumnParallelLinear, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        unusual = args or kwargs.get("grad_output_buffer") is not None or kwargs.get("gtp_remat_size", 1) > 1
        if unusual or not kwargs.get("sequence_parallel") or not _linear_fits(self, weight):
            return original(self, input, weight, *args, **kwargs)
        backend = _backend(self, "gather", input.shape[0] * self.tp_group.size(), weight, input)
        if backend is None:
            return original(self, input, weight, *args, **kwargs)
        output = all_gather_matmul(
            input.flatten(0, 1),
            weight,
            self.tp_group,
            transpose_b=True,
            bias=kwargs.get("bias"),
            backend=backend,
            weight_grad=_into_main_grad(weight, bool(kwargs.get("gradient_accumulation_fusion"))),
        )
        assert isinstance(output, Tensor)
        return output.view(-1, input.shape[1], output.shape[-1])

    return fluid_forward_impl


def row_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RowParallelLinear.forward`: GEMM and reduce-scatter of the sequence in one."""

    @functools.wraps(original)
    def fluid_forward(self: RowParallelLinear, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        serves = self.sequence_parallel and self.input_is_parallel and not self.explicit_expert_comm
        if not serves or getattr(self, "gtp_remat_size", 1) > 1 or not _linear_fits(self, self.weight):
            return original(self, input_)
        if input_.shape[0] % self.tp_group.size():
            return original(self, input_)  # Megatron refuses it by name
        backend = _backend(self, "scatter", input_.shape[0], self.weight, input_)
        if backend is None:
            return original(self, input_)
        output = matmul_reduce_scatter(
            input_.flatten(0, 1),
            self.weight,
            self.tp_group,
            transpose_b=True,
            bias=None if self.skip_bias_add else self.bias,
            backend=backend,
            weight_grad=_into_main_grad(self.weight, self.gradient_accumulation_fusion),
        ).view(-1, input_.shape[1], self.weight.shape[0])
        return output, self.bias if self.skip_bias_add else None

    return fluid_forward


def _linear_fits(linear: Any, weight: Tensor) -> bool:
    """A trainable weight of a plain linear whose group has several ranks."""
    mode = current_config().tp_overlap
    if mode == "off" or linear.tp_group.size() == 1:
        return False
    offloading = linear.config._cpu_offloading_context is not None
    return weight.requires_grad and not offloading and not hasattr(weight, "__fsdp_param__")


def _backend(linear: Any, operation: str, sequence: int, weight: Tensor, a: Tensor) -> str | None:
    """The backend to ask for, or None where Megatron's own path serves as well; sequence: rows of the whole [S, batch, K] input."""
    if a.dim() != 3:
        return None
    if current_config().tp_overlap == "on":
        return "auto"
    chosen = backend_for("auto", linear.tp_group, operation, Gemm(weight, transpose_b=True), sequence * a.shape[1], a)
    note_feature(FEATURE, chosen.name != "collective", f"{type(linear).__name__}: {chosen.name}")
    return None if chosen.name == "collective" else chosen.name


def _into_main_grad(weight: Tensor, fused: bool) -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """With gradient accumulation fusion: dW goes into main_grad, and autograd gets what makes Megatron's hooks fire."""
    if not fused or not hasattr(weight, "main_grad"):
        return None

    def weight_grad(a: Tensor, dc: Tensor) -> Tensor:
        add_product_to_main_grad(weight.main_grad, dc, a, overwrite=getattr(weight, "overwrite_main_grad", False))
        return mark_added_to_main_grad(weight)

    return weight_grad
