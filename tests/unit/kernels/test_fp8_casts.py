"""Casts to fp8 with a scale for each block, bit for bit against plain torch, and what they do to
outliers, zeros, denormals, infinities and NaN: of rows, of rows that move as bytes, and of rows
that are turned for weight gradients over uneven groups (what these compute: tests/unit/moe)."""

import itertools
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_casts import launch as casts
from megatron_fluid.kernels.fp8_casts.packed_rows import pack_rows, packed_width, unpack_rows
from megatron_fluid.kernels.fp8_casts.turns import turn_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import (
    CompandedRows,
    Fp8Matrices,
    Fp8Rows,
    fp8_grouped_matmul,
)
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    blocks_of,
    fp8_weight_grads,
)
from tests.support import fp8_reference as reference
from tests.support.fp8_reference import turned

pytestmark = pytest.mark.interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter loses the last bits of bf16 numbers below the smallest normal one.
_DENORMAL_BF16 = DEVICE.type == "cuda"
_E4M3 = torch.float8_e4m3fn


def rows_of(kind: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return reference.rows_of(kind, rows, width).to(DEVICE, dtype)


def same_bits(found: Tensor, expected: Tensor) -> None:
    """Equal, NaN to NaN and zeros by their sign."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    nan = expected.float().isnan()
    assert torch.equal(found.float().isnan(), nan)
    bits = found.view(kind).masked_fill(nan, 0), expected.view(kind).masked_fill(nan, 0)
    assert torch.equal(*bits)


def same_rows(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Values and scales."""
    for pair in zip(found, expected, strict=True):
        same_bits(*pair)


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "denormals", "huge", "one value"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_cast_as_by_the_reference(kind: str, dtype: torch.dtype) -> None:
    if kind == "denormals" and dtype == torch.bfloat16 and not _DENORMAL_BF16:
        pytest.skip("needs a GPU")
    for rows, width in ((5, 640), (9, 128)):
        x = rows_of(kind, rows, width, dtype)
        found = casts.cast_rows(x)
        same_rows(found, reference.cast_rows(x))
        if kind == "denormals" and not _DENORMAL_BF16:
            continue
        restored = casts.restore_rows(found)
        same_bits(restored, reference.restore_rows(*found).bfloat16())
        largest = x.float().view(rows, -1, 128).abs().amax(2, keepdim=True)
        gap = (restored.float() - x.float()).view(rows, -1, 128).abs()
        # Half of the distance of e4m3 numbers, which the largest value is at least 224 of.
        assert bool((gap <= largest / 224 * 16).all()) or kind == "denormals"


def test_scales_are_the_least_powers_of_two_without_overflow() -> None:
    values = torch.tensor([448.0, 448.5, 1.0, 1.75, 1.7500001, 2.0**-125, 2.0**-140, 3e38, 0.0])
    x = torch.zeros(len(values), 128)
    x[:, 77] = -values
    found = casts.cast_rows(x.to(DEVICE)).scales[0].cpu()
    expected = [1.0, 2.0, 2.0**-8, 2.0**-8, 2.0**-7, 2.0**-126, 2.0**-126, 2.0**120, 1.0]
    assert found.tolist() == expected


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_block_with_an_infinity_or_a_nan_becomes_nan_and_no_other_does(bad: float) -> None:
    x = rows_of("normal", 3, 384, torch.bfloat16)
    x[1, 130] = bad
    found = casts.cast_rows(x)
    restored = casts.restore_rows(found)
    assert bool(restored[1, 128:256].isnan().all()) and bool(found.values[1, 128:256].isnan().all())
    restored[1, 128:256] = 0.0
    assert bool(restored.isfinite().all())
    same_rows(found, reference.cast_rows(x))


def test_rows_beyond_the_count_are_not_touched() -> None:
    x = rows_of("normal", 21, 128, torch.bfloat16)
    count = torch.tensor([10], dtype=torch.int32, device=DEVICE)
    whole, part = casts.cast_rows(x), casts.cast_rows(x, count)
    same_bits(part.values[:10], whole.values[:10])
    same_bits(part.scales[:, :10], whole.scales[:, :10])
    assert casts.cast_rows(x[:0]).values.shape == (0, 128)
    with pytest.raises(ConfigError, match="multiple of 128"):
        casts.cast_rows(x[:, :64].contiguous())


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "denormals", "nan"])
def test_weights_are_cast_in_both_layouts(kind: str) -> None:
    if kind == "denormals" and not _DENORMAL_BF16:
        pytest.skip("needs a GPU")
    w = rows_of(kind, 2 * 256, 384, torch.bfloat16).view(2, 256, 384)
    if kind == "nan":
        w[1, 3, 200] = float("nan")
    out = tuple(
        Fp8Matrices(
            torch.empty(2, j, k, dtype=_E4M3, device=DEVICE),
            torch.empty(2, j // 128, k // 128, device=DEVICE),
        )
        for j, k in ((256, 384), (384, 256))
    )
    casts.cast_weights(w, out)  # type: ignore[arg-type]
    for found, matrix in zip(out, (w, w.transpose(1, 2)), strict=True):
        same_rows(found, reference.cast_weights(matrix))
    if kind == "nan":
        assert bool(reference.restore_weights(*out[0])[1, :128, 128:256].isnan().all())
        assert bool(reference.restore_weights(*out[0])[0].isfinite().all())


def close_casts(found: Fp8Rows, value: Tensor) -> None:
    """That found is the cast of fp32 `value`, whose last bits another exponential may change."""
    gap = (reference.restore_rows(*found) - value).abs()
    scale = found.scales.t().repeat_interleave(128, 1)
    assert bool((gap <= (value.abs() * 2.0**-4).clamp(min=2.0**-10 * scale) * 1.01).all())


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "huge", "nan"])
def test_what_is_kept_of_fc1_is_companded_to_a_byte(kind: str) -> None:
    h, probs = rows_of(kind, 5, 768, torch.bfloat16), torch.rand(5, device=DEVICE)
    if kind == "nan":
        h[1, 3], h[2, 700] = float("nan"), float("inf")
    _, kept = casts.swiglu_cast(h, probs, True)
    assert kept is not None
    same_rows(kept, reference.compand_rows(h))
    restored = reference.restore_companded(*kept).view(5, -1, 128)
    blocks = h.float().view(5, -1, 128)
    finite = blocks.isfinite().all(2)
    assert torch.equal(restored.isnan().any(2), ~finite)
    assert torch.equal(restored.isnan().all(2), ~finite)
    # Half of the distance of neighbours, which grows with the root of the value.
    largest = blocks.abs().amax(2, keepdim=True)
    room = (blocks.abs() * largest).sqrt() / 127 + largest / 127**2
    assert bool(((restored - blocks).abs() <= room * 1.01)[finite].all())


