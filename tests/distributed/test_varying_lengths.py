"""`variable_seq_lengths` over NVLink: token counts that differ by rank and microbatch, against
Megatron's own path. Two CPU ranks share mapped files and interpret the kernels. Trainings over the
exchange that CPU ranks have: test_training_sequences.py.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_fluid.moe.nvlink import shared
from megatron_fluid.patches.moe import decision
from megatron_fluid.patches.moe import layer as seam
from tests.support import tiny_gpt
from tests.support.launch import on_ranks
from tests.support.symmetric_files import nvlink_over_files

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


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2, env={"TRITON_INTERPRET": "1"})
def test_over_nvlink_any_token_counts_give_megatrons_results(
    rank: int, world_size: int, tmp_path: Path, recompute: bool
) -> None:
    """Zero on a rank, more than before on one rank alone, fewer: also with a capacity factor."""
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    settings: dict[str, Any] = {"variable_seq_lengths": True, "moe_aux_loss_coeff": 0.0}
    if recompute:
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    sizes: list[int] = []
    found = []
    for plug_in in (tiny_gpt.plug_in(False), _nvlink(str(tmp_path), sizes)):
        with plug_in:
            layer = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))
            # Megatron's own, on 0.19, cannot view the logits of no tokens.
            layer.router.gating = functools.partial(F.linear, weight=layer.router.weight)
            found.append(_steps(layer, rank))
    assert seam.backend_of(layer) == ("nvlink", None)
    assert sizes == [5, 7, 9, 11], "all ranks grow to what the largest rank brings"
    stock, ours = found
    for name, value in stock.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)
