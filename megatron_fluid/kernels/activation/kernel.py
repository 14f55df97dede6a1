"""Expert activations with the routing probability fused in, forward and backward, over a row count
that stays on the device.

Forward: a = act(h) * p, where act is gated (`act(gate) * up`, h = [gate | up], width 2F, with the
variants of moe/activations.py: LIMIT 0 for no clamp, INTERLEAVE 0 for halves) or plain (`act(h)`,
width F). Backward: from da it gives dh, dp (a sum over F in a fixed order) and, when asked, a again
for the weight gradient of fc2, so that a need not be saved.

With a bias of fc1, h is what its GEMM gives, and act takes h + bias: the bias of the row's expert
is added in fp32, so that the sum is never rounded to h's dtype. Without one, `bias` and `experts`
are None, and nothing of it is compiled.

Reference: activation_reference of tests/support/kernel_references.py, and its autograd.

Shapes: N expert rows, F ffn, El experts. h, a, da, dh, bias in bf16, fp16 or fp32; p, dp fp32 [N];
arithmetic in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_fluid.cuda.triton_launch import power_of_two

__all__ = [
    "ACTIVATIONS",
    "activation_backward_kernel",
    "activation_kernel",
    "backward_program",
    "value_and_slope",
]

# name -> (code, gated)
ACTIVATIONS: dict[str, tuple[int, bool]] = {
    "swiglu": (0, True),
    "geglu": (1, True),
    "silu": (0, False),
    "gelu": (1, False),
    "relu2": (2, False),
    "relu": (3, False),
    "quick_geglu": (4, True),
    "quick_gelu": (4, False),
}


def backward_program(width: int) -> tuple[int, int, int]:
    """BLOCK and warps of activation_backward_kernel for F = `width`, and how many of its programs
    an SM's registers hold. A lane has eight elements at least, 16 bytes, of rows as wide as that.
    """
    block = min(2048, power_of_two(width))
    while block > 1024 and width % block:
        block //= 2
    return (block, 4, 7) if block > 1024 else (block, 2, 14)


@triton.jit
def value_and_slope(g, CODE: tl.constexpr):
    """The activation of code CODE (see ACTIVATIONS) of g in fp32, and its derivative."""
    if CODE == 0:  # silu
        s = 1.0 / (1.0 + tl.exp(-g))
        value = g * s
        slope = s * (1.0 + g * (1.0 - s))
    elif CODE == 1:  # gelu, exact
        cdf = 0.5 * (1.0 + tl.math.erf(g * 0.7071067811865476))
        value = g * cdf
        slope = cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)
    elif CODE == 2:  # squared relu
        r = tl.maximum(g, 0.0)
        value = r * r
        slope = 2.0 * r
    elif CODE == 4:  # x * sigmoid(1.702 x)
        s = 1.0 / (1.0 + tl.exp(-1.702 * g))
        value = g * s
        slope = s + 1.702 * value * (1.0 - s)
    else:  # relu
        value = tl.maximum(g, 0.0)
        slope = tl.where(g > 0.0, 1.0, 0.0)
    return value, slope


@triton.jit
def activation_kernel(
    h,  # [>= N, 2F or F]
    prob,  # fp32 [>= N]
    out,  # [>= N, F]
    rows,  # int32 scalar: N
    bias,  # [El, 2F or F], its columns as those of h; or None
    experts,  # int32 [>= N]: whose rows they are; or None
    F: tl.constexpr, CODE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr = 0.0, OFFSET: tl.constexpr = 0.0, INTERLEAVE: tl.constexpr = 0,
):  # fmt: skip
    """Grid (any, ceil(F / BLOCK))."""
    n = tl.load(rows)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < F
    WIDTH: tl.constexpr = 2 * F if GATED else F
    i = tl.program_id(0)
    STEP: tl.constexpr = INTERLEAVE if INTERLEAVE else F  # from a gate to its up
    column = f // INTERLEAVE * (2 * INTERLEAVE) + f % INTERLEAVE if INTERLEAVE else f
    while i < n:
        line = h + i.to(tl.int64) * WIDTH + column
        g = tl.load(line, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            added = bias + tl.load(experts + i).to(tl.int64) * WIDTH + column
            g += tl.load(added, mask=inside, other=0.0).to(tl.float32)
        if LIMIT > 0:
            g = tl.minimum(g, LIMIT)
        value, _ = value_and_slope(g, CODE)
        if GATED:
            up = tl.load(line + STEP, mask=inside, other=0.0).to(tl.float32)
            if bias is not None:
                up += tl.load(added + STEP, mask=inside, other=0.0).to(tl.float32)
            if LIMIT > 0:
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            value *= up + OFFSET
        value *= tl.load(prob + i)
        tl.store(out + i.to(tl.int64) * F + f, value.to(out.dtype.element_ty), mask=inside)
        i += tl.num_programs(0)


@triton.jit
def activation_backward_kernel(
    h,  # [>= N, 2F or F]
    prob,  # fp32 [>= N]
    da,  # [>= N, F]
    dh,  # [>= N, 2F or F] out (may be h itself)
    a,  # [>= N, F] out (may be da itself)
    dprob,  # fp32 [>= N] out
    rows,  # int32 scalar: N
    bias,  # [El, 2F or F], its columns as those of h; or None
    experts,  # int32 [>= N]: whose rows they are; or None
    F: tl.constexpr, CODE: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
    LIMIT: tl.constexpr = 0.0, OFFSET: tl.constexpr = 0.0, INTERLEAVE: tl.constexpr = 0,
):  # fmt: skip
    """Grid (any,): one program owns a row, so that dprob is summed in a fixed order.

    A program for each row moves bytes as fast as a plain copy does. A fixed number, each taking row
    after row, is slower, by most where the SMs do not hold all of them at once: the last ones then
    run alone.
    """
    n = tl.load(rows)
    WIDTH: tl.constexpr = 2 * F if GATED else F
    STEP: tl.constexpr = INTERLEAVE if INTERLEAVE else F  # from a gate to its up
    i = tl.program_id(0)
    while i < n:
        p = tl.load(prob + i)
        if bias is not None:
            added = bias + tl.load(experts + i).to(tl.int64) * WIDTH
        partial = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, F, BLOCK):
            f = first + tl.arange(0, BLOCK)
            inside = f < F
            column = f // INTERLEAVE * (2 * INTERLEAVE) + f % INTERLEAVE if INTERLEAVE else f
            at = i.to(tl.int64) * WIDTH + column
            g = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
            if bias is not None:
                g += tl.load(added + column, mask=inside, other=0.0).to(tl.float32)
            kept = g <= LIMIT
            if LIMIT > 0:
                g = tl.minimum(g, LIMIT)
            value, slope = value_and_slope(g, CODE)
            if LIMIT > 0:
                slope = tl.where(kept, slope, 0.0)
            grad = tl.load(da + i.to(tl.int64) * F + f, mask=inside, other=0.0).to(tl.float32)
            if GATED:
                up = tl.load(h + at + STEP, mask=inside, other=0.0).to(tl.float32)
                if bias is not None:
                    up += tl.load(added + column + STEP, mask=inside, other=0.0).to(tl.float32)
                dup = grad * p * value
                if LIMIT > 0:
                    dup = tl.where(tl.abs(up) <= LIMIT, dup, 0.0)
                    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
                up += OFFSET
                partial += grad * value * up
                tl.store(dh + at, (grad * p * up * slope).to(dh.dtype.element_ty), mask=inside)
                tl.store(dh + at + STEP, dup.to(dh.dtype.element_ty), mask=inside)
                value *= up
            else:
                partial += grad * value
                tl.store(dh + at, (grad * p * slope).to(dh.dtype.element_ty), mask=inside)
            tl.store(a + i.to(tl.int64) * F + f, (value * p).to(a.dtype.element_ty), mask=inside)
        tl.store(dprob + i, tl.sum(partial, 0))
        i += tl.num_programs(0)
