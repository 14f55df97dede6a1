"""On CPUs activations take rows block by block: the same numbers as all at once, in memory that is
there."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.moe import experts
from megatron_fluid.moe.activations import resolve_activation

ROWS, WIDTH = 37, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("consume", [True, False])
@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_blocks_are_bitwise_the_whole(
    name: str, consume: bool, weighted: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    activation = resolve_activation(name)
    h = torch.randn(ROWS, WIDTH).to(dtype)
    da = torch.randn(ROWS, WIDTH // activation.gates).to(dtype)
    probs = torch.rand(ROWS) if weighted else None
    found = []
    for block in (2**20, 4 * WIDTH):  # one block; ten, the last of one row
        monkeypatch.setattr(experts, "_BLOCK", block)
        given = h.clone(), da.clone()
        forward = experts.activation_forward(activation, given[0], probs)
        backward = experts.activation_backward(activation, *given, probs, consume=consume)
        if not consume:
            assert torch.equal(given[0], h)
        found.append([forward, *backward])
    for whole, blocks in zip(*found, strict=True):
        assert (whole is None) == (blocks is None)
        assert whole is None or torch.equal(whole, blocks)
    if consume:
        assert backward[0].data_ptr() == given[0].data_ptr()


def test_a_caller_s_own_function_sees_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_BLOCK", WIDTH)
    seen = []

    def function(h: torch.Tensor) -> torch.Tensor:
        seen.append(h.shape[0])
        return h.tanh()

    activation = resolve_activation(function)
    experts.activation_forward(activation, torch.randn(ROWS, WIDTH), None)
    assert seen[-1] == ROWS
