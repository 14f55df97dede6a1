"""The overlapped forms of AllGather-GEMM and GEMM-ReduceScatter with all ranks in one process: what
they compute, call after call, and what they refuse. Driver, symmetric memory and kernels are
simulated; each phase runs for every rank in turn. Races are for tests/gpu/test_tensor_parallel.py.
"""

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.kernels.fused_gemm.launch import Signals, chunks_of_block, tiles_of_block
from megatron_fluid.tensor_parallel import fused
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend
from megatron_fluid.tensor_parallel.fused import FusedBackend
from megatron_fluid.tensor_parallel.gemm import Gemm
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_driver import SimulatedDriver
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = NEEDS_INTERPRETER

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


class _InOrder(CopyEngineBackend):
    """Its barrier is the order in which the test runs the ranks' phases."""

    def _barrier(self, operation: str, address: int, nbytes: int) -> None:
        pass


def copy_engine_forms(ranks: int) -> list[CopyEngineBackend]:
    world = SimulatedWorkspace(ranks)
    return [_InOrder(world.rank(r), SimulatedDriver()) for r in range(ranks)]


class _FusedOnCpu:
    """What the kernels of FusedGemm do, on a CPU, which counts the tiles as they do."""

    def __init__(self, dtype: torch.dtype, workspace: Any) -> None:
        self.rank, self.ranks = workspace.rank, workspace.world_size
        self.reached = 0  # by the flags of gathers so far

    def high(self, rows: int, width: int) -> int:
        # Of 20 tiles, two strips; so small a block would have one.
        return 20 if rows > 320 else tiles_of_block(rows, width, self.ranks, 66)

    def rows_before(self, rows: int, width: int, depth: int, step: int) -> int:
        return step * rows - step % 2  # the shards of odd steps come in chunks, others whole

    def gather(
        self, shard: Tensor, landed: Tensor, b: Tensor, bias: Tensor | None, c: Tensor,
        signals: Signals,
    ) -> None:  # fmt: skip
        m, depth = shard.shape
        words = (ctypes.c_int32 * self.ranks).from_address(signals.flags)
        chunks = -(-depth // signals.part)
        assert signals.value > self.reached, "the flags of an earlier call would do"
        self.reached = signals.value + chunks - 1
        assert all(words[r] == self.reached for r in range(self.ranks) if r != self.rank)
        whole = landed.clone()
        whole[self.rank * m : (self.rank + 1) * m] = shard
        c.copy_(whole.float() @ b.float() + (0.0 if bias is None else bias.float()))

    def scatter(
        self, a: Tensor, b: Tensor, places: list[int], counters: Tensor, chunks: int
    ) -> None:
        for owner, (part, place) in enumerate(zip(a.chunk(self.ranks), places, strict=True)):
            block = (part.float() @ b.float()).to(a.dtype)
            ctypes.memmove(place, block.data_ptr(), block.nbytes)
            for chunk in chunks_of_block(*block.shape, self.high(*block.shape), chunks):
                counters[owner, chunk.number] += chunk.parts


def fused_forms(ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[FusedBackend]:
    """In as many chunks as may be."""
    monkeypatch.setattr(fused, "FusedGemm", _FusedOnCpu)
    monkeypatch.setattr(fused, "_GATHER_BYTES", 1)
    monkeypatch.setattr(fused, "_SCATTER_BYTES", 1)
    world = SimulatedWorkspace(ranks)
    return [FusedBackend(world.rank(r), SimulatedDriver()) for r in range(ranks)]


def gather_all(
    backends: list[Any], shards: list[Tensor], gemms: list[Any], keep: bool
) -> list[Any]:
    if isinstance(backends[0], FusedBackend):
        begun = [b._push(s, g) for b, s, g in zip(backends, shards, gemms, strict=True)]
    else:
        begun = [b._announce(s) for b, s in zip(backends, shards, strict=True)]
    return [
        b._gather_matmul(s, own, g, keep)
        for b, s, own, g in zip(backends, shards, begun, gemms, strict=True)
    ]


def scatter_all(backends: list[Any], a: list[Tensor], gemms: list[Any]) -> list[Tensor]:
    made = [b._matmul_blocks(x, g) for b, x, g in zip(backends, a, gemms, strict=True)]
    if isinstance(backends[0], CopyEngineBackend):
        return [b._add(*m, g, None) for b, m, g in zip(backends, made, gemms, strict=True)]
    for backend, (_, blocks) in zip(backends, made, strict=True):
        backend._send(blocks)
    return [b._add(slots, g.bias) for b, (slots, _), g in zip(backends, made, gemms, strict=True)]


def _close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()
    error = (found.double() - wanted).norm() / wanted.norm()
    assert TOLERANCE[found.dtype] < 0.5 / wanted.shape[0] ** 0.5, (
        "the tolerance could not notice a lost row"
    )
    assert error < TOLERANCE[found.dtype], f"relative error {error:.2e}"


def _check(
    backends: list[Any], m: int, n: int, k: int, dtype: torch.dtype, transpose_b: bool, bias: bool
) -> None:
    ranks = len(backends)
    generator = torch.Generator().manual_seed(m * 7 + n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights = [random(k, n) for _ in range(ranks)]
    beta = random(n) if bias else None
    gemms = [Gemm(w.t().contiguous() if transpose_b else w, transpose_b, beta) for w in weights]
    added = beta.double() if beta is not None else 0.0
    shards = [random(m, k) for _ in range(ranks)]
    whole = torch.cat(shards)
    for keep in (True, False):
        for weight, (c, gathered) in zip(
            weights, gather_all(backends, shards, gemms, keep), strict=True
        ):
            _close(c, whole.double() @ weight.double() + added)
            assert torch.equal(gathered, whole) if keep else gathered is None
    parts = [random(ranks * m, k) for _ in range(ranks)]
    total = sum(p.double() @ w.double() for p, w in zip(parts, weights, strict=True)) + added
    results = scatter_all(backends, parts, gemms)
    for rank, found in enumerate(results):
        _close(found, total[rank * m : (rank + 1) * m])
    torch.testing.assert_close(scatter_all(backends, parts, gemms), results, rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_copy_engine_form_equals_the_reference(ranks: int) -> None:
    backends = copy_engine_forms(ranks)
    for step in range(ranks):  # everybody reads from somebody else
        assert sorted(b._order[step] for b in backends) == list(range(ranks))
    for turn, m in enumerate((4, 9, 2)):  # the buffers grow once and then serve what is smaller
        _check(backends, m, 24, 16, torch.bfloat16, turn % 2 == 0, turn > 0)
    _check(backends, 5, 7, 11, torch.float32, True, True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_fused_form_moves_every_chunk(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are another test's, on GPUs: this is what copy engines bring, where and when."""
    backends = fused_forms(ranks, monkeypatch)
    # One chunk and several of K and of columns, with edges; two strips of tiles.
    for turn, (m, n, k) in enumerate(
        ((6, 16, 32), (40, 1040, 208), (341, 528, 64), (33, 272, 1040))
    ):
        dtype = torch.float16 if turn == 2 else torch.bfloat16
        _check(backends, m, n, k, dtype, turn % 2 == 0, turn > 0)


def test_what_is_gathered_stays_until_the_next_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, m, k = 2, 16, 64
    backends = fused_forms(ranks, monkeypatch)
    gemms, lent = [Gemm(torch.randn(k, 32).to(torch.bfloat16))] * ranks, []
    for turn in range(3):
        shards = [torch.randn(m, k).to(torch.bfloat16) for _ in range(ranks)]
        with torch.inference_mode(turn == 0):  # a validation before training
            found = [whole for _, whole in gather_all(backends, shards, gemms, True)]
        assert all(torch.equal(whole.view(-1, k), torch.cat(shards)) for whole in found)
        lent += [whole.data_ptr() for whole in found]
    assert lent == [
        b._gathers._addresses[turn][rank] for turn in (0, 1, 0) for rank, b in enumerate(backends)
    ]


@pytest.mark.parametrize("stride", [0, 2])
def test_a_bias_is_read_by_its_strides(stride: int) -> None:
    backends = copy_engine_forms(2)
    bias = torch.arange(1, 33).to(torch.bfloat16).as_strided((16,), (stride,))
    a = [torch.zeros(8, 16, dtype=torch.bfloat16)] * 2
    gemms = [Gemm(torch.zeros(16, 16, dtype=torch.bfloat16), bias=bias)] * 2
    for c, _ in gather_all(backends, a, gemms, False):
        assert torch.equal(c, bias.expand(16, 16))
    for c in scatter_all(backends, a, gemms):
        assert torch.equal(c, bias.expand(4, 16))


@pytest.mark.parametrize("warm", [False, True])
def test_the_copy_engine_form_takes_no_rows(warm: bool) -> None:
    backends, gemms = copy_engine_forms(2), [Gemm(torch.randn(16, 24))] * 2
    for rows in (4, 0) if warm else (0, 0, 4):
        a = [torch.randn(rows, 16) for _ in range(2)]
        for c, whole in gather_all(backends, a, gemms, True):
            torch.testing.assert_close(c, torch.cat(a) @ gemms[0].b)
            assert torch.equal(whole, torch.cat(a))
        for found, wanted in zip(
            scatter_all(backends, a, gemms), ((a[0] + a[1]) @ gemms[0].b).chunk(2), strict=False
        ):
            torch.testing.assert_close(found, wanted[: rows // 2])


# ---- what they refuse, and errors when a peer stays away


def test_a_gather_that_nobody_finishes_is_waited_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its signals would not be seen, and the next but one might overwrite what a peer still
    reads."""
    backends = fused_forms(3, monkeypatch)
    shard = torch.randn(4, 64).to(torch.bfloat16)
    for rank in (0, 2):
        backends[rank].start_gather(shard)  # rank 1 stays away
    with pytest.raises(PeerTimeoutError, match="rank 0.*peer 1.*tp_fused_gather"):
        backends[0].start_gather(shard)


@pytest.mark.parametrize("name", ["copy_engine", "fused"])
def test_nothing_is_moved_in_a_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would turn to the half of the capture, which a peer may still read."""
    (backend,) = copy_engine_forms(1) if name == "copy_engine" else fused_forms(1, monkeypatch)
    monkeypatch.setattr(backend._driver, "capturing", lambda: True)
    a, b = (torch.randn(16, 16).to(torch.bfloat16) for _ in range(2))
    for call in (
        lambda: backend.start_gather(a),
        lambda: backend.gather_matmul(a, Gemm(b)),
        lambda: backend.matmul_scatter(a, Gemm(b)),
    ):
        with pytest.raises(FluidError, match=f"the {name} backend .* cannot be captured"):
            call()
    assert not backend._gathers._addresses[0] and not backend._scatters._addresses[0]


def test_a_chunk_is_not_sent_before_the_kernel_has_counted_its_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = fused_forms(2, monkeypatch)
    a, gemm = torch.randn(8, 16).to(torch.bfloat16), Gemm(torch.randn(16, 528).to(torch.bfloat16))
    for backend in backends:
        _, blocks = backend._matmul_blocks(a, gemm)
    backends[1]._counters[0, 1] -= 1  # as if a part of a tile were missing
    with pytest.raises(FluidError, match="would wait for 4 forever"):
        backends[1]._send(blocks)


def test_a_block_that_never_comes_is_reported_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = fused_forms(3, monkeypatch)
    a, gemm = torch.randn(12, 16).to(torch.bfloat16), Gemm(torch.randn(16, 16).to(torch.bfloat16))
    for rank in (0, 2):
        slots, blocks = backends[rank]._matmul_blocks(a, gemm)
        backends[rank]._send(blocks)
    backends[2]._add(slots, None)
    with pytest.raises(PeerTimeoutError, match="rank 2.*peer 1.*tp_fused_scatter"):
        backends[2]._matmul_blocks(a, gemm)


def test_the_fused_form_refuses_what_its_kernel_cannot_multiply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (backend,) = fused_forms(1, monkeypatch)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.bfloat16)

    for a, b, reason in (
        (torch.randn(4, 16), torch.randn(16, 16), "multiplies bf16 and fp16, not torch.float32"),
        (half(4, 24), half(24, 16), "K 24 and N 16 are not multiples of 16"),
        (half(4, 16), half(16, 64)[:, ::2], r"B has strides \(64, 2\)"),
        (half(0, 16), half(16, 16), "A has no rows"),
        (half(65)[1:].view(4, 16), half(16, 16), "does not begin on a 16-byte boundary"),
    ):
        for call in (backend.gather_matmul, backend.matmul_scatter):
            with pytest.raises(ConfigError, match=reason):
                call(a, Gemm(b))
