"""The choice of the core attention's kernel, and the mask of a window."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.attention import attention_kernels
from megatron_fluid.attention.attention_kernels import (
    CORE_KERNELS,
    CoreCase,
    choose_kernel,
    window_mask,
)
from megatron_fluid.errors import ConfigError


def test_a_query_sees_a_window_of_keys() -> None:
    seen = window_mask(5, 2, True, torch.device("cpu"))
    assert seen.nonzero().tolist() == [
        [0, 0],
        [1, 0],
        [1, 1],
        [2, 1],
        [2, 2],
        [3, 2],
        [3, 3],
        [4, 3],
        [4, 4],
    ]
    assert window_mask(4, 2, False, torch.device("cpu")).sum() == 10


def test_the_kernel_choice() -> None:
    case = CoreCase(8, torch.float32, "cpu")
    assert choose_kernel("auto", case).name == "sdpa"
    assert choose_kernel("auto", CoreCase(8, torch.float32, "cpu", window=3)).name == "sdpa"
    for name in ("flash_attn", "te"):
        with pytest.raises(ConfigError, match=rf"{name}.*CUDA"):
            choose_kernel(name, case)
        with pytest.raises(ConfigError, match=rf"{name}.*float32"):
            choose_kernel(name, CoreCase(8, torch.float32, "cuda"))
    with pytest.raises(ConfigError, match="attention_kernel.*auto, sdpa, flash_attn, te"):
        choose_kernel("fast", case)
    assert set(CORE_KERNELS) == {"sdpa", "flash_attn", "te"}


def test_heads_that_a_kernel_does_not_take_are_refused_by_name_and_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        attention_kernels, "_import_problem", lambda module: None
    )  # as if all were installed
    fits, wide = (CoreCase(dim, torch.bfloat16, "cuda", window=8) for dim in (256, 264))
    assert (
        choose_kernel("flash_attn", fits).name == choose_kernel("auto", fits).name == "flash_attn"
    )
    with pytest.raises(
        ConfigError,
        match="attention_kernel: found 'flash_attn'.*up to 256, not 264; allowed: auto, sdpa",
    ):
        choose_kernel("flash_attn", wide)
    assert choose_kernel("auto", wide).name != "flash_attn"
    assert choose_kernel("te", wide).name == "te" and choose_kernel("sdpa", wide).name == "sdpa", (
        "they take any"
    )
