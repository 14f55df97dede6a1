"""The kernels of the NVLink MoE path, exactly as the path launches them at the shapes of
benchmarks/cases/moe.py."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases.moe import CASES as SHAPES
from benchmarks.cases.moe import MoECase
from megatron_fluid.kernels.activation import kernel as fused_activation
from megatron_fluid.kernels.fp8_casts.packed_rows import packed_width
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle
from megatron_fluid.moe.activations import Variant
from megatron_fluid.moe.nvlink import buffers as nvlink_path
from megatron_fluid.moe.nvlink import sent_rows
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import Schedule
from tests.support.kernel_cases import NARROW, WIDE, KernelCase, cases_of
from tests.support.simulated_workspace import SimulatedWorkspace

RANKS, TOKENS = 4, 64
DEEPSEEK = SHAPES["deepseek-v3"]
_MOVES = (
    *("push_kernel", "scatter_kernel", "reduce_push_kernel", "reduce_kernel", "send_rows_kernel"),
    *("activation_kernel", "activation_backward_kernel"),
)


def _judged(case: KernelCase) -> KernelCase:
    spills = 0
    if case.kernel_name in ("publish_kernel", "reduce_kernel"):
        spills = 8  # one value, once a program; of reduce_kernel by Triton 3.8
    if case.maxnreg and "packed" in case.name:
        spills = 8  # where tiles begin and end, outside the loop that copies their rows
    if case.maxnreg and "*fp32:16" in case.arguments:
        spills = 128  # it must have room beside a pusher; no layer runs in fp32
    if case.kernel_name not in _MOVES:
        return replace(case, spills=spills)
    return replace(case, wanted=WIDE, unwanted=(*NARROW, "ld.global.v4.b16"), spills=spills)


def _buffers(shape: MoECase, tokens: int = TOKENS, rank: int = 3, **options: Any) -> NvlinkBuffers:
    space = SimulatedWorkspace(RANKS).rank(rank)
    buffers = NvlinkBuffers(space, tokens, shape.hidden, shape.top_k, shape.experts, **options)
    buffers.stream_programs, buffers.stream_chunks = 48, 8  # as on a GPU
    buffers.plan_blocks = 128 if tokens > 1 else 1  # as of 4096 tokens
    buffers.sms = 132
    return buffers


def _whole(name: str) -> None:
    """The un-cut path, forward and backward, and a streamed dispatch."""
    shape = SHAPES[name]
    handle = _moves(_buffers(shape))
    rows, row_grad = torch.empty(TOKENS, shape.hidden, dtype=torch.bfloat16), torch.empty(TOKENS)
    h, a = rows.new_empty(TOKENS, 2 * shape.ffn), rows.new_empty(TOKENS, shape.ffn)
    forms = [("swiglu", Variant())]
    if name == next(iter(SHAPES)):  # gpt-oss's
        forms.append(("quick_geglu", Variant(7.0, 1.0)))
    for form, variant in forms:
        others = row_grad, handle.row_count
        fused_activation.fused_activation_forward(form, h, *others, variant=variant)
        fused_activation.fused_activation_backward(form, h, a, *others, variant=variant)


def _moves(buffers: NvlinkBuffers) -> RoutingHandle:
    """Every step but the GEMMs and the activation."""
    tokens, top_k = buffers.max_tokens, buffers.top_k
    handle, grads = _published(buffers), torch.empty(tokens, top_k)
    nvlink_path.make_plan(buffers, handle)
    x = torch.empty(tokens, buffers.hidden, dtype=torch.bfloat16)
    rows, row_grad = x.new_empty(TOKENS, buffers.hidden), torch.empty(TOKENS)
    nvlink_path.push(buffers, handle, x)
    nvlink_path.scatter(buffers, handle, x, rows)
    nvlink_path.reduce_push(buffers, handle, rows)
    nvlink_path.reduce_push(buffers, handle, rows, row_grad)
    nvlink_path.reduce(buffers, handle)
    nvlink_path.reduce(buffers, handle, grads=grads)
    nvlink_path.push(buffers, handle, x, streamed=True)
    nvlink_path.scatter(buffers, handle, x, rows, streamed=True)
    nvlink_path.barrier(buffers)
    result = x.new_empty(x.shape)
    for ends in (None, [0]):
        handle.ends = ends
        sent_rows.begin_combine(buffers, handle)
        sent_rows.begin_combine(buffers, handle, row_grad)
    sent_rows.send_rows(buffers, handle, rows)
    buffers.schedule = Schedule(sent_rows=True)
    nvlink_path.reduce(buffers, handle, result)
    nvlink_path.reduce(buffers, handle, result, grads)
    return handle


def _dispatched(
    shape: MoECase, width: int, *, whole: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """A streamed dispatch, of which a pushing program must find room beside waiting ones at any
    shape, and a whole one."""
    buffers = _buffers(shape, dtype=dtype)
    handle = _published(buffers)
    x = torch.empty(TOKENS, width, dtype=dtype)
    for streamed in (False, True) if whole else (True,):
        nvlink_path.push(buffers, handle, x, streamed=streamed)
        nvlink_path.scatter(buffers, handle, x, x.new_empty(x.shape), streamed=streamed)


def _published(buffers: NvlinkBuffers) -> RoutingHandle:
    ids = torch.zeros(buffers.max_tokens, buffers.top_k, dtype=torch.int32)
    return nvlink_path.publish(buffers, ids, torch.empty(ids.shape))


_CALLS: dict[str, Callable[[], object]] = {
    "deepseek-v3": lambda: _whole("deepseek-v3"),
    "mixtral-8x7b": lambda: _whole("mixtral-8x7b"),
    # One token a rank, on rank 1: integers that are 1 become constants.
    "one token": lambda: _moves(_buffers(MoECase(2048, 1024, 32, 2), tokens=1, rank=1)),
    "16 of 64": lambda: _dispatched(MoECase(7168, 2048, 64, 16), 7168),  # of 256 compiles long
    "22 of 64": lambda: _dispatched(MoECase(4096, 2048, 64, 22), 4096),
    "deepseek-v3, packed": lambda: _dispatched(DEEPSEEK, packed_width(DEEPSEEK.hidden), whole=True),
    "deepseek-v3, fp32": lambda: _dispatched(DEEPSEEK, DEEPSEEK.hidden, dtype=torch.float32),
}
CASES = [_judged(case) for case in cases_of(_CALLS)]
