"""`variable_seq_lengths`: token counts that differ by rank and microbatch, against Megatron's own
path.

Over NVLink two CPU ranks share mapped files and interpret the kernels; a model trains over the
exchange that CPU ranks have. MEGATRON_FLUID_TEST_ITERATIONS=200 makes that training longer.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode")

# Tokens of each rank by microbatch: the first of the forwards that come before any backward.
COUNTS = ((3, 5), (0, 7), (9, 0), (2, 2), (11, 1))


def _steps(layer: Any, rank: int) -> dict[str, torch.Tensor]:
    """All forwards, then all backwards, as in a pipeline: buffers grow in between."""
    outputs, found = [], {}
    for number, counts in enumerate(COUNTS):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(counts[rank], 1, 32, generator=generator).requires_grad_()
        outputs.append((x, layer(x)[0]))
    for number, (x, y) in enumerate(outputs):
        y.square().sum().backward()
        found |= {f"y {number}": y.detach(), f"dx {number}": x.grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}


@contextlib.contextmanager
def _nvlink(folder: str, sizes: list[int]) -> Iterator[None]:
    """Inside, layers that are patched exchange over NVLink; `sizes` tells how its buffers grow."""
    from megatron_fluid.moe.nvlink import shared
    from megatron_fluid.patches.moe import decision
    from tests.support import tiny_gpt
    from tests.support.symmetric_files import nvlink_over_files

    real = shared.shared_buffers

    def make(group: Any, tokens: int, *rest: Any, **settings: Any) -> Any:
        sizes.append(tokens)
        return real(group, tokens, *rest, **settings)

    with (
        nvlink_over_files(folder),
        mock.patch.object(decision, "nvlink_unsupported_reason", return_value=None),
        mock.patch.object(shared, "shared_buffers", make),
        tiny_gpt.plug_in(True, moe_backend="nvlink"),
    ):
        yield


def _layer(rank: int, world_size: int, folder: str, recompute: bool) -> dict[str, Any]:
    from megatron_fluid.patches.moe import layer as seam
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    settings: dict[str, Any] = {"variable_seq_lengths": True, "moe_aux_loss_coeff": 0.0}
    if recompute:
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    found: dict[str, Any] = {"sizes": []}
    for name, plug_in in (
        ("stock", tiny_gpt.plug_in(False)),
        ("ours", _nvlink(folder, found["sizes"])),
    ):
        with plug_in:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))
            # Megatron's own, on 0.19, cannot view the logits of no tokens.
            layer.router.gating = functools.partial(F.linear, weight=layer.router.weight)
            found[name] = _steps(layer, rank)
    found["backend"] = seam.backend_of(layer)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_over_nvlink_any_token_counts_give_megatrons_results(
    tmp_path: Path, recompute: bool
) -> None:
    """Zero on a rank, more than before on one rank alone, fewer: also with a capacity factor."""
    arguments = str(tmp_path), recompute
    results = run_ranks(_layer, 2, *arguments, timeout_s=300, env={"TRITON_INTERPRET": "1"})
    for found in results:
        assert found["backend"] == ("nvlink", None)
        assert found["sizes"] == [5, 7, 9, 11], "all ranks grow to what the largest rank brings"
        for name, value in found["stock"].items():
            torch.testing.assert_close(found["ours"][name], value, rtol=1e-4, atol=1e-5, msg=name)


def _train(rank: int, world_size: int, folder: str, iterations: int) -> dict[str, Any]:
    from tests.support import tiny_gpt

    def batch(rank: int, iteration: int, microbatch: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(7 * iteration + 3 * microbatch + rank)
        length = int(torch.randint(1, tiny_gpt.SEQUENCE + 1, (), generator=generator))
        tokens, labels, positions = whole(rank, iteration, microbatch)
        return tokens[:, :length], labels[:, :length], positions[:, :length]

    def cut_mask(model: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens, positions, mask = inputs
        return tokens, positions, mask[..., : tokens.shape[1], : tokens.shape[1]]

    whole = tiny_gpt.batch
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {"sizes": []}
    for name, plug_in in (
        ("stock", tiny_gpt.plug_in(False)),
        ("ours", _nvlink(folder, found["sizes"])),
    ):
        with plug_in, mock.patch.object(tiny_gpt, "batch", batch):
            model = tiny_gpt.gpt(tiny_gpt.config_of(variable_seq_lengths=True))
            model.register_forward_pre_hook(cut_mask)
            run = tiny_gpt.train(model, iterations, microbatches=2, distributed_optimizer=True)
            found[name] = run.losses, run.gradient_norms
    return found


def test_training_with_lengths_drawn_for_each_microbatch_follows_megatrons(tmp_path: Path) -> None:
    iterations = int(os.environ.get("MEGATRON_FLUID_TEST_ITERATIONS", "2"))
    arguments, limit_s = (str(tmp_path), iterations), 200 + 12 * iterations
    results = run_ranks(_train, 2, *arguments, timeout_s=limit_s, env={"TRITON_INTERPRET": "1"})
    for found in results:
        assert len(set(found["sizes"])) > 1, "buffers have grown"
        for ours, stock in zip(found["ours"], found["stock"], strict=True):
            assert ours == pytest.approx(stock, rel=1e-3)
        assert len(found["stock"][0]) == iterations
