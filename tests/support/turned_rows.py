"""Rows of experts cast to e4m3 and turned, as kernels/fp8_weight_grads takes them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_fluid.kernels.fp8_weight_grads.launch import TurnedRows
from tests.support.fp8_reference import block_scale

__all__ = ["turn_rows"]


def turn_rows(x: Tensor, ends: Sequence[int], unused: int = 0) -> TurnedRows:
    """x [N, W], W features; the rows of expert e end at ends[e]. Behind the last expert's places
    come `unused` blocks of NaNs."""
    parts = [
        pad(x[start:end].float(), (0, 0, 0, -(end - start) % 128))
        for start, end in itertools.pairwise([0, *ends])
    ]
    blocks = torch.cat(parts).unflatten(0, (-1, 128)).transpose(1, 2)  # [P / 128, W, 128]
    scales = block_scale(blocks)
    values = blocks / scales.unsqueeze(2)
    values = pad(values, (0, 0, 0, 0, 0, unused), value=torch.nan)
    scales = pad(scales, (0, 0, 0, unused), value=torch.nan)
    turned = values.permute(1, 0, 2).flatten(1).contiguous()
    return TurnedRows(turned.to(torch.float8_e4m3fn), scales.contiguous())
