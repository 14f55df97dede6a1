"""Two levels between hosts: outputs and every gradient as without them, each token across once for
each host, and no byte more than the plan says."""

import os
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound, Transfer
from megatron_fluid.moe import expert_weights
from megatron_fluid.moe.hierarchical.plan import plan_hierarchical
from tests.support.expert_calls import hierarchical_moe
from tests.support.launch import on_ranks, run_ranks
from tests.support.moe_cases import ROUTINGS, Case, run_cases

TWO_OF_TWO, UNEVEN, INTERLEAVED = (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1)


def on_hosts(hosts: Sequence[int], rank: int) -> None:
    """This rank says that it is on the host that the layout gives it."""
    os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{hosts[rank]}"


def cases_body(rank: int, world: int, hosts: Sequence[int], cases: Sequence[Case]) -> float:
    on_hosts(hosts, rank)
    return run_cases(rank, world, cases)


@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN, INTERLEAVED, (0, 1, 2, 3), (0, 1)])
def test_every_routing_equals_the_reference(hosts: tuple[int, ...]) -> None:
    cases = [Case(routing, chunks=chunks) for routing in ROUTINGS for chunks in (1, 2)]
    run_ranks(cases_body, len(hosts), hosts, cases)


@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN])
def test_settings_of_a_training_equal_the_reference(hosts: tuple[int, ...]) -> None:
    cases = [
        Case("masked", chunks=1, layers=3, microbatches=2, deferred=True),
        Case("masked", chunks=2, experts_per_rank=1, layers=2, microbatches=2, deferred=True),
        Case("uneven", chunks=3, layers=2, top_k=5, tokens=29),
        Case("random", chunks=5, tokens=3, weights="tuple"),
        Case("random", chunks=2, weights="in_out", train_tokens=False),
        Case("empty experts", chunks=2, activation="callable", deferred=True),
        Case("random", chunks=2, dtype=torch.float32, hidden=64, ffn=48),
        Case("random", chunks=2, dtype=torch.bfloat16, hidden=64, ffn=48),
    ]
    run_ranks(cases_body, len(hosts), hosts, cases)


TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 37, 32, 24, 16, 8


class CountedRounds(P2PRounds):
    """Counts the bytes that are sent to each rank."""

    sent_bytes: list[int]

    def exchange(
        self, operation: str, index: int, transfers: Sequence[Transfer], call: int = 0
    ) -> PendingRound:
        for peer, sent, _ in transfers:
            self.sent_bytes[peer] += sum(tensor.nbytes for tensor in sent)
        return super().exchange(operation, index, transfers, call)


def bytes_body(rank: int, world: int, hosts: Sequence[int], chunks: int) -> tuple[int, int]:
    """The bytes that a training step sent to other hosts, and the rows that the plan lets cross."""
    on_hosts(hosts, rank)
    rounds = CountedRounds(dist.group.WORLD)
    rounds.sent_bytes = [0] * world
    g = torch.Generator().manual_seed(7)
    ids = torch.rand(world, TOKENS, EXPERTS, generator=g).argsort(2)[..., :TOP_K]
    own, domains = rounds.domains[rank], rounds.domains
    reached = [{domains[e * world // EXPERTS] for e in token} for token in ids[rank].tolist()]
    crossing = sum(len(hosts_of - {own}) for hosts_of in reached)
    x = torch.randn(TOKENS, HIDDEN).requires_grad_()
    probs = torch.rand(TOKENS, TOP_K).requires_grad_()
    w1 = torch.randn(EXPERTS // world, 2 * FFN, HIDDEN)
    w2 = torch.randn(EXPERTS // world, HIDDEN, FFN)
    routed = plan_hierarchical(ids[rank], EXPERTS, rounds, 0, chunks=chunks)
    y = hierarchical_moe(x, probs, routed, w1, w2, "swiglu", rounds)
    y.sum().backward()
    sent = zip(rounds.sent_bytes, domains, strict=True)
    return sum(count for count, domain in sent if domain != own), crossing


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN])
def test_a_token_crosses_once_for_each_host_and_not_a_byte_more(
    hosts: tuple[int, ...], chunks: int
) -> None:
    sent, crossing = zip(*run_ranks(bytes_body, len(hosts), hosts, chunks), strict=True)
    # Four times a row: tokens and dy go, y and dX come back, probabilities with the first and the
    # last. What comes back is sent by the gateways: the sum over ranks is what is known.
    row = 4 * HIDDEN * 4 + 2 * TOP_K * 4
    assert sum(sent) == row * sum(crossing)


@on_ranks(2)
def test_one_host_refuses_it_by_name(rank: int, world: int) -> None:
    on_hosts((0, 0), rank)
    layer = MoELayer(MoEConfig(16, 24, 4, 2, backend="hierarchical"), dist.group.WORLD)
    with pytest.raises(ValueError, match="hierarchical.*on one"):
        layer(torch.zeros(3, 16))


@on_ranks(2, env={"MEGATRON_FLUID_TIMEOUT_S": "60"})
def test_after_an_error_that_all_ranks_catch_the_next_call_is_right(rank: int, world: int) -> None:
    """Receives of the failed call are posted still, and take nothing of the next one."""
    on_hosts((0, 1), rank)
    config = MoEConfig(16, 24, 4, 2, backend="hierarchical")
    layer = MoELayer(config, dist.group.WORLD, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    wanted = layer(x)
    for fails in (1, 2):
        calls = [*[mock.DEFAULT] * (fails - 1), torch.OutOfMemoryError("no memory")]
        real = mock.Mock(wraps=expert_weights.grouped_matmul, side_effect=calls)
        with (
            mock.patch.object(expert_weights, "grouped_matmul", real),
            pytest.raises(torch.OutOfMemoryError),
        ):
            layer(torch.randn(6, 16, dtype=torch.float64))
        torch.testing.assert_close(layer(x), wanted)
