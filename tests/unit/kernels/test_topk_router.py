"""Top-k and softmax in one kernel against the plain router; what is made of Megatron's routing."""

import pytest
import torch

from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.fused_router import chosen_of, topk_softmax
from megatron_fluid.moe.router import route

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(37, 24, 3), (16, 8, 1), (5, 4, 4), (0, 8, 2)]
)
def test_forward_and_backward_equal_the_plain_router(tokens: int, experts: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator).to(DEVICE).requires_grad_()
    plain = logits.detach().clone().requires_grad_()
    expected = route(plain, top_k)
    ids, probs = topk_softmax(logits, top_k)
    assert torch.equal(ids.long(), expected.ids)
    assert torch.allclose(probs, expected.probs, atol=1e-6)
    grad = torch.randn(tokens, top_k, generator=generator).to(DEVICE)
    probs.backward(grad)
    expected.probs.backward(grad)
    assert torch.allclose(logits.grad, plain.grad, atol=1e-6)


@pytest.mark.interpreter
def test_numbers_that_are_none_choose_experts_that_exist_once_each() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [
        [1.0, -inf, -inf, -inf, -inf], [-inf] * 5, [nan] * 5, [0.0, nan, 2.0, nan, 1.0],
        [0.0, inf, 2.0, -inf, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0],
    ]  # fmt: skip
    ids, probs = topk_softmax(torch.tensor(rows, device=DEVICE), 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 3, 2], [1, 2, 4], [4, 3, 2]]
    expected = torch.tensor(rows).gather(1, ids.long().cpu()).softmax(1)
    assert torch.allclose(probs.cpu(), expected, equal_nan=True)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="top_k"):
        topk_softmax(torch.zeros(3, 6), 7)
    with pytest.raises(ConfigError, match="float32"):
        topk_softmax(torch.zeros(3, 6, dtype=torch.bfloat16), 2)


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
