"""Products of expert rows against one expert at a time, in fp32: empty experts, counts of all
lengths, rows nobody owns. On a Hopper GPU by our own kernels, elsewhere expert by expert. That the
kernels' source compiles is seen everywhere."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.cuda import kernel_build
from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import FP8_GROUPED
from megatron_fluid.kernels.fp8_weight_grads.launch import FP8_WEIGHT_GRADS
from megatron_fluid.kernels.fused_gemm.launch import FUSED
from megatron_fluid.kernels.grouped_gemm import launch as grouped_gemm
from megatron_fluid.kernels.grouped_gemm.launch import (
    GROUPED,
    Owners,
    add_weight_grads,
    can_add_weight_grads,
    can_gate,
    can_send,
    gated_matmul,
    grouped_matmul,
    grouped_weight_grad,
    host_ends,
    sent_matmul,
    takes_main_grads,
)
from megatron_fluid.kernels.sm90.launch import HopperKernels, Source
from tests.support.fresh_program import run_code
from tests.support.machine import sms_in_use

GPU = torch.cuda.is_available()
HOPPER = GPU and is_hopper(0)
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16] if GPU else [torch.float32]
SPARE = 3  # rows of the buffers after the last expert's
hopper_only = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")


def _counts() -> list[list[int]]:
    """Rows of the experts: none, one, a tile's edges, a tile and more, several, many experts."""
    draw = random.Random(1)
    edges = [0, 1, 31, 33, 64, 65, 255, 256, 257, 288, 289, 0, 512, 530, 545, 577, 700]
    long = [1700, 0, 2047, 703, 704, 5]  # on both sides of where old sums are fetched
    halves = [rows for width in range(128, 289, 16) for rows in (width, width + 1)]
    return [
        [5, 0, 33, 16],
        [0, 0, 0, 7],
        [256],
        edges,
        long,
        halves,
        [draw.randrange(0, 300) for _ in range(130)],
    ]


SHAPES = (
    [(64, 256), (72, 200), (448, 1408), (1024, 136), (64, 104), (64, 208)] if GPU else [(40, 56)]
)


