"""One Megatron MoE layer by Megatron, and with this package's experts behind a token dispatcher,
compared: what the tests of these experts share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.support import tiny_gpt

__all__ = ["compared", "plug_in", "uneven_collectives", "worst", "zeros_moved"]


@contextlib.contextmanager
def uneven_collectives() -> Iterator[None]:
    """Inside, gloo gathers and reduce-scatters parts of several sizes, as NCCL does: Megatron's
    all-to-all does so where experts are split."""

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
        for rank, part in enumerate(parts):
            if rank == group.rank():
                part.copy_(mine)
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group)

    def reduce_scatter(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None) -> None:
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in parts])[group.rank()])

    with (
        mock.patch.object(dist, "all_gather", all_gather),
        mock.patch.object(dist, "reduce_scatter", reduce_scatter),
    ):
        yield


@contextlib.contextmanager
def plug_in(on: bool, **fields: Any) -> Iterator[list[int]]:
    """tiny_gpt.plug_in, which yields the calls in which our experts stood alone. `auto` chooses as
    on GPUs that do not reach each other's memory."""
    from megatron_fluid.patches.moe import separate_experts

    calls: list[int] = []
    real = separate_experts.run_experts

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    grouped = "megatron_fluid.patches.moe.expert_modules._te_linear_types"
    with (
        tiny_gpt.plug_in(on, **fields) as fused,
        mock.patch.object(separate_experts, "run_experts", counted),
        mock.patch(grouped, return_value=(tiny_gpt.GroupedLinear,)),
        mock.patch("megatron_fluid.patches.moe.decision.cpu_mode_active", return_value=False),
    ):
        yield calls
    assert not fused, "a fused call of a layer that was to run phase by phase"


def zeros_moved(layer: torch.nn.Module) -> None:
    """Give biases values: Megatron starts them at zero."""
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            with torch.no_grad():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))


def compared(
    rank: int, overrides: dict[str, Any], lengths: tuple[int, ...], fields: dict[str, Any]
) -> dict[str, Any]:
    """One MoELayer in fp64, two accumulated passes and one without gradients: for output, input
    gradient and every weight gradient its size and the difference.

    Args:
        overrides: of the TransformerConfig.
        lengths: tokens of each rank.
        fields: of the FluidConfig.
    """
    from megatron_fluid.patches.moe import layer as moe_layer

    settings = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", **overrides}
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {}
    for way in ("stock", "ours"):
        with plug_in(way == "ours", **fields) as calls:
            config = tiny_gpt.config_of(**settings)
            layer = tiny_gpt.moe_layer(config, grouped="moe_grouped_gemm" in overrides)
            zeros_moved(layer)
            generator = torch.Generator().manual_seed(77 + rank)
            shape = lengths[rank], 2, config.hidden_size
            hidden = torch.randn(*shape, dtype=torch.float64, generator=generator)
            hidden.requires_grad_()
            for _ in range(2):
                output, bias = layer(hidden)
                (output.square().sum() + output.sum()).backward()
            assert bias is None
            values = {"output": output.detach(), "input": hidden.grad}
            values |= {name: parameter.grad for name, parameter in layer.named_parameters()}
            with torch.no_grad():
                values["output without gradients"] = layer.eval()(hidden)[0]
            found[way] = values
            result[f"{way} calls"] = len(calls)
            result["exchange"] = moe_layer.backend_of(layer)
            result["experts"] = moe_layer.experts_reason_of(layer)
    stock, ours = found["stock"], found["ours"]
    assert stock.keys() == ours.keys() and all(value is not None for value in ours.values())
    result["differences"] = {
        name: (float(value.abs().max()), float((value - ours[name]).abs().max()))
        for name, value in stock.items()
    }
    return result


def worst(result: dict[str, Any]) -> float:
    """The largest difference of a result of `compared`, relative to a size of at least one."""
    assert "error" not in result, result["error"]
    return max(off / max(size, 1.0) for size, off in result["differences"].values())
