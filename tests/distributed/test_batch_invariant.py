"""With batch_invariant a token has the same bits whatever other tokens are in the batch, whatever
the number of ranks, over every transport, in training layers and in the inference layer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import MoEBaseline, MoELayer, patches
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import InferenceMoELayer
from tests.support.batch_invariance import bits_in_batches, tokens_seen
from tests.support.launch import on_ranks, run_ranks
from tests.support.symmetric_files import nvlink_over_files

# Widths of no power of two, and experts whose rows fill no tile.
CONFIG: dict[str, Any] = {"hidden_size": 72, "ffn_hidden_size": 56, "num_experts": 8, "top_k": 3}
CONFIG |= {"init_std": 0.3, "batch_invariant": True}
LAYERS: dict[str, dict[str, Any]] = {
    "swiglu": {"shared_ffn_hidden_size": 20},
    "sigmoid": {"score_function": "sigmoid", "activation": "gelu", "scaling": 2.5},
    "pre_softmax": {"pre_softmax": True, "activation": "geglu", "top_k": 8},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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


def _check(ranks: list[dict[str, Tensor]], names: Iterable[str]) -> None:
    """Of all that ranks found, what begins with the same name has the same bits."""
    for name in names:
        seen = [bits for found in ranks for key, bits in found.items() if key.startswith(name)]
        assert tokens_seen(seen) == 1, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_token_has_the_same_bits_in_every_batch_over_every_transport(dtype: str) -> None:
    ranks: list[dict[str, Tensor]] = []
    for world, kinds in ((1, ("local", "rounds", "baseline")), (4, ("rounds", "baseline"))):
        ranks += run_ranks(_training, world, kinds, dtype)
    _check(ranks, LAYERS)


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
        layer = InferenceMoELayer.of(training, max_num_tokens=64)
        found[f"{name} inference"] = bits_in_batches(layer, rank, 72, torch.bfloat16)
        layer.destroy()
    return found


def test_the_inference_layer_gives_the_bits_of_the_training_layer() -> None:
    ranks = [found for world in (1, 4) for found in run_ranks(_inference, world)]
    _check(ranks, LAYERS)


@on_ranks(2)
def test_a_transport_that_sums_before_it_sends_is_refused_by_name(rank: int, world: int) -> None:
    layer = _layer("hierarchical", dtype="fp32")
    with pytest.raises(ConfigError, match="auto or rounds, because batch_invariant is on"):
        layer(torch.zeros(2, 72))
    weights = torch.zeros(4, 16, 8).bfloat16(), torch.zeros(4, 8, 8).bfloat16()
    sizes = {"max_num_tokens": 4, "experts_per_token": 1, "batch_invariant": True}
    with pytest.raises(ConfigError, match=r"transport: .*nvshmem.*batch_invariant is on"):
        InferenceMoELayer(*weights, None, transport="nvshmem", **sizes)  # type: ignore[arg-type]


@on_ranks(1)
def test_a_layer_takes_the_setting_where_its_config_has_none(rank: int, world: int) -> None:
    set_config(FluidConfig(batch_invariant=True))
    layers = [_layer("local", dtype="fp32", batch_invariant=given) for given in (None, False)]
    assert [layer.batch_invariant for layer in layers] == [True, False]


# The interpreter has other exponentials than torch, and does not round to bf16.
_EXACT = {"activation": "relu2", "num_experts": 4, "top_k": 2}


def _exact_bits(rank: int, world: int, folder: str) -> list[Tensor]:
    """Of layers on one rank; on several over symmetric memory, also for inference."""
    half = torch.float16
    if world == 1:
        return [bits_in_batches(_layer("local", dtype="fp16", **_EXACT), rank, 72, half)]
    with nvlink_over_files(folder):
        training = _layer("nvlink", dtype="fp16", **_EXACT)
        found = [bits_in_batches(training, rank, 72, half)]
        layer = InferenceMoELayer.of(training, max_num_tokens=36, transport="nvlink")
        return [*found, bits_in_batches(layer, rank, 72, half)]


def test_over_symmetric_memory_a_token_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    how: dict[str, Any] = {"timeout_s": 300, "env": {"TRITON_INTERPRET": "1"}}
    ranks = [found for n in (1, 2) for found in run_ranks(_exact_bits, n, str(tmp_path), **how)]
    assert tokens_seen([bits for found in ranks for bits in found]) == 1


MEGATRON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "by the flag": ({}, {"batch_invariant": True}),
    "by Megatron's mode": ({"batch_invariant_mode": True}, {}),
    "with biases": ({"add_bias_linear": True}, {"batch_invariant": True}),
    "phase by phase": ({}, {"batch_invariant": True}),
}


def _megatron(rank: int, world: int) -> dict[str, Tensor]:
    from megatron_fluid.kernels.fixed_tiles.launch import fixed_tile_linear
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world)
    found = {}
    for name, (model, fluid) in MEGATRON.items():
        for backend in ("local", "rounds") if world == 1 else ("rounds",):
            with tiny_gpt.plug_in(True, moe_backend=backend, **fluid) as calls:
                config = tiny_gpt.config_of()
                for field, value in model.items():  # attention would refuse the mode on a CPU
                    setattr(config, field, value)
                layer = tiny_gpt.moe_layer(config)
                for number, expert in enumerate(layer.experts.local_experts):
                    torch.manual_seed(rank * len(layer.experts.local_experts) + number)
                    for parameter in expert.parameters():
                        torch.nn.init.normal_(parameter, std=0.3)
                # Megatron's mode replaces this GEMM on GPUs.
                layer.router.gating = lambda x, layer=layer: fixed_tile_linear(
                    x, layer.router.weight
                )
                if name == "phase by phase":
                    layer.combine = layer.combine
                key = f"{name}, {backend} on {world}"
                found[key] = bits_in_batches(
                    lambda x, layer=layer: layer(x[:, None])[0][:, 0], rank, 32, torch.float32
                )
                assert bool(calls) is (name != "phase by phase")
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode")
def test_layers_of_megatron_have_it_by_the_flag_or_by_megatrons_mode() -> None:
    pytest.importorskip("megatron.core")
    ranks = [found for world in (1, 4) for found in run_ranks(_megatron, world)]
    _check(ranks, MEGATRON)


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo ranks of CPU mode")
@pytest.mark.skipif(not patches.megatron_installed(), reason="megatron-core is not installed")
@on_ranks(1)
def test_a_layer_that_stays_megatrons_is_refused_under_the_flag(rank: int, world: int) -> None:
    from tests.support import tiny_gpt

    tiny_gpt.parallel()
    config = tiny_gpt.config_of()
    config.expert_gtp_weight_remat_size = 2
    for backend, limit in (("auto", "expert_gtp_weight_remat_size=2"), ("megatron", "moe_backend")):
        named = rf"batch_invariant: found True, allowed: False, because .*{limit}"
        with (
            tiny_gpt.plug_in(True, moe_backend=backend, batch_invariant=True),
            pytest.raises(ConfigError, match=named),
        ):
            tiny_gpt.moe_layer(config)
