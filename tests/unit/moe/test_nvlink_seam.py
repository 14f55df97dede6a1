"""What the NVLink path makes of Megatron's routing."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.moe.fused_router import chosen_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize("turned", [False, True])
def test_chosen_of_gives_every_choice_its_probability(turned: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, experts, top_k = 20, 8, 3
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    routing_map.scatter_(
        1, torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices, True
    )
    routing_map[4] = False
    routing_map[5, routing_map[5].nonzero()[0]] = False
    probs = (
        (torch.rand(tokens, experts, generator=generator) * routing_map).to(DEVICE).requires_grad_()
    )
    routing_map = routing_map.to(DEVICE)
    # Two ranks of four experts; the second keeps its own in descending order.
    columns = torch.tensor([0, 1, 2, 3, 7, 6, 5, 4], device=DEVICE) if turned else None
    ids, picked = chosen_of(probs, routing_map, top_k, columns)
    expert = ids if columns is None else torch.where(ids < 0, ids, columns[ids.long()].int())
    for t in range(tokens):
        chosen = expert[t][ids[t] >= 0].tolist()
        assert sorted(chosen) == routing_map[t].nonzero()[:, 0].tolist()
        assert torch.equal(picked[t][ids[t] >= 0], probs[t, chosen])
        assert ids[t][ids[t] >= 0].tolist() == sorted(ids[t][ids[t] >= 0].tolist())
    assert not picked[ids < 0].any()
    picked.sum().backward()
    assert torch.equal(probs.grad, routing_map.float())


def test_parameters_of_another_dtype_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_fluid.patches.moe.parts import nvlink_unsupported_reason

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def reason(dtype: torch.dtype) -> str | None:
        return nvlink_unsupported_reason(
            TransformerConfig(
                num_layers=1,
                hidden_size=32,
                num_attention_heads=4,
                num_moe_experts=4,
                gated_linear_unit=True,
                activation_func=torch.nn.functional.silu,
                add_bias_linear=False,
                params_dtype=dtype,
                use_cpu_initialization=True,
            )
        )

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert reason(dtype) is None
    assert "parameters of torch.float64" in str(reason(torch.float64))
