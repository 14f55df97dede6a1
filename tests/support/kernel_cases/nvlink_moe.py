"""The kernels of the NVLink MoE path, exactly as the path launches them at the shapes of
benchmarks/cases/moe.py.

The steps run here with launches that are noted down in place of being started, so no constant can
differ from what a GPU is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cases.moe import CASES as SHAPES
from benchmarks.cases.moe import MoECase
from megatron_fluid.cuda.triton_launch import Argument
from megatron_fluid.kernels.activation import kernel as fused_activation
from megatron_fluid.kernels.fp8_casts.packed_rows import packed_width
from megatron_fluid.moe.activations import Variant
from megatron_fluid.moe.nvlink import buffers as nvlink_path
from megatron_fluid.moe.nvlink import sent_rows
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from tests.support.kernel_cases import KernelCase
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["CASES"]

RANKS, TOKENS = 4, 64
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
# Rows must move by 16 bytes a lane: of rows alone are there accesses of two bytes, or of four in
# halves.
_NARROW = (
    "ld.global.b16",
    "st.global.b16",
    "ld.global.v2.b16",
    "st.global.v2.b16",
    "ld.global.v4.b16",
)
_MOVES = {
    "push_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
    "scatter_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
    "reduce_push_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
    "reduce_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
    "send_rows_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
    "activation_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
    "activation_backward_kernel": ("ld.global.v4.b32", "st.global.v4.b32"),
}


def _type(name: str, value: Argument, varying: Sequence[str]) -> str:
    """What Triton makes of an argument of a first launch."""
    if isinstance(value, Tensor):
        return _TYPES[value.dtype] + (":16" if value.data_ptr() % 16 == 0 else "")
    if value == 1 and name not in varying:
        return "1"
    kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    return kind + (":16" if value % 16 == 0 and name not in varying else "")


class _Noted:
    """Takes the place of Launch."""

    found: ClassVar[dict[str, KernelCase]] = {}
    label = ""

    def __init__(
        self,
        kernel: Any,
        num_warps: int,
        constants: Mapping[str, object],
        fixed: Sequence[Argument] = (),
        maxnreg: int | None = None,
    ) -> None:
        self.kernel, self.num_warps, self.constants, self.fixed = (
            kernel,
            num_warps,
            dict(constants),
            tuple(fixed),
        )
        self.maxnreg = maxnreg

    def __call__(
        self, grid: tuple[int, int], arguments: Sequence[Argument], stream: object = None
    ) -> None:
        kernel = self.kernel
        names = [name for name in kernel.arg_names if name not in self.constants]
        varying = [
            n if isinstance(n, str) else kernel.arg_names[n]
            for n in getattr(kernel, "do_not_specialize", ())
        ]
        values = [*arguments, *self.fixed]
        assert len(names) == len(values), kernel.__name__
        types = tuple(
            _type(name, value, varying) for name, value in zip(names, values, strict=True)
        )
        name = f"{_Noted.label} {kernel.__name__}"
        while name in _Noted.found:
            name += "'"
        moves = _MOVES.get(kernel.__name__, ())
        narrow = _NARROW if moves else ()
        # With 16 warps a thread has 128 registers; one pointer that the inner loop does not use may
        # wait outside them.
        spills = 8 if kernel.__name__ == "reduce_push_kernel" and self.num_warps == 16 else 0
        if kernel.__name__ == "publish_kernel":
            spills = 8  # one value, once a program
        if self.maxnreg and "packed" in _Noted.label:
            spills = 8  # where tiles begin and end, outside the loop that copies their rows
        if (
            self.maxnreg and "*fp32:16" in types
        ):  # it must have room beside a pusher; no layer runs in fp32
            spills = 128
        _Noted.found[name] = KernelCase(
            *(name, kernel, types, self.constants, self.num_warps, moves, narrow, spills),
            maxnreg=self.maxnreg,
        )


def _note(label: str, steps: Callable[[], object]) -> None:
    _Noted.label = label
    with contextlib.ExitStack() as stack:
        for module in (nvlink_path, sent_rows, fused_activation):
            stack.enter_context(mock.patch.object(module, "Launch", _Noted))
        steps()


def _buffers(
    shape: MoECase,
    schedule: Schedule = NO_OVERLAP,
    tokens: int = TOKENS,
    rank: int = 3,
    ranks: int = RANKS,
    **options: Any,
) -> NvlinkBuffers:
    space = SimulatedWorkspace(ranks).rank(rank)
    buffers = NvlinkBuffers(
        space, tokens, shape.hidden, shape.top_k, shape.experts, schedule=schedule, **options
    )
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
    launches = (fused_activation._forward_launches, fused_activation._backward_launches)
    for found in launches:
        found.clear()
    forms = [("swiglu", Variant())]
    if name == next(iter(SHAPES)):  # gpt-oss's
        forms.append(("quick_geglu", Variant(7.0, 1.0)))
    for form, variant in forms:
        others = row_grad, handle.row_count
        fused_activation.fused_activation_forward(form, h, *others, variant=variant)
        fused_activation.fused_activation_backward(form, h, a, *others, variant=variant)
    for found in launches:
        found.clear()


def _moves(buffers: NvlinkBuffers) -> RoutingHandle:
    """Every step but the GEMMs and the activation."""
    tokens, top_k = buffers.max_tokens, buffers.top_k
    ids, probs, grads = (
        torch.zeros(tokens, top_k, dtype=torch.int32),
        _probs(top_k, tokens),
        _probs(top_k, tokens),
    )
    handle = nvlink_path.publish(buffers, ids, probs)
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


def _streamed(shape: MoECase, dtype: torch.dtype = torch.bfloat16) -> None:
    """A streamed dispatch, of which a pushing program must find room beside waiting ones at any
    shape."""
    buffers = _buffers(shape, dtype=dtype)
    handle = nvlink_path.publish(
        buffers, torch.zeros(TOKENS, shape.top_k, dtype=torch.int32), _probs(shape.top_k)
    )
    x = torch.empty(TOKENS, shape.hidden, dtype=dtype)
    nvlink_path.push(buffers, handle, x, streamed=True)
    nvlink_path.scatter(buffers, handle, x, x.new_empty(x.shape), streamed=True)


def _packed(name: str) -> None:
    """A dispatch of packed fp8 rows, whole and streamed."""
    shape = SHAPES[name]
    buffers = _buffers(shape)
    handle = nvlink_path.publish(
        buffers, torch.zeros(TOKENS, shape.top_k, dtype=torch.int32), _probs(shape.top_k)
    )
    x = torch.empty(TOKENS, packed_width(shape.hidden), dtype=torch.bfloat16)
    for streamed in (False, True):
        nvlink_path.push(buffers, handle, x, streamed=streamed)
        nvlink_path.scatter(buffers, handle, x, x.new_empty(x.shape), streamed=streamed)


def _probs(top_k: int, tokens: int = TOKENS) -> Tensor:
    return torch.empty(tokens, top_k)


_note("deepseek-v3", lambda: _whole("deepseek-v3"))
_note("mixtral-8x7b", lambda: _whole("mixtral-8x7b"))
_note("qwen3-30b-a3b", lambda: _whole("qwen3-30b-a3b"))
# One token a rank, on rank 1: integers that are 1 become constants.
_note("one token", lambda: _moves(_buffers(MoECase(2048, 1024, 32, 2), tokens=1, rank=1)))
_note("16 of 256", lambda: _streamed(MoECase(7168, 2048, 256, 16)))
_note("22 of 256", lambda: _streamed(MoECase(4096, 2048, 256, 22)))
_note("deepseek-v3, packed", lambda: _packed("deepseek-v3"))
_note("deepseek-v3, fp32", lambda: _streamed(SHAPES["deepseek-v3"], torch.float32))

CASES = list(_Noted.found.values())
