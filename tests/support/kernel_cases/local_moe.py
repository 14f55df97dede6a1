"""The kernels of the local MoE transport, as moe/local/kernel_plan.py launches them at the shapes
of benchmarks/cases/moe.py and at narrow ones; the kernel with fixed tiles."""

from dataclasses import replace

import torch

from benchmarks.cases.moe import CASES as SHAPES
from megatron_fluid.kernels.fixed_tiles.launch import product_by_kernel
from megatron_fluid.kernels.fp8_casts.packed_rows import packed_width
from megatron_fluid.moe.local.kernel_plan import KernelPlan, make_plan
from tests.support.kernel_cases import NARROW, WIDE, KernelCase, cases_of

TOKENS = 64
_SHAPE = SHAPES["deepseek-v3"]
_HALVES = {torch.bfloat16: "*bf16:16", torch.float16: "*fp16:16"}


def _plan(
    top_k: int, experts: int, probs: torch.dtype = torch.float32, ids: torch.dtype = torch.int32
) -> KernelPlan:
    shape = TOKENS, top_k
    return make_plan(torch.zeros(shape, dtype=ids), torch.zeros(shape, dtype=probs), experts, False)


def _moved(hidden: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    plan = _plan(top_k, experts)
    rows = plan.permute(torch.empty(TOKENS, hidden, dtype=dtype))
    plan.unpermute(rows)
    for graded in (plan, _plan(top_k, experts, dtype)):
        graded.unpermute(rows, torch.empty(len(rows)))


def _packed() -> None:
    """Rows of fp8 with their scales."""
    width = packed_width(_SHAPE.hidden)
    _plan(_SHAPE.top_k, _SHAPE.experts).permute(torch.empty(TOKENS, width, dtype=torch.bfloat16))


def _router(dtype: torch.dtype) -> None:
    """The router's product in a batch-invariant layer."""
    x, weight = (torch.empty(n, _SHAPE.hidden, dtype=dtype) for n in (2, _SHAPE.experts))
    offsets = torch.tensor([2], dtype=torch.int32)
    product_by_kernel(x, weight.t()[None], offsets, torch.empty(2, _SHAPE.experts))


def _judged(case: KernelCase) -> KernelCase:
    """Rows must move by 16 bytes a lane; gradients of probabilities in 16 bits are rounded."""
    if case.kernel_name not in ("permute_kernel", "unpermute_kernel"):
        # A plan of so many choices keeps them in local memory.
        return replace(case, spills=5 << 10 if case.constants.get("K") == 22 else 0)
    halves = [kind for kind in _HALVES.values() if case.arguments[-2] == kind]
    if case.kernel_name == "unpermute_kernel" and halves:
        kind = halves[0][1:].removesuffix(":16").replace("fp", "f")
        return replace(case, wanted=(*WIDE, f"cvt.rn.{kind}.f32"))
    return replace(case, wanted=WIDE, unwanted=NARROW)


_CALLS = {
    "deepseek-v3": lambda: _moved(_SHAPE.hidden, _SHAPE.top_k, _SHAPE.experts, torch.bfloat16),
    "22 of 64, fp16": lambda: _moved(4096, 22, 64, torch.float16),
    "12 of 16": lambda: _plan(12, 16, torch.float16, torch.int64),
    "1 of 1": lambda: _plan(1, 1),
    "packed": _packed,
    **{f"router in {kind}": lambda kind=kind: _router(kind) for kind in (*_HALVES, torch.float32)},
}
CASES = [_judged(case) for case in cases_of(_CALLS)]
