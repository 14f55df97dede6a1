"""Megatron's experts behind this package's exchange, with Megatron's own gradients: under the 1F1B
expert overlap, which calls a layer's phases one by one, and under autocast."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from tests.support.megatron_parity import plug_in
from tests.support.tiny_gpt import guarded

WAYS = ("stock", "exchange")


def _one_by_one(way: str, delayed: bool = False) -> dict[str, Any]:
    """Two iterations of three microbatches under the 1F1B expert overlap, which runs a layer's
    phases one by one, those of a forward between those of another microbatch's backward: every
    parameter's gradient. delayed: weight gradients wait until the schedule asks for them, which of
    Megatron's modules only Transformer Engine's know."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_fluid.patches.moe import separate_experts
    from tests.support import tiny_gpt

    ran: list[int] = []
    run = separate_experts._DelayedGradients.run

    def counted(self: Any) -> int:
        ran.append(run(self))
        return ran[-1]

    overrides = {
        "moe_shared_expert_intermediate_size": 40,
        "overlap_moe_expert_parallel_comm": True,
        "bf16": True,  # Megatron asks for it
    }
    scale = mock.patch.object(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.ones(1))
    count = mock.patch.object(separate_experts._DelayedGradients, "run", counted)
    with plug_in(way != "stock") as counts, scale, count:
        config = tiny_gpt.config_of(**overrides)
        config.bf16, config.delay_wgrad_compute = False, delayed
        model = tiny_gpt.gpt(config)
        mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)

        def step(batches: Any, model: Any, return_schedule_plan: bool = False) -> Any:
            tokens, labels, positions = next(batches)
            arguments = tokens, positions, mask
            run = model.build_schedule_plan if return_schedule_plan else model
            return run(*arguments, labels=labels), lambda y: (y.float().mean(), {"loss": y.mean()})

        rank = torch.distributed.get_rank()
        losses: list[float] = []
        for iteration in range(2):
            found = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=(tiny_gpt.batch(rank, iteration, m) for m in range(3)),
                model=[model],
                num_microbatches=3,
                seq_length=tiny_gpt.SEQUENCE,
                micro_batch_size=tiny_gpt.BATCH,
                forward_only=False,
            )
            losses += [float(report["loss"]) for report in found]
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        counted = counts["fused"], counts["exchange"]
        return {"losses": losses, "grads": grads, "counts": counted, "delayed": sum(ran)}


def _autocast(rank: int) -> dict[str, torch.Tensor]:
    """A layer in fp32 under autocast to bf16: output and gradients, by our exchange and Megatron's.
    The experts are Megatron's."""
    from tests.support import tiny_gpt

    found = {}
    for way in WAYS:
        with plug_in(way != "stock") as counts:
            autocast = {"enable_autocast": True, "autocast_dtype": torch.bfloat16}
            config = tiny_gpt.config_of(moe_grouped_gemm=True, **autocast)
            # Megatron's linears and its router know the autocast of GPUs alone.
            layer = tiny_gpt.moe_layer(config, grouped=True)
            layer.route = torch.autocast("cpu", enabled=False)(layer.route)
            hidden = torch.randn(6 + rank, 2, 32, generator=torch.Generator().manual_seed(rank))
            hidden.requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                output, _ = layer(hidden)
            output.float().square().sum().backward()
            found[f"{way} output"], found[f"{way} input"] = output.detach(), hidden.grad
            found |= {f"{way} {name}": p.grad for name, p in layer.named_parameters()}
            assert counts["exchange"] == (way != "stock")
    return found  # type: ignore[return-value]


def _world(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from tests.support import tiny_gpt

    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    found = {"autocast": guarded(lambda: _autocast(rank))}
    for way in WAYS:
        found[f"one by one {way}"] = guarded(lambda w=way: _one_by_one(w))
    found["one by one delayed"] = guarded(lambda: _one_by_one("exchange", delayed=True))
    return found


@pytest.fixture(scope="module")
def ep2() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


def test_under_autocast_the_experts_are_megatrons_behind_our_exchange(
    ep2: list[dict[str, Any]],
) -> None:
    for result in ep2:
        case = result["autocast"]
        assert "error" not in case, case["error"]
        names = [name.removeprefix("stock ") for name in case if name.startswith("stock ")]
        assert len(names) == 7
        for name in names:
            right, mine = case[f"stock {name}"].float(), case[f"exchange {name}"].float()
            assert case[f"stock {name}"].dtype == case[f"exchange {name}"].dtype, name
            assert float((mine - right).norm()) <= 2e-2 * float(right.norm()), name


def test_phases_of_the_1f1b_overlap_called_one_by_one(ep2: list[dict[str, Any]]) -> None:
    for result in ep2:
        stock, ours, delayed = (result[f"one by one {way}"] for way in (*WAYS, "delayed"))
        for case in (stock, ours, delayed):
            assert "error" not in case, case["error"]
        assert stock["counts"] == (0, 0) and len(stock["grads"]) > 20
        # Two projections in each of two layers, in each microbatch.
        for case, waited in ((ours, 0), (delayed, 24)):
            assert case["counts"] == (0, 12) and case["delayed"] == waited
            assert case["losses"] == pytest.approx(stock["losses"], rel=1e-6, abs=0)
            assert stock["grads"].keys() == case["grads"].keys()
            for name, value in stock["grads"].items():
                torch.testing.assert_close(case["grads"][name], value, rtol=1e-5, atol=1e-7)
