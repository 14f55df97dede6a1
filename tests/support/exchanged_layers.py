"""An MoE layer by Megatron, with this package's exchange under Megatron's experts, and with this
package's experts, compared: what the tests of the token dispatcher share."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from tests.support import tiny_gpt

__all__ = [
    "NEVER_FUSED",
    "NEVER_OURS",
    "WAYS",
    "guarded",
    "keep_megatrons",
    "layer_both",
    "plug_in",
]


class _Adapted(ColumnParallelLinear):
    """A linear with a low-rank adapter beside it, as adapters are put on by other software."""

    def adapt(self) -> None:
        g = torch.Generator().manual_seed(11)
        out, width = self.weight.shape
        for name, shape in (("down", (2, width)), ("up", (out, 2))):
            value = torch.randn(shape, generator=g, dtype=self.weight.dtype)
            self.register_parameter(name, torch.nn.Parameter(value))

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        output, bias = super().forward(input_, *args, **kwargs)
        return output + input_ @ self.down.t() @ self.up.t(), bias


def change(layer: Any, what: str, rank: int) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    if what == "adapters":
        for expert in layer.experts.local_experts:
            expert.linear_fc1.__class__ = _Adapted
            expert.linear_fc1.adapt()
    if what == "hook" and rank == 1:
        layer.experts.local_experts[0].linear_fc1.register_forward_hook(lambda *_: None)
    if what == "phase":

        class Scaled(MoELayer):
            def combine(self, output: torch.Tensor) -> torch.Tensor:
                return super().combine(2 * output)

        layer.__class__ = Scaled
    if what == "quantisation":
        # Of Transformer Engine's quantised linears only what they ask of a dispatcher: full tiles.
        layer.config.fp8, layer.config.fp8_recipe = "hybrid", "blockwise"
        layer.config.moe_router_padding_for_quantization = True
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
            linear.register_forward_pre_hook(full_tiles)
    if what == "frozen":
        layer.experts.requires_grad_(False)


NEVER_FUSED = ("phase", "latent")  # ours phase by phase
NEVER_OURS = ("adapters", "hook", "quantisation", *NEVER_FUSED)
WAYS = ("stock", "exchange", "ours")


def keep_megatrons(layers: Any) -> None:
    """A hook on an expert, which ours would never call."""
    for layer in layers:
        layer.experts.register_forward_hook(lambda *_: None)


def full_tiles(_: Any, arguments: tuple[torch.Tensor, list[int]]) -> None:
    rows, splits = arguments
    assert rows.shape[0] == sum(splits) and all(split % 16 == 0 for split in splits), splits


@contextlib.contextmanager
def plug_in(on: bool) -> Iterator[tuple[list[int], list[int]]]:
    """tiny_gpt.plug_in, which yields the calls whose experts are ours, and those whose exchange
    alone is."""
    from megatron_fluid.moe.open_exchange import OpenExchange

    exchanged: list[int] = []
    real = OpenExchange.dispatch

    def counted(self: Any, *args: Any) -> Any:
        exchanged.append(1)
        return real(self, *args)

    with (
        tiny_gpt.plug_in(on) as calls,
        mock.patch.object(OpenExchange, "dispatch", counted),
        mock.patch(
            "megatron_fluid.patches.moe.expert_modules._te_linear_types",
            return_value=(tiny_gpt.GroupedLinear,),
        ),
    ):
        yield calls, exchanged


def guarded(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return body()
    except Exception:  # noqa: BLE001 (reported by the test)
        return {"error": traceback.format_exc()}


def layer_both(
    rank: int, overrides: dict[str, Any], lengths: tuple[int, int], what: str
) -> dict[str, Any]:
    """One MoELayer in fp64, two accumulated passes: for output, input gradient and every weight
    gradient its size and the difference, by our exchange phase by phase and fused. "separate":
    whether the experts of the former were ours."""
    from megatron_fluid.patches.moe import layer as moe_layer

    settings = {"params_dtype": torch.float64, "moe_router_dtype": "fp64", **overrides}
    found: dict[str, dict[str, torch.Tensor]] = {}
    counts: dict[str, tuple[int, int]] = {}
    reason: str | None = None
    separate = False
    for way in WAYS[:2] if what in NEVER_OURS else WAYS:
        with plug_in(way != "stock") as (calls, exchanged):
            config = tiny_gpt.config_of(**settings)
            layer = tiny_gpt.moe_layer(config, grouped="moe_grouped_gemm" in overrides)
            for name, parameter in layer.named_parameters():
                if "bias" in name:  # Megatron starts them at zero
                    with torch.no_grad():
                        parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
            change(layer, what, rank)
            if way == "exchange" and what not in NEVER_OURS:
                keep_megatrons([layer])
            generator = torch.Generator().manual_seed(77 + rank)
            shape = lengths[rank], 2, config.hidden_size
            hidden = torch.randn(*shape, dtype=torch.float64, generator=generator)
            if what == "wanted":
                hidden = hidden.abs()
                with torch.no_grad():
                    layer.router.weight[[0, 1, 2]] = 1.0
            hidden.requires_grad_()
            for _ in range(2):
                output, bias = layer(hidden)
                (output.square().sum() + output.sum()).backward()
            assert bias is None
            values = {"output": output.detach(), "input": hidden.grad}
            values |= {n: p.grad for n, p in layer.named_parameters() if p.requires_grad}
            assert all(value is not None for value in values.values())
            with torch.no_grad():
                values["output without gradients"] = layer.eval()(hidden)[0]
            found[way] = values  # type: ignore[assignment]
            counts[way] = len(calls), len(exchanged)
            if way == "exchange":
                reason = moe_layer.experts_reason_of(layer)
                separate = reason is None
                reason = reason or moe_layer.DECISIONS.fusion_reason_of(layer)
    stock = found.pop("stock")
    assert all(values.keys() == stock.keys() for values in found.values())
    differences = {
        way: {
            name: (float(value.abs().max()), float((value - values[name]).abs().max()))
            for name, value in stock.items()
        }
        for way, values in found.items()
    }
    return {"differences": differences, "counts": counts, "reason": reason, "separate": separate}
