"""`--fluid-moe-backend local`: a layer of one expert-parallel rank under Megatron."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "compact": {},
    "capacity": {"moe_expert_capacity_factor": 1.0},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def _losses(rank: int, world: int) -> dict[str, Any]:
    from megatron_fluid.patches.moe import layer as moe_layer
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=1)
    found: dict[str, Any] = {}
    for name, overrides in CASES.items():
        for on, backend in ((False, "auto"), (True, "local")):
            with tiny_gpt.plug_in(on, moe_backend=backend):
                model = tiny_gpt.gpt(tiny_gpt.config_of(**overrides))
                found[name, on] = tiny_gpt.train(model, iterations=4).losses
                if on:
                    layer = model.decoder.layers[-1].mlp
                    served = tiny_gpt.expert_order(layer) is not None
                    found[name, "path"] = served, moe_layer.backend_of(layer)
    return found


def test_losses_equal_megatrons_own() -> None:
    (found,) = run_ranks(_losses, 1)
    for name in CASES:
        assert found[name, True] == pytest.approx(found[name, False], rel=1e-6), name
        assert found[name, "path"] == (True, ("local", None)), name
