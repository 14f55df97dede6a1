"""Two levels between hosts: outputs and every gradient as without them, each token across once for
each host, and no byte more than the plan says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.moe.hierarchical import choice, transport, wire
from megatron_fluid.moe.hierarchical.choice import ExpertCost, ExpertShape
from megatron_fluid.moe.hierarchical.model import FORMS, Form, Wire
from megatron_fluid.moe.hierarchical.plan import rows_between_hosts
from megatron_fluid.moe.hierarchical.transport import plan_hierarchical
from megatron_fluid.moe.rounds.plan import ExactPlan, permute, permute_probs, unpermute
from megatron_fluid.topology import HostLayout
from tests.support.expert_calls import hierarchical_moe, overlapped_moe
from tests.support.launch import run_ranks
from tests.support.moe_cases import ROUTINGS, Case, run_cases

JOINED = Form(joined=True)
TWO_OF_TWO, UNEVEN, INTERLEAVED = (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1)


def on_hosts(hosts: Sequence[int], rank: int) -> None:
    """This rank says that it is on the host that the layout gives it."""
    os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{hosts[rank]}"


def cases_body(rank: int, world: int, hosts: Sequence[int], cases: Sequence[Case]) -> float:
    on_hosts(hosts, rank)
    return run_cases(rank, world, cases)


@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN, INTERLEAVED, (0, 1, 2, 3), (0, 1)])
def test_every_routing_equals_the_reference(hosts: tuple[int, ...]) -> None:
    cases = [Case(routing, form=form) for routing in ROUTINGS for form in (Form(2), JOINED)]
    run_ranks(cases_body, len(hosts), hosts, cases, timeout_s=240)


@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN])
def test_settings_of_a_training_equal_the_reference(hosts: tuple[int, ...]) -> None:
    cases = [
        Case("masked", form=JOINED, layers=3, microbatches=2, deferred=True),
        Case("masked", form=Form(1, 1.0), layers=2, microbatches=2, deferred=True),
        Case("uneven", form=Form(3), layers=2, top_k=5, tokens=29),
        Case("random", form=Form(5), tokens=3, weights="tuple"),
        Case("random", form=Form(2), weights="in_out", train_tokens=False),
        Case("empty experts", form=Form(2), activation="callable", deferred=True),
        Case("random", form=Form(2), dtype=torch.float32, hidden=64, ffn=48),
        Case("random", form=Form(2), dtype=torch.bfloat16, hidden=64, ffn=48),
    ]
    run_ranks(cases_body, len(hosts), hosts, cases, timeout_s=240)


TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 37, 32, 24, 16, 8


def one_level_body(rank: int, world: int, hosts: Sequence[int]) -> None:
    on_hosts(hosts, rank)
    rounds = P2PRounds(dist.group.WORLD)
    g = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=g).argsort(1)[:, :TOP_K]
    ids = torch.where(torch.rand(ids.shape, generator=g) < 0.2, -1, ids)
    shapes = ((TOKENS, HIDDEN), (TOKENS, TOP_K), (EXPERTS // world, 2 * FFN, HIDDEN))
    shapes += ((EXPERTS // world, HIDDEN, FFN),)
    drawn = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    results = []
    for form in (None, Form(3), Form(2, 1.0), JOINED):
        x, probs, w1, w2 = (t.clone().requires_grad_() for t in drawn)
        if form is not None:
            routed = plan_hierarchical(ids, EXPERTS, rounds, 0, form)
            y = hierarchical_moe(x, probs, routed, w1, w2, "swiglu", rounds)
        else:
            plan = ExactPlan.from_topk(ids, EXPERTS, rounds)
            rows = permute(x, plan), permute_probs(probs, plan)
            y = unpermute(overlapped_moe(*rows, plan, w1, w2, "swiglu", rounds), plan)
        y.square().sum().backward()
        results.append([y, x.grad, probs.grad, w1.grad, w2.grad])
    for one, *others in zip(*results, strict=True):
        assert one is not None and one.abs().max() > 1e-3
        for two in others:
            torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN])
def test_it_equals_one_level_in_fp32(hosts: tuple[int, ...]) -> None:
    run_ranks(one_level_body, len(hosts), hosts)


def bytes_body(
    rank: int, world: int, hosts: Sequence[int], form: Form | None
) -> tuple[list[int], int, list[int]]:
    """What each rank got, the rows that the plan lets cross, and what a training step sent."""
    on_hosts(hosts, rank)
    rounds = P2PRounds(dist.group.WORLD)
    g = torch.Generator().manual_seed(7)
    ids = torch.rand(world, TOKENS, EXPERTS, generator=g).argsort(2)[..., :TOP_K]
    crossing = rows_between_hosts(ids, EXPERTS, HostLayout(tuple(rounds.domains)))[rank]
    x = torch.randn(TOKENS, HIDDEN).requires_grad_()
    probs = torch.rand(TOKENS, TOP_K).requires_grad_()
    w1 = torch.randn(EXPERTS // world, 2 * FFN, HIDDEN)
    w2 = torch.randn(EXPERTS // world, HIDDEN, FFN)
    if form is not None:
        routed = plan_hierarchical(ids[rank], EXPERTS, rounds, 0, form)
        y = hierarchical_moe(x, probs, routed, w1, w2, "swiglu", rounds)
    else:
        plan = ExactPlan.from_topk(ids[rank], EXPERTS, rounds)
        rows = permute(x, plan), permute_probs(probs, plan)
        y = unpermute(overlapped_moe(*rows, plan, w1, w2, "swiglu", rounds), plan)
    y.sum().backward()
    return rounds.sent_bytes, crossing, list(rounds.domains)


def across(results: list[tuple[list[int], int, list[int]]]) -> list[int]:
    """Bytes that each rank sent to other hosts."""
    domains = results[0][2]
    return [
        sum(sent for peer, sent in enumerate(to) if domains[peer] != domains[rank])
        for rank, (to, *_) in enumerate(results)
    ]


@pytest.mark.parametrize("form", [Form(3), JOINED], ids=["pieces", "joined"])
@pytest.mark.parametrize("hosts", [TWO_OF_TWO, UNEVEN])
def test_a_token_crosses_once_for_each_host_and_not_a_byte_more(
    hosts: tuple[int, ...], form: Form
) -> None:
    results = run_ranks(bytes_body, len(hosts), hosts, form)
    # Four times a row: tokens and dy go, y and dX come back, probabilities with the first and the
    # last. What comes back is sent by the gateways: the sum over ranks is what is known.
    row = 4 * HIDDEN * 4 + 2 * TOP_K * 4
    assert sum(across(results)) == row * sum(crossing for _, crossing, _ in results)


def test_it_sends_less_than_a_row_for_each_choice() -> None:
    two, one = (run_ranks(bytes_body, 4, TWO_OF_TWO, form) for form in (Form(3), None))
    # top-8 of 16: half of the choices are on the other host, nearly always one of them
    assert sum(across(two)) < 0.3 * sum(across(one))


def layer_body(rank: int, world: int, hosts: Sequence[int], wanted: str) -> list[torch.Tensor]:
    on_hosts(hosts, rank)
    torch.manual_seed(rank)
    config = MoEConfig(16, 24, 8, 2, shared_ffn_hidden_size=8, backend=wanted)
    layer = MoELayer(config, dist.group.WORLD, dtype=torch.float64)
    x = torch.randn(11, 16, dtype=torch.float64).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert layer.backend == ("hierarchical" if wanted == "auto" else wanted)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def test_auto_takes_it_between_hosts_and_the_layer_is_the_same() -> None:
    one, two = (run_ranks(layer_body, 4, TWO_OF_TWO, b) for b in ("rounds", "auto"))
    for rank in range(4):
        torch.testing.assert_close(two[rank], one[rank], rtol=1e-11, atol=1e-11)


def measured_body(rank: int, world: int) -> list[Form]:
    """The forms of a call by a measured wire, of one after the wire is forgotten, and of one by
    bytes."""
    on_hosts((0, 1), rank)
    torch.manual_seed(rank)
    layer = MoELayer(MoEConfig(16, 24, 8, 2), dist.group.WORLD)
    seen = noted_forms()
    layer(torch.randn(11, 16))
    found = wire.host_wire(layer.rounds)
    assert found.bytes_per_s > 0 and found.latency_s > 0
    layer(torch.randn(11, 16))
    assert wire.host_wire(layer.rounds) is found
    wire.forget_wires()
    layer(torch.randn(11, 16))
    assert wire.host_wire(layer.rounds) is not found
    set_config(FluidConfig(deterministic=True))
    layer(torch.randn(11, 16))
    return seen


def test_a_group_measures_its_wire_once_and_all_ranks_take_the_same_form() -> None:
    first, second = run_ranks(measured_body, 2)
    assert first == second and len(first) == 4
    assert all(form in FORMS for form in first[:3])
    assert first[3] == Form(1)


def refused_body(rank: int, world: int) -> str:
    on_hosts((0, 0), rank)
    layer = MoELayer(MoEConfig(16, 24, 4, 2, backend="hierarchical"), dist.group.WORLD)
    try:
        layer(torch.zeros(3, 16))
    except ValueError as error:
        return str(error)
    return ""


def test_one_host_refuses_it_by_name() -> None:
    for said in run_ranks(refused_body, 2):
        assert "hierarchical" in said and "on one" in said


def recomputed_body(rank: int, world: int) -> list[bool]:
    """By what two passes of a checkpointed layer choose their forms."""
    on_hosts((0, 1), rank)
    torch.manual_seed(rank)
    layer = MoELayer(MoEConfig(16, 24, 8, 2), dist.group.WORLD)
    learning: list[bool] = []

    def noted(*given: Any) -> Form:
        learning.append(given[-1].learns)
        return choice.choose_form(*given)

    transport.choose_form = noted
    x = torch.randn(11, 16).requires_grad_()
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    return learning


def test_a_recomputation_takes_the_form_of_its_forward() -> None:
    for learning in run_ranks(recomputed_body, 2):
        assert learning == [True, True]


def noted_forms() -> list[Form]:
    """The forms that this process chooses from now on."""
    seen: list[Form] = []

    def noted(*given: Any) -> Form:
        seen.append(choice.choose_form(*given))
        return seen[-1]

    transport.choose_form = noted
    return seen


def mixed_body(rank: int, world: int) -> dict[str, Form]:
    """The form of a call by which ranks record gradients, where that makes a difference: the wire
    and the experts take fixed times."""
    on_hosts((0, 1), rank)
    rounds = P2PRounds(dist.group.WORLD)
    choice.host_wire = lambda rounds: Wire(1.49e6 / 17e-3)
    choice.expert_cost = lambda *given: ExpertCost(row_s=32e-6, pass_s=1.3e-3)
    seen = noted_forms()
    shape = ExpertShape(512, 2048, 1024, torch.float32)
    ids = torch.tensor([0, 1] if rank else [2, 3]).repeat(256, 1)  # both on the other host
    # One after the other: the first learns how many tokens there are, by a second all-gather.
    recording = {"first": [0], "second": [1], "both": [0, 1], "none": []}
    for ranks in recording.values():
        with torch.set_grad_enabled(rank in ranks):
            plan = plan_hierarchical(ids, 4, rounds, 2048, experts=shape)
        assert plan.joined == seen[-1].joined and len(plan.pieces) == seen[-1].chunks + 1
    return dict(zip(recording, seen, strict=True))


def test_ranks_of_which_one_records_gradients_take_the_same_form() -> None:
    one, other = run_ranks(mixed_body, 2)
    assert one == other
    assert one["first"] == one["second"] == one["both"]
    assert one["none"] != one["both"]  # so that a rank that asked itself alone would be found out


def deterministic_body(rank: int, world: int) -> Form:
    """The form of a call for which one rank alone wants bytes to decide."""
    on_hosts((0, 1), rank)
    rounds = P2PRounds(dist.group.WORLD)
    set_config(FluidConfig(deterministic=rank == 1))
    choice.host_wire = lambda rounds: pytest.fail("the wire was timed")
    seen = noted_forms()
    shape = ExpertShape(512, 2048, 1024, torch.float32)
    plan_hierarchical(torch.tensor([[0, 2]] * 8), 4, rounds, 2048, experts=shape)
    return seen[-1]


def test_a_rank_that_wants_no_times_to_decide_decides_for_all() -> None:
    one, other = run_ranks(deterministic_body, 2)
    assert one == other
