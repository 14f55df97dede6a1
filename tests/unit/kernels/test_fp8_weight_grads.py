"""Weight gradients of fp8 rows on a CPU, and what their functions refuse."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    blocks_of,
    fp8_weight_grads,
    turned_weight_grads,
)
from tests.support.turned_rows import turn_rows

_COUNTS = [130, 0, 1, 128, 0]
_ENDS = list(itertools.accumulate(_COUNTS))
_OFFSETS = torch.tensor(_ENDS, dtype=torch.int32)


def _operands(high: int = 256, wide: int = 128) -> tuple[Tensor, Tensor, TurnedRows, TurnedRows]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(_ENDS[-1], width, generator=g) for width in (high, wide))
    return x, y, turn_rows(x, _ENDS), turn_rows(y, _ENDS)


def test_the_reference_is_each_experts_product_but_for_the_rounding_of_the_casts() -> None:
    x, y, left, right = _operands()
    found = turned_weight_grads(left, right, _ENDS)
    for expert, (start, end) in enumerate(itertools.pairwise([0, *_ENDS])):
        wanted = x[start:end].t() @ y[start:end]
        if start == end:
            assert not found[expert].any()
        else:
            assert 0.01 < float((found[expert] - wanted).norm() / wanted.norm()) < 0.06


def test_a_cpu_computes_the_reference() -> None:
    _, _, left, right = _operands()
    wanted = turned_weight_grads(left, right, _ENDS)
    for ends in (None, _ENDS):
        assert torch.equal(fp8_weight_grads(left, right, _OFFSETS, ends), wanted.bfloat16())


@pytest.mark.parametrize("stacked", [False, True])
def test_a_cpu_adds_the_reference_to_what_was_there(stacked: bool) -> None:
    _, _, left, right = _operands()
    old = torch.randn(5, 256, 128, generator=torch.Generator().manual_seed(2))
    outputs = old.clone() if stacked else [matrix.clone() for matrix in old]
    addresses = torch.zeros(5, dtype=torch.int64)
    add_fp8_weight_grads(left, right, _OFFSETS, addresses, outputs)
    wanted = old + turned_weight_grads(left, right, _ENDS)
    assert all(map(torch.equal, outputs, wanted))


@pytest.mark.parametrize("rows", [True, False])
def test_a_cpu_writes_the_reference_over_what_was_there(rows: bool) -> None:
    _, _, left, right = _operands()
    offsets, wanted = _OFFSETS, turned_weight_grads(left, right, _ENDS)
    if not rows:
        left, right = (TurnedRows(t.values[:, :0], t.scales[:0]) for t in (left, right))
        offsets, wanted = torch.zeros_like(offsets), torch.zeros_like(wanted)
    outputs = torch.full((5, 256, 128), torch.nan)
    addresses = torch.zeros(5, dtype=torch.int64)
    add_fp8_weight_grads(left, right, offsets, addresses, outputs, overwrite=True)
    assert torch.equal(outputs, wanted)


def test_blocks_of_bounds_the_blocks_that_rows_take() -> None:
    for rows, experts in ((0, 4), (1, 4), (5, 4), (300, 1), (300, 7)):
        most = max(
            sum(-(-n // 128) for n in (*counts, rows - sum(counts)))
            for counts in itertools.combinations_with_replacement((0, 1, 127, 128), experts - 1)
            if sum(counts) <= rows
        )
        assert most <= blocks_of(rows, experts) <= rows // 128 + min(rows, experts)


def _columns(turned: TurnedRows, chosen: slice) -> TurnedRows:
    return TurnedRows(turned.values[:, chosen].contiguous(), turned.scales)


def _turned_strides(turned: TurnedRows) -> TurnedRows:
    values = turned.values.view(torch.uint8).t().contiguous().t()
    return TurnedRows(values.view(torch.float8_e4m3fn), turned.scales)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: TurnedRows(x.values.bfloat16(), x.scales), "bfloat16"),
        (lambda x: TurnedRows(x.values[:64], x.scales[:, :64].contiguous()), r"\[64, 512\]"),
        (lambda x: _columns(x, slice(128, None)), r"\[256, 384\]"),
        (lambda x: TurnedRows(x.values, x.scales[1:]), r"\[3, 256\]"),
        (lambda x: TurnedRows(x.values, x.scales.double()), "float64"),
        (_turned_strides, "contiguous"),
        (None, "int64"),
    ],
    ids="dtype features places scales scales'-dtype strides offsets".split(),
)
def test_operands_that_do_not_fit_are_refused(
    change: Callable[[TurnedRows], TurnedRows] | None, words: str
) -> None:
    _, _, left, right = _operands()
    given = (left, right, _OFFSETS.long()) if change is None else (change(left), right, _OFFSETS)
    with pytest.raises(ConfigError, match=words):
        fp8_weight_grads(*given)
    with pytest.raises(ConfigError, match=words):
        add_fp8_weight_grads(*given, _OFFSETS.long(), torch.zeros(5, 256, 128))


def test_outputs_that_do_not_fit_are_refused() -> None:
    _, _, left, right = _operands()
    addresses = torch.zeros(5, dtype=torch.int64)
    for outputs, places in (
        (torch.zeros(4, 256, 128), addresses),
        (torch.zeros(5, 128, 256), addresses),
        (torch.zeros(5, 256, 128).bfloat16(), addresses),
        (torch.zeros(5, 256, 128), addresses[1:]),
        (torch.zeros(5, 256, 128), addresses.int()),
    ):
        with pytest.raises(ConfigError, match="operands of fp8 weight gradients with"):
            add_fp8_weight_grads(left, right, _OFFSETS, places, outputs)
