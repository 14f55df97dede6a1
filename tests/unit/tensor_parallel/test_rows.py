"""Rows of experts that are split over ranks: from blocks of tokens to all rows of an expert
together."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.tensor_parallel.expert_gemm import TokenRows


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("hot", [False, True])
def test_every_experts_rows_of_all_blocks_come_together(blocks: int, hot: bool) -> None:
    tokens, experts, k = 24, 7, 3
    generator = torch.Generator().manual_seed(blocks)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, -1).indices
    if hot:  # others have no row
        ids = torch.arange(k).expand_as(ids).contiguous()
    rows = TokenRows.plan(ids, experts, blocks)
    # By block, a row is known by its token and expert: expert * tokens + token.
    marks = torch.cat(
        [
            rows.tokens[b]
            + b * rows.block_tokens
            + tokens
            * torch.searchsorted(
                rows.ends[b], torch.arange(rows.tokens.shape[1], dtype=torch.int32), right=True
            )
            for b in range(blocks)
        ]
    )
    whole = rows.expert_major()
    expected = sorted(int(e) * tokens + t for t in range(tokens) for e in ids[t])
    assert whole.sort(marks).tolist() == expected
    assert whole.tokens.tolist() == [mark % tokens for mark in expected]
    assert whole.ends.dtype == torch.int32
    assert (
        whole.ends.tolist() == torch.bincount(ids.flatten(), minlength=experts).cumsum(0).tolist()
    )
