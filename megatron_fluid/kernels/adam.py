"""Adam over many parameters in one launch, which clips the gradient on its way in and writes the
parameter in the model's precision, too.

The arithmetic is that of Transformer Engine's kernels for both, instruction by instruction
(common/multi_tensor/adam.cu and scale.cu, compiled with --use_fast_math): fused multiply-adds where
the compiler makes them, approximate reciprocals and roots, and denormals taken as zeros. What is
written for the model is the new fp32 parameter, rounded.

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


# $0 to $2: parameter and both moments; $3 to $6: gradient, parameter and both moments; then scale,
# beta1, 1 - beta1, beta2, 1 - beta2, the reciprocals of both corrections, epsilon, decay and rate.
_BEGIN = """
{
    .reg .f32 g, t, u;
    mul.rn.ftz.f32 g, $3, $7;
"""
_MOMENTS = """
    mul.rn.ftz.f32 t, g, $9;
    fma.rn.ftz.f32 $1, $5, $8, t;
    mul.rn.ftz.f32 t, g, $11;
    mul.rn.ftz.f32 t, t, g;
    fma.rn.ftz.f32 $2, $6, $10, t;
    mul.rn.ftz.f32 t, $2, $13;
    sqrt.approx.ftz.f32 t, t;
    add.rn.ftz.f32 t, t, $14;
    rcp.approx.ftz.f32 t, t;
    mul.rn.ftz.f32 u, $1, $12;
    mul.rn.ftz.f32 u, u, t;
"""
_DECAY = "    fma.rn.ftz.f32 {0}, $4, $15, {0};\n"
_END = """
    neg.ftz.f32 u, u;
    fma.rn.ftz.f32 $0, u, $16, $4;
}
"""
_ADAM = tl.constexpr(_BEGIN + _DECAY.format("g") + _MOMENTS + _END)
_ADAMW = tl.constexpr(_BEGIN + _MOMENTS + _DECAY.format("u") + _END)
_REGISTERS = tl.constexpr("=&f,=&f,=&f" + ",f" * 14)


@triton.jit
def _reciprocal(value, PLAIN: tl.constexpr):
    if PLAIN:
        return 1.0 / value
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _updated(
    g, p, m, v, scale, beta1, rest1, beta2, rest2, inverse1, inverse2, eps, decay, rate,
    DECOUPLED: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """The new parameter and moments. PLAIN: in Triton's own operations, for its interpreter."""
    if PLAIN:
        g *= scale
        if not DECOUPLED:
            g += decay * p
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        update = m * inverse1 / (tl.sqrt(v * inverse2) + eps)
        if DECOUPLED:
            update += decay * p
        return p - rate * update, m, v
    return tl.inline_asm_elementwise(
        _ADAMW if DECOUPLED else _ADAM,
        _REGISTERS,
        [g, p, m, v, scale, beta1, rest1, beta2, rest2, inverse1, inverse2, eps, decay, rate],
        dtype=(tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit(
    do_not_specialize=[
        "beta1", "rest1", "beta2", "rest2", "correction1", "correction2", "eps", "decay",
        "rate",
    ]
)  # fmt: skip
def adam_kernel(
    table,  # int64 [parameters, COLUMNS]: 16-byte aligned addresses
    chunks,  # int32 [programs, 2]: parameter and number of the chunk of it
    scale,  # fp32 [1]: of the gradient
    beta1, rest1, beta2, rest2, correction1, correction2, eps, decay, rate,
    KIND: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Numbers are the bits of fp32 ones: beta1, 1 - beta1, beta2, 1 - beta2, both bias corrections,
    epsilon, weight decay and learning rate. KIND: dtype of the model's
    parameter, None without one. DECOUPLED: AdamW's decay. PLAIN: as _updated has it. Grid
    (programs,); a program has BLOCK elements of a parameter."""
    line = table + tl.load(chunks + tl.program_id(0) * 2).to(tl.int64) * _COLUMNS
    first = tl.load(chunks + tl.program_id(0) * 2 + 1).to(tl.int64) * BLOCK
    elements = tl.load(line + 5)
    column = tl.arange(0, BLOCK)
    g_at = _pointer(line, 0, tl.float32) + first + column
    p_at = _pointer(line, 1, tl.float32) + first + column
    m_at = _pointer(line, 2, tl.float32) + first + column
    v_at = _pointer(line, 3, tl.float32) + first + column
    whole = first + BLOCK <= elements  # without a mask, accesses are wide
    inside = first + column < elements
    if whole:
        g = tl.load(g_at)
        p = tl.load(p_at)
        m = tl.load(m_at)
        v = tl.load(v_at)
    else:
        g = tl.load(g_at, mask=inside, other=0.0)
        p = tl.load(p_at, mask=inside, other=0.0)
        m = tl.load(m_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=inside, other=0.0)
    p, m, v = _updated(
        g, p, m, v, tl.load(scale), _fp32(beta1), _fp32(rest1), _fp32(beta2), _fp32(rest2),
        _reciprocal(_fp32(correction1), PLAIN), _reciprocal(_fp32(correction2), PLAIN),
        _fp32(eps), _fp32(decay), _fp32(rate), DECOUPLED, PLAIN,
    )  # fmt: skip
    if whole:
        tl.store(p_at, p)
        tl.store(m_at, m)
        tl.store(v_at, v)
        if KIND is not None:
            tl.store(_pointer(line, 4, KIND) + first + column, p.to(KIND))
    else:
        tl.store(p_at, p, mask=inside)
        tl.store(m_at, m, mask=inside)
        tl.store(v_at, v, mask=inside)
        if KIND is not None:
            tl.store(_pointer(line, 4, KIND) + first + column, p.to(KIND), mask=inside)
