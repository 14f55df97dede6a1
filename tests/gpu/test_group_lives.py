"""Layers of one shape after another, on groups that are closed, or destroyed and made again: nobody
hangs, and the gradients are those of fp32. Kernel caches are empty in each run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import MoEBaseline, MoEConfig, MoELayer, close_group
from tests.support.launch import run_ranks
from tests.support.machine import GPUS, RANKS

LIVES = 10
WORLD = max(2, min(RANKS, 4))
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU, found none")]


def _use_empty_caches(rank: int, folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _config(life: int) -> MoEConfig:
    """Every expert is chosen, so that bf16 and fp32 route alike."""
    experts = (4, 8)[life % 2]
    hidden, ffn = (256, 512, 384)[life % 3], (256, 128)[life // 2 % 2]
    return MoEConfig(
        hidden_size=hidden, ffn_hidden_size=ffn, num_experts=experts, top_k=experts,
        shared_ffn_hidden_size=128 * (life % 2),
    )  # fmt: skip


def _gradients(layer: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    layer(x).float().square().sum().mul(0.1).backward()
    assert x.grad is not None
    found = {"x": x.grad.float()}
    for name, parameter in layer.named_parameters():
        found[name] = parameter.grad.float()
    return found


def _one_life(life: int, rank: int, group: Any, device: torch.device) -> float:
    """The largest relative error of a gradient against MoEBaseline in fp32."""
    config = _config(life)
    layer = MoELayer(config, group, device=device, dtype=torch.bfloat16)
    right = MoEBaseline(config, group, device=device, dtype=torch.float32)
    right.load_state_dict(layer.state_dict())
    draws = torch.Generator().manual_seed(97 * life + rank)
    tokens = (300, 0, 77)[(life + rank) % 3] + 5 * life
    x = torch.randn(tokens, config.hidden_size, generator=draws).to(device, torch.bfloat16)
    ours, theirs = _gradients(layer, x), _gradients(right, x.float())
    errors = [float((ours[n] - g).norm() / (g.norm() + 1e-12)) for n, g in theirs.items()]
    return max(errors)


def lives(rank: int, world: int, made_again: bool, folder: str) -> list[float]:
    _use_empty_caches(rank, folder)
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for life in range(LIVES):
        group: Any = dist.group.WORLD
        if made_again:
            group = dist.new_group(list(range(world)))
        found.append(_one_life(life, rank, group, device))
        close_group(group)
        if made_again:
            dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("made_again", [False, True], ids=["closed", "made again"])
def test_layers_of_ten_lives_of_a_group_have_the_gradients_of_fp32(
    made_again: bool, tmp_path: Path
) -> None:
    found = run_ranks(lives, WORLD, made_again, str(tmp_path), backend="nccl", timeout_s=400)
    assert max(max(errors) for errors in found) < 0.01, found


def megatron_lives(rank: int, world: int, folder: str) -> list[dict[str, float]]:
    """Megatron's groups are destroyed and made again, with expert parallelism of each life's own
    size; its own layer with the same weights is the reference."""
    _use_empty_caches(rank, folder)
    from megatron.core import parallel_state

    from tests.support import tiny_gpt

    found = []
    for life in range(LIVES):
        tiny_gpt.parallel(expert_model_parallel_size=world)
        config = tiny_gpt.config_of(
            hidden_size=(128, 256)[life % 2], moe_ffn_hidden_size=(256, 128, 384)[life % 3],
            num_moe_experts=8, moe_router_topk=(8, 4)[life % 2], moe_router_dtype="fp64",
        )  # fmt: skip
        draws = torch.Generator().manual_seed(13 * life + rank)
        x = torch.randn(32 + life, 2, config.hidden_size, generator=draws).cuda()
        grads = []
        for on in (False, True):
            with tiny_gpt.plug_in(on, moe_backend="nvlink", timeout_s=60.0):
                layer = tiny_gpt.moe_layer(config).cuda()
                given = x.clone().requires_grad_()
                layer(given)[0].square().sum().mul(0.1).backward()
                assert given.grad is not None
                grads.append([given.grad, *(p.grad for p in layer.parameters())])
        errors = [float((a - b).norm() / (b.norm() + 1e-12)) for b, a in zip(*grads, strict=True)]
        found.append({"error": max(errors)})
        parallel_state.destroy_model_parallel()
    return found


def test_megatrons_groups_made_again_keep_the_gradients(tmp_path: Path) -> None:
    ranks = run_ranks(megatron_lives, WORLD, str(tmp_path), backend="nccl", timeout_s=400)
    assert max(life["error"] for lives in ranks for life in lives) < 0.01, ranks