@pytest.mark.parametrize("keep", [False, True])
def test_swiglu_and_its_cast_in_one_pass(keep: bool) -> None:
    h, probs = rows_of("outliers", 5, 768, torch.bfloat16), torch.rand(7, device=DEVICE)
    probs[2] = 0.0
    found, kept = casts.swiglu_cast(h, probs, keep)
    gate, up = h.float().chunk(2, 1)
    close_casts(found, torch.nn.functional.silu(gate) * up * probs[:5, None])
    assert (kept is not None) == keep


@pytest.mark.parametrize("companded", [False, True])
def test_the_backward_of_swiglu_and_its_cast_in_one_pass(companded: bool) -> None:
    h, da = rows_of("normal", 6, 1280, torch.bfloat16), rows_of("outliers", 6, 640, torch.bfloat16)
    probs = torch.rand(6, device=DEVICE)
    given: Tensor | CompandedRows = h
    if companded:
        given = CompandedRows(*reference.compand_rows(h))
        h = reference.restore_companded(*given)
    expected = reference.swiglu_backward(h, da, probs)
    kept = da.clone()
    in_fp8, none, a_cast, sums = casts.swiglu_backward_cast(given, da, probs, in_fp8=True)
    assert none is None and torch.equal(da, kept), "with fp8 weight gradients fp8 alone is written"
    dh_cast, dh, a, dprobs = casts.swiglu_backward_cast(given, da, probs)
    close_casts(dh_cast, expected[0])
    for value, right in zip((dh, a, dprobs), expected, strict=True):
        assert isinstance(value, Tensor)
        torch.testing.assert_close(value.float(), right, rtol=1e-2, atol=1e-2 * float(right.std()))
    same_rows((*in_fp8, sums), (*dh_cast, dprobs))
    assert isinstance(a_cast, Fp8Rows)
    close_casts(a_cast, expected[1])


