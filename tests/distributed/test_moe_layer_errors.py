"""What MoE layers, the overlapped function and the seed's function refuse."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_fluid import (
    MoEBaseline,
    MoELayer,
    MultiCardOverlapContext,
    TransformerLayer,
    close_group,
    moe_multicard_p2p_overlap_forward,
)
from megatron_fluid.attention.layer import sum_gradients
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.moe.rounds.plan import ExactPlan
from tests.support.expert_calls import overlapped_moe
from tests.support.launch import on_ranks
from tests.support.moe_layers import CONFIG, F64, group, layer_of


@on_ranks(2)
def test_a_layer_names_the_setting_that_is_wrong(rank: int, world: int) -> None:
    experts = "num_experts: found 7, allowed: a multiple of the 2 expert-parallel ranks"
    with pytest.raises(ConfigError, match=experts):
        MoELayer({**CONFIG, "num_experts": 7}, group())
    with pytest.raises(ConfigError, match="group: found None"):
        MoEBaseline(CONFIG, None)
    for backend, width, said in (
        ("nvlink", 8, "'nvlink', allowed: auto or rounds, because its tensors are on the cpu"),
        ("nvlnk", 8, "backend: found 'nvlnk', allowed: auto, nvlink, hierarchical, rounds, local"),
        ("auto", 9, "layer 0 moe: last dimension of tokens: found 9, allowed: 8"),
    ):
        with pytest.raises(ConfigError, match=said):
            MoELayer({**CONFIG, "backend": backend}, group(), dtype=F64)(
                torch.ones(3, width, dtype=F64)
            )


@on_ranks(2)
def test_what_differs_on_a_rank_is_an_error_on_all_at_once(rank: int, world: int) -> None:
    dtype = torch.float16 if rank else torch.bfloat16
    layer = MoELayer(CONFIG, group()).to(dtype)
    with pytest.raises(ConfigError, match="tokens: dtype: found 'torch.bfloat16' on rank 0"):
        layer(torch.ones(3, 8, dtype=dtype))
    with torch.autocast("cpu", enabled=not rank), pytest.raises(ConfigError, match="tokens: dtype"):
        MoELayer(CONFIG, group())(torch.ones(3, 8))
    weights = [torch.nn.Parameter(torch.ones(2), requires_grad=rank == i) for i in range(2)]
    with pytest.raises(ConfigError, match="sum_gradients: parameter .: found"):
        sum_gradients(weights, group())
    with pytest.raises(ConfigError if rank else FluidError, match="top_k: found 9"):
        MoELayer({**CONFIG, "top_k": 9 if rank else 3}, group())
    with pytest.raises(ConfigError, match="timeout_s: found nan, allowed: a number"):
        MultiCardOverlapContext("cpu", group=group(), timeout_s=float("nan"))


@on_ranks(2, env={"MEGATRON_FLUID_TIMEOUT_S": "60"})
def test_a_layer_that_is_refused_on_one_rank_is_so_on_all(rank: int, world: int) -> None:
    """Also in the first call of a group, whichever rank it is and however the group is given."""
    late = mock.patch("megatron_fluid.comm.agreement._JOIN_S", 60.0)  # however late a rank comes
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    layers = (MoELayer, mesh["ep"]), (MoELayer, mesh["ep"], mesh), (TransformerLayer, group())
    for refused, (kind, *given) in itertools.product(range(2), layers):
        error, said, sizes = FluidError, f"rank {refused} raised ConfigError", CONFIG
        if rank == refused:
            error, said, sizes = ConfigError, "found", CONFIG | {"dx_chunks": 0}
        with late, pytest.raises(error, match=said):
            layer_of(kind, given[-1 if rank == refused else 0], sizes)
        dist.barrier()
        close_group(group())  # the next one is the first call again


@on_ranks(2)
def test_calls_name_the_argument_that_is_wrong_and_the_group_still_works(
    rank: int, world: int
) -> None:
    plan = ExactPlan(rank, ((2,), (3,)), ((2 + rank,),) * 2)
    w1, w2, x = (torch.ones(size, dtype=F64) for size in ((1, 4, 8), (1, 8, 4), (5, 8)))
    good: dict[str, Any] = {"x": x, "probs": None, "plan": plan, "w1": w1, "w2": w2}
    good |= {"activation": "gelu", "rounds": shared_rounds(group())}
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
            overlapped_moe(**good | wrong)
    weights = w1.transpose(1, 2), w2.transpose(1, 2)
    for splits, tokens, said in (
        ([4, 6], [2, 3], r"layer 4 moe: output_splits: found \[4, 6\], allowed: \[2, 3\]"),
        ([4, 6], [2, 3, 1], r"tokens_per_expert: found \[3\], allowed: \[2, 1\]"),
    ):
        counts = 4, 1, tokens, [[2], [3]]
        with pytest.raises(ConfigError, match=said):
            moe_multicard_p2p_overlap_forward(
                x, [2, 3], splits, *weights, group(), "gelu", MultiCardOverlapContext("cpu", 2),
                *counts,
            )  # type: ignore[arg-type]  # fmt: skip
    other = [t.to(torch.float16 if rank else torch.bfloat16) for t in (x, *weights)]
    with pytest.raises(ConfigError, match="moe: tokens: dtype: found 'torch.bfloat16' on rank 0"):
        moe_multicard_p2p_overlap_forward(
            other[0], [2, 3], [2, 3], *other[1:], group(), "gelu",
            MultiCardOverlapContext("cpu", 2), *counts,
        )  # type: ignore[arg-type]  # fmt: skip
    assert overlapped_moe(**good).shape == x.shape
