"""The decode-time all-to-all against its reference, on whatever launched this: `pytest -svx
tests/test_all_to_all.py`.

Under torchrun or mpirun this process is one rank. With NODE_RANK, WORLD_SIZE, WORLD_LOCAL_SIZE and
MASTER_* it starts its node's ranks. With neither it starts one rank a GPU on this machine, or four
gloo ranks where there is none.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.launchers import NodeLaunch, RankLaunch, detect_launch
from megatron_fluid.errors import FluidError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.reference import combine_reference, dispatch_reference
from tests.support.launch import run_ranks
from tests.support.machine import RANKS

_CPU_RANKS = 4
_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
_TIMEOUT_S = 60.0


# ---- starting ranks
def _on_every_rank(body: Callable[..., None], *arguments: Any) -> None:
    """Run body(rank, world_size, *arguments) on all ranks of the job and fail if any of this node's
    failed."""
    launch = detect_launch()
    if (
        isinstance(launch, RankLaunch)
        and launch.world_size > 0
        and not os.environ.get("FLUID_TEST_SPAWN")
    ):
        _join(launch)
        body(launch.rank, launch.world_size, *arguments)
        dist.barrier()
        return
    if isinstance(launch, NodeLaunch):
        _spawn_node(launch, body, arguments)
        return
    run_ranks(
        body, RANKS or _CPU_RANKS, *arguments, backend="nccl" if RANKS else "gloo", timeout_s=120
    )


def _world_size() -> int:
    launch = detect_launch()
    if launch is None or (isinstance(launch, RankLaunch) and os.environ.get("FLUID_TEST_SPAWN")):
        return RANKS or _CPU_RANKS
    return launch.world_size


def _join(launch: RankLaunch) -> None:
    if dist.is_initialized():
        return
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"tcp://{launch.address}:{launch.port}",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S),
        device_id=torch.device("cuda", launch.local_rank) if on_gpu else None,
    )


def _spawn_node(launch: NodeLaunch, body: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch.multiprocessing as mp

    payload = pickle.dumps((launch, body, arguments))
    # Forked from a server that has imported torch: a fresh interpreter a rank and test would take
    # most of the time.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["torch", "torch.distributed", "pytest"]
    )
    mp.start_processes(
        _node_rank, args=(payload,), nprocs=launch.local_size, start_method="forkserver"
    )


def _node_rank(local_rank: int, payload: bytes) -> None:
    launch, body, arguments = pickle.loads(payload)
    rank = launch.rank(local_rank)
    torch.set_num_threads(1)
    _join(rank)
    body(rank.rank, rank.world_size, *arguments)
    dist.barrier()
    dist.destroy_process_group()


# ---- one round
class _Job:
    """Sizes, and the same random tokens of every source on every rank."""

    def __init__(
        self,
        world: int,
        dp: int,
        local: int,
        k: int,
        capacity: int,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self.world, self.dp, self.local, self.k, self.capacity, self.hidden = (
            world,
            dp,
            local,
            k,
            capacity,
            hidden,
        )
        self.dtype = dtype
        self.sources = world // dp
        self.experts = local * world
        self.scale_words = -(-hidden // 128) if dtype == torch.float8_e4m3fn else 0
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )

    def open(self, rank: int, **keywords: Any) -> AllToAll:
        return AllToAll.intranode(
            self.capacity, self.experts, self.k, rank, self.world, self.dp, self.hidden,
            self.hidden * self.dtype.itemsize, self.scale_words * 4, timeout_s=10.0, **keywords,
        )  # fmt: skip

    def draw(
        self, seed: int, full: bool = False
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        g = torch.Generator().manual_seed(seed)
        x, scale, ids, weights = [], [], [], []
        kind = seed % 5
        for source in range(self.sources):
            m = (
                self.capacity
                if full
                else int(torch.randint(0, self.capacity + 1, (1,), generator=g))
            )
            m = 0 if kind == 1 and source == 0 and not full else m
            table = (
                torch.rand(m, self.experts, generator=g).topk(self.k, -1).indices.to(torch.int32)
            )
            if kind == 2:  # everything on the first experts
                table = torch.arange(self.k, dtype=torch.int32).expand(m, -1).clone()
            if kind == 3:
                table[torch.rand(table.shape, generator=g) < 0.3] = -1
            if kind == 4 and m:
                table[0] = 1  # one expert named K times
            x.append(torch.randn(m, self.hidden, generator=g).to(self.dtype))
            scale.append(torch.rand(m, self.scale_words, generator=g))
            ids.append(table)
            weights.append(torch.rand(m, self.k, generator=g))
        return x, scale, ids, weights

    def padded(self) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = self.capacity * self.sources
        counts = torch.full((self.local,), -7, dtype=torch.int32, device=self.device)
        x = torch.zeros(
            self.local,
            rows,
            self.hidden * self.dtype.itemsize,
            dtype=torch.uint8,
            device=self.device,
        )
        scale = (
            torch.zeros(self.local, rows, self.scale_words, device=self.device)
            if self.scale_words
            else None
        )
        return counts, x.view(self.dtype), scale


def _expert_y(job: _Job, seed: int, rank: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randn(job.local, job.capacity * job.sources, job.hidden, generator=g).to(dtype)


def _round(
    job: _Job,
    ata: AllToAll,
    rank: int,
    seed: int,
    *,
    split: bool,
    early: bool,
    combine_dtype: torch.dtype,
) -> None:
    x, scale, ids, weights = job.draw(seed)
    source, device = rank // job.dp, job.device
    counts, out, out_scale = job.padded()
    own = [t[source].to(device) for t in (x, scale, ids, weights)]
    own_ids = own[2].view(torch.uint32) if seed % 2 else own[2]
    own_scale = own[1] if job.scale_words else None
    early_weights = own[3] if early else None
    if split:
        ata.dispatch(
            None, None, None, own[0], own_scale, own_ids, do_recv=False, weights=early_weights
        )
        ata.dispatch(counts, out, out_scale, None, None, None, do_send=False)
    else:
        ata.dispatch(counts, out, out_scale, own[0], own_scale, own_ids, weights=early_weights)
    expected = dispatch_reference(ids, rank, job.local)
    assert torch.equal(counts.cpu(), expected.counts)
    for expert in range(job.local):
        n = int(counts[expert])
        if n:
            got = out[expert, :n].cpu()
            assert torch.equal(got.view(torch.uint8), expected.gather(expert, x).view(torch.uint8))
            if out_scale is not None:
                assert torch.equal(out_scale[expert, :n].cpu(), expected.gather(expert, scale))
    y = _expert_y(job, seed, rank, combine_dtype)
    result = torch.full((x[source].shape[0], job.hidden), 3.0, dtype=combine_dtype, device=device)
    late_weights = None if early else own[3]
    accumulate = seed % 3 == 0
    if split:
        ata.combine(None, None, late_weights, y.to(device), do_recv=False)
        ata.combine(result, own_ids, late_weights, None, do_send=False, accumulate=accumulate)
    else:
        ata.combine(result, own_ids, late_weights, y.to(device), accumulate=accumulate)
    wanted = combine_reference(
        ids, weights, [_expert_y(job, seed, r, combine_dtype) for r in range(job.world)], job.local
    )
    reference = wanted[source] + (3.0 if accumulate else 0.0)
    ata.check_errors()
    if reference.numel() and reference.norm() > 0:
        error = float((result.cpu().float() - reference).norm() / reference.norm())
        assert error < _TOLERANCE[combine_dtype], f"seed {seed}: relative error {error}"
    else:
        assert torch.equal(result.cpu().float(), reference)


CASES = {
    # dp, local experts, k, capacity, hidden, dtype, combine dtype, rounds
    "bf16": (1, 4, 2, 8, 64, torch.bfloat16, torch.bfloat16, 5),
    "fp8 with scales": (1, 8, 6, 16, 384, torch.float8_e4m3fn, torch.bfloat16, 4),
    "fp16": (1, 2, 3, 5, 40, torch.float16, torch.float16, 4),
    "replicas": (2, 3, 4, 7, 128, torch.bfloat16, torch.bfloat16, 5),
    "one token, top-1": (1, 1, 1, 1, 16, torch.bfloat16, torch.bfloat16, 4),
    "top-16": (1, 8, 16, 4, 8, torch.bfloat16, torch.bfloat16, 4),
}


def _rounds_body(rank: int, world: int, name: str, split: bool, early: bool) -> None:
    dp, local, k, capacity, hidden, dtype, combine_dtype, rounds = CASES[name]
    job = _Job(world, dp, local, k, capacity, hidden, dtype)
    ata = job.open(rank, combine_dtype=combine_dtype)
    for seed in range(rounds):
        _round(job, ata, rank, seed, split=split, early=early, combine_dtype=combine_dtype)
    ata.destroy()


@pytest.mark.parametrize("early", [False, True], ids=["weights-at-combine", "weights-at-dispatch"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", list(CASES))
def test_rounds_match_the_reference(name: str, split: bool, early: bool) -> None:
    dp, local, k = CASES[name][:3]
    world = _world_size()
    if world % dp or local * world < k:
        pytest.skip(f"{world} ranks cannot have {dp} replicas and {k} of {local} experts a rank")
    _on_every_rank(_rounds_body, name, split, early)


def _layouts_body(rank: int, world: int) -> None:
    """Packed rows, and hooks."""
    job = _Job(world, 1, 4, 3, 6, 256, torch.float8_e4m3fn)
    ata = job.open(rank)
    for seed in range(4):
        x, scales, ids, weights = job.draw(seed)
        rows = job.capacity * job.sources * job.k + job.local * 8
        counts = torch.zeros(job.local, dtype=torch.int32, device=job.device)
        offsets = torch.zeros_like(counts)
        out = torch.zeros(rows, job.hidden, dtype=torch.uint8, device=job.device).view(
            torch.float8_e4m3fn
        )
        scale = torch.zeros(rows, job.scale_words, device=job.device)
        receive = ata.dispatch_with_hook(
            counts,
            out,
            scale,
            x[rank].to(job.device),
            scales[rank].to(job.device),
            ids[rank].to(job.device),
            weights=weights[rank].to(job.device),
            out_expert_offsets=offsets,
            alignment=8,
        )
        receive()
        expected = dispatch_reference(ids, rank, job.local)
        assert torch.equal(counts.cpu(), expected.counts)
        ends = (-(-expected.counts // 8) * 8).cumsum(0)
        assert torch.equal(offsets.cpu().long(), ends)
        y = torch.zeros(rows, job.hidden, dtype=torch.bfloat16, device=job.device)
        padded = [_expert_y(job, seed, r, torch.bfloat16) for r in range(world)]
        for expert in range(job.local):
            n, first = int(counts[expert]), int(ends[expert]) - -(-int(counts[expert]) // 8) * 8
            y[first : first + n] = padded[rank][expert, :n].to(job.device)
            if n:
                got = out[first : first + n].cpu().view(torch.uint8)
                assert torch.equal(got, expected.gather(expert, x).view(torch.uint8))
                got = scale[first : first + n].cpu()
                assert torch.equal(got, expected.gather(expert, scales))
        result = torch.zeros(x[rank].shape[0], job.hidden, dtype=torch.bfloat16, device=job.device)
        ata.combine(result, ids[rank].to(job.device), None, y)
        reference = combine_reference(ids, weights, padded, job.local)[rank]
        if reference.numel() and reference.norm() > 0:
            assert (
                float((result.cpu().float() - reference).norm() / reference.norm())
                < _TOLERANCE[torch.bfloat16]
            )
    ata.destroy()


def test_packed_rows_with_hooks() -> None:
    _on_every_rank(_layouts_body)


def _repeat_body(rank: int, world: int) -> None:
    job = _Job(world, 1, 4, 4, 8, 64, torch.bfloat16)
    ata = job.open(rank)
    x, _, ids, weights = job.draw(5, full=True)
    y = _expert_y(job, 5, rank, torch.bfloat16).to(job.device)
    first: tuple[Tensor, Tensor] | None = None
    own = [t[rank].to(job.device) for t in (x, ids, weights)]
    for _ in range(5):
        counts, out, _ = job.padded()
        ata.dispatch(counts, out, None, own[0], None, own[1])
        result = torch.zeros(job.capacity, job.hidden, dtype=torch.bfloat16, device=job.device)
        ata.combine(result, own[1], own[2], y)
        if first is None:
            first = (out.clone(), result.clone())
        assert torch.equal(out, first[0])
        assert torch.equal(result, first[1])
    ata.destroy()


def test_results_repeat_bitwise() -> None:
    _on_every_rank(_repeat_body)


def _report_body(rank: int, world: int) -> None:
    job = _Job(world, 1, 2, 2, 4, 16, torch.bfloat16)
    ata = job.open(rank)
    assert ata.transport in ata.transport_report()
    with pytest.raises(ValueError, match="transport"):
        job.open(rank, transport="carrier pigeon")
    if not torch.cuda.is_available():
        for wanted in ("nvlink", "nvshmem"):
            with pytest.raises(
                ValueError, match=f"'{wanted}', which cannot be met.*CUDA is not available"
            ):
                job.open(rank, transport=wanted)
    for timeout_s in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"timeout_s: found"):
            AllToAll.intranode(4, 2 * world, 1, rank, world, 1, 16, 32, 0, timeout_s=timeout_s)
    with pytest.raises(ValueError, match=r"rank and world_size"):
        AllToAll.intranode(4, 2 * world, 1, rank + 1, world, 1, 16, 32, 0)
    ata.destroy()
    with pytest.raises(FluidError, match="destroy"):
        ata.dispatch(None, None, None, None, None, None)


def test_transport_is_reported_and_requests_are_met_or_refused() -> None:
    _on_every_rank(_report_body)
