"""fp8 experts without a GPU: products by their reference in plain torch, casts by theirs, where
Triton's interpreter takes minutes, and no check of the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_fluid.kernels.fp8_grouped_gemm.launch import CompandedRows, Fp8Matrices, Fp8Rows
from megatron_fluid.kernels.fp8_weight_grads.launch import TurnedRows
from megatron_fluid.moe import expert_weights, fp8_experts
from tests.support import fp8_reference as reference


def _cast_rows(x: Tensor, count: Tensor | None = None) -> Fp8Rows:
    return Fp8Rows(*reference.cast_rows(x))


def _restore_rows(x: Fp8Rows, count: Tensor | None = None) -> Tensor:
    return reference.restore_rows(*x).bfloat16()


def _unpack_rows(packed: Tensor, width: int) -> Fp8Rows:
    scales = packed.view(torch.float32)[:, width // 4 : width // 4 + width // 128]
    return Fp8Rows(packed.view(torch.float8_e4m3fn)[:, :width], scales.t().contiguous())


def _cast_weights(w: Tensor, out: tuple[Fp8Matrices, Fp8Matrices]) -> None:
    for to, matrices in zip(out, (w, w.transpose(1, 2)), strict=True):
        for place, value in zip(to, reference.cast_weights(matrices), strict=True):
            place.copy_(value)


def _swiglu_cast(
    h: Tensor, probs: Tensor, keep: bool, count: Tensor | None = None
) -> tuple[Fp8Rows, CompandedRows | None]:
    gate, up = h.float().chunk(2, 1)
    value = torch.nn.functional.silu(gate) * up * probs[: len(h), None]
    return _cast_rows(value), CompandedRows(*reference.compand_rows(h)) if keep else None


def _swiglu_backward_cast(
    h: Tensor | CompandedRows, da: Tensor, probs: Tensor, count: Tensor | None = None,
    in_fp8: bool = False,
) -> tuple[Fp8Rows, Tensor | None, Tensor | Fp8Rows, Tensor]:  # fmt: skip
    wide = reference.restore_companded(*h) if isinstance(h, CompandedRows) else h
    dh, a, dprobs = reference.swiglu_backward(wide, da, probs[: len(da)])
    if in_fp8:
        return _cast_rows(dh), None, _cast_rows(a), dprobs
    return _cast_rows(dh), dh.bfloat16(), a.bfloat16(), dprobs


def _turn_rows(x: Fp8Rows, offsets: Tensor) -> TurnedRows:
    return reference.turn_rows(*x, offsets.tolist())


def _grouped_matmul(x: Fp8Rows, weights: Fp8Matrices, offsets: Tensor) -> Tensor:
    return reference.scaled_grouped_product(*x, *weights, offsets.tolist()).bfloat16()


def _weight_grads(left: TurnedRows, right: TurnedRows, offsets: Tensor) -> Tensor:
    return reference.turned_weight_grads(left, right, offsets.tolist()).bfloat16()


def _add_weight_grads(
    left: TurnedRows, right: TurnedRows, offsets: Tensor, addresses: Tensor,
    outputs: Tensor | Sequence[Tensor], overwrite: bool = False,
) -> None:  # fmt: skip
    found = reference.turned_weight_grads(left, right, offsets.tolist())
    for output, grad in zip(outputs, found, strict=True):
        output.copy_(grad if overwrite else output + grad)


def emulate(replace: Callable[[object, str, object], None] = setattr, casts: bool = True) -> None:
    """Have fp8 experts run on a CPU; `replace` puts a value in a module's place. Without `casts`
    the casts stay Triton's."""
    replace(fp8_experts, "fp8_unsupported_reason", lambda *given: None)
    for owner in (fp8_experts, expert_weights):
        replace(owner, "fp8_grouped_matmul", _grouped_matmul)
    replace(fp8_experts, "fp8_weight_grads", _weight_grads)
    replace(fp8_experts, "add_fp8_weight_grads", _add_weight_grads)
    if casts:
        for function in (
            *(_cast_rows, _restore_rows, reference.pack_rows, _unpack_rows, _cast_weights),
            *(_swiglu_cast, _swiglu_backward_cast, _turn_rows),
        ):
            replace(fp8_experts, function.__name__.removeprefix("_"), function)
