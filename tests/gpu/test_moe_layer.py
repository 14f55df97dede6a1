"""The standalone MoE layer on GPUs computes what the plain all-to-all layer does, over symmetric
memory, in rounds and on two levels between hosts."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from megatron_fluid import MoEBaseline, MoEConfig, MoELayer
from tests.support.launch import run_ranks
from tests.support.machine import RANKS, SHARED

WORLD = min(RANKS, 4)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD < 2, reason="needs two ranks on GPUs")]
CONFIG = {
    "hidden_size": 512,
    "ffn_hidden_size": 256,
    "num_experts": 16,
    "top_k": 4,
    "shared_ffn_hidden_size": 256,
}


def run(layer: MoELayer | MoEBaseline, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    x = tokens.clone().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.float().square().mean().backward()
    found = {"output": output, "x": x.grad}
    found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {name: value.detach().float() for name, value in found.items() if value is not None}


def compare(rank: int, world: int, backend: str) -> dict[str, float]:
    """Relative differences from the all-to-all layer with the same weights, in bf16 like it, so
    that both route alike; three calls, uneven ranks, once without tokens; in the last one rank
    alone brings more than any had in the first.
    """
    if backend == "hierarchical":  # half of the ranks say that they are on another host
        os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{2 * rank // world}"
    device = torch.device("cuda", torch.cuda.current_device())
    group = dist.group.WORLD
    config = MoEConfig(**CONFIG, backend=backend)
    layer = MoELayer(config, group, device=device, dtype=torch.bfloat16)
    plain = MoEBaseline(config, group, device=device, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    errors: dict[str, float] = {}
    for call, tokens in enumerate((600 + 40 * rank, 130 * rank, 900 if rank == 1 else 50)):
        generator = torch.Generator(device).manual_seed(10 * call + rank)
        x = torch.randn(
            tokens, CONFIG["hidden_size"], device=device, generator=generator
        ).bfloat16()
        ours, right = run(layer, x), run(plain, x)
        assert layer.backend == ("nvlink" if backend == "auto" else backend)
        assert set(ours) == set(right)
        for name, value in ours.items():
            error = (value - right[name]).norm() / (right[name].norm() + 1e-20)
            errors[f"call {call} {name}"] = float(error)
    return errors


_SENT = pytest.mark.skipif(SHARED, reason="gloo sends no tensors of GPUs")


@pytest.mark.parametrize(
    "backend",
    ["auto", pytest.param("rounds", marks=_SENT), pytest.param("hierarchical", marks=_SENT)],
)
def test_the_layer_computes_what_the_all_to_all_layer_does(backend: str) -> None:
    for rank, errors in enumerate(
        run_ranks(compare, WORLD, backend, backend="nccl", timeout_s=120)
    ):
        assert all(error < 0.02 for error in errors.values()), f"rank {rank}: {errors}"
