"""The overlapped forms of AllGather-GEMM and GEMM-ReduceScatter with all ranks in one process: what
they compute, call after call.

The driver, the symmetric memory and the kernels are simulated; each phase of an operation runs for
every rank in turn. Races are for tests/gpu/test_tensor_parallel.py.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.comm.simulated import SimulatedWorkspace
from megatron_fluid.cuda.copy_engine import SimulatedDriver
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.kernels.fused_gemm import Signals, chunks_of_block, tiles_of_block
from megatron_fluid.tensor_parallel import fused
from megatron_fluid.tensor_parallel.copy_engine import CopyEngineBackend, _runs
from megatron_fluid.tensor_parallel.expert_gemm import GatherProduct, ScatterProduct, TokenRows
from megatron_fluid.tensor_parallel.fused import FusedBackend
from megatron_fluid.tensor_parallel.gemm import Gemm
from megatron_fluid.tensor_parallel.measured import nearest_backend
from megatron_fluid.tensor_parallel.signal_wait import SignalWaitBackend
from tests.support.machine import NEEDS_INTERPRETER

pytestmark = NEEDS_INTERPRETER

TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}


class _InOrder(CopyEngineBackend):
    """Its barrier is the order in which the test runs the ranks' phases."""

    def _barrier(self, operation: str, address: int, nbytes: int) -> None:
        pass


def _copy_engine(ranks: int, **options: Any) -> list[CopyEngineBackend]:
    world = SimulatedWorkspace(ranks)
    return [_InOrder(world.rank(r), SimulatedDriver(), **options) for r in range(ranks)]


def _signal_wait(ranks: int, programs: int = 5) -> list[SignalWaitBackend]:
    world = SimulatedWorkspace(ranks)
    return [
        SignalWaitBackend(
            world.rank(r), SimulatedDriver(), _InOrder(world.rank(r), SimulatedDriver()), programs
        )
        for r in range(ranks)
    ]


