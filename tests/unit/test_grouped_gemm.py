"""Our grouped GEMMs against products of one expert at a time: empty experts, tails of all lengths, rows nobody owns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fluid.kernels.oracles import activation_oracle
from megatron_fluid.moe.grouped_gemm import add_weight_grads, gated_matmul, tiled_matmul

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
COUNTS = [[5, 0, 33, 16], [0, 0, 0, 7], [8, 9, 17, 1]]
SPARE = 3  # rows of the buffers after the last expert's


def _rows(counts: list[int], width: int, seed: int) -> Tensor:
    """Random rows; those that belong to no expert would spoil any sum."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts) + SPARE, width, generator=g)
    x[sum(counts) :] = float("nan")
    return x.to(DEVICE, DTYPE)


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def _close(found: Tensor, expected: Tensor) -> bool:
    limit = 1e-5 if torch.float32 == DTYPE else 1e-2
    return bool((found.float() - expected.float()).norm() <= limit * expected.float().norm().clamp(min=1e-6))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("out_in", [True, False])
def test_products_equal_those_of_one_expert_at_a_time(counts: list[int], out_in: bool) -> None:
    inner, outer = 40, 56
    x, n = _rows(counts, inner, 1), sum(counts)
    w = torch.randn(len(counts), *((outer, inner) if out_in else (inner, outer))).to(DEVICE, DTYPE)
    weights = w.transpose(1, 2) if out_in else w
    found = tiled_matmul(x, weights, _offsets(counts), programs=3)
    expected = torch.cat([rows @ weights[e] for e, rows in enumerate(x[:n].split(counts))])
    assert _close(found[:n], expected)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("keep", [True, False])
def test_a_gated_product_carries_its_activation(counts: list[int], keep: bool) -> None:
    inner, ffn = 40, 24
    x, n = _rows(counts, inner, 2), sum(counts)
    stack = torch.randn(len(counts), 2 * ffn, inner).to(DEVICE, DTYPE)
    prob = torch.rand(n + SPARE, device=DEVICE)
    out = torch.full((n + SPARE, ffn), 7.0, device=DEVICE, dtype=DTYPE)
    hidden = gated_matmul(x, stack, prob, _offsets(counts), "swiglu", out, keep, programs=2)
    expected = torch.cat([rows @ stack[e].t() for e, rows in enumerate(x[:n].split(counts))])
    assert (hidden is not None) == keep
    assert hidden is None or _close(hidden[:n], expected)
    assert _close(out[:n], activation_oracle(expected.float(), prob[:n], "swiglu"))
    assert bool((out[n:] == 7.0).all())


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("overwrite", [True, False])
def test_weight_gradients_are_added_in_fp32(counts: list[int], overwrite: bool) -> None:
    a, b = 40, 24
    left, right, n = _rows(counts, a, 3), _rows(counts, b, 4), sum(counts)
    outputs = [torch.full((a, b), 0.5, device=DEVICE) for _ in counts]
    addresses = torch.tensor([o.data_ptr() for o in outputs], device=DEVICE)
    add_weight_grads(left, right, _offsets(counts), addresses, outputs, 3, overwrite)
    parts = zip(outputs, left[:n].split(counts), right[:n].split(counts), strict=True)
    for output, mine, yours in parts:
        assert _close(output - (0.0 if overwrite else 0.5), mine.float().t() @ yours.float())
