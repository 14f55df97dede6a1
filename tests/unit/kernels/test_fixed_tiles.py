"""The kernel with fixed tiles under Triton's interpreter, against its reference."""

import pytest
import torch

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fixed_tiles.launch import (
    FixedTiles,
    fixed_tile_linear,
    fixed_tile_matmul,
    product_by_kernel,
    row_by_row,
)
from megatron_fluid.kernels.grouped_gemm.launch import grouped_matmul
from tests.support.machine import NEEDS_INTERPRETER

COUNTS = [0, 40, 1, 0, 7]
OFFSETS = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(COUNTS), 50, generator=generator)
    return x, torch.randn(len(COUNTS), 70, 50, generator=generator).transpose(1, 2)


@NEEDS_INTERPRETER
@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "a matrix for each expert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_computes_what_the_reference_does(
    operands: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype, apart: bool
) -> None:
    x, weights = (operand.to(dtype) for operand in operands)
    out = torch.full((len(x) + 1, 70), -7.0)
    more = torch.cat([x, x[:1]])
    product_by_kernel(more, list(weights.unbind(0)) if apart else weights, OFFSETS, out)
    torch.testing.assert_close(out[:-1], fixed_tile_matmul(x, weights, OFFSETS, dtype=out.dtype))
    assert (out[-1] == -7.0).all()  # belongs to no expert


def test_the_reference_computes_what_a_product_does(
    operands: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, weights = operands
    wanted = grouped_matmul(x, weights, OFFSETS)
    torch.testing.assert_close(grouped_matmul(x, FixedTiles(weights), OFFSETS), wanted)
    found = fixed_tile_linear(x.view(4, -1, 50), weights[0].t())
    torch.testing.assert_close(found.view(-1, 70), x @ weights[0])
    assert fixed_tile_matmul(x[:0], weights, OFFSETS * 0).shape == (0, 70)


def test_the_kernel_refuses_other_dtypes_by_name() -> None:
    x = torch.zeros(2, 4, dtype=torch.float64)
    with pytest.raises(ConfigError, match="batch_invariant: operands: found .torch.float64 rows"):
        product_by_kernel(x, x.new_zeros(1, 4, 4), torch.tensor([2]), x)


def test_elements_have_the_bits_of_their_row_alone() -> None:
    x = torch.randn(9, 13)
    whole = row_by_row(torch.sigmoid, x)
    assert all(torch.equal(whole[i], torch.sigmoid(x[i])) for i in range(9))
    assert row_by_row(torch.sigmoid, x[:0]).shape == (0, 13)
