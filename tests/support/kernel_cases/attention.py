"""The kernels of the attention exchange, at the shape of Mixtral-8x7B on 4 ranks."""

from dataclasses import replace

import torch

from megatron_fluid.attention.attention_kernels import CoreCase, run_sdpa
from megatron_fluid.attention.exchange.symmetric import SymmetricExchange
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.overlap import AttentionCall, overlapped_attention
from megatron_fluid.attention.packed import Norm, Rotary, pack_in_one_pass
from tests.support.kernel_cases import WIDE, KernelCase, cases_of
from tests.support.thread_ranks import ThreadBuffers, run_threads

RANKS, HEADS, DIM, LENGTH = 4, 32, 128, 32
BF16, CPU = torch.bfloat16, torch.device("cpu")
_NARROW = ("st.global.b16", "st.global.b32", "st.global.v2.b32")


def _call(kv_heads: int, rotary: Rotary | None, norm: bool) -> None:
    """Forward and backward on all ranks."""
    heads, sequence = HeadLayout(HEADS, kv_heads, DIM, RANKS), SequenceLayout(LENGTH, RANKS)
    table = None if rotary is None else rotary.table(LENGTH, CPU, BF16)
    sizes = {"num_kv_heads": kv_heads, "head_dim": DIM, "qk_norm": norm, "dtype": BF16}
    layer = SelfAttention(64, HEADS, **sizes)  # type: ignore[arg-type]

    def attend(buffers: ThreadBuffers) -> None:
        exchange = SymmetricExchange(buffers, heads, sequence)
        call = AttentionCall(exchange, run_sdpa, CoreCase(DIM, BF16, "cpu"), table)
        x = torch.zeros(LENGTH // RANKS, 1, 64, dtype=BF16, requires_grad=True)
        overlapped_attention(x, layer.weights(), call).sum().backward()

    run_threads(RANKS, "sm_push", attend)


def _pack(norm: bool) -> None:
    """Gradients of one rank's heads side by side."""
    part, table = HeadLayout(HEADS, 8, DIM, RANKS).part(0), Rotary(DIM).table(LENGTH, CPU, BF16)
    q, k, v = (torch.empty(LENGTH, 1, count, DIM, dtype=BF16) for count in (8, 2, 2))
    target, weight = torch.empty(LENGTH, 1, part.width, dtype=BF16), torch.empty(DIM, dtype=BF16)
    norms = (Norm(weight, weight, 1e-6), target.clone()) if norm else (None, None)
    pack_in_one_pass((q, k, v), part, table, target, *norms, apart=True)


def _judged(case: KernelCase) -> KernelCase:
    narrow = _NARROW
    if case.kernel_name.startswith(("push_", "arrive_rows")):
        narrow = (*narrow, "ld.global.b16")
    elif case.kernel_name.startswith("pack_"):  # norms' shares are fp32
        narrow = ("st.global.b16", "st.global.v2.b32")
    return replace(case, wanted=WIDE, unwanted=narrow)


CASES = [
    _judged(case)
    for case in cases_of(
        {
            "plain": lambda: _call(8, None, False),
            "rotated": lambda: _call(8, Rotary(DIM), False),
            "norm": lambda: _call(8, Rotary(DIM), True),
            "shared heads": lambda: _call(2, Rotary(DIM), False),
            "packed": lambda: _pack(norm=False),
            "packed, norm": lambda: _pack(norm=True),
        }
    )
]
