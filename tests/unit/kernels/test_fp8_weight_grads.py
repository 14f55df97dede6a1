"""Weight gradients of fp8 rows on a CPU, and what their functions refuse."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from megatron_fluid.cuda import kernel_build
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    blocks_of,
    compile_fp8_weight_grads_ahead,
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


def _refused(name: str) -> tuple[TurnedRows, TurnedRows, Tensor]:
    _, _, left, right = _operands()
    match name:
        case "dtype":
            return TurnedRows(left.values.bfloat16(), left.scales), right, _OFFSETS
        case "features":
            return TurnedRows(left.values[:64], left.scales[:, :64].contiguous()), right, _OFFSETS
        case "places":
            return TurnedRows(left.values[:, 128:].contiguous(), left.scales), right, _OFFSETS
        case "scales":
            return left, TurnedRows(right.values, right.scales[1:]), _OFFSETS
        case "scales' dtype":
            return left, TurnedRows(right.values, right.scales.double()), _OFFSETS
        case "strides":
            turned = right.values.view(torch.uint8).t().contiguous().t()
            return left, TurnedRows(turned.view(torch.float8_e4m3fn), right.scales), _OFFSETS
        case _:
            return left, right, _OFFSETS.long()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dtype", "bfloat16"),
        ("features", r"\[64, 512\]"),
        ("places", r"\[256, 384\]"),
        ("scales", r"\[3, 128\]"),
        ("scales' dtype", "float64"),
        ("strides", "contiguous"),
        ("offsets", "int64"),
    ],
)
def test_operands_that_do_not_fit_are_refused(name: str, words: str) -> None:
    left, right, offsets = _refused(name)
    with pytest.raises(ConfigError, match=words):
        fp8_weight_grads(left, right, offsets)
    with pytest.raises(ConfigError, match=words):
        add_fp8_weight_grads(left, right, offsets, offsets.long(), torch.zeros(5, 256, 128))


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


def test_nothing_is_compiled_ahead_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(kernel_build, "start", started.append)
    compile_fp8_weight_grads_ahead(torch.device("cpu"))
    assert not started
