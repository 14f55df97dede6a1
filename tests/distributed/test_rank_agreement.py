"""Ranks that do not agree about a layer: a named error on all of them, never a rank that waits in
another path's collective."""

import contextlib
import io
import os
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import startup_report
from megatron_fluid.patches.layer_specs import FluidMoELayer
from megatron_fluid.patches.moe import layer as moe_layer
from tests.support import tiny_gpt
from tests.support.launch import on_ranks, run_ranks

LIVE_S, LOST_S = 500.0, 3.0  # bounds on waits for ranks that come, and for one that does not


def outcome_of(layer: Any) -> tuple[str, str, float]:
    """The outcome of a forward on this rank: the error's class and text, and its seconds."""
    start = time.monotonic()
    try:
        layer(torch.randn(4, 2, 32, dtype=next(layer.parameters()).dtype))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def _disagree(rank: int, world_size: int) -> dict[str, Any]:
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found: dict[str, Any] = {}

    def build(**settings: Any) -> Any:
        return tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))

    for name, backends in (("named", ("rounds", "megatron")), ("auto", ("auto", "megatron"))):
        with tiny_gpt.plug_in(True, moe_backend=backends[rank], timeout_s=LIVE_S):
            found[name] = outcome_of(build())
    with tiny_gpt.plug_in(True, moe_backend="auto", timeout_s=LIVE_S + rank) as calls:
        layer = build(**({"activation_func_fp8_input_store": True} if rank else {}))
        kind, *_ = outcome_of(layer)
        reason = moe_layer.backend_of(layer), moe_layer.experts_reason_of(layer)
        found["a reason of one rank"] = (kind, *reason, len(calls))
        layer = build()
        fails = mock.patch.object(moe_layer.DECISIONS, "find", side_effect=IndexError)
        with fails if rank else contextlib.nullcontext():
            found["a rank that fails"] = outcome_of(layer)
    with tiny_gpt.plug_in(True, moe_backend="auto", timeout_s=LOST_S):
        layer = build()
        if rank == 0:
            found["a rank that stays away"] = outcome_of(layer)
    return found


def test_ranks_that_disagree_name_it_without_a_timeout() -> None:
    ranks = run_ranks(_disagree, 2)
    for found in ranks:
        for name, backend in (("named", "rounds"), ("auto", "auto")):
            kind, text, _ = found[name]
            assert kind == "ConfigError"
            assert f"moe_backend: found '{backend}' on rank 0, 'megatron' on rank 1" in text
            assert "timeout_s" not in text
        kind, exchange, reason, overlapped = found["a reason of one rank"]
        assert (kind, exchange, overlapped) == ("", ("rounds", None), 0)
        assert reason.startswith("rank 1 of the group: activation_func_fp8_input_store")
    assert ranks[0]["a rank that fails"][0] == "FluidError"
    assert "rank 1 failed: IndexError" in ranks[0]["a rank that fails"][1]
    assert ranks[1]["a rank that fails"][0] == "IndexError"
    kind, text, seconds = ranks[0]["a rank that stays away"]
    assert kind == "PeerTimeoutError" and seconds >= LOST_S
    assert "rank 1 did not come" in text


def _fall_back_elsewhere(rank: int, world_size: int, lost: bool) -> str:
    """Two expert-parallel groups of two ranks; a hook on rank 3's experts is found in the first
    call, a setting of rank 2's and 3's layer when it is built. Where rank 3 is lost, the others
    have reported when rank 0 looks. What this rank prints."""
    tiny_gpt.parallel(expert_model_parallel_size=2)
    if lost:
        reporting = dist.new_group([0, 1, 2])
        agreement(dist.group.WORLD).barrier("a session begins", LIVE_S)  # a report waits for it
    recorded._features.clear()
    os.environ["MEGATRON_FLUID_VERBOSE"] = "1"
    printed = io.StringIO()
    with tiny_gpt.plug_in(True, moe_backend="auto", timeout_s=LOST_S if lost else LIVE_S):
        late = tiny_gpt.moe_layer(tiny_gpt.config_of())
        settings = {"activation_func_fp8_input_store": True} if rank >= 2 else {}
        built = tiny_gpt.moe_layer(tiny_gpt.config_of(**settings))
        if rank == 3:
            late.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *_: None)
        with contextlib.redirect_stdout(printed):
            if not (lost and rank == 3):
                if lost and rank == 0:
                    dist.barrier(reporting)
                startup_report.setup_model_and_optimizer(lambda: ([late, built], None, None))()
                if lost and rank:
                    dist.barrier(reporting)
            if not lost:
                late(torch.randn(4, 2, 32))
    return printed.getvalue()


def test_a_fallback_on_other_ranks_is_told_with_its_ranks() -> None:
    printed = run_ranks(_fall_back_elsewhere, 4, False)
    rows = [line for line in printed[0].splitlines() if line.startswith("overlapped MoE layer")]
    assert len(rows) == 2
    assert "(ranks 2-3)" in rows[1] and "activation_func_fp8_input_store" in rows[1]
    assert "no report from" not in printed[0] and "NO MoE layer" not in printed[0]
    assert "overlapped MoE layer on from this call on (ranks 2-3)" in printed[2]
    assert "Megatron's experts: rank 1 of the group: a hook is registered" in printed[2]
    assert printed[1] == printed[3] == ""


def test_the_table_is_printed_without_a_rank_that_is_gone() -> None:
    printed = run_ranks(_fall_back_elsewhere, 4, True)
    assert f"no report from rank 3 within {LOST_S / 4:g} s" in printed[0]


@on_ranks(2)
def test_a_layer_of_the_spec_on_megatrons_path_is_told_loudly(rank: int, world_size: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=2)
    printed = io.StringIO()
    with tiny_gpt.plug_in(False, moe_backend="auto"):
        config = tiny_gpt.config_of()
        config.expert_gtp_weight_remat_size = 2
        layer = tiny_gpt.moe_layer(config)
        layer.__class__ = FluidMoELayer
        with contextlib.redirect_stdout(printed):
            layer(torch.randn(4, 2, 32))
    said = printed.getvalue()
    loudly = "WARNING: FluidMoELayer of the layer spec keeps Megatron's own path"
    assert said == "" if rank else loudly in said
