"""The sum over slots equals its reference in plain torch, bit for bit: fp32, rank order.

Triton's interpreter cuts fp32 to bf16 where hardware rounds: a bf16 result may be one step below.
"""

import pytest
import torch

from megatron_fluid.kernels.move_tokens.reduce_slots import reduce_slots, reduce_slots_kernel
from tests.support.machine import NEEDS_INTERPRETER


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 33, 129), (8, 1, 4097), (3, 0, 7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_slots_are_added_in_fp32_in_rank_order(
    dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slots = torch.randn(shape, dtype=torch.float32).to(dtype).to(device)
    bias = torch.randn(shape[2]).to(dtype).to(device) if with_bias else None
    total = slots[0].float()
    for w in range(1, shape[0]):
        total = total + slots[w].float()
    if bias is not None:
        total = total + bias.float()
    found = reduce_slots(slots, bias)
    if dtype == torch.bfloat16 and device == "cpu":
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), total, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, total.to(dtype))


@NEEDS_INTERPRETER
def test_slots_may_lie_farther_apart_than_int32_counts() -> None:
    numel, block = 1 << 30, 64
    # Few of its pages are ever touched.
    buffer = torch.empty((1 << 31) + 3 * numel, dtype=torch.int8)
    slots = buffer[1 << 31 :]
    buffer[:block] = 100  # where an offset that wrapped around would read
    for w in range(3):
        slots[w * numel : w * numel + block] = w + 1
    out = torch.empty(block)
    reduce_slots_kernel[(1,)](
        slots, out, out, numel, numel, W=3, HAS_BIAS=False, ALIGNED=True, BLOCK=block
    )
    assert (out == 6).all()
