"""What MoE layers refuse, and what they say of a rank that dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import (
    MoEBaseline,
    MoELayer,
    MultiCardOverlapContext,
    moe_multicard_p2p_overlap_forward,
)
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.moe.rounds.plan import ExactPlan
from tests.support.expert_calls import overlapped_moe
from tests.support.launch import run_ranks, run_ranks_outcomes
from tests.support.moe_layers import CONFIG, F64, LIMIT_S, group, stack, tokens_of

# ---- errors


def refusal_body(rank: int, world: int) -> None:
    rounds = shared_rounds(group())
    with pytest.raises(
        ConfigError,
        match="num_experts: found 7, allowed: a multiple of the 2 expert-parallel ranks",
    ):
        MoELayer({**CONFIG, "num_experts": 7}, group())
    with pytest.raises(ConfigError, match="group: found None"):
        MoEBaseline(CONFIG, None)
    with pytest.raises(
        ConfigError,
        match="found 'nvlink', allowed: auto or rounds, because its tensors are on the cpu",
    ):
        MoELayer({**CONFIG, "backend": "nvlink"}, group(), dtype=F64)(torch.ones(3, 8, dtype=F64))
    with pytest.raises(
        ConfigError,
        match="backend: found 'nvlnk', allowed: auto, nvlink, hierarchical, rounds, local, or None",
    ):
        MoELayer({**CONFIG, "backend": "nvlnk"}, group(), dtype=F64)(torch.ones(3, 8, dtype=F64))
    layer = MoELayer(CONFIG, group(), dtype=F64)
    with pytest.raises(
        ConfigError, match="layer 0 moe: last dimension of tokens: found 9, allowed: 8"
    ):
        layer(torch.ones(3, 9, dtype=F64))
    plan = ExactPlan(rank, ((2,), (3,)), ((2 + rank,),) * 2)
    w1, w2, x = (torch.ones(size, dtype=F64) for size in ((1, 4, 8), (1, 8, 4), (5, 8)))
    good = {"x": x, "probs": None, "plan": plan, "w1": w1, "w2": w2, "activation": "gelu"}
    good["rounds"] = rounds
    for expected, wrong in {
        r"moe: tokens: found \[4, 8\], allowed: \[5, hidden\]": {"x": x[:4]},
        r"moe: probs: found \[4\], allowed: \[5\]": {"probs": x[:4, 0]},
        r"width of weight2: found 4, allowed: 2 \(swiglu of 4\)": {"activation": "swiglu"},
        r"hidden size of the weights: found \[7, 8\], allowed: 8": {"w1": w1[..., :7]},
        r"dtype of the weights: found torch.float32": {"w1": w1.float()},
        r"weight1: found \[4, 8\], allowed: three dimensions": {"w1": w1[0]},
        r"dx_chunks: found 0": {"dx_chunks": 0},
        r"activation: found 'swish'": {"activation": "swish"},
        f"the plan is for rank 0 of 1, the group's rank is {rank} of 2": {
            "plan": ExactPlan(0, ((5,),), ((5,),))
        },
    }.items():
        with pytest.raises(ConfigError, match=expected):
            overlapped_moe(**good | wrong)  # type: ignore[arg-type]
    context = MultiCardOverlapContext("cpu", 2)
    seed = [
        x,
        [2, 3],
        [4, 6],
        w1.transpose(1, 2),
        w2.transpose(1, 2),
        group(),
        "gelu",
        context,
        4,
        1,
        [2, 3],
        [[2], [3]],
    ]
    with pytest.raises(
        ConfigError, match=r"layer 4 moe: output_splits: found \[4, 6\], allowed: \[2, 3\]"
    ):
        moe_multicard_p2p_overlap_forward(*seed)  # type: ignore[arg-type]
    seed[10] = [2, 3, 1]
    with pytest.raises(ConfigError, match=r"tokens_per_expert: found \[3\], allowed: \[2, 1\]"):
        moe_multicard_p2p_overlap_forward(*seed)  # type: ignore[arg-type]
    # After all that the group still works.
    assert overlapped_moe(**good).shape == x.shape  # type: ignore[arg-type]


def test_refusals_name_what_is_wrong() -> None:
    run_ranks(refusal_body, 2, timeout_s=LIMIT_S)


def lost_rank_body(rank: int, world: int, where: str) -> str:
    """Rank 1 leaves in the second layer's forward, or in the backward of the first."""
    set_config(FluidConfig(timeout_s=6.0))
    layers = stack(2)

    def leave(*unused: Any) -> None:
        if rank == 1:
            os._exit(0)

    layers[1].register_forward_pre_hook(leave) if where == "forward" else None
    try:
        x = tokens_of(rank + 1).requires_grad_()
        y = layers[0](x)
        if where == "backward":
            y.register_hook(leave)
        layers[1](y).sum().backward()
        dist.barrier()
    except PeerTimeoutError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies_is_named(where: str) -> None:
    outcomes = run_ranks_outcomes(lost_rank_body, 3, where, timeout_s=LIMIT_S)
    layer = "layer 1 moe" if where == "forward" else "layer 0 moe"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.error
        assert f"rank {outcome.rank}: no answer from" in outcome.value
        assert layer in outcome.value
