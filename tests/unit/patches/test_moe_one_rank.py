"""MoE layers of one expert-parallel rank under Megatron, without a GPU: `--fluid-moe-backend` local
and `--fp8-format e4m3 --fp8-recipe blockwise`."""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_fluid import get_fluid_custom_layers, patches
from megatron_fluid.moe import fp8_experts
from megatron_fluid.patches.moe import decision
from megatron_fluid.patches.moe import layer as moe_layer
from tests.support import fp8_emulation, tiny_gpt
from tests.support.launch import on_ranks

MICROBATCHES, STEPS = 2, 2
SHAPE: dict[str, Any] = {
    "hidden_size": 128, "moe_ffn_hidden_size": 128, "num_moe_experts": 2, "moe_router_topk": 2,
    "bf16": True,
}  # fmt: skip
FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


@on_ranks(1)
def test_weights_are_cast_once_a_step_however_layers_are_built(rank: int, world: int) -> None:
    found: dict[Any, Any] = {}
    tiny_gpt.parallel(expert_model_parallel_size=1)

    def config(**overrides: Any) -> Any:
        made = tiny_gpt.config_of(**SHAPE, params_dtype=torch.bfloat16)
        for name, value in overrides.items():  # its own checks ask for Transformer Engine
            setattr(made, name, value)
        return made

    for whose, backend, said in (
        ("megatron", "local", "fp8='e4m3': --fluid-moe-fp8 is megatron"),
        ("ours", "local", "Hopper GPUs, and tensors are on the cpu"),
        ("ours", "rounds", "fp8='e4m3': backends rounds and hierarchical have"),
    ):
        with tiny_gpt.plug_in(True, moe_backend=backend, moe_fp8=whose):
            layer = tiny_gpt.gpt(config(**FP8)).decoder.layers[-1].mlp
            assert said in str(moe_layer.experts_reason_of(layer))

    decision.fp8_reason = lambda *_: None
    fp8_emulation.emulate()
    casts: list[float] = []
    cast_weights = fp8_experts.cast_weights

    def counted_cast(w: Any, out: Any) -> None:
        cast_weights(w, out)
        casts.append(w.float().sum().item())

    fp8_experts.cast_weights = counted_cast
    turn_rows = fp8_experts.turn_rows = mock.Mock(wraps=fp8_experts.turn_rows)
    kinds: dict[str, dict[str, Any]] = {
        "bf16": {},
        "fp8": FP8,
        "bf16 gradients": FP8,
        "one layer": FP8
        | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1}
        | {"num_layers_at_end_in_bf16": 0},
        "without init's patch": FP8,
        "layer spec": FP8,
    }
    for kind, overrides in kinds.items():
        if kind == "without init's patch":
            patches.disable("moe-layer-init")
        casts.clear()
        turn_rows.reset_mock()
        settings = {"moe_fp8_weight_grads": "bf16"} if kind == "bf16 gradients" else {}
        with tiny_gpt.plug_in(True, moe_backend="local", **settings) as calls:
            made = config(**overrides)
            spec = get_fluid_custom_layers(made) if kind == "layer spec" else None
            model = tiny_gpt.gpt(made, spec)
            sizes = {"iterations": STEPS, "microbatches": MICROBATCHES}
            found[kind] = tiny_gpt.train(model, **sizes, distributed_optimizer=True).losses
            assert len(calls) == 2 * STEPS * MICROBATCHES
            found[kind, "path"] = moe_layer.backend_of(model.decoder.layers[-1].mlp)
            found[kind, "casts"] = list(casts)
            found[kind, "turned"] = turn_rows.call_count
    for kind, layers in (("fp8", 2), ("bf16 gradients", 2), ("one layer", 1)):
        operands = 0 if kind == "bf16 gradients" else 4
        assert found[kind, "turned"] == operands * STEPS * MICROBATCHES * layers
        assert found[kind, "path"] == ("local", None)
        assert found[kind] == pytest.approx(found["bf16"], rel=2e-2)
        assert found[kind] != found["bf16"]
        casts = found[kind, "casts"]
        assert len(casts) == STEPS * 2 * layers
        # Of the weights of that step: the distributed optimizer changed them in between.
        assert all(a != b for a, b in zip(casts[: 2 * layers], casts[2 * layers :], strict=True))
    assert found["layer spec"] == found["fp8"] == found["without init's patch"]
    assert found["layer spec", "casts"] == found["fp8", "casts"]
    # Nobody has told Megatron to mark these layers: they cast in every call.
    assert len(found["without init's patch", "casts"]) == MICROBATCHES * len(found["fp8", "casts"])
    assert found["bf16", "casts"] == []
