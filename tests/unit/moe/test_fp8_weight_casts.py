"""When the weights of experts in fp8 are cast: once, and again when they may have changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from megatron_fluid import MoELayer
from megatron_fluid.moe import fp8_experts
from megatron_fluid.moe.expert_weights import ExpertWeights
from tests.support.expert_calls import local_moe
from tests.support.fp8_emulation import emulate
from tests.support.launch import on_ranks
from tests.unit.moe.test_fp8_experts import E, F, H, emulated, gap, make

__all__ = ["emulated"]  # a fixture

pytestmark = pytest.mark.usefixtures("emulated")


def test_weights_are_cast_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, leaves, grad = make()
    x, probs, w1, w2 = leaves
    casts, plain = [], fp8_experts.cast_weights
    monkeypatch.setattr(
        fp8_experts, "cast_weights", lambda *given: casts.append(plain(*given)) or None
    )
    w1 = nn.Parameter(w1.detach())
    fcs = ExpertWeights(w1, E), ExpertWeights([*map(nn.Parameter, w2.detach().unbind(0))], E)
    for _ in range(2):  # microbatches
        local_moe(x, ids, probs, *fcs, fp8=True).backward(grad)
    assert len(casts) == 2
    with torch.no_grad():
        w1.mul_(2.0)
    local_moe(x, ids, probs, *fcs, fp8=True)
    assert len(casts) == 3
    w1.data.mul_(2.0)  # past the version counter
    fp8_experts.weight_cast(fcs[0]).expire()  # as Megatron's layer does in each step
    y = local_moe(x, ids, probs, *fcs, fp8=True)
    assert len(casts) == 4
    assert torch.equal(y, local_moe(x, ids, probs, w1, w2, fp8=True))


@on_ranks(1)
def test_weights_that_change_past_their_version_counters_are_cast_again(
    rank: int, world: int
) -> None:
    """FSDP2 gathers into the same parameters, FSDP1 into tensors that are no parameters. Fused
    steps and averages of DTensors are no better."""
    emulate()
    config: Any = {"hidden_size": H, "ffn_hidden_size": F, "num_experts": E, "top_k": 2}
    config |= {"backend": "local", "fp8_recipe": "blockwise"}
    x = torch.randn(16, H, generator=torch.Generator().manual_seed(1)).bfloat16()

    def kept(layer: MoELayer) -> nn.Module:
        return fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)

    def resharded(layer: MoELayer) -> nn.Module:
        return fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=True)

    def distributed(layer: MoELayer) -> MoELayer:
        for name in ("weight1", "weight2"):
            local, mesh = getattr(layer, name).detach(), init_device_mesh("cpu", (1,))
            setattr(layer, name, nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)])))
        return layer

    def losses(shard: Callable[[MoELayer], nn.Module], **how: bool) -> list[float]:
        module = shard(MoELayer(config, dist.group.WORLD, dtype=torch.bfloat16))
        single: Any = [{"params": [param]} for param in module.parameters()]
        optimizer, found = torch.optim.AdamW(single, lr=3e-3, **how), []
        for _ in range(4):
            loss = (module(x).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    plain = losses(lambda layer: layer)
    assert plain[3] < plain[0]
    assert losses(distributed, foreach=True) == plain
    assert losses(lambda layer: layer, fused=True) == pytest.approx(plain, rel=2e-3)
    layer = MoELayer(config, dist.group.WORLD, dtype=torch.bfloat16)
    layer(x)
    copied = copy.deepcopy(layer)
    memory = layer.weight2.detach().clone()
    for scale in (1.0, 4.0):  # the next parameter lies where the last one lay, with its counter
        memory.mul_(scale)
        place = torch.empty(0, dtype=memory.dtype).set_(memory.untyped_storage(), 0, memory.shape)
        copied.weight2 = nn.Parameter(place)
        assert gap(copied(x).float(), scale * layer(x).float()) < 1e-2
    with torch.no_grad():
        first = layer(x)
        layer.weight2.data.mul_(2.0)  # as a broadcast writes the weights that a trainer sends
        torch.testing.assert_close(layer(x), 2 * first, rtol=1e-2, atol=1e-4)
    # Last, since no counter of this process is trusted once FSDP2 was there.
    assert losses(lambda layer: FSDP(layer, device_id=torch.device("cpu"))) == plain
    assert losses(kept) == losses(resharded) == plain


def test_weights_are_cast_once_in_each_capture_and_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    casts: list[object] = []
    capture: list[tuple[int, int] | None] = [None]
    monkeypatch.setattr(fp8_experts, "cast_weights", lambda *given: casts.append(given))
    monkeypatch.setattr(fp8_experts, "current_capture", lambda: capture[0])
    steps = functools.cache(fp8_experts._optimizer_steps.__wrapped__)
    monkeypatch.setattr(fp8_experts, "_optimizer_steps", steps)
    weights = nn.Parameter(torch.randn(E, 2 * F, H).bfloat16())
    cast = fp8_experts.WeightCast()

    def casts_of_two_microbatches(number: int | None, stream: int = 5) -> int:
        capture[0] = None if number is None else (number, stream)
        before = len(casts)
        for _ in range(2):
            cast.forward_matrices(ExpertWeights(weights, E))
        return len(casts) - before

    assert casts_of_two_microbatches(None) == 1
    assert casts_of_two_microbatches(1) == 1, "a replay casts what the weights are then"
    assert casts_of_two_microbatches(1, stream=6) == 1, "the first stream's cast may come later"
    assert casts_of_two_microbatches(2) == 1
    cast.expire()
    assert casts_of_two_microbatches(2) == 1, "an optimizer's step within a capture"
    assert casts_of_two_microbatches(None) == 1, "a capture has run nothing"
    capture[0] = 3, 5
    torch.optim.SGD([weights]).step()
    assert casts_of_two_microbatches(3) == 1
    assert casts_of_two_microbatches(None) == 2, "replays of an optimizer's step tell nothing"
    monkeypatch.setattr(fp8_experts, "sharded_by_fsdp", lambda: True)
    assert casts_of_two_microbatches(3) == 2, "FSDP2 gathers past the counters"
