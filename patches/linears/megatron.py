"""Megatron's own linear layers under tensor and sequence parallelism, their collectives hidden
behind their GEMMs.

ColumnParallelLinear gathers the sequence before its GEMM and RowParallelLinear reduce-scatters it
after; with sequence parallelism both are served by megatron_fluid.tensor_parallel. Parameters,
names and gradients stay Megatron's; with gradient accumulation fusion the weight gradient goes
straight into `main_grad`. Everything else (no sequence parallelism, frozen or gathered weights,
deferred embedding gradients, experts' own communication, a GEMM that is not Megatron's own) keeps
Megatron's path. Transformer Engine's linears: te_linears.py.

`--fluid-tp-overlap`: "off"; "on" sends every linear that fits through `all_gather_matmul` and
`matmul_reduce_scatter`; "auto" only those whose size and group a faster form than the collective
serves.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad, mark_added_to_main_grad
from megatron_fluid.config import current_config
from megatron_fluid.patches.startup_report import note_feature, withdraw_feature
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from megatron_fluid.tensor_parallel.choice import backend_for
from megatron_fluid.tensor_parallel.gemm import Gemm

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = ["backend_of", "column_forward_impl", "into_main_grad", "note", "row_forward"]

FEATURE = "tensor-parallel overlap"
_LAYERS = "megatron.core.tensor_parallel.layers"
_OTHER_GEMM = "its GEMM is not Megatron's own (a quantiser's, say)"
_SHARDED_WEIGHT = "its weight is gathered for each use"
_said: set[str] = set()


def column_forward_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `ColumnParallelLinear._forward_impl`: gather of the sequence and GEMM in one."""

    gemm_is_own = _watch_gemm()

    @functools.wraps(original)
    def fluid_forward_impl(
        self: ColumnParallelLinear, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        # Experts' tokens are gathered by their dispatcher: Megatron gives them
        # sequence_parallel=False, whatever the run has.
        if self.explicit_expert_comm:
            return original(self, input, weight, *args, **kwargs)
        unusual = None
        if not gemm_is_own():
            unusual = _OTHER_GEMM
        elif kwargs.get("grad_output_buffer") is not None:
            unusual = (
                "Megatron computes its weight gradient later (--defer-embedding-wgrad-compute)"
            )
        elif kwargs.get("gtp_remat_size", 1) > 1:
            unusual = _SHARDED_WEIGHT
        elif args:
            unusual = "its _forward_impl is called with other arguments than Megatron's"
        if not _linear_fits(self, weight, input, bool(kwargs.get("sequence_parallel")), unusual):
            return original(self, input, weight, *args, **kwargs)
        sequence = input.shape[0] * self.tp_group.size()
        backend = backend_of(self, self.tp_group, "gather", sequence, weight, input)
        if backend is None:
            return original(self, input, weight, *args, **kwargs)
        output = all_gather_matmul(
            input.flatten(0, 1),
            weight,
            self.tp_group,
            transpose_b=True,
            bias=kwargs.get("bias"),
            backend=backend,
            weight_grad=into_main_grad(weight, bool(kwargs.get("gradient_accumulation_fusion"))),
        )
        assert isinstance(output, Tensor)
        return output.view(sequence, input.shape[1], output.shape[-1])

    return fluid_forward_impl


def row_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RowParallelLinear.forward`: GEMM and reduce-scatter of the sequence in one."""

    gemm_is_own = _watch_gemm()
    own_impl = importlib.import_module(_LAYERS).RowParallelLinear._forward_impl

    @functools.wraps(original)
    def fluid_forward(self: RowParallelLinear, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.explicit_expert_comm:
            return original(self, input_)
        unusual = None
        if not gemm_is_own():
            unusual = _OTHER_GEMM
        elif getattr(type(self), "_forward_impl", None) is not own_impl or "_forward_impl" in vars(
            self
        ):
            unusual = (
                "its _forward_impl is not Megatron's own"  # which the overlapped form would not ask
            )
        elif getattr(self, "gtp_remat_size", 1) > 1:
            unusual = _SHARDED_WEIGHT
        if not _linear_fits(
            self, self.weight, input_, self.sequence_parallel and self.input_is_parallel, unusual
        ):
            return original(self, input_)
        if input_.shape[0] % self.tp_group.size():
            return original(self, input_)  # Megatron refuses it by name
        backend = backend_of(self, self.tp_group, "scatter", input_.shape[0], self.weight, input_)
        if backend is None:
            return original(self, input_)
        output = matmul_reduce_scatter(
            input_.flatten(0, 1),
            self.weight,
            self.tp_group,
            transpose_b=True,
            bias=None if self.skip_bias_add else self.bias,
            backend=backend,
            weight_grad=into_main_grad(self.weight, self.gradient_accumulation_fusion),
        ).view(input_.shape[0] // self.tp_group.size(), input_.shape[1], self.weight.shape[0])
        return output, self.bias if self.skip_bias_add else None

    return fluid_forward


def _watch_gemm() -> Callable[[], bool]:
    """Gives a function that says whether Megatron's linears call the same GEMM as now: quantisers
    replace it while a linear runs."""
    layers = importlib.import_module(_LAYERS)
    own = layers.linear_with_grad_accumulation_and_async_allreduce
    return lambda: layers.linear_with_grad_accumulation_and_async_allreduce is own


def _linear_fits(
    linear: Any, weight: Tensor, a: Tensor, sequence_parallel: bool, unusual: str | None = None
) -> bool:
    """Whether the overlapped form computes what this linear would; notes the reason where it does
    not.

    unusual: what else speaks against it.
    """
    if current_config().tp_overlap == "off" or linear.tp_group.size() == 1:
        return False
    reason = _why_not(linear, weight, a, sequence_parallel) or unusual
    if reason is not None:
        note(linear, False, reason)
    return reason is None


def _why_not(linear: Any, weight: Tensor, a: Tensor, sequence_parallel: bool) -> str | None:
    if not sequence_parallel:
        return "there is nothing to gather or to scatter without --sequence-parallel"
    if not weight.requires_grad:
        return "its weight is frozen"
    if torch.is_autocast_enabled(a.device.type):
        return "autocast decides its dtypes"
    if a.dtype != weight.dtype:
        return f"its input is {a.dtype}, its weight {weight.dtype}"
    if linear.config._cpu_offloading_context is not None or hasattr(weight, "__fsdp_param__"):
        return "its tensors are offloaded or sharded"
    return None


def backend_of(
    linear: Any, group: dist.ProcessGroup, operation: str, sequence: int, weight: Tensor, a: Tensor
) -> str | None:
    """The backend to ask for, "auto", or None where Megatron's own path serves as well; sequence:
    rows of the whole [S, batch, K] input."""
    if a.dim() != 3:
        note(
            linear,
            False,
            f"its input has {a.dim()} dimensions instead of 3, [sequence, batch, hidden]",
        )
        return None
    gemm, rows = Gemm(weight, transpose_b=True), sequence * a.shape[1]
    chosen = backend_for("auto", group, operation, gemm, rows, a.flatten(0, 1)).name
    if current_config().tp_overlap == "on":
        note(linear, True, chosen)
        return "auto"
    if chosen == "collective":
        note(linear, False, "nothing faster than NCCL and the GEMM for its size")
        return None
    note(linear, True, chosen)
    return "auto"


def note(linear: Any, on: bool, reason: str) -> None:
    """Record what became of a linear, in place of what was recorded of it before; rank 0 prints
    each finding once, since sizes are known only after the start-up table."""
    text = f"{type(linear).__name__}: {reason}"
    before = getattr(linear, "_fluid_noted", None)
    if before == (on, text):
        return
    if before is not None:
        withdraw_feature(FEATURE, *before)
    linear._fluid_noted = (on, text)
    if text not in _said:
        _said.add(text)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"megatron_fluid: {FEATURE} {'on' if on else 'off'}: {text}", flush=True)
    note_feature(FEATURE, on, text)


def into_main_grad(weight: Tensor, fused: bool) -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """With gradient accumulation fusion: dW goes into main_grad, and autograd gets what makes
    Megatron's hooks fire, or, where no hook of Megatron's waits for the mark, nothing."""
    if not fused or not hasattr(weight, "main_grad"):
        return None

    def weight_grad(a: Tensor, dc: Tensor) -> Tensor | None:
        add_product_to_main_grad(
            weight.main_grad, dc, a, overwrite=getattr(weight, "overwrite_main_grad", False)
        )
        # Without the mark nobody would know that what autograd is given is not the gradient.
        return (
            mark_added_to_main_grad(weight) if hasattr(weight, "grad_added_to_main_grad") else None
        )

    return weight_grad
