"""Expert activations with the routing probability fused in, forward and backward, over a row count
that stays on the device.

Forward: a = act(h) * p, where act is gated (`act(gate) * up`, h = [gate | up], width 2F, with the
variants of moe/activations.py: LIMIT 0 for no clamp, INTERLEAVE 0 for halves) or plain (`act(h)`,
width F). Backward: from da it gives dh, dp (a sum over F in a fixed order) and, when asked, a again
for the weight gradient of fc2, so that a need not be saved.

With a bias of fc1, h is what its GEMM gives, and act takes h + bias: the bias of the row's expert
is added in fp32, so that the sum is never rounded to h's dtype. Without one, `bias` and `experts`
are None, and nothing of it is compiled.

The plain form is activation_forward and activation_backward of moe/experts.py, which call the
launches below where they fit.

Reference: activation_reference of tests/support/kernel_references.py, and its autograd.

Shapes: N expert rows, F ffn, El experts. h, a, da, dh, bias in bf16, fp16 or fp32; p, dp fp32 [N];
arithmetic in fp32.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, aligned, power_of_two

__all__ = [
    "ACTIVATIONS",
    "activation_backward_kernel",
    "activation_kernel",
    "backward_program",
    "can_fuse",
    "fused_activation_backward",
    "fused_activation_forward",
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


# ---- Launches

# Of a gated activation: LIMIT or None, OFFSET, INTERLEAVE. The Variant of moe/activations.py.
type Variant = tuple[float | None, float, int]
# Of fc1: a bias for each expert [El, F1], the expert of each row int32 [n]. RowBiases there.
type RowBiases = tuple[Tensor, Tensor]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN: Variant = (None, 0.0, 0)
# Name, variant, F, dtypes of h and of a bias.
type _Key = tuple[int, str, Variant, int, torch.dtype, torch.dtype | None]
_forward_launches: dict[_Key, Launch] = {}
_backward_launches: dict[_Key, tuple[Launch, int]] = {}


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":  # interpreted
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_fuse(name: str, h: Tensor, probs: Tensor | None) -> bool:
    """Whether the kernels take this activation (by name) of h [n, F1]."""
    if probs is not None and not (probs.is_contiguous() and probs.dtype == torch.float32):
        return False
    return h.is_contiguous() and h.dtype in _DTYPES and name in ACTIVATIONS


def _constants(
    name: str, variant: Variant, width: int, block: int, bias: RowBiases | None
) -> dict[str, object]:
    code, gated = ACTIVATIONS[name]
    constants: dict[str, object] = {"bias": None, "experts": None} if bias is None else {}
    constants |= {"F": width, "CODE": code, "GATED": gated, "BLOCK": block}
    extra = {"LIMIT": float(variant[0] or 0.0), "OFFSET": float(variant[1])}
    return constants | extra | {"INTERLEAVE": variant[2]}


def _key(name: str, variant: Variant, width: int, h: Tensor, bias: RowBiases | None) -> _Key:
    bias_type = None if bias is None else bias[0].dtype
    return h.get_device(), name, variant, width, h.dtype, bias_type


def _given(bias: RowBiases | None) -> tuple[Tensor, ...]:
    """The arguments of a launch that a bias is."""
    return () if bias is None else (aligned(bias[0]), bias[1])


def _count(h: Tensor) -> Tensor:
    return torch.full((1,), h.shape[0], dtype=torch.int32, device=h.device)


def _ones(h: Tensor) -> Tensor:
    return torch.ones(h.shape[0], device=h.device)


def fused_activation_forward(
    name: str,
    h: Tensor,
    probs: Tensor | None,
    count: Tensor | None = None,
    variant: Variant = _PLAIN,
    bias: RowBiases | None = None,
) -> Tensor:
    """a = act(h + bias) * p: h [n, F1], probs fp32 [n] or longer, None for ones -> a [n, F] in h's
    dtype. The first `count` rows are written (int32 [1], on the device); all without it."""
    width = h.shape[1] // 2 if ACTIVATIONS[name][1] else h.shape[1]
    out = h.new_empty((h.shape[0], width))
    if not h.shape[0]:
        return out
    block = min(1024, power_of_two(width))
    columns = -(-width // block)
    key = _key(name, variant, width, h, bias)
    launch = _forward_launches.get(key)
    if launch is None:
        constants = _constants(name, variant, width, block, bias)
        launch = Launch(activation_kernel, 4, constants)
        _forward_launches[key] = launch
    grid = (max(1, _num_sms(h.device) * 16 // columns), columns)
    probs = _ones(h) if probs is None else probs
    launch(grid, (h, probs, out, _count(h) if count is None else count, *_given(bias)))
    return out


def fused_activation_backward(
    name: str,
    h: Tensor,
    da: Tensor,
    probs: Tensor | None,
    count: Tensor | None = None,
    *,
    bounded: bool = False,
    consume: bool = False,
    variant: Variant = _PLAIN,
    bias: RowBiases | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The backward: da [n, F] -> dh [n, F1], a [n, F], dprobs fp32 [n].

    a takes da's memory, and dh that of h with `consume`. bounded: most of the n rows may be empty,
    so programs fill the SMs in place of one program a row.
    """
    rows, width = da.shape
    dh = h if consume else torch.empty_like(h)
    dprobs = torch.empty(rows, dtype=torch.float32, device=h.device)
    if not rows:
        return dh, da, None if probs is None else dprobs
    key = _key(name, variant, width, h, bias)
    found = _backward_launches.get(key)
    if found is None:
        block, warps, resident = backward_program(width)
        constants = _constants(name, variant, width, block, bias)
        launch = Launch(activation_backward_kernel, warps, constants)
        found = _backward_launches[key] = launch, resident
    launch, resident = found
    programs = min(rows, _num_sms(h.device) * resident) if bounded else rows
    count = _count(h) if count is None else count
    weights = _ones(h) if probs is None else probs
    launch((programs, 1), (h, weights, da, dh, da, dprobs, count, *_given(bias)))
    return dh, da, None if probs is None else dprobs
