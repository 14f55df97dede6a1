"""What the NVLink path makes of Megatron's routing, and what it asks of a configuration."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_fluid.patches.moe_nvlink import topk_of


@pytest.mark.parametrize("turned", [False, True])
def test_topk_of_gives_every_choice_its_probability(turned: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, experts, top_k = 20, 8, 3
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    routing_map.scatter_(1, torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices, True)
    routing_map[4] = False
    routing_map[5, routing_map[5].nonzero()[0]] = False
    probs = (torch.rand(tokens, experts, generator=generator) * routing_map).requires_grad_()
    # Two ranks of four experts; the second keeps its own in descending order.
    columns = torch.tensor([0, 1, 2, 3, 7, 6, 5, 4]) if turned else None
    ids, picked = topk_of(probs, routing_map, top_k, columns)
    expert = ids if columns is None else torch.where(ids < 0, ids, columns[ids])
    for t in range(tokens):
        chosen = expert[t][ids[t] >= 0].tolist()
        assert sorted(chosen) == routing_map[t].nonzero()[:, 0].tolist()
        assert torch.equal(picked[t][ids[t] >= 0], probs[t, chosen])
        assert ids[t][ids[t] >= 0].tolist() == sorted(ids[t][ids[t] >= 0].tolist())
    torch.where(ids >= 0, picked, 0.0).sum().backward()
    assert torch.equal(probs.grad, routing_map.float())
