"""What the functions of fp8 weight gradients refuse (what they compute: tests/unit/moe), and the
rows that are turned for them: bit for bit against plain torch over uneven groups, with outliers,
infinities and NaN."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_casts.turns import turn_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    blocks_of,
    fp8_weight_grads,
)
from tests.support import fp8_reference as reference
from tests.support.fp8_reference import turned

_COUNTS = [130, 0, 1, 128, 0]
_ENDS = list(itertools.accumulate(_COUNTS))
_OFFSETS = torch.tensor(_ENDS, dtype=torch.int32)


def _operands() -> tuple[TurnedRows, TurnedRows]:
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(_ENDS[-1], width, generator=g) for width in (256, 128))
    return turned(x, _ENDS), turned(y, _ENDS)


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
    left, right = _operands()
    given = (left, right, _OFFSETS.long()) if change is None else (change(left), right, _OFFSETS)
    with pytest.raises(ConfigError, match=words):
        fp8_weight_grads(*given)
    with pytest.raises(ConfigError, match=words):
        add_fp8_weight_grads(*given, _OFFSETS.long(), torch.zeros(5, 256, 128))


def test_outputs_that_do_not_fit_are_refused() -> None:
    left, right = _operands()
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


interpreted = pytest.mark.interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rows_of(kind: str, rows: int, width: int) -> Fp8Rows:
    x = reference.rows_of(kind, rows, width)
    if kind == "not finite":
        x[1, 130], x[140, 3], x[rows - 1, 200] = float("nan"), float("inf"), float("-inf")
    return Fp8Rows(*reference.cast_rows(x.to(DEVICE)))


def offsets_of(counts: list[int]) -> tuple[Tensor, list[int]]:
    ends = list(itertools.accumulate(counts))
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE), ends


def check(found: TurnedRows, x: Fp8Rows, ends: list[int]) -> None:
    """That the blocks in use are those of the reference, bit for bit but for signs of NaN."""
    rows, width = x.values.shape
    blocks = blocks_of(rows, len(ends))
    assert found.values.shape == (width, 128 * blocks) and found.scales.shape == (blocks, width)
    values, scales = reference.turn_rows(x.values[: ends[-1]], x.scales, ends)
    given = (found.values[:, : values.shape[1]].float(), values.float())
    given += (found.scales[: len(scales)], scales)
    for own, right in itertools.batched(given, 2):
        nan = right.isnan()
        assert torch.equal(own.isnan(), nan)
        bits = [t.masked_fill(nan, 0.0).view(torch.int32) for t in (own, right)]
        assert torch.equal(*bits)


KINDS = ["normal", "outliers", "zeros", "denormals", "huge", "one scale", "one value", "not finite"]


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_turned_as_by_the_reference(kind: str) -> None:
    offsets, ends = offsets_of([0, 1, 130, 0, 128, 3])
    x = rows_of(kind, ends[-1], 256)
    check(turn_rows(x, offsets), x, ends)


@interpreted
@pytest.mark.parametrize(
    "counts",
    [[1], [128], [129], [0, 0, 127, 0], [0] * 40, [3] * 33, [0] * 1023 + [2]],
    ids=lambda c: f"{len(c)} experts, {sum(c)} rows",
)
@pytest.mark.parametrize("extra", [0, 7])
def test_every_row_finds_its_place_and_rows_of_no_expert_none(
    counts: list[int], extra: int
) -> None:
    offsets, ends = offsets_of(counts)
    x = rows_of("outliers", ends[-1] + extra, 128)
    if ends[-1]:
        check(turn_rows(x, offsets), x, ends)
    else:
        turn_rows(x, offsets)


@interpreted
@pytest.mark.parametrize("gap", [16, 8, 3])
def test_rows_may_lie_apart(gap: int) -> None:
    offsets, ends = offsets_of([60, 150])
    x = rows_of("outliers", ends[-1], 256)
    packed = torch.zeros(ends[-1], 256 + gap, dtype=torch.uint8, device=DEVICE)
    packed[:, :256] = x.values.view(torch.uint8)
    apart = Fp8Rows(packed[:, :256].view(torch.float8_e4m3fn), x.scales)
    assert apart.values.stride() == (256 + gap, 1)
    check(turn_rows(apart, offsets), x, ends)


@interpreted
def test_operands_that_cannot_be_turned_are_named() -> None:
    offsets, _ = offsets_of([3])
    x = rows_of("normal", 3, 128)
    assert turn_rows(Fp8Rows(x.values[:0], x.scales), offsets).values.shape == (128, 0)
    for values in (x.values.float(), x.values[:, :64], x.values.t()):
        with pytest.raises(ConfigError, match="operands of turn_rows"):
            turn_rows(Fp8Rows(values, x.scales), offsets)
    with pytest.raises(ConfigError, match=r"scales torch.float32 \[1, 2\]"):
        turn_rows(Fp8Rows(x.values, x.scales[:, :2].contiguous()), offsets)
    with pytest.raises(ConfigError, match=r"offsets torch.int64"):
        turn_rows(x, offsets.long())
