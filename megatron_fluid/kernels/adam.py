"""Adam over many parameters in one launch, which clips the gradient on its way in and writes the
parameter in the model's precision, too.

The arithmetic is Transformer Engine's (common/multi_tensor/adam.cu, compiled with fused
multiply-adds), value for value: gradients are scaled first and rounded, as its own kernel for
clipping does, and what is written for the model is the new fp32 parameter, rounded.

Bytes a parameter, with a model in 16 bits: 30 (gradient, parameter and both moments read;
parameter, moments and the model's parameter written). Clipping, Adam and the copy one after the
other take 42.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COLUMNS", "adam_kernel"]

COLUMNS = ("gradient", "parameter", "exp_avg", "exp_avg_sq", "model", "elements")
"""Of a parameter's line in the table: addresses of fp32 tensors, that of the model's parameter (of
any float type), and how many elements each has."""

_COLUMNS = tl.constexpr(len(COLUMNS))


@triton.jit
def _fp32(bits):
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _pointer(table, column: tl.constexpr, kind: tl.constexpr):
    address = tl.load(table + column)
    return tl.multiple_of(address.to(tl.pointer_type(kind)), 16)


@triton.jit(
    do_not_specialize=[
        "scale", "beta1", "rest1", "beta2", "rest2", "correction1", "correction2", "eps", "decay",
        "rate",
    ]
)  # fmt: skip
def adam_kernel(
    table,  # int64 [parameters, COLUMNS]: 16-byte aligned addresses
    chunks,  # int32 [programs, 2]: parameter and number of the chunk of it
    scale, beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, rate,
    KIND: tl.constexpr, DECOUPLED: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers are the bits of fp32 ones: scale of the gradient (SCALED), beta1, 1 - beta1, beta2,
    1 - beta2, both bias corrections, epsilon, weight decay and learning rate. KIND: dtype of the
    model's parameter, None without one. DECOUPLED: AdamW's decay. Grid (programs,); a program has
    CHUNK elements of a parameter, BLOCK at a time."""
    line = table + tl.load(chunks + tl.program_id(0) * 2).to(tl.int64) * _COLUMNS
    first = tl.load(chunks + tl.program_id(0) * 2 + 1).to(tl.int64) * CHUNK
    elements = tl.load(line + 5)
    g_at = _pointer(line, 0, tl.float32) + first
    p_at = _pointer(line, 1, tl.float32) + first
    m_at = _pointer(line, 2, tl.float32) + first
    v_at = _pointer(line, 3, tl.float32) + first
    whole = first + CHUNK <= elements  # without a mask, accesses are wide
    for start in range(0, CHUNK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if whole:
            g = tl.load(g_at + at)
            p = tl.load(p_at + at)
            m = tl.load(m_at + at)
            v = tl.load(v_at + at)
        else:
            inside = first + at < elements
            g = tl.load(g_at + at, mask=inside, other=0.0)
            p = tl.load(p_at + at, mask=inside, other=0.0)
            m = tl.load(m_at + at, mask=inside, other=0.0)
            v = tl.load(v_at + at, mask=inside, other=0.0)
        if SCALED:
            g *= _fp32(scale)
        if not DECOUPLED:
            g = tl.fma(_fp32(decay), p, g)
        m = tl.fma(_fp32(beta1), m, _fp32(rest1) * g)
        v = tl.fma(_fp32(beta2), v, _fp32(rest2) * g * g)
        root = tl.sqrt_rn(tl.div_rn(v, _fp32(correction2))) + _fp32(eps)
        update = tl.div_rn(tl.div_rn(m, _fp32(correction1)), root)
        if DECOUPLED:
            update = tl.fma(_fp32(decay), p, update)
        p = tl.fma(-_fp32(rate), update, p)
        if whole:
            tl.store(p_at + at, p)
            tl.store(m_at + at, m)
            tl.store(v_at + at, v)
            if KIND is not None:
                tl.store(_pointer(line, 4, KIND) + first + at, p.to(KIND))
        else:
            inside = first + at < elements
            tl.store(p_at + at, p, mask=inside)
            tl.store(m_at + at, m, mask=inside)
            tl.store(v_at + at, v, mask=inside)
            if KIND is not None:
                tl.store(_pointer(line, 4, KIND) + first + at, p.to(KIND), mask=inside)
