"""Rows of a token summed in fp32, against plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.kernels.sum_rows import sum_rows

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "k", "hidden"), [(3, 2, 16), (5, 3, 2500), (1, 1, 8), (0, 2, 8)]
)
@pytest.mark.parametrize("with_probs", [False, True])
def test_rows_are_summed_in_the_order_of_choices(
    dtype: torch.dtype, tokens: int, k: int, hidden: int, with_probs: bool
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(tokens * k, hidden, generator=generator).to(dtype).to(device)
    rows = torch.randperm(tokens * k, generator=generator).view(tokens, k).to(device)
    probs = torch.rand(tokens, k, generator=generator).to(device) if with_probs else None
    out = torch.full((tokens, hidden), float("nan"), dtype=dtype, device=device)
    sum_rows(z, rows, probs, out)
    wanted = torch.zeros(tokens, hidden, device=device)
    for choice in range(k):
        part = z[rows[:, choice]].float()
        wanted += part if probs is None else part * probs[:, choice, None]
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance / 10)