def _rows(n: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows; those that belong to no expert would spoil any sum."""
    x = torch.randn(n + SPARE, width, generator=torch.Generator().manual_seed(seed))
    x[n:] = float("nan")
    return x.to(DEVICE, dtype)


def _matrices(experts: int, high: int, wide: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(experts, high, wide, generator=generator) / 8).to(DEVICE, dtype)


def _offsets(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def _each(counts: list[int], product: Callable[[int, slice], Tensor]) -> list[Tensor]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [
        product(e, slice(end - count, end))
        for e, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def _check(found: Tensor, expected: Tensor) -> None:
    limit = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}[found.dtype]
    error = (found.float() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error <= limit, f"off by {error:.1e}"


every_case = pytest.mark.parametrize(
    ("counts", "shape", "dtype"),
    [
        pytest.param(
            counts, shape, dtype, id=f"{len(counts)} experts-{sum(counts)} rows-{shape}-{dtype}"
        )
        for counts in _counts()
        for shape in SHAPES
        for dtype in DTYPES
    ],
)


@every_case
@pytest.mark.parametrize("out_in", [True, False])
def test_products_equal_those_of_one_expert_at_a_time(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype, out_in: bool
) -> None:
    (inner, outer), n = shape, sum(counts)
    x = _rows(n, inner, dtype, 1)
    w = _matrices(len(counts), *((outer, inner) if out_in else (inner, outer)), dtype)
    weights = w.transpose(1, 2) if out_in else w
    found = grouped_matmul(x, weights, _offsets(counts))
    expected = _each(counts, lambda e, rows: x[rows].float() @ weights[e].float())
    _check(found[:n], torch.cat(expected))


@hopper_only
@every_case
@pytest.mark.parametrize("out_in", [True, False])
def test_rows_that_are_sent_have_the_bits_of_those_that_are_kept(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype, out_in: bool
) -> None:
    """In any order, into the buffers of two ranks, and nowhere else."""
    (inner, outer), n = shape, sum(counts)
    x = _rows(n, inner, dtype, 1)
    w = _matrices(len(counts), *((outer, inner) if out_in else (inner, outer)), dtype)
    weights, offsets = w.transpose(1, 2) if out_in else w, _offsets(counts)
    assert can_send(x, weights)
    slots = n + 5
    places = torch.randperm(2 * slots, generator=torch.Generator().manual_seed(3))[:n].to(DEVICE)
    shift = 31 if n == 256 else slots.bit_length()
    # The second rank's origins may need all 32 bits.
    origins = torch.nn.functional.pad(places // slots << shift | places % slots, (0, SPARE)).to(
        torch.int32
    )
    buffers = torch.full((2, slots, outer), float("nan"), device=DEVICE, dtype=dtype)
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)
    for programs in (None, 6):
        buffers.fill_(float("nan"))
        with sms_in_use(programs):
            sent_matmul(x, weights, offsets, Owners(origins, addresses, shift))
        expected = torch.full_like(buffers.view(-1, outer), float("nan"))
        expected[places] = grouped_matmul(x, weights, offsets)[:n]
        assert torch.equal(buffers.view(expected.shape).nan_to_num(7.0), expected.nan_to_num(7.0))


def _activated(h: Tensor, prob: Tensor) -> Tensor:
    """By the kernel that reads what a GEMM wrote."""
    from megatron_fluid.kernels.activation.kernel import activation_kernel

    out, width = h.new_empty(h.shape[0], h.shape[1] // 2), h.shape[1] // 2
    count = torch.tensor([h.shape[0]], dtype=torch.int32, device=h.device)
    block = 1 << (width - 1).bit_length()
    shape = {"F": width, "CODE": 0, "GATED": True, "BLOCK": block}
    activation_kernel[(200, 1)](h, prob, out, count, None, None, **shape)
    return out


@hopper_only
@every_case
@pytest.mark.parametrize(("programs", "wide"), [(None, False), (6, False), (None, True), (6, True)])
def test_a_gated_product_has_the_bits_of_a_product_and_its_activation(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype, programs: int | None, wide: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(grouped_gemm, "wide_tiles_pay", lambda ends, depth: wide)
    start, forms = HopperKernels.launch, []

    def launch(self: HopperKernels, name: str, *arguments: Any) -> None:
        if name in ("grouped_gated", "grouped_wide"):
            forms.append(name == "grouped_wide")
        start(self, name, *arguments)

    monkeypatch.setattr(HopperKernels, "launch", launch)
    n, (inner, outer) = sum(counts), (shape[0], shape[1] // 16 * 16)
    x, w = _rows(n, inner, dtype, 1), _matrices(len(counts), outer, inner, dtype).transpose(1, 2)
    prob = torch.rand(n + SPARE, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    offsets = _offsets(counts)
    assert can_gate(x, w, prob, "swiglu") and not can_gate(x, w, prob, "geglu")
    h = grouped_matmul(x, w, offsets)
    expected = _activated(h[:n], prob)
    assert bool(expected.isfinite().all()) and (not n or bool(expected.any()))
    for keep in (True, False):
        out = torch.full((n + SPARE, outer // 2), 7.0, device=DEVICE, dtype=dtype)
        with sms_in_use(programs):
            found = gated_matmul(x, w, offsets, prob, out, keep, counts)
        assert torch.equal(out[:n], expected)
        assert bool((out[n:] == 7.0).all()), "rows that belong to no expert are left alone"
        assert forms.pop() == wide
        assert (found is None) != keep
        assert found is None or torch.equal(found[:n], h[:n])


@every_case
def test_weight_gradients_equal_those_of_one_expert_at_a_time(
    counts: list[int], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    n = sum(counts)
    left, right = _rows(n, shape[0], dtype, 2), _rows(n, shape[1], dtype, 3)
    expected = torch.stack(
        _each(counts, lambda e, rows: left[rows].float().t() @ right[rows].float())
    )
    _check(grouped_weight_grad(left, right, _offsets(counts)), expected)


@hopper_only
@every_case
def test_weight_gradients_are_added_or_written_in_fp32_whatever_the_tiles(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Also of experts without rows. Where sums are written what was there is not read, and the bits
    are those of sums added to zeros. Nothing beside is touched."""
    n, size, guard = sum(counts), shape[0] * shape[1], 68  # not all begin on 32 bytes
    left, right = _rows(n, shape[0], dtype, 4), _rows(n, shape[1], dtype, 5)
    once, twice = [], []
    for long_rows, programs in ((0, 20), (1 << 30, 20), (None, 20), (None, 2), (None, None)):
        monkeypatch.setattr(grouped_gemm, "_LONG_ROWS", long_rows)
        whole = torch.full((len(counts), size + guard), 7.0, device=DEVICE)
        whole[:, :size] = float("nan") if long_rows is None else 0.0
        outputs = [row[:size].view(shape) for row in whole]
        assert can_add_weight_grads(left, right) and takes_main_grads(outputs)
        addresses = torch.tensor([o.data_ptr() for o in outputs], device=DEVICE)
        given = left, right, _offsets(counts), addresses, outputs
        for found in (once, twice):
            with sms_in_use(programs):
                add_weight_grads(*given, overwrite=long_rows is None)
            found.append(torch.stack(outputs))
        assert (whole[:, size:] == 7.0).all()
    expected = torch.stack(
        _each(counts, lambda e, rows: left[rows].float().t() @ right[rows].float())
    )
    _check(twice[0], 2 * expected)
    assert torch.equal(twice[0], twice[1])
    assert all(torch.equal(once[0], other) for other in (*once, *twice[2:]))


@hopper_only
@pytest.mark.parametrize("programs", [1, 2, 30, 131, 132])
def test_any_number_of_sms_gives_the_same_bits(programs: int) -> None:
    counts = [300, 0, 17, 900, 128]
    x, w = _rows(sum(counts), 256, torch.bfloat16, 6), _matrices(5, 512, 256, torch.bfloat16)
    full = grouped_matmul(x, w.transpose(1, 2), _offsets(counts))
    with sms_in_use(programs):
        part = grouped_matmul(x, w.transpose(1, 2), _offsets(counts))
    assert torch.equal(full[: sum(counts)], part[: sum(counts)])


@hopper_only
def test_launches_on_two_streams_and_in_a_replayed_graph_do_not_mix() -> None:
    counts = [700, 40, 333]
    x, w = _rows(sum(counts), 512, torch.bfloat16, 8), _matrices(3, 512, 512, torch.bfloat16)
    offsets, sums = _offsets(counts), torch.zeros(2, 3, 512, 512, device=DEVICE)
    expected = grouped_matmul(x, w, offsets)[: sum(counts)].clone()
    addresses = [torch.tensor([o.data_ptr() for o in each], device=DEVICE) for each in sums]
    add_weight_grads(x, x, offsets, addresses[1], sums[1])
    graph, found = torch.cuda.CUDAGraph(), []
    torch.cuda.synchronize()
    with sms_in_use(64), torch.cuda.graph(graph):
        captured = [grouped_matmul(x, w, offsets) for _ in range(3)]
        for _ in range(3):
            add_weight_grads(x, x, offsets, addresses[0], sums[0])
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with sms_in_use(64), torch.cuda.stream(stream):
                found.append(grouped_matmul(x, w, offsets))
    torch.cuda.synchronize()
    assert all(torch.equal(y[: sum(counts)], expected) for y in (*captured, *found))
    _check(sums[0] / 60, sums[1])


def test_offsets_are_read_on_the_host_where_nothing_is_grouped() -> None:
    assert host_ends(torch.tensor([2, 5], dtype=torch.int32), None) == [2, 5]
    assert host_ends(torch.tensor([2, 5], dtype=torch.int32), [1, 2]) == [1, 2]


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_what_must_be_read_on_the_host_is_refused_in_a_capture() -> None:
    offsets = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    torch.cuda.synchronize()
    with pytest.raises(ConfigError, match="CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        host_ends(offsets, None)


def test_what_does_not_match_is_refused() -> None:
    x, w = torch.ones(4, 8), torch.ones(2, 8, 16)
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    with pytest.raises(ConfigError, match="width of expert rows: found 8, allowed: 16"):
        grouped_matmul(x, w.transpose(1, 2), offsets)
    with pytest.raises(ConfigError, match="offsets: found 'torch.int64"):
        grouped_matmul(x, w, offsets.long())
    with pytest.raises(ConfigError, match="offsets: found 'torch.int32 .1.'"):
        grouped_matmul(x, w, offsets[:1])
    with pytest.raises(ConfigError, match="left has 4 rows and right 3"):
        grouped_weight_grad(x, x[:3], offsets)
    with pytest.raises(ConfigError, match="an int32 origin for each"):
        sent_matmul(x, w, offsets, Owners(offsets, torch.zeros(1, dtype=torch.int64), 4))
    assert not can_add_weight_grads(x.bfloat16(), x.bfloat16()) and not takes_main_grads([x.half()])
    with pytest.raises(ConfigError, match="outputs"):
        add_weight_grads(x, x, offsets, torch.zeros(2, dtype=torch.int64), [torch.zeros(8, 9)] * 2)


@pytest.mark.parametrize(("rows", "overwrite", "kernel"), [
    (895, False, "grouped_sums"), (896, False, "grouped_long_sums"), (1, True, "grouped_long_sums")
])  # fmt: skip
def test_many_rows_and_sums_that_are_written_take_wider_tiles(
    monkeypatch: pytest.MonkeyPatch, rows: int, overwrite: bool, kernel: str
) -> None:
    called = []
    monkeypatch.setattr(grouped_gemm, "_launch", lambda name, *rest: called.append(name))
    monkeypatch.setattr(grouped_gemm, "in_boxes", lambda *tensor: ())
    x, outputs = torch.ones(rows, 8), [torch.zeros(8, 8)]
    addresses, offsets = torch.zeros(1, dtype=torch.int64), torch.tensor([rows], dtype=torch.int32)
    add_weight_grads(x, x, offsets, addresses, outputs, overwrite=overwrite)
    with pytest.raises(ConfigError, match="^outputs: found 'meta', allowed: on cpu"):
        add_weight_grads(x, x, offsets, addresses.to("meta"), outputs)
    assert called == [kernel]


@hopper_only
@pytest.mark.parametrize("ends", [[512, 100, 700], [100, 9000, 9000]])
def test_offsets_that_decrease_or_lead_out_of_the_rows_do_no_harm(ends: list[int]) -> None:
    x, w = torch.randn(700, 256, device=DEVICE).bfloat16(), _matrices(3, 256, 128, torch.bfloat16)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    clamped = torch.tensor(
        [min(max(ends[: i + 1]), 700) for i in range(3)], dtype=torch.int32, device=DEVICE
    )
    assert torch.equal(grouped_matmul(x, w, offsets), grouped_matmul(x, w, clamped))
    assert torch.equal(grouped_weight_grad(x, x, offsets), grouped_weight_grad(x, x, clamped))
    sums = torch.zeros(2, 3, 256, 256, device=DEVICE)
    for given, each in zip((offsets, clamped), sums, strict=True):
        addresses = torch.tensor([o.data_ptr() for o in each], device=DEVICE)
        add_weight_grads(x, x, given, addresses, each)
    assert torch.equal(*sums)


_FIRST_IN_A_CAPTURE = """
import torch
from megatron_fluid.kernels.grouped_gemm.launch import grouped_matmul
x, w = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((300, 256), (2, 256, 128)))
offsets = torch.tensor([100, 300], dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    found = grouped_matmul(x, w, offsets)
graph.replay()
expected = grouped_matmul(x, w, offsets)
torch.cuda.synchronize()
assert torch.equal(found, expected) and bool(found.any())
"""


@hopper_only
def test_the_first_use_may_be_captured() -> None:
    done = run_code(_FIRST_IN_A_CAPTURE, environment=os.environ)
    assert done.returncode == 0, done.stderr


FP8_SOURCES = (FP8_GROUPED, FP8_WEIGHT_GRADS)
SOURCES = (GROUPED, FUSED, *FP8_SOURCES)
# Each takes seconds, and shares its templates with the backward kernel of its name.
LEFT_TO_GPUS = {"gather_forward", "grouped_forward", "scatter_forward", "sent_forward"}


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is None, reason="needs NVRTC, of torch's CUDA builds")
@pytest.mark.parametrize(("source", "kernel"), [
    (source, kernel)
    for source in SOURCES for kernel in source.kernels if kernel not in LEFT_TO_GPUS
], ids=lambda each: each if isinstance(each, str) else "")  # fmt: skip
def test_each_kernel_compiles_for_hopper(source: Source, kernel: str) -> None:
    dtype = torch.float8_e4m3fn if source in FP8_SOURCES else torch.bfloat16
    code = source.unit(kernel, dtype).compile()
    others = {name for other in SOURCES for name in other.kernels} - {kernel}
    assert kernel.encode() in code
    assert not any(f".text.{other}".encode() in code for other in others)


@pytest.mark.compile
@pytest.mark.skipif(torch.version.cuda is None, reason="needs NVRTC, of torch's CUDA builds")
def test_a_source_that_does_not_compile_shows_the_compilers_words() -> None:
    with pytest.raises(FluidError, match="nothing"):
        kernel_build.Unit(
            "wrong.cu", b"int wrong = nothing;\n", (), ("--gpu-architecture=sm_90a",)
        ).compile()
