"""A combine over NVLink that sends single rows, and no sums: begin_combine, then the rows by
sent_matmul(..., owners(...)) from the GEMM's epilogue, or by send_rows after any other GEMM, then
reduce (buffers.py). Shapes as there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, power_of_two
from megatron_fluid.kernels.grouped_gemm.launch import Owners
from megatron_fluid.kernels.move_tokens.kernel import row_pieces
from megatron_fluid.kernels.move_tokens.sent_rows import begin_combine_kernel, send_rows_kernel
from megatron_fluid.kernels.routing_plan.kernel import RoutingHandle
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers

__all__ = ["begin_combine", "owners", "send_rows"]


def begin_combine(
    buffers: NvlinkBuffers, handle: RoutingHandle, row_grad: Tensor | None = None
) -> None:
    """Start a combine that sends single rows. Sends row_grad fp32 [>= N], if given, and zeros for
    rows over the capacity (in bounded mode, or if a token may name an expert twice).
    """
    graded = row_grad is not None
    bounded = handle.ends is None or buffers.top_k > buffers.local_experts

    def make() -> Launch:
        constants: dict[str, object] = {"HAS_GRAD": graded, "BOUNDED": bounded}
        constants |= {"K": buffers.top_k, "KP": power_of_two(buffers.top_k)}
        constants |= {"H": buffers.hidden, "W": buffers.ranks, "SHIFT": buffers.shift}
        constants |= {"ROWS": 16, "BLOCK": 32}
        fixed = (
            buffers.local("combine", buffers.dtype),
            buffers.addresses("combine", buffers.dtype),
            buffers.addresses("prob grads", torch.float32),
            *(buffers.combine_flags.counter, buffers.abort, buffers.rank, buffers.max_tokens),
        )
        return Launch(begin_combine_kernel, 4, constants, fixed)

    launch = buffers.launch(("begin combine", graded, bounded), make)
    programs = -(-buffers.ranks * buffers.max_tokens // 16) if graded or bounded else 1
    grads = handle.row_prob if row_grad is None else row_grad
    launch((programs, 1), (handle.inverse, grads, handle.origins, handle.row_count))


def owners(buffers: NvlinkBuffers, handle: RoutingHandle) -> Owners:
    """The destination of each expert row, for sent_matmul."""
    return Owners(handle.origins, buffers.addresses("combine", buffers.dtype), buffers.shift)


def send_rows(buffers: NvlinkBuffers, handle: RoutingHandle, y: Tensor) -> None:
    """Write each row of y [>= N, H] into the combine buffer of its token's rank."""

    def make() -> Launch:
        constants = {"SHIFT": buffers.shift, "H": buffers.hidden, "ROWS": 4}
        constants |= row_pieces(buffers.hidden, 8)
        fixed = (buffers.addresses("combine", buffers.dtype), buffers.rank)
        return Launch(send_rows_kernel, 4, constants, fixed)

    if y.shape[0]:
        launch = buffers.launch("send rows", make)
        launch((buffers.sms * 5, 1), (y, handle.origins, handle.row_count))
