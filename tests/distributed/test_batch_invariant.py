"""With batch_invariant a token has the same bits whatever other tokens are in the batch, whatever
the number of ranks, over every transport, in training layers and in the inference layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import MoEBaseline, MoELayer
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import InferenceMoELayer
from tests.support.batch_invariance import bits_in_batches, tokens_seen
from tests.support.launch import run_ranks

# Widths of no power of two, and experts whose rows fill no tile.
CONFIG: dict[str, Any] = {
    "hidden_size": 72,
    "ffn_hidden_size": 56,
    "num_experts": 8,
    "top_k": 3,
    "init_std": 0.3,
    "batch_invariant": True,
}
LAYERS: dict[str, dict[str, Any]] = {
    "swiglu": {"shared_ffn_hidden_size": 20},
    "sigmoid": {"score_function": "sigmoid", "activation": "gelu", "scaling": 2.5},
    "pre_softmax": {"pre_softmax": True, "activation": "geglu", "top_k": 8},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _layer(kind: str, **changes: Any) -> MoELayer | MoEBaseline:
    group = dist.group.WORLD
    dtype = DTYPES[changes.pop("dtype")]
    if kind == "baseline":
        return MoEBaseline(CONFIG | changes, group, dtype=dtype)
    return MoELayer(CONFIG | changes | {"backend": kind}, group, dtype=dtype)


def _training(rank: int, world: int, kinds: tuple[str, ...], dtype: str) -> dict[str, Tensor]:
    found = {}
    for kind in kinds:
        for name, changes in LAYERS.items():
            layer = _layer(kind, dtype=dtype, **changes)
            found[f"{name} {kind}"] = bits_in_batches(layer, rank, 72, DTYPES[dtype])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch_over_every_transport(dtype: str) -> None:
    ranks: list[dict[str, Tensor]] = []
    for world, kinds in ((1, ("local", "rounds", "baseline")), (2, _SEVERAL), (4, _SEVERAL)):
        ranks += run_ranks(_training, world, kinds, dtype)
    for name in LAYERS:
        seen = [bits for found in ranks for key, bits in found.items() if key.startswith(name)]
        assert tokens_seen(seen) == 1, name


_SEVERAL = ("rounds", "baseline")


def _without(rank: int, world: int) -> Tensor:
    layer = _layer("rounds", dtype="fp32", batch_invariant=False)
    return bits_in_batches(layer, rank, 72, torch.float32)


def test_without_it_bits_differ() -> None:
    """Else the other tests show nothing."""
    assert tokens_seen(run_ranks(_without, 2)) > 1


def _inference(rank: int, world: int) -> dict[str, Tensor]:
    found = {}
    for name, changes in LAYERS.items():
        training = _layer("auto", dtype="bf16", **changes)
        found[f"{name} training"] = bits_in_batches(training, rank, 72, torch.bfloat16)
        layer = InferenceMoELayer.of(training, max_num_tokens=64, timeout_s=60.0)
        found[f"{name} inference"] = bits_in_batches(layer, rank, 72, torch.bfloat16)
        layer.destroy()
    return found


def test_the_inference_layer_gives_the_bits_of_the_training_layer() -> None:
    ranks = [found for world in (1, 2, 4) for found in run_ranks(_inference, world)]
    for name in LAYERS:
        seen = [bits for found in ranks for key, bits in found.items() if key.startswith(name)]
        assert tokens_seen(seen) == 1, name


def _refused(rank: int, world: int) -> None:
    layer = _layer("hierarchical", dtype="fp32")
    with pytest.raises(ConfigError, match="auto or rounds, because batch_invariant is on"):
        layer(torch.zeros(2, 72))
    weights = torch.zeros(4, 16, 8).bfloat16(), torch.zeros(4, 8, 8).bfloat16()
    sizes = {"max_num_tokens": 4, "experts_per_token": 1, "batch_invariant": True}
    with pytest.raises(ConfigError, match=r"transport: .*nvshmem.*batch_invariant is on"):
        InferenceMoELayer(*weights, None, transport="nvshmem", **sizes)  # type: ignore[arg-type]


def test_a_transport_that_sums_before_it_sends_is_refused_by_name() -> None:
    run_ranks(_refused, 2)


def _by_setting(rank: int, world: int) -> tuple[bool, bool]:
    set_config(FluidConfig(batch_invariant=True))
    layers = [_layer("local", dtype="fp32", batch_invariant=given) for given in (None, False)]
    return layers[0].batch_invariant, layers[1].batch_invariant


def test_a_layer_takes_the_setting_where_its_config_has_none() -> None:
    assert run_ranks(_by_setting, 1) == [(True, False)]
