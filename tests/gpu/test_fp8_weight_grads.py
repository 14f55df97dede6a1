"""Weight gradients of fp8 expert rows on a Hopper GPU, alone and added to fp32 ones, against their
reference over uneven groups."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.kernels.fp8_weight_grads.launch import (
    TurnedRows,
    add_fp8_weight_grads,
    fp8_weight_grads,
)
from tests.support.fp8_reference import turned, turned_weight_grads
from tests.support.machine import sms_in_use

HOPPER = torch.cuda.is_available() and is_hopper(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

COUNTS = [
    [300],
    [1, 0, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 0],
    [0, 700, 3, 511, 513, 2050],
    [0, 0],
    [5] * 300,  # more experts than have room in shared memory
]
_SHAPES = [(128, 128), (384, 1152), (640, 256)]
_GUARD = 64  # numbers between matrices that nothing may change


def _operands(
    counts: list[int], high: int, wide: int, unused: int = 0, seed: int = 1
) -> tuple[TurnedRows, TurnedRows, Tensor, list[int]]:
    """Rows with outliers, turned, offsets on the device and on the host."""
    g = torch.Generator("cuda").manual_seed(seed)
    ends = list(itertools.accumulate(counts))
    sides = []
    for width in (high, wide):
        x = torch.randn(ends[-1], width, device="cuda", generator=g)
        x[::7, ::50] *= 1e3
        sides.append(turned(x, ends, unused))
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    return sides[0], sides[1], offsets, ends


class _Matrices:
    """Old fp32 sums of experts, with room between them."""

    def __init__(self, experts: int, high: int, wide: int) -> None:
        g = torch.Generator("cuda").manual_seed(5)
        size = high * wide + _GUARD
        self.whole = torch.randn(experts, size, device="cuda", generator=g)
        self.matrices = [row[:-_GUARD].view(high, wide) for row in self.whole]
        places = [matrix.data_ptr() for matrix in self.matrices]
        self.addresses = torch.tensor(places, device="cuda")


def _absolute(rows: TurnedRows) -> TurnedRows:
    values = rows.values.view(torch.uint8) & 0x7F
    return TurnedRows(values.view(torch.float8_e4m3fn), rows.scales)


def _assert_close(
    found: Tensor,
    left: TurnedRows,
    right: TurnedRows,
    ends: list[int],
    before: Tensor | None = None,
    times: int = 1,
) -> None:
    """Each sum is right but for what tensor cores cut off its products, a part of the sum of their
    magnitudes, and for the rounding to bf16, or to fp32 of what was there `before`."""
    wanted = times * turned_weight_grads(left, right, ends)
    most = times * turned_weight_grads(_absolute(left), _absolute(right), ends)
    if before is None:
        assert found.dtype == torch.bfloat16
        gap, allowed = (found.float() - wanted).abs(), 6e-3 * most
    else:
        gap, allowed = (found - before - wanted).abs(), 3e-3 * most + 3e-7 * times * before.abs()
    assert bool((gap <= allowed).all()), float((gap / allowed).nan_to_num().max())


@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{len(c)} experts, {sum(c)} rows")
@pytest.mark.parametrize(("high", "wide"), _SHAPES)
def test_weight_gradients_of_every_expert(counts: list[int], high: int, wide: int) -> None:
    left, right, offsets, ends = _operands(counts, high, wide, unused=2)
    found = []
    for programs in (None, 2, None):
        # What is written into has held NaNs.
        torch.full((len(counts), high, wide), torch.nan, device="cuda", dtype=torch.bfloat16)
        with sms_in_use(programs):
            found.append(fp8_weight_grads(left, right, offsets))
    _assert_close(found[0], left, right, ends)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{len(c)} experts, {sum(c)} rows")
@pytest.mark.parametrize(("high", "wide"), _SHAPES)
def test_weight_gradients_are_added_to_what_was_there(
    counts: list[int], high: int, wide: int
) -> None:
    left, right, offsets, ends = _operands(counts, high, wide, unused=2)
    old = _Matrices(len(counts), high, wide)
    found = []
    for programs in (None, 2, None):
        new = _Matrices(len(counts), high, wide)
        given = left, right, offsets, new.addresses, new.matrices
        with sms_in_use(programs):
            add_fp8_weight_grads(*given)
        assert torch.equal(new.whole[:, -_GUARD:], old.whole[:, -_GUARD:])
        found.append(torch.stack(new.matrices))
    before = torch.stack(old.matrices)
    for expert, count in enumerate(counts):
        if not count:
            assert torch.equal(found[0][expert], before[expert])
    _assert_close(found[0], left, right, ends, before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{len(c)} experts, {sum(c)} rows")
@pytest.mark.parametrize(("high", "wide"), _SHAPES)
def test_gradients_that_are_written_have_the_bits_of_those_added_to_zeros(
    counts: list[int], high: int, wide: int
) -> None:
    """Also of experts without rows. What was there is not read, and nothing beside is written."""
    left, right, offsets, _ = _operands(counts, high, wide, unused=2)
    added = _Matrices(len(counts), high, wide)
    for matrix in added.matrices:
        matrix.zero_()
    add_fp8_weight_grads(left, right, offsets, added.addresses, added.matrices)
    for programs in (None, 2):
        new = _Matrices(len(counts), high, wide)
        for matrix in new.matrices:
            matrix.fill_(torch.nan)
        given = left, right, offsets, new.addresses, new.matrices
        with sms_in_use(programs):
            add_fp8_weight_grads(*given, overwrite=True)
        assert torch.equal(new.whole, added.whole)


def test_no_place_at_all() -> None:
    left, right, offsets, _ = _operands([0, 0], 256, 128)
    assert left.values.shape[1] == 0
    assert not bool(fp8_weight_grads(left, right, offsets).any())
    new, old = _Matrices(2, 256, 128), _Matrices(2, 256, 128)
    add_fp8_weight_grads(left, right, offsets, new.addresses, new.matrices)
    assert torch.equal(new.whole, old.whole)
    add_fp8_weight_grads(left, right, offsets, new.addresses, new.matrices, overwrite=True)
    assert not bool(torch.stack(new.matrices).any())


@pytest.mark.parametrize("adds", [False, True])
def test_a_nan_stays_in_its_feature_of_its_expert(adds: bool) -> None:
    left, right, offsets, _ = _operands([70, 200, 0, 10], 256, 384)

    def compute() -> Tensor:
        if not adds:
            return fp8_weight_grads(left, right, offsets)
        new = _Matrices(4, 256, 384)
        add_fp8_weight_grads(left, right, offsets, new.addresses, new.matrices)
        return torch.stack(new.matrices)

    clean = compute()
    left.scales[2, 69] = torch.nan  # expert 1
    right.scales[1, 300] = torch.nan
    left.values.view(torch.uint8)[100, 400] = 0x7F  # expert 3
    hit = torch.zeros_like(clean, dtype=torch.bool)
    hit[1, 69] = hit[1, :, 300] = hit[3, 100] = True
    found = compute()
    assert torch.equal(found.isnan(), hit)
    assert torch.equal(found[~hit], clean[~hit])


def test_offsets_beyond_the_places_write_nothing_elsewhere() -> None:
    left, right, offsets, _ = _operands([130, 60, 5], 256, 256)
    wanted = fp8_weight_grads(left, right, offsets)
    wild = offsets + torch.tensor([0, 0, 1 << 30], dtype=torch.int32, device="cuda")
    found = fp8_weight_grads(left, right, wild)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("adds", [False, True])
def test_a_graph_follows_the_counts_on_the_device(adds: bool) -> None:
    cases = [_operands(counts, 256, 384, seed=s) for s, counts in enumerate(([70, 200], [256, 0]))]
    left, right, offsets, _ = _operands([70, 200], 256, 384, seed=9)
    new = _Matrices(2, 256, 384)
    out = torch.empty(2, 256, 384, device="cuda", dtype=torch.bfloat16)

    def compute() -> None:
        if adds:
            add_fp8_weight_grads(left, right, offsets, new.addresses, new.matrices)
        else:
            out.copy_(fp8_weight_grads(left, right, offsets))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
        compute()
    for case in cases:
        places = case[0].values.shape[1]
        for to, of in ((left, case[0]), (right, case[1])):
            to.values.view(torch.uint8)[:, :places] = of.values.view(torch.uint8)
            to.scales[: places // 128] = of.scales
        offsets.copy_(case[2])
        before = torch.stack(new.matrices)
        graph.replay()
        if adds:
            _assert_close(torch.stack(new.matrices), *case[:2], case[3], before, times=2)
        else:
            assert torch.equal(out, fp8_weight_grads(*case[:3]))
            _assert_close(out, *case[:2], case[3])
