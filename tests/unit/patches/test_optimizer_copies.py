"""Megatron's distributed optimizer with slices that are kept from step to step: the same bits, and
nothing stale."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch

from tests.support.launch import run_ranks

PATCHES = ("optimizer-gradients", "optimizer-parameters")


def _trained(dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    from tests.support import tiny_gpt

    half = {"bf16": True} if dtype == torch.bfloat16 else {}
    with tiny_gpt.plug_in(False):
        model = tiny_gpt.gpt(tiny_gpt.config_of(params_dtype=dtype, **half), seed=3)
        run = tiny_gpt.train(model, iterations=4, microbatches=2, distributed_optimizer=True)
    return run.losses, [parameter.detach().clone() for parameter in model.parameters()]


def _world(rank: int, world_size: int) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megatron_fluid import patches
    from megatron_fluid.patches import optimizer_copies
    from tests.support import tiny_gpt

    tiny_gpt.parallel()
    patches.revert(*PATCHES)
    plain = {name: getattr(DistributedOptimizer, name) for name in _METHODS}
    optimizers: list[Any] = []
    found: dict[str, Any] = {}

    class Seen(optimizer_copies._ParamCopies):
        def __init__(self, optimizer: Any) -> None:
            super().__init__(optimizer)
            optimizers.append(optimizer)

    for dtype in (torch.float32, torch.bfloat16):
        losses, parameters = _trained(dtype)
        with (
            patches.patched(*PATCHES),
            mock.patch.object(optimizer_copies, "_ParamCopies", Seen),
            mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as copy,
        ):
            ours = _trained(dtype)
        pairs = zip(parameters, ours[1], strict=True)
        found[str(dtype)] = {
            "losses": losses == ours[0],
            "bits": all(torch.equal(one, other) for one, other in pairs),
            "launches": copy.call_count,
            "looked": len(optimizers) == len({id(each) for each in optimizers}),
        }
        optimizers[:-1] = []
        found[str(dtype)] |= _moved(optimizers[0], plain)
        optimizers.clear()
    return found


_METHODS = ("_copy_model_grads_to_main_grads", "_copy_main_params_to_model_params")


def _moved(optimizer: Any, plain: dict[str, Any]) -> dict[str, bool]:
    """What is written after a buffer, a gradient and a shard were replaced, against Megatron's
    own."""
    from megatron_fluid import patches

    def grads() -> list[torch.Tensor]:
        return [shard.grad for group in optimizer.shard_fp32_groups for shard in group] + [
            shard.grad for group in optimizer.shard_fp32_from_float16_groups for shard in group
        ]

    def agree(method: str, results: Any) -> bool:
        with patches.patched(*PATCHES):
            getattr(optimizer, method)()
        ours = [value.clone() for value in results()]
        for value in results():
            value.zero_()
        plain[method](optimizer)
        return all(torch.equal(a, b) for a, b in zip(ours, results(), strict=True))

    def buffers() -> list[torch.Tensor]:
        return [bucket.param_data for buffer in optimizer.buffers for bucket in buffer.buckets]

    found = {"buffer": True, "gradient": True}
    for buffer in optimizer.buffers:
        for bucket in buffer.buckets:
            bucket.param_data = torch.zeros_like(bucket.param_data)
    found["buffer"] = agree(_METHODS[1], buffers) and any(b.any() for b in buffers())
    groups = (optimizer.model_fp32_groups, optimizer.model_float16_groups)
    models = [model for kind in groups for group in kind for model in group]
    with torch.no_grad():
        for number, model in enumerate(models):
            model.main_grad = torch.full_like(model.main_grad, number + 1.0)
    with patches.patched(*PATCHES):
        optimizer._copy_model_grads_to_main_grads()
    ours = [grad.clone() for grad in grads()]
    plain[_METHODS[0]](optimizer)
    found["gradient"] = all(torch.equal(a, b) for a, b in zip(ours, grads(), strict=True))
    models[0].main_grad = models[0].main_grad.bfloat16()  # reduced in half precision: Megatron's
    with patches.patched(*PATCHES):
        optimizer._copy_model_grads_to_main_grads()
    found["half"] = all(grad.dtype == torch.float32 for grad in grads())
    return found


def test_steps_have_the_bits_of_megatrons_and_see_what_was_replaced() -> None:
    for rank in run_ranks(_world, 2):
        for dtype in ("torch.float32", "torch.bfloat16"):
            case = rank[dtype]
            assert case["losses"] and case["bits"]
            assert case["launches"] >= 4 and case["looked"]
            assert case["buffer"] and case["gradient"] and case["half"]
