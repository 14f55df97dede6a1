"""Megatron's own linear layers and Transformer Engine's under tensor and sequence parallelism, the
collective of the sequence hidden behind the GEMM.

Column-parallel linears gather the sequence before their GEMM and row-parallel ones reduce-scatter
it after; both are served by megatron_fluid.tensor_parallel. `--fluid-tp-overlap`: "off"; "on" for
every linear that fits; "auto" only for those whose size and group a faster form than the collective
serves. Parameters, names and gradients stay Megatron's; with gradient accumulation fusion the
weight gradient goes straight into `main_grad`. The norm of a TELayerNormColumnParallelLinear is
torch's, of the same weights.

Everything else (no sequence parallelism, frozen, gathered or quantised weights, delayed weight
gradients, experts, offloading, userbuffers, a GEMM or a class from elsewhere) keeps its own path.

Legend: S whole sequence, s = S / W a rank's part, B batch, K and N the linear's widths on a rank.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_fluid.backward.main_grad import add_product_to_main_grad, mark_added_to_main_grad
from megatron_fluid.config import current_config
from megatron_fluid.patches.engine.module_hooks import is_foreign
from megatron_fluid.patches.features import FeatureReport
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from megatron_fluid.tensor_parallel.choice import backend_for
from megatron_fluid.tensor_parallel.gemm import Gemm
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "REPORT",
    "column_forward_impl",
    "faster_than_nccl",
    "into_main_grad",
    "is_fused",
    "norm_of_rows",
    "normalised",
    "note",
    "quantises",
    "row_forward",
    "te_layer_norm_column_forward",
    "te_linear_forward",
    "weight_gradient_of",
]

REPORT = FeatureReport("tensor-parallel overlap", by_class=True)
_LAYERS = "megatron.core.tensor_parallel.layers"
_NOTHING = "there is nothing to gather or to scatter without --sequence-parallel"
_OTHER_GEMM = "its GEMM is not Megatron's own (a quantiser's, say)"
_OTHER_IMPL = "its _forward_impl is not Megatron's own"  # the overlapped form would not call it
_OTHER_ARGUMENTS = "its _forward_impl is called with other arguments than Megatron's"
_LATER = "Megatron computes its weight gradient later (--defer-embedding-wgrad-compute)"
_SHARDED_WEIGHT = "its weight is gathered for each use"

Result = tuple[Tensor, Tensor | None]


def note(linear: Any, on: bool, reason: str) -> None:
    """Record what became of a linear; rank 0 prints each finding once, since sizes are known only
    after the start-up table."""
    REPORT.note(linear, on, reason, ranks=(0,))


def column_forward_impl(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `ColumnParallelLinear._forward_impl`: gather of the sequence and GEMM in one."""

    gemm_is_own = _watch_gemm()

    @functools.wraps(original)
    def fluid_forward_impl(
        self: ColumnParallelLinear, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        # Experts' tokens are gathered by their dispatcher: Megatron gives them
        # sequence_parallel=False, whatever the run has.
        if self.explicit_expert_comm or not _wanted(self.tp_group):
            return original(self, input, weight, *args, **kwargs)
        reason = None if kwargs.get("sequence_parallel") else _NOTHING
        reason = reason or _tensors_reason(self, weight, input)
        if reason is None:
            if not gemm_is_own():
                reason = _OTHER_GEMM
            elif kwargs.get("grad_output_buffer") is not None:
                reason = _LATER
            elif kwargs.get("gtp_remat_size", 1) > 1:
                reason = _SHARDED_WEIGHT
            elif args:
                reason = _OTHER_ARGUMENTS
        fused, bias = bool(kwargs.get("gradient_accumulation_fusion")), kwargs.get("bias")
        output = _overlapped(self, "gather", input, reason, weight, self.tp_group, bias, fused)
        return original(self, input, weight, *args, **kwargs) if output is None else output

    return fluid_forward_impl


def row_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RowParallelLinear.forward`: GEMM and reduce-scatter of the sequence in one."""

    gemm_is_own = _watch_gemm()
    own_impl = importlib.import_module(_LAYERS).RowParallelLinear._forward_impl

    @functools.wraps(original)
    def fluid_forward(self: RowParallelLinear, input_: Tensor) -> Result:
        if self.explicit_expert_comm or not _wanted(self.tp_group):
            return original(self, input_)  # type: ignore[no-any-return]
        reason = None if self.sequence_parallel and self.input_is_parallel else _NOTHING
        reason = reason or _tensors_reason(self, self.weight, input_)
        if reason is None:
            impl = getattr(type(self), "_forward_impl", None)
            if not gemm_is_own():
                reason = _OTHER_GEMM
            elif impl is not own_impl or "_forward_impl" in vars(self):
                reason = _OTHER_IMPL
            elif getattr(self, "gtp_remat_size", 1) > 1:
                reason = _SHARDED_WEIGHT
        added, returned = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        fused = self.gradient_accumulation_fusion
        output = _overlapped(
            self, "scatter", input_, reason, self.weight, self.tp_group, added, fused
        )
        return original(self, input_) if output is None else (output, returned)

    return fluid_forward


def te_linear_forward(original: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `TELinear.forward`, which its column- and row-parallel subclasses share."""

    operations = {"column": "gather", "row": "scatter"}

    @functools.wraps(original)
    def fluid_forward(self: Any, x: Tensor) -> Result:
        operation = operations.get(getattr(self, "parallel_mode", None) or "")
        result = None if operation is None else _te_overlapped(self, operation, x)
        return original(self, x) if result is None else result

    return fluid_forward


def te_layer_norm_column_forward(original: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `TELayerNormColumnParallelLinear.forward`: the norm of the own rows, then gather and
    GEMM in one."""

    @functools.wraps(original)
    def fluid_forward(self: Any, x: Tensor) -> Result:
        result = _te_overlapped(self, "gather", x, norm_of_rows)
        return original(self, x) if result is None else result

    return fluid_forward


def _te_overlapped(
    linear: Any, operation: str, x: Tensor, prepare: Callable[[Any, Tensor], Tensor] | None = None
) -> Result | None:
    """(output, the bias that is left to the caller), or None."""
    group = linear._tp_group
    if not linear.sequence_parallel or not _wanted(group):
        return None
    bias = getattr(linear, "bias", None) if linear.use_bias else None
    added, returned = (None, bias) if linear.te_return_bias else (bias, None)
    weight, fused = getattr(linear, "weight", None), linear.fuse_wgrad_accumulation
    reason = _te_reason(linear, weight, x)
    output = _overlapped(linear, operation, x, reason, weight, group, added, fused, prepare)
    if output is None:
        return None
    linear.is_first_microbatch = False
    return output, returned


def _wanted(group: Any) -> bool:
    return current_config().tp_overlap != "off" and group.size() > 1


def _overlapped(
    linear: Any,
    operation: str,
    x: Tensor,
    reason: str | None,
    weight: Any,
    group: Any,
    bias: Tensor | None,
    fused: bool,
    prepare: Callable[[Any, Tensor], Tensor] | None = None,
) -> Tensor | None:
    """A linear and its collective in one; None where its own path serves as well, or has to.

    Args:
        operation: "gather" x [s, B, K] to the output [S, B, N], or "scatter" the product of x
            [S, B, K] to [s, B, N].
        reason: why its own path is kept, which is recorded; or None.
        bias: what is added to the output, [N].
        fused: whether gradient accumulation fusion is on.
        prepare: what is done to this rank's rows before they are gathered.
    """
    if reason is None and x.dim() != 3:
        reason = f"its input has {x.dim()} dimensions instead of 3, [sequence, batch, hidden]"
    if reason is not None:
        note(linear, False, reason)
        return None
    group = real_group(group)
    if operation == "scatter" and x.shape[0] % group.size():
        return None  # which Megatron refuses by name
    if not faster_than_nccl(linear, group, operation, weight, x):
        return None
    rows = x if prepare is None else prepare(linear, x)
    run = all_gather_matmul if operation == "gather" else matmul_reduce_scatter
    output = run(
        rows.flatten(0, 1),
        weight,
        group,
        transpose_b=True,
        bias=bias,
        backend="auto",
        weight_grad=into_main_grad(weight, fused),
    )
    ranks, sequence = group.size(), x.shape[0]
    sequence = sequence * ranks if operation == "gather" else sequence // ranks
    return output.view(sequence, x.shape[1], output.shape[-1])


def faster_than_nccl(
    linear: Any, group: dist.ProcessGroup, operation: str, weight: Tensor, x: Tensor
) -> bool:
    """Whether the overlapped form is taken for this rank's x of three dimensions; recorded."""
    sequence = x.shape[0] * (group.size() if operation == "gather" else 1)
    gemm = Gemm(weight, transpose_b=True)
    chosen = backend_for(
        "auto", group, operation, gemm, sequence * x.shape[1], x.flatten(0, 1)
    ).name
    if chosen == "collective" and current_config().tp_overlap != "on":
        note(linear, False, "nothing faster than NCCL and the GEMM for its size")
        return False
    note(linear, True, chosen)
    return True


def norm_of_rows(linear: Any, x: Tensor) -> Tensor:
    """The RMSNorm or LayerNorm of a TELayerNormColumnParallelLinear over [S, batch, H]."""
    weight, bias = linear.layer_norm_weight, getattr(linear, "layer_norm_bias", None)
    kind = "rms" if linear.normalization == "RMSNorm" else "layer"
    return normalised(kind, x, weight, bias, linear.eps, linear.zero_centered_gamma)


def normalised(
    kind: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centered: bool,
) -> Tensor:
    """RMSNorm ("rms") or LayerNorm of x [..., H]; centered: the weight is stored less one."""
    rows = x
    if centered and weight is not None:
        # In 16 bits 1 + weight would lose the weight's digits: the norm is taken in 32.
        wide = torch.promote_types(x.dtype, torch.float32)
        rows, weight, bias = (
            x.to(wide),
            weight.to(wide) + 1,
            None if bias is None else bias.to(wide),
        )
    if kind == "rms":
        return F.rms_norm(rows, x.shape[-1:], weight, eps).to(x.dtype)
    return F.layer_norm(rows, x.shape[-1:], weight, bias, eps).to(x.dtype)  # type: ignore[arg-type]


def into_main_grad(
    weight: Tensor, fused: bool, rows: slice | None = None
) -> Callable[[Tensor, Tensor], Tensor | None] | None:
    """The delivery of dW = dc^T a into main_grad, from inputs a [M, K] and dc [M, N].

    It gives what autograd is to have in dW's place, so that Megatron's hooks fire; None where no
    hook waits for the mark that main_grad has the gradient.

    Args:
        weight: the parameter, [N, K].
        fused: whether gradient accumulation fusion is on; without it there is no such delivery.
        rows: dW is that of these rows alone: dc is [M, rows], and autograd is always given
            something, which it completes to the weight's gradient.
    """
    if not fused or not hasattr(weight, "main_grad"):
        return None

    def deliver(a: Tensor, dc: Tensor) -> Tensor | None:
        main_grad, overwrite = weight.main_grad, getattr(weight, "overwrite_main_grad", False)
        if rows is not None:
            if overwrite:
                main_grad.zero_()  # the other rows' gradient is other ranks'
            main_grad, overwrite = main_grad[rows], False
        add_product_to_main_grad(main_grad, dc, a, overwrite=overwrite)
        # Without the mark nobody would know that what autograd is given is not the gradient.
        marked = hasattr(weight, "grad_added_to_main_grad")
        stand_in = mark_added_to_main_grad([weight])[0] if marked else None
        return stand_in if rows is None else torch.zeros_like(weight[rows])

    return deliver


def weight_gradient_of(
    linear: Any, compute: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """dW of a linear from dy and x, as `compute` gives it or, with gradient accumulation fusion,
    delivered into main_grad."""
    fused = is_fused(linear)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        deliver = into_main_grad(linear.weight, fused)
        if deliver is None:
            return compute(dy, x)
        stand_in = deliver(x.flatten(0, 1), dy.flatten(0, 1))
        # None where nobody looks for a mark (not Megatron's DistributedDataParallel): the queue of
        # weight gradients delivers tensors.
        return torch.zeros_like(linear.weight) if stand_in is None else stand_in

    return gradient


def is_fused(linear: Any) -> bool:
    """Whether gradient accumulation fusion is on for one of Megatron's linears."""
    fused = getattr(linear, "gradient_accumulation_fusion", None)
    return bool(linear.fuse_wgrad_accumulation if fused is None else fused)


def quantises() -> bool:
    """Whether a context of Transformer Engine's for FP8 is open."""
    base = sys.modules.get("transformer_engine.pytorch.module.base")
    state = getattr(base, "FP8GlobalStateManager", None)
    return state is not None and bool(state.is_fp8_enabled())


def _watch_gemm() -> Callable[[], bool]:
    """Gives a function that says whether Megatron's linears call Megatron's GEMM: quantisers
    replace it while a linear runs, or before this package is imported."""
    layers = importlib.import_module(_LAYERS)
    found = layers.linear_with_grad_accumulation_and_async_allreduce
    own = None if is_foreign(found) else found
    return lambda: layers.linear_with_grad_accumulation_and_async_allreduce is own


def _tensors_reason(linear: Any, weight: Tensor, x: Tensor) -> str | None:
    """Why the overlapped form would not compute what a linear does of these tensors, or None."""
    if linear.config.batch_invariant_mode:
        return "its GEMM must be Megatron's own (--batch-invariant-mode)"
    if not weight.requires_grad:
        return "its weight is frozen"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast decides its dtypes"
    if x.dtype != weight.dtype:
        return f"its input is {x.dtype}, its weight {weight.dtype}"
    if linear.config._cpu_offloading_context is not None or hasattr(weight, "__fsdp_param__"):
        return "its tensors are offloaded or sharded"
    return None


def _te_reason(linear: Any, weight: Any, x: Tensor) -> str | None:
    """Why one of Transformer Engine's linears keeps its own path, or None."""
    config = linear.config
    # What a class from elsewhere (a quantiser, say) adds may lie inside Transformer Engine's
    # forward, which the overlapped form does not run.
    known = ("megatron.core.", "transformer_engine.", "torch.", "abc.", "builtins.")
    modules = (kind.__module__ for kind in type(linear).__mro__)
    foreign = next((name for name in modules if not f"{name}.".startswith(known)), None)
    if foreign is not None:
        return f"its class comes from {foreign}, which may compute something else"
    if config.tp_comm_overlap:
        return "Transformer Engine's own overlap was asked for (--tp-comm-overlap)"
    if config.fp8 or config.fp4 or linear.te_quant_params is not None or quantises():
        return "it computes in quantised precision"
    if type(weight) is not torch.nn.Parameter:
        return "its weight is quantised or in several parameters"
    if (reason := _tensors_reason(linear, weight, x)) is not None:
        return reason
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"its input is {x.dtype}"
    if config.delay_wgrad_compute:
        return "Megatron computes its weight gradient later (--delay-wgrad-compute)"
    if getattr(linear, "return_layernorm_output", False):
        return "the output of its norm was asked for, too"
    inside = getattr(weight, "gtp_remat_size", None)
    if getattr(linear, "symmetric_ar_type", None) or inside is not None:
        return "it communicates in another way"
    return None
