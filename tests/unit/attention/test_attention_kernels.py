"""The choice of the core attention's kernel, and the mask of a window."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.attention import attention_kernels
from megatron_fluid.attention.attention_kernels import (
    CoreCase,
    choose_kernel,
    run_sdpa,
    run_te,
    window_mask,
)
from megatron_fluid.errors import ConfigError


def test_a_query_sees_a_window_of_keys() -> None:
    seen = window_mask(5, 2, True, torch.device("cpu"))
    pairs = [[query, key] for query in range(5) for key in range(max(query - 1, 0), query + 1)]
    assert seen.nonzero().tolist() == pairs
    assert window_mask(4, 2, False, torch.device("cpu")).sum() == 10


def test_the_kernel_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CoreCase(8, torch.float32, "cpu")
    assert choose_kernel("auto", case) is run_sdpa
    assert choose_kernel("auto", CoreCase(8, torch.float32, "cpu", window=3)) is run_sdpa
    with pytest.raises(ConfigError, match=r"te.*CUDA"):
        choose_kernel("te", case)
    with pytest.raises(ConfigError, match=r"te.*float32"):
        choose_kernel("te", CoreCase(8, torch.float32, "cuda"))
    with pytest.raises(ConfigError, match="attention_kernel.*auto, sdpa, te"):
        choose_kernel("fast", case)
    monkeypatch.setattr(attention_kernels, "_te_import_problem", lambda: None)  # as if installed
    windowed = CoreCase(256, torch.bfloat16, "cuda", window=8)
    assert choose_kernel("auto", windowed) is choose_kernel("te", windowed) is run_te
    assert choose_kernel("auto", CoreCase(256, torch.bfloat16, "cuda")) is run_sdpa
