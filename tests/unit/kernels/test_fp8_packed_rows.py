"""Tokens cast once and moved as rows of bytes, bit for bit against rows that are cast after they
were moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_casts import launch as casts
from megatron_fluid.kernels.fp8_casts.packed_rows import pack_rows, packed_width, unpack_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Matrices, Fp8Rows, fp8_grouped_matmul
from megatron_fluid.moe.local import kernel_plan
from megatron_fluid.moe.nvlink import buffers as steps
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from tests.support import fp8_reference as reference
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = pytest.mark.interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def tokens(count: int, width: int, seed: int = 3) -> Tensor:
    """bf16, with a NaN, an infinity, outliers and a block of zeros, where there is room."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    x[::2, ::100] *= 3e4
    if count > 3:
        x[1, :128], x[2, 5], x[3, 70] = 0.0, float("nan"), float("-inf")
    return x.bfloat16().to(DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(found: Fp8Rows, expected: Fp8Rows) -> None:
    for value, right in zip(found, expected, strict=True):
        assert torch.equal(bits(value), bits(right))


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
    same_bits(found, casts.cast_rows(x))
    assert found.values.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    assert torch.equal(
        bits(casts.restore_rows(found)), bits(casts.restore_rows(casts.cast_rows(x)))
    )


def test_packed_tokens_in_expert_order_are_the_rows_that_are_cast_there() -> None:
    experts, width = 5, 384
    ids = torch.tensor([[0, 3], [-1, -1], [3, 1], [1, -1], [4, 0], [0, 1], [3, 4]], device=DEVICE)
    plan = kernel_plan.make_plan(ids, torch.ones(ids.shape, device=DEVICE), experts, True)
    x = tokens(len(ids), width)
    packed = plan.permute(pack_rows(x))
    rows = plan.permute(x)
    assert len(rows) == int((ids >= 0).sum())
    same_bits(unpack_rows(packed, width), casts.cast_rows(rows))


@pytest.mark.parametrize("stream", [False, True])
def test_packed_tokens_cross_nvlink_in_their_own_width(stream: bool) -> None:
    """On three ranks, one without tokens; twice, so that flags are counted on."""
    ranks, local, top_k, capacity, width = 3, 2, 2, 7, 384
    sizes = [capacity, 0, 4]
    world = SimulatedWorkspace(ranks, DEVICE)
    every = [
        NvlinkBuffers(world.rank(r), capacity, width, top_k, ranks * local, torch.bfloat16)
        for r in range(ranks)
    ]
    g = torch.Generator().manual_seed(5)
    ids = [torch.rand(n, ranks * local, generator=g).topk(top_k).indices.to(DEVICE) for n in sizes]
    ids[0][2, 1] = -1
    probs = [torch.rand(n, top_k, generator=g).to(DEVICE) for n in sizes]
    handles = [steps.publish(every[r], ids[r], probs[r]) for r in range(ranks)]
    _signal(every, "plan_flags")
    for r in range(ranks):
        steps.make_plan(every[r], handles[r])
        handles[r].ends = every[r].read_offsets()
    xs = [tokens(n, width, seed=r) for r, n in enumerate(sizes)]

    def dispatched(sent: list[Tensor]) -> list[Tensor]:
        for r, buffers in enumerate(every):
            steps.push(buffers, handles[r], sent[r], streamed=stream)
        if not stream:
            _signal(every, "dispatch_flags")
        return [
            steps.scatter(b, h, x, x.new_empty(h.buffer_rows, x.shape[1]), streamed=stream)
            for b, h, x in zip(every, handles, sent, strict=True)
        ]

    def buffer_bits() -> list[Tensor]:
        return [b.local("receive", torch.bfloat16).view(torch.int16).clone() for b in every]

    before = buffer_bits()
    packed = [pack_rows(x) for x in xs]
    found = dispatched(packed)
    pitch = packed_width(width)
    for r, memory in enumerate(buffer_bits()):
        # Exactly the rows that a token of another rank has here, and nothing behind their pitch.
        rows, right = memory[: ranks * capacity * pitch].view(ranks, capacity, pitch), before[r]
        expected = right[: ranks * capacity * pitch].view(ranks, capacity, pitch).clone()
        for source in range(ranks):
            here = (ids[source] // local == r).any(1) & (source != r)
            expected[source, : sizes[source]][here] = packed[source].view(torch.int16)[here]
        assert torch.equal(rows, expected)
        assert torch.equal(memory[ranks * capacity * pitch :], right[ranks * capacity * pitch :])
    for rows, wide in zip(found, dispatched(xs), strict=True):
        same_bits(unpack_rows(rows, width), casts.cast_rows(wide))


def test_rows_that_a_failed_wait_marked_with_nan_are_nan() -> None:
    marked = torch.full((2, packed_width(384)), float("nan"), dtype=torch.bfloat16)
    found = unpack_rows(marked.to(DEVICE), 384)
    assert bool(found.scales.isnan().all()) and bool(casts.restore_rows(found).isnan().all())


def _signal(every: list[NvlinkBuffers], region: str) -> None:
    """Every rank signals before any waits, which ranks do at the same time."""
    for buffers in every:
        for peer in every:
            getattr(peer, region).flags[buffers.rank] = getattr(buffers, region).counter[0]


def test_a_product_takes_rows_that_lie_apart_and_refuses_unaligned_ones() -> None:
    x = tokens(2, 256)
    rows = unpack_rows(reference.pack_rows(x), 256)
    w = torch.randn(1, 128, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = Fp8Matrices(*(t.to(DEVICE) for t in reference.cast_weights(w)))
    offsets = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    if DEVICE.type == "cpu":
        found = fp8_grouped_matmul(rows, weights, offsets, [2])
        dense = Fp8Rows(*reference.cast_rows(x))
        assert torch.equal(found, fp8_grouped_matmul(dense, weights, offsets, [2]))
    memory = torch.zeros(2, 272, dtype=torch.uint8, device=DEVICE)
    for values in (memory[:, 8:264], memory.view(-1)[:528].view(2, 264)[:, :256]):
        bad = Fp8Rows(values.view(torch.float8_e4m3fn), rows.scales)
        with pytest.raises(ConfigError, match="multiples of 16 bytes"):
            fp8_grouped_matmul(bad, weights, offsets, [2])
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