def test_an_infinity_shows_after_swiglu_in_its_block_alone() -> None:
    h, probs = rows_of("normal", 2, 512, torch.bfloat16), torch.ones(2, device=DEVICE)
    h[1, 130] = float("inf")
    found, _ = casts.swiglu_cast(h, probs, False)
    restored = casts.restore_rows(found)
    assert bool(restored[1, 128:].isnan().all()) and bool(restored[0].isfinite().all())
    assert bool(restored[1, :128].isfinite().all())


def tokens(count: int, width: int, seed: int = 3) -> Tensor:
    """bf16, with a NaN, an infinity, outliers and a block of zeros, where there is room."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    x[::2, ::100] *= 3e4
    if count > 3:
        x[1, :128], x[2, 5], x[3, 70] = 0.0, float("nan"), float("-inf")
    return x.bfloat16().to(DEVICE)


@pytest.mark.parametrize(("width", "packed"), [(128, 128), (384, 256), (2048, 1088), (7168, 3712)])
def test_a_packed_row_has_a_byte_a_value_its_scales_and_zeros(width: int, packed: int) -> None:
    assert packed_width(width) == packed <= width
    x = tokens(1 if width > 1000 else 5, width)
    found = pack_rows(x)
    assert found.dtype == torch.bfloat16 and found.shape == (len(x), packed)
    # NaN of e4m3 has two signs, and which one is not the format's to say.
    nan = reference.cast_rows(x)[0].float().isnan()
    right, own = reference.pack_rows(x).view(torch.uint8), found.view(torch.uint8).clone()
    values = own[:, :width]
    assert torch.equal(values[nan] & 0x7F, torch.full_like(values[nan], 0x7F))
    values[nan], right[:, :width][nan] = 0x7F, 0x7F
    assert torch.equal(own, right)


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("width", [128, 384, 640])
def test_what_is_unpacked_is_the_cast(count: int, width: int) -> None:
    x = tokens(count, width)
    packed = pack_rows(x)
    found = unpack_rows(packed, width)
    same_rows(found, casts.cast_rows(x))
    assert found.values.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    same_bits(casts.restore_rows(found), casts.restore_rows(casts.cast_rows(x)))


def test_rows_that_a_failed_wait_marked_with_nan_are_nan() -> None:
    marked = torch.full((2, packed_width(384)), float("nan"), dtype=torch.bfloat16)
    found = unpack_rows(marked.to(DEVICE), 384)
    assert bool(found.scales.isnan().all()) and bool(casts.restore_rows(found).isnan().all())


def test_a_product_refuses_unaligned_rows() -> None:
    x = tokens(2, 256)
    rows = unpack_rows(reference.pack_rows(x), 256)
    w = torch.randn(1, 128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = Fp8Matrices(*(t.to(DEVICE) for t in reference.cast_weights(w)))
    offsets = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    memory = torch.zeros(2, 272, dtype=torch.uint8, device=DEVICE)
    for values in (memory[:, 8:264], memory.view(-1)[:528].view(2, 264)[:, :256]):
        bad = Fp8Rows(values.view(torch.float8_e4m3fn), rows.scales)
        with pytest.raises(ConfigError, match="multiples of 16 bytes"):
            fp8_grouped_matmul(bad, weights, offsets)
    with pytest.raises(ConfigError, match="a multiple of 128 bytes apart"):
        casts.restore_rows(Fp8Rows(memory.view(torch.float8_e4m3fn)[:, :256], rows.scales))


def test_what_cannot_be_packed_or_unpacked_is_named() -> None:
    x = tokens(4, 256)
    for bad in (x[:, :64].contiguous(), x.t().contiguous().t()):
        with pytest.raises(ConfigError, match="a multiple of 128"):
            pack_rows(bad)
    packed = pack_rows(x)
    for rows in (x, packed.float(), packed[:, ::2].repeat(1, 2)[:, :-1]):
        with pytest.raises(ConfigError, match=r"bfloat16 \[N, 192\]"):
            unpack_rows(rows, 256)
    with pytest.raises(ConfigError, match="dense torch.bfloat16"):
        unpack_rows(torch.cat([packed, packed], 1)[:, :192], 256)


# ---- rows that are turned for weight gradients, and what these refuse

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


@pytest.mark.parametrize(("change", "words"), [
    (lambda x: TurnedRows(x.values.bfloat16(), x.scales), "bfloat16"),
    (lambda x: TurnedRows(x.values[:64], x.scales[:, :64].contiguous()), r"\[64, 512\]"),
    (lambda x: _columns(x, slice(128, None)), r"\[256, 384\]"),
    (lambda x: TurnedRows(x.values, x.scales[1:]), r"\[3, 256\]"),
    (lambda x: TurnedRows(x.values, x.scales.double()), "float64"),
    (_turned_strides, "contiguous"),
    (None, "int64"),
], ids="dtype features places scales scales'-dtype strides offsets".split())  # fmt: skip
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


def fp8_rows(kind: str, rows: int, width: int) -> Fp8Rows:
    x = reference.rows_of(kind, rows, width)
    if kind == "not finite":
        x[1, 130], x[140, 3], x[rows - 1, 200] = float("nan"), float("inf"), float("-inf")
    return Fp8Rows(*reference.cast_rows(x.to(DEVICE)))


def offsets_of(counts: list[int]) -> tuple[Tensor, list[int]]:
    ends = list(itertools.accumulate(counts))
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE), ends


def check(found: TurnedRows, x: Fp8Rows, ends: list[int]) -> None:
    """That the blocks in use are those of the reference."""
    rows, width = x.values.shape
    blocks = blocks_of(rows, len(ends))
    assert found.values.shape == (width, 128 * blocks) and found.scales.shape == (blocks, width)
    values, scales = reference.turn_rows(x.values[: ends[-1]], x.scales, ends)
    in_use = found.values[:, : values.shape[1]], found.scales[: len(scales)]
    same_rows(in_use, (values, scales))


KINDS = ["normal", "outliers", "zeros", "denormals", "huge", "one scale", "one value", "not finite"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_turned_as_by_the_reference(kind: str) -> None:
    offsets, ends = offsets_of([0, 1, 130, 0, 128, 3])
    x = fp8_rows(kind, ends[-1], 256)
    check(turn_rows(x, offsets), x, ends)


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
    x = fp8_rows("outliers", ends[-1] + extra, 128)
    if ends[-1]:
        check(turn_rows(x, offsets), x, ends)
    else:
        turn_rows(x, offsets)


@pytest.mark.parametrize("gap", [16, 8, 3])
def test_rows_may_lie_apart(gap: int) -> None:
    offsets, ends = offsets_of([60, 150])
    x = fp8_rows("outliers", ends[-1], 256)
    packed = torch.zeros(ends[-1], 256 + gap, dtype=torch.uint8, device=DEVICE)
    packed[:, :256] = x.values.view(torch.uint8)
    apart = Fp8Rows(packed[:, :256].view(torch.float8_e4m3fn), x.scales)
    assert apart.values.stride() == (256 + gap, 1)
    check(turn_rows(apart, offsets), x, ends)


def test_operands_that_cannot_be_turned_are_named() -> None:
    offsets, _ = offsets_of([3])
    x = fp8_rows("normal", 3, 128)
    assert turn_rows(Fp8Rows(x.values[:0], x.scales), offsets).values.shape == (128, 0)
    for values in (x.values.float(), x.values[:, :64], x.values.t()):
        with pytest.raises(ConfigError, match="operands of turn_rows"):
            turn_rows(Fp8Rows(values, x.scales), offsets)
    with pytest.raises(ConfigError, match=r"scales torch.float32 \[1, 2\]"):
        turn_rows(Fp8Rows(x.values, x.scales[:, :2].contiguous()), offsets)
    with pytest.raises(ConfigError, match=r"offsets torch.int64"):
        turn_rows(x, offsets.long())