class _FusedOnCpu:
    """What the kernels of FusedGemm do, on a CPU; the tiles that are counted are the kernels'
    own."""

    def __init__(self, dtype: torch.dtype, workspace: Any) -> None:
        self.rank, self.ranks = workspace.rank, workspace.world_size
        self.reached = 0  # by the flags of gathers so far

    def high(self, rows: int, width: int) -> int:
        return max(
            tiles_of_block(rows, width, self.ranks, 66), min(rows // 64, 20)
        )  # of 20, two strips

    def rows_before(self, rows: int, width: int, depth: int, step: int) -> int:
        return step * rows - step % 2  # the shards of odd steps come in chunks, others whole

    def gather(
        self,
        shard: Tensor,
        landed: Tensor,
        b: Tensor,
        bias: Tensor | None,
        c: Tensor,
        signals: Signals,
    ) -> None:
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


def _fused(ranks: int, monkeypatch: pytest.MonkeyPatch) -> list[FusedBackend]:
    """In as many chunks as may be."""
    monkeypatch.setattr(fused, "FusedGemm", _FusedOnCpu)
    monkeypatch.setattr(fused, "_GATHER_BYTES", 1)
    monkeypatch.setattr(fused, "_SCATTER_BYTES", 1)
    world = SimulatedWorkspace(ranks)
    return [FusedBackend(world.rank(r), SimulatedDriver()) for r in range(ranks)]


def _gather(
    backends: list[Any], shards: list[Tensor], gemms: list[Any], keep: bool, lend: bool = False
) -> list[Any]:
    if isinstance(backends[0], FusedBackend):
        pushed = [b._push(s, g) for b, s, g in zip(backends, shards, gemms, strict=True)]
        return [
            b._gather_matmul(s, p, g, keep, lend)
            for b, s, p, g in zip(backends, shards, pushed, gemms, strict=True)
        ]
    if isinstance(backends[0], SignalWaitBackend):
        for backend, shard in zip(backends, shards, strict=True):
            backend._push(shard)
        return [
            b._gather_matmul(s, g, keep, lend)
            for b, s, g in zip(backends, shards, gemms, strict=True)
        ]
    staged = [b._announce(s) for b, s in zip(backends, shards, strict=True)]
    return [
        b._gather_matmul(s, t, g, keep)
        for b, s, t, g in zip(backends, shards, staged, gemms, strict=True)
    ]


def _scatter(backends: list[Any], a: list[Tensor], gemms: list[Any]) -> list[Tensor]:
    if isinstance(backends[0], FusedBackend):
        multiplied = [b._matmul_blocks(x, g) for b, x, g in zip(backends, a, gemms, strict=True)]
        return [
            b._add(slots, g.bias)
            for b, (slots, _), g in zip(backends, multiplied, gemms, strict=True)
        ]
    if isinstance(backends[0], SignalWaitBackend):
        made = [b._matmul_blocks(x, g) for b, x, g in zip(backends, a, gemms, strict=True)]
        for backend, (_, sent) in zip(backends, made, strict=True):
            backend._send(sent)
        return [
            b._add(slots, g.bias) for b, (slots, _), g in zip(backends, made, gemms, strict=True)
        ]
    made = [b._matmul_scatter(x, g) for b, x, g in zip(backends, a, gemms, strict=True)]
    return [b._add(*m, g, None) for b, m, g in zip(backends, made, gemms, strict=True)]


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
            weights, _gather(backends, shards, gemms, keep), strict=True
        ):
            _close(c, whole.double() @ weight.double() + added)
            assert torch.equal(gathered, whole) if keep else gathered is None
    parts = [random(ranks * m, k) for _ in range(ranks)]
    total = sum(p.double() @ w.double() for p, w in zip(parts, weights, strict=True)) + added
    results = _scatter(backends, parts, gemms)
    for rank, found in enumerate(results):
        _close(found, total[rank * m : (rank + 1) * m])
    for again, found in zip(_scatter(backends, parts, gemms), results, strict=True):
        assert torch.equal(again, found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lanes", [1, 2])
def test_the_copy_engine_form_equals_the_reference(ranks: int, lanes: int) -> None:
    backends = _copy_engine(ranks, gather_lanes=lanes)
    for turn, m in enumerate((4, 9, 2)):  # the buffers grow once and then serve what is smaller
        _check(backends, m, 24, 16, torch.bfloat16, turn % 2 == 0, turn > 0)
    _check(backends, 5, 7, 11, torch.float32, True, True)


@pytest.mark.parametrize("pieces", [(4,), (1, 3), (2, 1, 1), (1, 1, 2)])
def test_shards_can_be_multiplied_together(pieces: tuple[int, ...]) -> None:
    _check(_copy_engine(4, gather_pieces=pieces), 3, 8, 16, torch.float32, True, False)


@pytest.mark.parametrize("pieces", [(3, 1), (1, 2, 1), (2, 1, 1)])
def test_blocks_can_be_multiplied_together(pieces: tuple[int, ...]) -> None:
    _check(_copy_engine(4, scatter_pieces=pieces), 3, 8, 16, torch.float32, True, True)
    _check(
        _copy_engine(5, scatter_pieces=(*pieces[:-1], 1, 1)), 3, 8, 16, torch.float32, False, True
    )


def test_doubling_pieces_are_one_gemm_each_on_every_rank() -> None:
    backends = _copy_engine(8, gather_pieces=(1, 1, 2, 4), scatter_pieces=(4, 2, 1, 1))
    assert all(len(_runs(b._order[2:4])) == 1 and len(_runs(b._order[4:])) == 1 for b in backends)
    for step in range(8):  # everybody reads from somebody else
        assert sorted(b._order[step] for b in backends) == list(range(8))
    _check(backends, 3, 8, 16, torch.float32, True, True)


def test_pieces_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"gather_pieces: found \(1, 1\), allowed: positive integers with the sum 4",
    ):
        _copy_engine(4, gather_pieces=(1, 1))
    with pytest.raises(ValueError, match=r"scatter_pieces: found \(2, 2\), allowed: 1 as the last"):
        _copy_engine(4, scatter_pieces=(2, 2))


