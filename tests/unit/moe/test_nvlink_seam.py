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
    drawn = torch.rand(tokens, experts, generator=generator)
    routing_map.scatter_(1, drawn.topk(top_k, -1).indices, True)
    routing_map[4] = False
    routing_map[5, routing_map[5].nonzero()[0]] = False
    probs = (drawn * routing_map).to(DEVICE).requires_grad_()
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
