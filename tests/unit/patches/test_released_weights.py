"""Between two calls nothing holds the memory of expert weights: `param.data = ...` gives it back.
One gloo rank."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")


def _alive_after(layer: Any, parameters: list[torch.nn.Parameter], train: bool) -> int:
    """How many arrays outlive the moving of the parameters that they are the memory of, after a
    forward, with its backward or without."""
    arrays = []
    for parameter in parameters:
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        arrays.append(weakref.ref(array))
    del array
    with torch.set_grad_enabled(train):
        output = layer(torch.randn(4, 1, 32))
    if train:
        output.sum().backward()
    for parameter in parameters:
        parameter.data = parameter.detach().clone()
    return sum(array() is not None for array in arrays)


def _layers(rank: int, world_size: int) -> dict[str, list[int]]:
    from megatron_fluid import MoELayer
    from tests.support import tiny_gpt
    from tests.unit.patches.test_moe_router import over_nvlink

    tiny_gpt.parallel(expert_model_parallel_size=1)
    found = {}

    def try_it(name: str, layer: Any, holder: Any) -> None:
        parameters = list(holder.parameters())
        found[name] = [_alive_after(layer, parameters, train) for train in (False, True)]

    for backend in ("local", "rounds"):
        with tiny_gpt.plug_in(True, moe_backend=backend) as calls:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of())
            try_it(backend, lambda x, layer=layer: layer(x)[0], layer.experts)
            assert len(calls) == 2
    shape = {"num_moe_experts": 8, "moe_router_topk": 2}
    layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**shape), grouped=True)
    with over_nvlink(layer, 4) as path:
        try_it("nvlink", lambda x: path.forward(layer, x, None)[0], layer.experts)
    sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_experts": 4, "top_k": 2}
    alone = MoELayer(sizes, torch.distributed.group.WORLD)
    expert_weights = torch.nn.ParameterList([alone.weight1, alone.weight2])
    try_it("standalone", alone, expert_weights)
    return found


def test_weights_that_move_between_calls_leave_no_memory_behind() -> None:
    (found,) = run_ranks(_layers, 1, timeout_s=300, env={"TRITON_INTERPRET": "1"})
    assert found == {name: [0, 0] for name in ("local", "rounds", "nvlink", "standalone")}
