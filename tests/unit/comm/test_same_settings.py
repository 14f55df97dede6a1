"""Ranks that build layers with other settings are told which ones, on all ranks."""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_fluid
from megatron_fluid.comm.agreement import Agreement
from megatron_fluid.comm.layers import settings_difference
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency.all_to_all import AllToAll
from megatron_fluid.moe.layer import MoEBaseline, MoELayer
from megatron_fluid.patches.overlap_decision import Finding, exchange
from megatron_fluid.transformer_layer import TransformerLayer
from tests.support.launch import on_ranks, world_group

MOE: dict[str, Any] = {"hidden_size": 8, "ffn_hidden_size": 8, "num_experts": 4, "top_k": 2}


def _moe(layer: type = MoELayer, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    return layer({**MOE, **fields}, dist.group.WORLD, dtype=dtype)


@on_ranks(2)
def test_every_rank_names_the_settings_that_differ(rank: int, world: int) -> None:
    group, started = world_group(), time.monotonic()
    own: dict[str, Any] = {"timeout_s": 500.0 + rank, "profile_dir": f"/host{rank}"}

    def check(said: str, call: Callable[[], object]) -> None:
        with pytest.raises(ConfigError, match=said) as caught:
            call()
        assert "timeout_s" not in str(caught.value) and "profile_dir" not in str(caught.value)

    def agree(key: str) -> None:
        exchange(Finding(None), group, FluidConfig(**own), "overlapped MoE layer", key)

    check(
        "MoELayer: top_k: found '2' on rank 0, '3' on rank 1; allowed: the same on all ranks",
        lambda: _moe(top_k=2 + rank),
    )
    kinds = MoELayer, MoEBaseline
    check("layer: found 'MoELayer' on rank 0, 'MoEBaseline' on", lambda: _moe(kinds[rank]))
    dtypes = torch.float32, torch.float64
    check("dtype: found 'torch.float32' on rank 0,", lambda: _moe(dtype=dtypes[rank]))
    check(
        "SelfAttention: window: found 'None' on rank 0, '3' on rank 1",
        lambda: TransformerLayer(
            *(8, 2, 8, 4, 2), window=(None, 3)[rank], ep_group=group, cp_group=group
        ),
    )
    check(
        "AllToAll: max_num_tokens: found '4' on rank 0, '5' on rank 1",
        lambda: AllToAll.intranode(4 + rank, 4, 2, rank, 2, 1, 8, 16, 0),
    )
    set_config(FluidConfig(dx_chunks=1 + rank, **own))
    check("MoELayer: FluidConfig.dx_chunks: found '1' on rank 0, '2' on rank 1; allowed", _moe)
    with mock.patch.object(megatron_fluid, "__version__", f"0.{rank}"):
        set_config(FluidConfig(**own))
        version = "version: found '0.0' on rank 0, '0.1' on rank 1; allowed"
        check(f"MoELayer: FluidConfig.{version}", _moe)
        check(f"overlapped MoE layer: {version}", lambda: agree("1"))
    agree("2")
    assert time.monotonic() - started < 250, "differences are not waited for"


@on_ranks(2)
def test_layers_that_are_alike_are_compared_once_and_a_lost_rank_is_named(
    rank: int, world: int
) -> None:
    _moe()
    with mock.patch.object(Agreement, "gather", side_effect=AssertionError):
        _moe()
    set_config(FluidConfig(timeout_s=0.2))
    if rank == 0:
        with pytest.raises(PeerTimeoutError, match="a new layer .*: rank 1 did not come"):
            _moe(top_k=3)


def test_a_difference_names_values_and_ranks() -> None:
    settings = [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "1", "b": "x"}]
    assert settings_difference(settings, [4, 5, 6]) == "a: found '1' on ranks 4, 6, '2' on rank 5"
    assert settings_difference(settings[::2], [4, 6]) == ""
