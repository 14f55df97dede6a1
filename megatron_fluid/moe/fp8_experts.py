"""The experts of one rank in fp8: forward and dgrad by kernels/fp8_grouped_gemm, each operand
cast in one pass, weight gradients by kernels/fp8_weight_grads or in bf16.

    forward:  cast x -> dispatch -> fc1 -> SwiGLU * probability, cast -> fc2
    backward: cast dy -> dispatch -> dgrad of fc2 -> backward of SwiGLU, cast -> dgrad of fc1;
              dW2 = dy^T a and dW1 = dh^T x from the casts of dy and dh, the x that was multiplied
              and a, cast with dh; or from bf16 a and dh and the dy and x that were multiplied

Where the transport does not carry packed rows, x and dy are cast when they have arrived, and dW2 in
bf16 is made of bf16 dy. A weight gradient in fp8 has scales along the rows of each expert: both
operands are turned to these when it is computed. Transports that carry fp8 have one segment.

Kept for the backward: x in fp8, fc1's output companded to int8 (kernels/fp8_casts). Weights
are cast when they have changed.

Legend: N rows (sorted by expert), El experts, H hidden, F width of fc2's input, A and B widths of a
weight gradient.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_fluid.backward.weight_grads import sharded_by_fsdp
from megatron_fluid.cuda.devices import current_capture
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_casts.launch import (
    cast_rows,
    cast_weights,
    restore_rows,
    swiglu_backward_cast,
    swiglu_cast,
)
from megatron_fluid.kernels.fp8_casts.packed_rows import pack_rows, unpack_rows
from megatron_fluid.kernels.fp8_casts.turns import turn_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import (
    Fp8Matrices,
    Fp8Rows,
    fp8_grouped_matmul,
    fp8_unsupported_reason,
)
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    fp8_weight_grads,
)
from megatron_fluid.kernels.grouped_gemm.launch import takes_main_grads
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from megatron_fluid.moe.experts import (
    Hidden,
    PlainExperts,
    Route,
    Rows,
    add_to_main_grads,
    weight_grads,
)
from megatron_fluid.moe.transport import Exchange, Segment

__all__ = ["Fp8Experts", "WeightCast", "weight_cast"]


class WeightCast:
    """One projection's weights in fp8, in both layouts, cast again when they may have changed: by
    the parameters' version counters, a step of any optimizer of torch (fused ones raise no
    counter), or `expire`; in each forward under FSDP2, which gathers past the counters, or once
    such a step was captured into a CUDA graph, which tells of no replay.

    Code that changes a parameter past its counter (through `.data`, as Megatron's distributed
    optimizer does) has to call `expire`. Each CUDA-graph capture casts them again, so that a replay
    casts the weights as they are then; a capture of several microbatches casts them once.
    """

    def __init__(self) -> None:
        self._cast: tuple[Fp8Matrices, Fp8Matrices] | None = None
        _optimizer_steps()
        self._state: object = None  # of the weights and of this process, when they were cast
        # Another parameter at the same address may have the same counter, and so may the views that
        # FSDP1 makes in each forward.
        self._first: Callable[[], Tensor | None] = lambda: None

    def expire(self) -> None:
        self._state = None

    def forward_matrices(self, fc: ExpertWeights) -> Fp8Matrices:
        """[El, out, in], as the weights are now."""
        # Of another capture, or another stream of this one, it may come too late in a replay.
        steps, first = _optimizer_steps(), fc.params[0]
        state = fc.versions(), steps[0], current_capture()
        replayed = steps[1] > 0 and state[2] is None
        known = state == self._state and self._first() is first and not replayed
        if self._cast is None or not known or sharded_by_fsdp():
            self._make(fc)
            self._state, self._first = state, weakref.ref(first)
        assert self._cast is not None
        return self._cast[0]

    def backward_matrices(self) -> Fp8Matrices:
        """[El, in, out], as they were in the last forward."""
        assert self._cast is not None, "a forward comes first"
        return self._cast[1]

    # Made in an evaluation, the cast is read by a backward later.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self, fc: ExpertWeights) -> None:
        first = fc.matrices[0]
        experts, (out, width) = fc.num_experts, first.shape
        if self._cast is None:
            self._cast = (
                _matrices(first, experts, out, width),
                _matrices(first, experts, width, out),
            )
        stack = fc.stack
        if stack is not None and stack.stride()[1:] == (width, 1) and stack.stride(0) % 8 == 0:
            cast_weights(stack, self._cast)
            return
        for e, matrix in enumerate(fc.matrices):
            part = [Fp8Matrices(m.values[e : e + 1], m.scales[e : e + 1]) for m in self._cast]
            cast_weights(matrix.contiguous().unsqueeze(0), (part[0], part[1]))


def _matrices(like: Tensor, experts: int, out: int, width: int) -> Fp8Matrices:
    values = like.new_empty((experts, out, width), dtype=torch.float8_e4m3fn)
    scales = like.new_empty((experts, out // 128, width // 128), dtype=torch.float32)
    return Fp8Matrices(values, scales)


@functools.cache
def _optimizer_steps() -> list[int]:
    """[how many steps torch's optimizers have taken in this process, how many were captured into a
    CUDA graph], counted from here on."""
    steps = [0, 0]

    def count(*given: Any) -> None:
        steps[0] += 1
        steps[1] += current_capture() is not None

    register_optimizer_step_post_hook(count)
    return steps


def weight_cast(fc: ExpertWeights) -> WeightCast:
    """The cast of the weights of `fc`, which lives as long as they lie where they do."""
    found: WeightCast | None = fc.kept.cast
    if found is None:
        found = fc.kept.cast = WeightCast()
    return found


def _probs(rows: Tensor, probs: Tensor | None) -> Tensor:
    if probs is None:
        return torch.ones(rows.shape[0], dtype=torch.float32, device=rows.device)
    return probs.float().contiguous()


def _cast(rows: Rows, groups: RowGroups) -> Fp8Rows:
    """rows [N, H] in fp8, where they are not yet."""
    return rows if isinstance(rows, Fp8Rows) else cast_rows(rows.contiguous(), groups.count)


class Fp8Experts(PlainExperts):
    """Experts in fp8. See PlainExperts, and the passes above.

    Args:
        in_fp8: whether weight gradients are computed in fp8, too; else in bf16.
        name: of the layer, for errors.
        biased, offloaded: whether the experts have biases, and whether their activations are
            offloaded. Neither is supported.

    Raises:
        ConfigError: they cannot be computed so, or the GPU is no Hopper.
    """

    def __init__(
        self, fc1: ExpertWeights, fc2: ExpertWeights, activation: Activation, in_fp8: bool, *,
        name: str, biased: bool = False, offloaded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(fc1, fc2, activation)
        self.in_fp8 = in_fp8
        kind = activation.name if activation.built_in else f"{activation.name}, the caller's own"
        weight = fc1.params[0]
        shape = fc1.in_width, fc2.in_width
        reason = fp8_unsupported_reason(*shape, kind, weight.dtype, weight.device)
        if reason is None and biased:
            reason = "fp8 experts have no biases"
        if reason is None and offloaded:
            reason = "fp8 experts do not support activation offloading"
        if reason is not None:
            raise ConfigError.of(f"{name}: fp8_recipe", "blockwise", f"None, because {reason}")

    def packed(self, x: Tensor) -> Tensor:
        return pack_rows(x.contiguous())

    def unpacked(self, rows: Tensor) -> Fp8Rows:
        return unpack_rows(rows, self.fc1.in_width)

    def hidden(self, rows: Rows, groups: RowGroups) -> Tensor:
        weights = weight_cast(self.fc1).forward_matrices(self.fc1)
        return fp8_grouped_matmul(_cast(rows, groups), weights, groups.offsets)

    def forward(
        self, rows: Rows, segment: Segment, exchange: Exchange, keep: bool
    ) -> tuple[Rows, Hidden | None]:
        groups = segment.groups
        cast = _cast(rows, groups)
        h = self.hidden(cast, groups)
        activated, kept = swiglu_cast(h, _probs(h, segment.probs), keep, groups.count)
        matrices = weight_cast(self.fc2).forward_matrices(self.fc2)
        exchange.combine_product(segment, activated, matrices)
        return cast, kept

    def backward(
        self, dy: Rows, h: Hidden, route: Route, segment: Segment, exchange: Exchange, consume: bool
    ) -> tuple[Rows, tuple[Rows, Rows]]:
        probs, groups = route
        rows = _cast(dy, groups)
        weights = weight_cast(self.fc2).backward_matrices()
        da = fp8_grouped_matmul(rows, weights, groups.offsets)
        cast, dh, a, dprobs = swiglu_backward_cast(
            h, da, _probs(da, probs), groups.count, self.in_fp8
        )
        grads = None if probs is None else dprobs.to(probs.dtype)
        exchange.combine_product(segment, cast, weight_cast(self.fc1).backward_matrices(), grads)
        return cast if dh is None else dh, (rows if self.in_fp8 else dy, a)

    def weight_grads(self, fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> list[Tensor]:
        if self.in_fp8:
            return fc.as_gradients(_gradient(fc, dy, x, groups))
        return weight_grads(fc, _in_bf16(dy, groups), _in_bf16(x, groups), groups)

    def add_to_main_grads(self, fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> None:
        if not self.in_fp8:
            add_to_main_grads(fc, _in_bf16(dy, groups), _in_bf16(x, groups), groups)
            return
        grads, known = fc.kernel_grads(takes_main_grads)
        overwrite = fc.overwrites_main_grads()
        if known.fit:
            left, right = _turned(fc, dy, x, groups)
            operands = left, right, groups.offsets, known.addresses, grads
            add_fp8_weight_grads(*operands, overwrite=overwrite)
            return
        # main_grads in another precision than fp32 or strided: dW is rounded to bf16 before.
        for grad, gradient in zip(grads, _gradient(fc, dy, x, groups), strict=True):
            if overwrite:
                grad.copy_(gradient)
            else:
                grad += gradient


def _in_bf16(rows: Rows, groups: RowGroups) -> Tensor:
    """Operand of a weight gradient in bf16 in place of fp8, which stands for it."""
    return restore_rows(rows, groups.count) if isinstance(rows, Fp8Rows) else rows


def _gradient(fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups) -> Tensor:
    """dW of all experts in bf16, in the layout of the weights, zero for an expert without rows.
    [El, A, B]"""
    return fp8_weight_grads(*_turned(fc, dy, x, groups), groups.offsets)


def _turned(
    fc: ExpertWeights, dy: Rows, x: Rows, groups: RowGroups
) -> tuple[TurnedRows, TurnedRows]:
    """Both operands of a weight gradient in the order of the weights' layout."""
    left, right = (x, dy) if fc.layout == "in_out" else (dy, x)
    first = turn_rows(_cast(left, groups), groups.offsets)
    return first, turn_rows(_cast(right, groups), groups.offsets)
