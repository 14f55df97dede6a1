"""What is compiled in the background for a Megatron layer that has been built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.patches.moe import compile_ahead


@pytest.mark.parametrize("router_dtype", [None, "fp32"])
@pytest.mark.parametrize("backend", ["local", "nvlink where all GPUs of the group reach it"])
@pytest.mark.parametrize(
    ("biased", "fp8", "ends", "kinds"),
    [
        (False, None, False, {False}),
        (True, None, True, {False}),
        (False, "e4m3", False, {True}),
        (False, "e4m3", True, {True, False}),
    ],
)
def test_a_layers_kernels_follow_its_sizes_its_routers_dtype_and_its_backend(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    router_dtype: str | None,
    biased: bool,
    fp8: str | None,
    ends: bool,
    kinds: set[bool],
) -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        num_moe_experts=6,
        moe_ffn_hidden_size=48,
        moe_router_topk=3,
        moe_router_dtype=router_dtype,
        add_bias_linear=biased,
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=False,
    )
    config.fp8, config.first_last_layers_bf16 = fp8, ends  # type: ignore[assignment]
    gemms: list[Any] = []
    local: list[Any] = []
    monkeypatch.setattr(
        compile_ahead, "compile_ahead", lambda *given, sends: gemms.append((*given, sends))
    )
    monkeypatch.setattr(compile_ahead, "compile_local_ahead", lambda *given: local.append(given))
    weight = torch.zeros(1, dtype=torch.bfloat16)
    layer: Any = SimpleNamespace(config=config, experts=SimpleNamespace())
    compile_ahead.compile_layer_ahead(layer, weight, backend)
    on_one = backend == "local"
    like = weight.device, weight.dtype
    assert gemms == [(*like, 64, "swiglu", not on_one)]
    probs = torch.bfloat16 if router_dtype is None else torch.float32
    kind = resolve_activation("swiglu")
    given = (*like, torch.int64, (64, 48, 6, 3), kind, probs, biased)
    assert len(local) == len(kinds) * on_one
    assert set(local) == {(*given, packs) for packs in kinds if on_one}
