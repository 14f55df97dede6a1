"""The decode-time all-to-all against its reference, on whatever launched this: `pytest -svx
tests/test_all_to_all.py`.

Under torchrun or mpirun this process is one rank. With NODE_RANK, WORLD_SIZE, WORLD_LOCAL_SIZE and
MASTER_* it starts its node's ranks. With neither it starts one rank a GPU on this machine, or four
gloo ranks where there is none.
"""

import datetime
import itertools
import multiprocessing
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.harness.launchers import NodeLaunch, RankLaunch, detect_launch
from megatron_fluid.errors import FluidError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.reference import combine_reference
from tests.support.all_to_all_calls import check_close, check_received, pack, unpack
from tests.support.launch import run_ranks
from tests.support.machine import RANKS

_CPU_RANKS = 4
_TOLERANCE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
_TIMEOUT_S = 600.0
_ALIGNMENT = 8


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
    run_ranks(body, RANKS or _CPU_RANKS, *arguments, backend="nccl" if RANKS else "gloo")


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
@dataclass(frozen=True)
class _Job:
    """Sizes, and the same random tokens of every source on every rank."""

    world: int
    dp: int
    local: int
    k: int
    capacity: int
    hidden: int
    dtype: torch.dtype
    combine_dtype: torch.dtype = torch.bfloat16

    @property
    def layout(self) -> Layout:
        scale_words = -(-self.hidden // 128) if self.dtype == torch.float8_e4m3fn else 0
        return Layout(
            self.capacity, self.local * self.world, self.k, self.world, self.dp, self.hidden,
            self.hidden * self.dtype.itemsize, scale_words * 4, self.combine_dtype,
        )  # fmt: skip

    @property
    def device(self) -> torch.device:
        on_gpu = torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    def open(self, rank: int, **keywords: Any) -> AllToAll:
        sizes = vars(self.layout) | {"rank": rank, "timeout_s": 10.0} | keywords
        return (AllToAll.internode if "domain_size" in sizes else AllToAll.intranode)(**sizes)

    def open_two_levels(self, rank: int) -> tuple[AllToAll, list[int]]:
        """Domains of two ranks; and the ranks in the order in which their tokens take slots."""
        backend, domains = "nccl" if torch.cuda.is_available() else "gloo", self.world // 2
        ata = self.open(rank, transport=f"{backend}+{backend}", domain_size=2)
        assert f"{domains} domains of 2 ranks" in ata.transport_report()
        return ata, [2 * n + index for index in range(2) for n in range(domains)]

    def draw(self, seed: int, full: bool = False) -> tuple[list[Tensor], ...]:
        """Rows, scales, expert ids and weights of each source."""
        g = torch.Generator().manual_seed(seed)
        drawn: tuple[list[Tensor], ...] = ([], [], [], [])
        kind, layout = seed % 5, self.layout
        for source in range(layout.num_sources):
            m = int(torch.randint(0, self.capacity + 1, (1,), generator=g))
            m = self.capacity if full else 0 if kind == 1 and source == 0 else m
            table = torch.rand(m, layout.num_experts, generator=g).topk(self.k, -1).indices.int()
            if kind == 2:  # everything on the first experts
                table = torch.arange(self.k, dtype=torch.int32).expand(m, -1).clone()
            if kind == 3:
                table[torch.rand(table.shape, generator=g) < 0.3] = -1
            if kind == 4 and m:
                table[0] = 1  # one expert named K times
            x = torch.randn(m, self.hidden, generator=g).to(self.dtype)
            scale = torch.rand(m, layout.scale_words, generator=g)
            weights = torch.rand(m, self.k, generator=g)
            for found, tensor in zip(drawn, (x, scale, table, weights), strict=True):
                found.append(tensor)
        return drawn

    def received(self, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tensors to receive counts, rows and scales in."""
        layout, device = self.layout, self.device
        lead: tuple[int, ...] = (self.local, layout.max_rows)
        if packed:
            lead = (layout.packed_rows(_ALIGNMENT),)
        counts = torch.full((self.local,), -7, dtype=torch.int32, device=device)
        x = torch.zeros(*lead, layout.hidden_dim_bytes, dtype=torch.uint8, device=device)
        words = layout.scale_words
        scale = torch.zeros(*lead, words, device=device) if words else None
        return counts, x.view(self.dtype), scale

    def expert_y(self, seed: int, rank: int) -> Tensor:
        g = torch.Generator().manual_seed(seed * 1000 + rank)
        rows = self.layout.max_rows
        return torch.randn(self.local, rows, self.hidden, generator=g).to(self.combine_dtype)


def _round(
    job: _Job, ata: AllToAll, rank: int, seed: int, way: str, early: bool, order: list[int]
) -> None:
    """One dispatch and combine. `way`: "whole" calls, "split" ones, or "packed" rows by a hook.
    `order`: the sources in the order of slots."""
    x, scale, ids, weights = ([table[s] for s in order] for table in job.draw(seed))
    source, device = order.index(rank // job.dp), job.device
    split, packed = way == "split", way == "packed"
    counts, out, out_scale = job.received(packed)
    own = [t[source].to(device) for t in (x, scale, ids, weights)]
    own_ids = own[2].view(torch.uint32) if seed % 2 else own[2]
    own_scale = own[1] if job.layout.scale_words else None
    early_weights, late_weights = (own[3], None) if early else (None, own[3])
    sent, nothing = (own[0], own_scale, own_ids), (None, None, None)
    offsets = torch.zeros_like(counts)
    if packed:
        ata.dispatch_with_hook(
            counts, out, out_scale, *sent, weights=early_weights, out_expert_offsets=offsets,
            alignment=_ALIGNMENT,
        )()  # fmt: skip
    elif split:
        ata.dispatch(*nothing, *sent, do_recv=False, weights=early_weights)
        ata.dispatch(counts, out, out_scale, *nothing, do_send=False)
    else:
        ata.dispatch(counts, out, out_scale, *sent, weights=early_weights)
    padded = [job.expert_y(seed, r) for r in range(job.world)]
    y, got = padded[rank], [counts.cpu(), out.cpu(), None if out_scale is None else out_scale.cpu()]
    if packed:
        y, ends = pack(y, got[0], len(out), _ALIGNMENT)
        assert offsets.tolist() == ends
        got[1:] = [None if t is None else unpack(t, got[0], ends, _ALIGNMENT) for t in got[1:]]
    check_received(tuple(got), rank, ids, x, scale)  # type: ignore[arg-type]
    y = y.to(device)
    result = torch.full_like(own[0], 3.0, dtype=job.combine_dtype)
    accumulate = seed % 3 == 0
    if split:
        ata.combine(None, None, late_weights, y, do_recv=False)
        ata.combine(result, own_ids, late_weights, None, do_send=False, accumulate=accumulate)
    else:
        ata.combine(result, own_ids, late_weights, y, accumulate=accumulate)
    wanted = combine_reference(ids, weights, padded, job.local)[source]
    ata.check_errors()
    # Over two levels sums are rounded once more.
    tolerance = _TOLERANCE[job.combine_dtype] * (1.5 if "+" in ata.transport else 1.0)
    check_close(result.cpu(), wanted + (3.0 if accumulate else 0.0), tolerance)


CASES = {
    # dp, local experts, k, capacity, hidden, dtype, combine dtype
    "bf16": (1, 4, 2, 8, 64, torch.bfloat16, torch.bfloat16),
    "fp8 with scales": (1, 8, 6, 16, 384, torch.float8_e4m3fn, torch.bfloat16),
    "fp16": (1, 2, 3, 5, 40, torch.float16, torch.float16),
    "replicas": (2, 3, 4, 7, 128, torch.bfloat16, torch.bfloat16),
    "one token, top-1": (1, 1, 1, 1, 16, torch.bfloat16, torch.bfloat16),
    "top-16": (1, 8, 16, 4, 8, torch.bfloat16, torch.bfloat16),
}


def _rounds_body(rank: int, world: int, name: str, way: str, early: bool, levels: int) -> None:
    job = _Job(world, *CASES[name])
    ata, order = job.open_two_levels(rank) if levels == 2 else (job.open(rank), [])
    for seed in range(5):
        _round(job, ata, rank, seed, way, early, order or list(range(job.layout.num_sources)))
    ata.destroy()


@pytest.mark.parametrize("early", [False, True], ids=["weights-at-combine", "weights-at-dispatch"])
@pytest.mark.parametrize(("name", "way", "levels"), [
    *itertools.product(CASES, ["whole", "split"], [1]),
    *itertools.product(["fp8 with scales"], ["whole", "split"], [2]),
    ("fp8 with scales", "packed", 1),
])  # fmt: skip
def test_rounds_match_the_reference(name: str, way: str, levels: int, early: bool) -> None:
    dp, local, k = CASES[name][:3]
    world = _world_size()
    if world % (dp * levels) or local * world < k:
        pytest.skip(f"{world} ranks cannot have {dp} replicas and {k} of {local} experts a rank")
    _on_every_rank(_rounds_body, name, way, early, levels)


def _repeat_body(rank: int, world: int) -> None:
    job = _Job(world, 1, 4, 4, 8, 64, torch.bfloat16)
    ata = job.open(rank)
    x, _, ids, weights = job.draw(5, full=True)
    y = job.expert_y(5, rank).to(job.device)
    results = []
    own = [t[rank].to(job.device) for t in (x, ids, weights)]
    for _ in range(5):
        counts, out, _ = job.received(False)
        ata.dispatch(counts, out, None, own[0], None, own[1])
        result = torch.zeros(job.capacity, job.hidden, dtype=torch.bfloat16, device=job.device)
        ata.combine(result, own[1], own[2], y)
        results.append((out, result))
        assert all(torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True))
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
