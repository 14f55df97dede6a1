"""Megatron's experts behind this package's exchange, with Megatron's own gradients: under the 1F1B
expert overlap, which calls a layer's phases one by one, and under autocast."""

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_fluid.patches.moe import separate_experts
from tests.support import tiny_gpt
from tests.support.launch import on_ranks
from tests.support.megatron_parity import plug_in


def _start(ranks: int) -> None:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    tiny_gpt.parallel(expert_model_parallel_size=ranks)


@on_ranks(2)
def test_under_autocast_the_experts_are_megatrons_behind_our_exchange(
    rank: int, world_size: int
) -> None:
    """A layer in fp32 under autocast to bf16: output and gradients."""
    _start(world_size)
    found: list[dict[str, Any]] = []
    for on in (False, True):
        with plug_in(on) as counts:
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
            grads = {name: p.grad for name, p in layer.named_parameters()}
            found.append({"output": output.detach(), "input": hidden.grad, **grads})
            assert counts["exchange"] == on
    stock, ours = found
    assert len(stock) == 7
    for name, right in stock.items():
        assert ours[name].dtype == right.dtype, name
        error = (ours[name].float() - right.float()).norm() / right.float().norm()
        assert error <= 2e-2, name


def _one_by_one(on: bool, delayed: bool = False) -> dict[str, Any]:
    """Two iterations of three microbatches under the 1F1B expert overlap, which runs a layer's
    phases one by one, those of a forward between those of another microbatch's backward: every
    parameter's gradient. delayed: weight gradients wait until the schedule asks for them, which of
    Megatron's modules only Transformer Engine's know."""
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
    with plug_in(on) as counts, scale, count:
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
                data_iterator=(tiny_gpt.batch(rank, iteration, m) for m in range(3)), model=[model],
                num_microbatches=3, seq_length=tiny_gpt.SEQUENCE, micro_batch_size=tiny_gpt.BATCH,
                forward_only=False,
            )  # fmt: skip
            losses += [float(report["loss"]) for report in found]
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        calls = counts["fused"], counts["exchange"], sum(ran)
        return {"losses": losses, "grads": grads, "counts": calls}


@on_ranks(2)
def test_phases_of_the_1f1b_overlap_called_one_by_one(rank: int, world_size: int) -> None:
    _start(world_size)
    stock = _one_by_one(False)
    assert stock["counts"] == (0, 0, 0) and len(stock["grads"]) > 20
    # Two projections in each of two layers, in each microbatch.
    for delayed, waited in ((False, 0), (True, 24)):
        ours = _one_by_one(True, delayed)
        assert ours["counts"] == (0, 12, waited)
        assert ours["losses"] == pytest.approx(stock["losses"], rel=1e-6, abs=0)
        torch.testing.assert_close(ours["grads"], stock["grads"], rtol=1e-5, atol=1e-7)
