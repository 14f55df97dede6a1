"""Biases of experts over rows sorted by expert, against a loop over experts in fp32: experts
without rows, rows behind the last expert's, chunks of all lengths."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_fluid.kernels.activation.biases import add_biases, add_products, sum_by_expert
from tests.support.kernel_references import stored

pytestmark = pytest.mark.interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = [0, 5, 0, 257, 256, 1, 0, 600, 0]  # none, a chunk's edges, several chunks
FEW = [0, 3, 0, 4, 1, 0]
SPARE = 3  # rows behind the last expert's
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _rows(width: int, dtype: torch.dtype, counts: list[int] = COUNTS) -> tuple[Tensor, ...]:
    """Rows [N + SPARE, D], of which the last are NaN, biases [El, D], offsets, experts, scale."""
    g = torch.Generator().manual_seed(3)
    n = sum(counts)
    rows = torch.randn(n + SPARE, width, generator=g).to(dtype)
    scale = torch.rand(n + SPARE, generator=g)
    rows[n:], scale[n:] = float("nan"), float("nan")
    bias = torch.randn(len(counts), width, generator=g).to(dtype)
    offsets = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    experts = torch.arange(len(counts) + 1).repeat_interleave(torch.tensor([*counts, SPARE]))
    given = rows, bias, offsets, experts.int(), scale
    return tuple(x.to(DEVICE) for x in given)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1030])
def test_biases_are_added_in_fp32_and_rounded_once(
    width: int, dtype: torch.dtype, weighted: bool
) -> None:
    rows, bias, offsets, experts, scale = _rows(width, dtype, FEW)
    n = sum(FEW)
    own, factor = bias[experts[:n].long()], (scale[:n, None] if weighted else 1.0)
    product_first = stored(rows[:n].float() + own.float() * factor, dtype)
    # As a GPU multiplies and adds: no rounding between the two.
    at_once = stored((rows[:n].double() + own.double() * factor).float(), dtype)
    add_biases(rows, bias, experts, offsets[-1:], scale if weighted else None)
    assert ((rows[:n] == product_first) | (rows[:n] == at_once)).all()
    assert rows[n:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 1030])
def test_products_with_biases_are_added(width: int, dtype: torch.dtype) -> None:
    rows, bias, offsets, experts, products = _rows(width, dtype, FEW)
    n = sum(FEW)
    right = products[:n] + (rows[:n].float() * bias[experts[:n].long()].float()).sum(1)
    add_products(products, rows, bias, experts, offsets[-1:])
    torch.testing.assert_close(products[:n], right, rtol=1e-5, atol=1e-4)
    assert products[n:].isnan().all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("width", "dtype"), [*((24, dtype) for dtype in DTYPES), (300, torch.bfloat16)]
)
def test_sums_by_expert_are_those_of_its_rows_alone_bit_for_bit(
    width: int, dtype: torch.dtype, weighted: bool
) -> None:
    """Neither where the rows lie nor how many the others have changes a sum."""
    rows, _, offsets, _, scale = _rows(width, dtype)
    given = scale if weighted else None
    found = sum_by_expert(rows, offsets, given)
    assert found.dtype == torch.float32
    assert torch.equal(found, sum_by_expert(rows, offsets, given))
    spans = itertools.pairwise([0, *offsets.tolist()])
    for e, (begin, end) in enumerate(spans):
        total, own, weights = found[e], rows[begin:end].clone(), scale[begin:end].clone()
        right = own.double() * (weights[:, None] if weighted else 1.0)
        torch.testing.assert_close(total.double(), right.sum(0), rtol=1e-5, atol=1e-4)
        # Of as many experts, for which the same kernel is compiled.
        ends = offsets.new_tensor([0] * e + [end - begin] * (len(COUNTS) - e))
        alone = sum_by_expert(own, ends, weights if weighted else None)
        assert torch.equal(total, alone[e])


def test_no_rows_at_all_have_sums_of_zero() -> None:
    offsets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    found = sum_by_expert(torch.empty(0, 8, device=DEVICE), offsets)
    assert torch.equal(found, torch.zeros(3, 8, device=DEVICE))