@pytest.mark.parametrize(("ranks", "programs"), [(1, 2), (2, 1), (3, 5), (4, 32)])
def test_the_signal_wait_form_equals_the_reference(ranks: int, programs: int) -> None:
    backends = _signal_wait(ranks, programs)
    # One tile and several, in both directions, with edges; K of whole steps and not.
    for turn, (m, n, k) in enumerate(((6, 16, 32), (130, 272, 80), (8, 528, 64))):
        dtype = torch.float16 if turn == 1 else torch.bfloat16
        _check(backends, m, n, k, dtype, turn % 2 == 0, turn > 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_fused_form_moves_every_chunk(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are another test's, on GPUs: this is what copy engines bring, where and when."""
    backends = _fused(ranks, monkeypatch)
    # One chunk and several of K and of columns, with edges; two strips of tiles.
    for turn, (m, n, k) in enumerate(
        ((6, 16, 32), (40, 1040, 208), (2200, 528, 64), (33, 272, 1040))
    ):
        dtype = torch.float16 if turn == 2 else torch.bfloat16
        _check(backends, m, n, k, dtype, turn % 2 == 0, turn > 0)


def test_the_fused_form_lends_what_it_gathers_without_a_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, m, k = 4, 4, 208  # of a GEMM's gather, four chunks
    backends = _fused(ranks, monkeypatch)
    b = torch.randn(k, 32).to(torch.bfloat16)
    gemms = [Gemm(b)] * ranks
    for _ in range(3):
        shards = [torch.randn(m, k).to(torch.bfloat16) for _ in range(ranks)]
        finish = [
            backend.start_gather(shard) for backend, shard in zip(backends, shards, strict=True)
        ]
        lent = [end() for end in finish]
        assert all(torch.equal(found, torch.cat(shards)) for found in lent)
        others = [torch.randn(m, k).to(torch.bfloat16) for _ in range(ranks)]
        pushed = [
            backend._push(shard, Gemm(b)) for backend, shard in zip(backends, others, strict=True)
        ]
        assert all(torch.equal(found, torch.cat(shards)) for found in lent), (
            "peers may be in their next gather already"
        )
        for backend, shard, push, gemm in zip(backends, others, pushed, gemms, strict=True):
            c, whole = backend._gather_matmul(shard, push, gemm, keep=True, lend=True)
            assert (
                whole is not None
                and torch.equal(whole, torch.cat(others))
                and whole.data_ptr() == push[0].data_ptr()
            )
            _close(c, whole.double() @ b.double())


def test_a_gather_that_nobody_finishes_is_waited_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its signals would not be seen, and the next but one might overwrite what a peer still
    reads."""
    backends = _fused(3, monkeypatch)
    shard = torch.randn(4, 64).to(torch.bfloat16)
    for rank in (0, 2):
        backends[rank].start_gather(shard)  # rank 1 stays away
    with pytest.raises(PeerTimeoutError, match="rank 0.*peer 1.*tp_fused_gather"):
        backends[0].start_gather(shard)


@pytest.mark.parametrize("form", ["flagged", "fused"])
def test_what_is_kept_stays_and_what_is_lent_is_the_lent_half(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, m, k = 2, 16, 64
    backends: list[Any] = _fused(ranks, monkeypatch) if form == "fused" else _signal_wait(ranks)
    gemms = [Gemm(torch.randn(k, 32).to(torch.bfloat16))] * ranks
    kept = []
    for turn in range(3):
        shards = [torch.randn(m, k).to(torch.bfloat16) for _ in range(ranks)]
        with torch.inference_mode(turn == 0):  # a validation before training
            found = [whole for _, whole in _gather(backends, shards, gemms, True, lend=turn > 0)]
        kept.append((torch.cat(shards), found))
        for whole in found:
            assert torch.equal(whole.view(-1, k), kept[-1][0])
    wanted, first = kept[0]
    assert all(torch.equal(whole.view(-1, k), wanted) for whole in first), "two gathers later"
    lent = [whole.data_ptr() for whole in kept[1][1] + kept[2][1]]
    assert lent == [
        b._gathers._addresses[half][rank] for half in (1, 0) for rank, b in enumerate(backends)
    ]


def test_the_fused_form_starts_no_gather_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    (backend,) = _fused(1, monkeypatch)
    monkeypatch.setattr(backend._driver, "capturing", lambda: True)
    with pytest.raises(FluidError, match="cannot be captured"):
        backend.start_gather(torch.randn(4, 64).to(torch.bfloat16))


def test_the_copy_engine_form_moves_nothing_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would turn to the half of the capture, which a peer may still read."""
    (backend,) = _copy_engine(1)
    monkeypatch.setattr(backend._driver, "capturing", lambda: True)
    a, gemm = torch.randn(4, 16), Gemm(torch.randn(16, 8))
    for call in (
        lambda: backend.start_gather(a),
        lambda: backend.gather_matmul(a, gemm),
        lambda: backend.matmul_scatter(a, gemm),
    ):
        with pytest.raises(FluidError, match="the copy_engine backend .* cannot be captured"):
            call()
    assert not backend._gathers._addresses[0] and not backend._scatters._addresses[0]


def test_the_copy_engine_form_refuses_sums_that_it_would_round() -> None:
    (backend,) = _copy_engine(1)
    a, gemm = torch.randn(4, 16).double(), Gemm(torch.randn(16, 8).double())
    for call in (backend.gather_matmul, backend.matmul_scatter):
        with pytest.raises(ConfigError, match="it adds in fp32, not in torch.float64"):
            call(a, gemm)


@pytest.mark.parametrize("form", ["copy_engine", "flagged"])
@pytest.mark.parametrize("stride", [0, 2])
def test_a_bias_is_read_by_its_strides(form: str, stride: int) -> None:
    backends: list[Any] = _copy_engine(2) if form == "copy_engine" else _signal_wait(2)
    bias = torch.arange(1, 33).to(torch.bfloat16).as_strided((16,), (stride,))
    a = [torch.zeros(8, 16, dtype=torch.bfloat16)] * 2
    gemms = [Gemm(torch.zeros(16, 16, dtype=torch.bfloat16), bias=bias)] * 2
    for c, _ in _gather(backends, a, gemms, False):
        assert torch.equal(c, bias.expand(16, 16))
    for c in _scatter(backends, a, gemms):
        assert torch.equal(c, bias.expand(4, 16))


@pytest.mark.parametrize("warm", [False, True])
def test_the_copy_engine_form_takes_no_rows(warm: bool) -> None:
    backends, gemms = _copy_engine(2), [Gemm(torch.randn(16, 24))] * 2
    for rows in (4, 0) if warm else (0, 0, 4):
        a = [torch.randn(rows, 16) for _ in range(2)]
        for c, whole in _gather(backends, a, gemms, True):
            torch.testing.assert_close(c, torch.cat(a) @ gemms[0].b)
            assert torch.equal(whole, torch.cat(a))
        for found, wanted in zip(
            _scatter(backends, a, gemms), ((a[0] + a[1]) @ gemms[0].b).chunk(2), strict=False
        ):
            torch.testing.assert_close(found, wanted[: rows // 2])


@pytest.mark.parametrize("b", [torch.ones(16, 8), torch.ones(16, 8).to(torch.float8_e4m3fn)])
def test_a_bias_has_the_dtype_of_c_or_of_a(b: Tensor) -> None:
    fp8 = b.dtype != torch.float32
    a, scale = torch.ones(4, 16).to(b.dtype), torch.ones(1) if fp8 else None
    half = torch.bfloat16
    for dtype in (half,) if fp8 else (half, torch.float32):
        found = Gemm(
            b, bias=torch.ones(8, dtype=dtype), scale_a=scale, scale_b=scale, out_dtype=half
        )(a)
        assert found.dtype == half and (found == 17).all()
    for dtype in (torch.float16, torch.float32) if fp8 else (torch.float16,):
        with pytest.raises(ConfigError, match=f"bias: found {dtype}, allowed: .*{half}"):
            Gemm(b, bias=torch.ones(8, dtype=dtype), scale_a=scale, scale_b=scale, out_dtype=half)(
                a
            )


def test_a_gathered_shard_that_never_comes_is_reported_by_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = _fused(3, monkeypatch)
    shard = torch.randn(4, 64).to(torch.bfloat16)
    finish = [backends[rank].start_gather(shard) for rank in (0, 2)]  # rank 1 stays away
    finish[0]()
    with pytest.raises(PeerTimeoutError, match="rank 0.*peer 1.*tp_fused_gather"):
        backends[0].start_gather(shard)


def test_a_chunk_is_not_sent_before_the_kernel_has_counted_its_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = _fused(2, monkeypatch)
    a, gemm = torch.randn(8, 16).to(torch.bfloat16), Gemm(torch.randn(16, 528).to(torch.bfloat16))
    backends[0]._matmul_blocks(a, gemm)
    backends[1]._counters[0, 1] -= 1  # as if a part of a tile were missing
    with pytest.raises(FluidError, match="would wait for 4 forever"):
        backends[1]._matmul_blocks(a, gemm)


def test_a_block_that_never_comes_is_reported_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = _fused(3, monkeypatch)
    a, gemm = torch.randn(12, 16).to(torch.bfloat16), Gemm(torch.randn(16, 16).to(torch.bfloat16))
    for rank in (0, 2):
        slots, _ = backends[rank]._matmul_blocks(a, gemm)
    backends[2]._add(slots, None)
    with pytest.raises(PeerTimeoutError, match="rank 2.*peer 1.*tp_fused_scatter"):
        backends[2]._matmul_blocks(a, gemm)


def test_the_signal_wait_form_refuses_what_its_kernel_cannot_multiply() -> None:
    (backend,) = _signal_wait(1)
    a = torch.randn(4, 16)
    with pytest.raises(ConfigError, match="not torch.float32 into torch.float32"):
        backend.gather_matmul(a, Gemm(torch.randn(16, 16)))
    half = torch.bfloat16
    with pytest.raises(ConfigError, match="K 24 and N 16 are not multiples of 16"):
        backend.matmul_scatter(torch.randn(4, 24).to(half), Gemm(torch.randn(24, 16).to(half)))
    with pytest.raises(
        ConfigError, match=r"B has strides \(64, 2\), allowed: one dimension contiguous"
    ):
        backend.gather_matmul(a.to(half), Gemm(torch.randn(16, 64).to(half)[:, ::2]))
    with pytest.raises(ConfigError, match="A has no rows"):
        backend.gather_matmul(a[:0].to(half), Gemm(torch.randn(16, 16).to(half)))
    with pytest.raises(ConfigError, match="does not begin on a 16-byte boundary"):
        backend.gather_matmul(
            torch.randn(4 * 16 + 1).to(half)[1:].view(4, 16), Gemm(torch.randn(16, 16).to(half))
        )


def test_a_shard_that_never_comes_is_reported_by_peer() -> None:
    backends = _signal_wait(3)
    half = torch.bfloat16
    shards, gemm = (
        [torch.randn(4, 16).to(half) for _ in range(3)],
        Gemm(torch.randn(16, 16).to(half)),
    )
    for rank in (0, 2):
        backends[rank]._push(shards[rank])
    backends[0]._gather_matmul(shards[0], gemm, False)
    with pytest.raises(PeerTimeoutError, match="rank 0.*peer 1.*tp_flagged_gather"):
        backends[0]._push(shards[0])


def test_a_block_is_not_sent_before_the_kernel_has_finished_it() -> None:
    backends = _signal_wait(2)
    a, gemm = torch.randn(8, 16).to(torch.bfloat16), Gemm(torch.randn(16, 16).to(torch.bfloat16))
    _, sent = backends[0]._matmul_blocks(a, gemm)
    backends[0]._send(sent)
    backends[1]._matmul_blocks(a, gemm)
    backends[1]._blocks_done += 1  # as if a tile were missing
    with pytest.raises(FluidError, match="would wait for 2 forever"):
        backends[1]._send(sent)


@pytest.mark.parametrize("pieces", [(1, 1, 1), (1, 2), (3,)])
def test_the_copy_engine_form_serves_experts_block_by_block(pieces: tuple[int, ...]) -> None:
    ranks, m, hidden, ffn, experts, k = 3, 5, 6, 4, 4, 2
    backends = _copy_engine(ranks, gather_pieces=pieces)
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(ranks * m, experts, generator=generator).topk(k, -1).indices
    ids[:m] = torch.tensor([0, 3])  # a block in which two experts have nothing
    probs = torch.rand(ranks * m, k, generator=generator)
    rows = TokenRows.plan(ids, experts, ranks)
    assert rows.ends[0].tolist() == [m, m, m, 2 * m]
    x = torch.randn(ranks * m, hidden, generator=generator)
    w1 = [torch.randn(experts, hidden, ffn, generator=generator) for _ in range(ranks)]
    w2 = [torch.randn(experts, ffn, hidden, generator=generator) for _ in range(ranks)]
    h = [
        c
        for c, _ in _gather(
            backends, list(x.chunk(ranks)), [ScatterProduct(w, rows) for w in w1], False
        )
    ]  # type: ignore[misc]
    for found, w in zip(h, w1, strict=True):
        wanted = torch.einsum("mh,mkhf->mkf", x, w[ids])
        place = rows.rows + (torch.arange(ranks) * m * k)[:, None, None]
        torch.testing.assert_close(found[place.flatten(0, 1)], wanted)
    total = sum(
        torch.einsum("mk,mh,mkhf,mkfg->mg", probs, x, a[ids], b[ids])
        for a, b in zip(w1, w2, strict=True)
    )
    found = _scatter(backends, h, [GatherProduct(w, rows, probs) for w in w2])  # type: ignore[misc]
    torch.testing.assert_close(torch.cat(found), total, rtol=1e-4, atol=1e-4)
    assert torch.equal(rows.by_choice(rows.by_row(probs)), probs)


def test_a_measured_shape_speaks_for_its_neighbours() -> None:
    table = [
        ("H200", 4, "gather", 1024, 512, 512, "flagged"),
        ("H200", 4, "gather", 4096, 512, 512, "copy_engine"),
        ("H200", 8, "gather", 1024, 512, 512, "collective"),
    ]
    found = {
        m: nearest_backend(table, "H200", 4, "gather", (m, 512, 512))
        for m in (256, 512, 1024, 1500, 3000, 8192, 8193)
    }
    assert found == {
        256: None,
        512: "flagged",
        1024: "flagged",
        1500: "flagged",
        3000: "copy_engine",
        8192: "copy_engine",
        8193: None,
    }
    assert nearest_backend(table, "H200", 4, "scatter", (1024, 512, 512)) is None
    assert nearest_backend(table, "A100", 4, "gather", (1024, 512, 512)) is None
    assert nearest_backend(table, "H200", 4, "gather", (1024, 512, 2048)) is None
    # Both are twice as short, one of them alike in N and K.
    table = [
        ("H200", 4, "scatter", 8192, 4096, 1024, "flagged"),
        ("H200", 4, "scatter", 8192, 8192, 2048, "copy_engine"),
    ]
    assert nearest_backend(table, "H200", 4, "scatter", (16384, 8192, 2048)) == "copy_engine"


def test_fp8_with_scales_by_row_goes_block_by_block() -> None:
    ranks, m, n, k = 3, 4, 16, 32
    generator = torch.Generator().manual_seed(2)
    backends = _copy_engine(ranks)
    shards = [torch.randn(m, k, generator=generator).to(torch.float8_e4m3fn) for _ in range(ranks)]
    weight = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
    by_row = torch.rand(ranks * m, 1, generator=generator) + 0.5
    by_column = torch.rand(1, n, generator=generator) + 0.5
    bias = torch.randn(n, generator=generator)
    gemm = Gemm(weight, True, bias, by_row, by_column, torch.float32)
    product = (torch.cat(shards).float() * by_row) @ (weight.float().t() * by_column)
    for c, gathered in _gather(backends, shards, [gemm] * ranks, True):
        torch.testing.assert_close(c, product + bias)
        assert torch.equal(gathered.view(torch.uint8), torch.cat(shards).view(torch.uint8))
    for rank, found in enumerate(_scatter(backends, [torch.cat(shards)] * ranks, [gemm] * ranks)):
        torch.testing.assert_close(found, ranks * product[rank * m : (rank + 1) * m] + bias)
