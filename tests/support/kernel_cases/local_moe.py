"""The kernels of the local MoE transport, as moe/local/kernel_plan.py launches them at the
shapes of benchmarks/cases/moe.py and at narrow ones; the kernel with fixed tiles."""

from __future__ import annotations

from unittest import mock

import torch

from benchmarks.cases.moe import CASES as SHAPES
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.kernels.fixed_tiles import launch as fixed_tiles
from megatron_fluid.kernels.fixed_tiles.kernel import fixed_tile_kernel
from megatron_fluid.kernels.fp8_casts.packed_rows import packed_width
from megatron_fluid.moe.local import kernel_plan
from tests.support.kernel_cases import KernelCase

__all__ = ["CASES"]

# Rows must move by 16 bytes a lane.
_WIDE = ("ld.global.v4.b32", "st.global.v4.b32")
_NARROW = ("ld.global.b16", "st.global.b16", "ld.global.v2.b16", "st.global.v2.b16")
_NAMES = {torch.bfloat16: "*bf16:16", torch.float16: "*fp16:16", torch.float32: "*fp32:16"}
_INT32, _FP32 = "*i32:16", "*fp32:16"


def _case(
    name: str,
    launch: Launch,
    arguments: tuple[str, ...],
    moves: bool = False,
    wanted: tuple[str, ...] = (),
) -> KernelCase:
    wanted, unwanted = (_WIDE, _NARROW) if moves else (wanted, ())
    return KernelCase(
        f"{name} {launch._kernel.__name__}",
        *(launch._kernel, arguments, launch._constants, launch._num_warps, wanted, unwanted),
    )


def _planned(
    name: str, top_k: int, experts: int, probs: torch.dtype = torch.float32
) -> list[KernelCase]:
    device, ids = torch.device("cpu"), "*i64:16" if top_k == 12 else _INT32
    dtype = torch.int64 if top_k == 12 else torch.int32
    count, sort = kernel_plan._plan_launches(device, dtype, probs, top_k, experts)
    arguments = (ids, _NAMES[probs], *[_INT32] * 3, _FP32, "i32", "i32")
    return [_case(name, count, (ids, _INT32, "i32")), _case(name, sort, arguments)]


def _moved(name: str, hidden: int, top_k: int, dtype: torch.dtype) -> list[KernelCase]:
    device, rows = torch.device("cpu"), _NAMES[dtype]
    launch = kernel_plan._permute_launch(device, dtype, hidden, top_k)
    found = [_case(name, launch, (rows, _INT32, rows, "i32"), moves=True)]
    for grads in (None, torch.float32):
        launch = kernel_plan._unpermute_launch(device, dtype, hidden, top_k, grads)
        arguments = (rows, _INT32, rows, _FP32, _FP32, "i32")
        found.append(_case(f"{name}{', graded' * bool(grads)}", launch, arguments, moves=True))
    launch = kernel_plan._unpermute_launch(device, dtype, hidden, top_k, dtype)
    arguments = (rows, _INT32, rows, _FP32, rows, "i32")
    rounds = (*_WIDE, f"cvt.rn.{rows[1:].removesuffix(':16').replace('fp', 'f')}.f32")
    found.append(_case(f"{name}, graded in {dtype}", launch, arguments, wanted=rounds))
    return found


def _fixed_tiles(dtype: torch.dtype) -> KernelCase:
    """The router's product in a batch-invariant layer."""
    with mock.patch.object(fixed_tiles, "_launcher", return_value=mock.Mock()) as made:
        x, weight = (torch.empty(n, _SHAPE.hidden, dtype=dtype) for n in (2, _SHAPE.experts))
        offsets, out = torch.tensor([2]), torch.empty(2, _SHAPE.experts)
        fixed_tiles.product_by_kernel(x, weight.t()[None], offsets, out)
    arguments = (_NAMES[dtype], _NAMES[dtype], "*i64:16", _INT32, _FP32, "i32")
    constants = made.return_value.call_args.kwargs
    return KernelCase(f"router in {dtype}", fixed_tile_kernel, arguments, constants)


_SHAPE = SHAPES["deepseek-v3"]
_PACKED = kernel_plan._permute_launch(
    torch.device("cpu"), torch.bfloat16, packed_width(_SHAPE.hidden), _SHAPE.top_k
)
CASES = [
    _case("packed", _PACKED, ("*bf16:16", _INT32, "*bf16:16", "i32"), moves=True),
    *_planned("deepseek-v3", _SHAPE.top_k, _SHAPE.experts),
    *_moved("deepseek-v3", _SHAPE.hidden, _SHAPE.top_k, torch.bfloat16),
    *_planned("12 of 16", 12, 16, torch.float16),
    *_planned("1 of 1", 1, 1),
    *_moved("22 of 256, fp16", 4096, 22, torch.float16),
    *(_fixed_tiles(kind) for kind in _NAMES),
]
