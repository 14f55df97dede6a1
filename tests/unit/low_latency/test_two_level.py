"""The two-level exchange: simulated ranks with a fake transport between domains that delays,
reorders and drops; and gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import topology
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency import AllToAll, open_transport
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.peer_memory import PeerMemory
from megatron_fluid.low_latency.reference import combine_reference
from megatron_fluid.low_latency.transport import (
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
)
from megatron_fluid.low_latency.two_level import TwoLevel, TwoLevelLayout
from tests.support.all_to_all_calls import (
    check_close,
    check_received,
    receive,
    receive_back,
    send,
    send_back,
)
from tests.support.fake_nvshmem import FakeNvshmem, fake_nvshmem
from tests.support.launch import on_ranks, world_group
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.moe_reference import routing
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["fake_nvshmem"]

_TOLERANCE = 1.2e-2  # three roundings to bf16


def _build(fake: FakeNvshmem, sizes: TwoLevelLayout) -> list[TwoLevel]:
    from megatron_fluid.low_latency.nvshmem import Nvshmem

    rails = [SimulatedWorkspace(sizes.domains) for _ in range(sizes.domain_size)]
    domains = [SimulatedWorkspace(sizes.domain_size) for _ in range(sizes.domains)]
    fake.ranks = [rails[g].rank(n) for g in range(sizes.domain_size) for n in range(sizes.domains)]
    found = []
    for rank in range(sizes.layout.world_size):
        n, g = divmod(rank, sizes.domain_size)
        rail = Nvshmem(sizes.rail, rails[g].rank(n))
        domain = PeerMemory(sizes.domain, domains[n].rank(g))
        found.append(TwoLevel(sizes, rank, domain, rail, torch.device("cpu")))
    return found


def _tokens(layout: Layout, turn: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(turn)
    x, ids, weights = [], [], []
    for _ in range(layout.world_size):
        m = int(torch.randint(0, layout.max_num_tokens + 1, (1,), generator=generator))
        x.append(torch.randn(m, layout.hidden_dim, generator=generator).to(torch.bfloat16))
        ids.append(routing("dropped", m, layout.num_experts, layout.experts_per_token, generator))
        weights.append(torch.rand(m, layout.experts_per_token, generator=generator))
    return x, ids, weights


@NEEDS_INTERPRETER
@pytest.mark.parametrize(("domains", "size", "k"), [(2, 2, 3), (3, 1, 2), (3, 2, 1)])
def test_simulated_ranks_match_the_reference(
    fake_nvshmem: FakeNvshmem, domains: int, size: int, k: int
) -> None:
    world, local, hidden = domains * size, 2, 16
    layout = Layout(3, local * world, k, world, 1, hidden, hidden * 2, 0)
    sizes = TwoLevelLayout(layout, size)
    ranks = _build(fake_nvshmem, sizes)
    # Tokens take slots by their ranks' indices in the domain, then by domain.
    order = [n * size + g for g in range(size) for n in range(domains)]
    slot = {rank: i for i, rank in enumerate(order)}
    for turn in range(3):
        x, ids, weights = _tokens(layout, turn)
        sources = [[table[rank] for rank in order] for table in (x, ids, weights)]
        outs, requests = [], []
        for r, two in enumerate(ranks):
            counts = torch.full((local,), -7, dtype=torch.int32)
            out = torch.zeros(local, layout.max_rows, hidden, dtype=torch.bfloat16)
            outs.append((counts, out))
            requests.append(DispatchReceive(counts, out))
            two.dispatch_send(DispatchSend(x[r], ids[r], weights[r]))
        fake_nvshmem.deliver()
        for two in ranks:
            two.forward_in_domain()
        y = []
        for r, two in enumerate(ranks):
            two.receive_in_domain(requests[r])
            two.check_errors()
            check_received((*outs[r], None), r, sources[1], sources[0])
            y.append(torch.randn(local, layout.max_rows, hidden).to(torch.bfloat16))
        combines = []
        for r, two in enumerate(ranks):
            result = torch.full_like(x[r], 2.0)
            combines.append(CombineReceive(result, ids[r], accumulate=turn == 1))
            two.send_in_domain(CombineSend(y[r], bound_m=two._count))
        for two in ranks:
            two.send_back(None)
        fake_nvshmem.deliver()
        wanted = combine_reference(sources[1], sources[2], y, local)
        for r, two in enumerate(ranks):
            two.combine_receive(combines[r])
            two.check_errors()
            reference = wanted[slot[r]] + (2.0 if turn == 1 else 0.0)
            check_close(combines[r].out, reference, _TOLERANCE)


@NEEDS_INTERPRETER
def test_a_peer_lost_between_domains_is_named_by_its_rank(fake_nvshmem: FakeNvshmem) -> None:
    layout = Layout(2, 8, 1, 4, 1, 16, 32, 0)
    ranks = _build(fake_nvshmem, TwoLevelLayout(layout, 2))
    x, ids = torch.randn(2, 16).to(torch.bfloat16), torch.zeros(2, 1, dtype=torch.int32)
    for r, two in enumerate(ranks):
        # Nothing that rank 3 sends reaches the first of its rail, rank 1.
        fake_nvshmem.dropped = {0} if r == 3 else set()
        two.dispatch_send(DispatchSend(x, ids, torch.ones(2, 1)))
    fake_nvshmem.deliver()
    for two in ranks:
        two.forward_in_domain()
    for fine in (0, 2, 3):
        ranks[fine].check_errors()
    with pytest.raises(PeerTimeoutError, match=r"rank 1.*peer 3 in .*dispatch.*between domains"):
        ranks[1].check_errors()


def test_sizes_that_two_levels_cannot_have_are_named() -> None:
    layout = Layout(2, 8, 4, 4, 1, 16, 32, 0)
    for domain_size, changed, named in (
        (3, layout, "domain_size"),
        (1, layout, "experts_per_token"),
        (2, Layout(2, 8, 2, 4, 2, 16, 32, 0), "dp_size"),
    ):
        with pytest.raises(ConfigError, match=named):
            TwoLevelLayout(changed, domain_size)


def _open(rank: int, world: int, *sizes: int, **named: Any) -> AllToAll:
    """An all-to-all over two levels of gloo, of (C, E, K, H)."""
    c, experts, k, hidden = sizes
    named = {"transport": "gloo+gloo", "domain_size": 2, **named}
    return AllToAll.internode(c, experts, k, rank, world, 1, hidden, hidden * 2, 0, **named)


@on_ranks(4)
def test_late_weights_find_their_tokens_whether_or_not_the_bound_comes_with_them(
    rank: int, world: int
) -> None:
    ata = _open(rank, world, 4, 4, 1, 16)
    x, weights = torch.full((4, 16), 1.0 + rank).to(torch.bfloat16), torch.full((4, 1), 2.0**rank)
    ids, bound = torch.tensor([[0], [1 << 40], [0], [0]]), torch.tensor([2], dtype=torch.int32)
    send(ata, x, ids, bound_m=bound)
    counts, out, _ = receive(ata)
    assert counts.tolist() == [4 if rank == 0 else 0]
    send_back(ata, out, weights)  # without the bound
    result = receive_back(ata, torch.full_like(x, 5.0), ids, weights, bound_m=bound)
    assert result[:, 0].tolist() == [(1 + rank) * 2**rank, 0, 5, 5]
    ata.destroy()


@on_ranks(2)
def test_after_lost_weights_every_call_fails(rank: int, world: int) -> None:
    dist.barrier()  # the bound is for lost weights, not for a process that starts late
    ata = _open(rank, world, 4, 4, 1, 16, domain_size=1, timeout_s=4.0)
    x, ids = torch.ones(4, 16).to(torch.bfloat16), torch.zeros(4, 1, dtype=torch.int32)
    send(ata, x, ids)
    out = receive(ata)[1]
    if rank == 0:
        lost = r"rank 0.*combine weights.*between domains"
        with pytest.raises(PeerTimeoutError, match=lost):
            send_back(ata, out, torch.ones(4, 1))
        with pytest.raises(PeerTimeoutError, match=lost):
            send(ata, x, ids)


@on_ranks(4)
def test_hosts_are_the_domains_where_no_size_is_given(rank: int, world: int) -> None:
    group, sizes = world_group(), (4, 8, 2, rank, world, 1, 16, 32, 0)
    topology.socket.gethostname = lambda: f"host{rank // 2}"  # type: ignore[attr-defined]
    assert open_transport.domain_size_of(group, None) == 2
    ata = _open(rank, world, 4, 8, 2, 16, domain_size=None)
    assert "2 domains of 2 ranks" in ata.transport_report()
    ata.destroy()
    plain = AllToAll.internode(*sizes)
    assert plain.transport == "gloo" and "CUDA is not available" in plain.transport_reason
    with pytest.raises(ConfigError, match=r"transport.*backend of the group, gloo"):
        _open(rank, world, 4, 8, 2, 16, transport="nvlink+nccl")
    with pytest.raises(ConfigError, match=r"transport: found 'gloo\+gloo'"):
        AllToAll.intranode(*sizes, transport="gloo+gloo")
    layout = Layout(4, 8, 2, 4, 1, 16, 32, 0)
    reason = open_transport.two_level_unsupported_reason(group, layout, 1, True)
    assert "one rank" in str(reason)
    topology.socket.gethostname = lambda: f"host{min(rank, 1)}"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="hosts that hold the same number of consecutive ranks"):
        open_transport.domain_size_of(group, None)


@pytest.mark.parametrize("between", ["nothing", "barrier", "other groups"])
@pytest.mark.parametrize("world", [1, 4])
@on_ranks()
def test_two_levels_open_again_whatever_groups_there_were(
    rank: int, world: int, between: str
) -> None:
    for turn in range(3):
        if between == "other groups":  # each rank is in another number of groups than the next one
            for r in range(min(turn + 1, world)):
                dist.new_group([r])
        ata = _open(rank, world, 4, world, 1, 16, domain_size=min(2, world))
        x = torch.full((4, 16), 1.0 + rank).to(torch.bfloat16)
        ids = torch.zeros(4, 1, dtype=torch.int32)
        send(ata, x, ids, torch.full((4, 1), 2.0))
        send_back(ata, receive(ata)[1])
        assert torch.equal(receive_back(ata, torch.zeros_like(x), ids), 2 * x), turn
        ata.destroy()
        if between == "barrier":
            dist.barrier()
