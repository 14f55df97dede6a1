"""The standalone MoE layer on GPUs computes what the plain all-to-all layer does, over symmetric
memory, in rounds and on two levels between hosts; also in CUDA graphs."""

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_fluid import FluidError, MoEBaseline, MoEConfig, MoELayer, graph_room
from tests.support.captured import capture
from tests.support.launch import run_ranks
from tests.support.machine import RANKS, SHARED

WORLD = min(RANKS, 4)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WORLD < 2, reason="needs two ranks on GPUs")]
CONFIG = {
    "hidden_size": 512, "ffn_hidden_size": 256, "num_experts": 16, "top_k": 4,
    "shared_ffn_hidden_size": 256,
}  # fmt: skip


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


def _captured(rank: int, world: int) -> list[bool]:
    """Whether this rank lacked room in each of four replays, all of which it compares with eager
    steps where no rank did. From the third on the router sends every token to rank 0; before the
    fourth the step has run eagerly so, and is captured again."""
    device, group = torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD
    config = MoEConfig.of({**CONFIG, "graph": True})
    layer = MoELayer(config, group, device=device, dtype=torch.bfloat16)
    x = torch.randn(512, CONFIG["hidden_size"], device=device).bfloat16().requires_grad_()
    leaves = [x, *layer.parameters()]

    def step() -> list[torch.Tensor]:
        output = layer(x)
        return [output, *torch.autograd.grad(output.float().square().mean(), leaves)]

    def captured() -> tuple[torch.cuda.CUDAGraph, Sequence[torch.Tensor]]:
        with graph_room():
            return capture(step)

    def lacks_room() -> bool:
        torch.cuda.synchronize()
        try:
            layer.check_overflow()
        except FluidError:
            return True
        return False

    lacked = []
    for _ in range(4):
        step()
    graph, values = captured()
    for replay in range(4):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            if replay >= 2:
                x[:, 0] = 1.0
                layer.router.weight[: CONFIG["top_k"], 0] = 100.0
        if replay == 3:
            step()
            graph, values = captured()
        graph.replay()
        lacked.append(lacks_room())
        if replay != 2:
            for number, (value, right) in enumerate(zip(values, step(), strict=True)):
                assert torch.equal(_local(value), _local(right)), f"replay {replay}: {number}"
    return lacked


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("world", [1, WORLD])
def test_a_captured_step_serves_any_routing_once_it_has_room(world: int) -> None:
    found = run_ranks(_captured, world, backend="nccl", timeout_s=120)
    assert found[0] == [False, False, world > 1, False]
    assert all(lacked == [False] * 4 for lacked in found[1:])
