"""Megatron's ColumnParallelLinear and RowParallelLinear, built and patched on gloo ranks: what
others put into them is kept, and every gradient is right, also straight into main_grad.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches import linears as seam
from megatron_fluid.patches import startup_report as startup
from tests.support import tiny_gpt
from tests.support.fused_linear import linear_of
from tests.support.launch import on_ranks, world_group
from tests.support.whole_linear import whole_linear

LINEARS = ("column-parallel-linear", "row-parallel-linear")
S, B, H, OUT = 8, 2, 6, 10  # the whole sequence, batch, hidden, outputs


def _build(mode: str, cls: type | None = None, bias: bool = True) -> Any:
    torch.manual_seed(1)
    linear = linear_of(mode, H, OUT, cls, bias)
    if bias:
        torch.nn.init.normal_(linear.bias)
    return linear


def _input(mode: str, rank: int, ranks: int, seed: int = 0) -> Tensor:
    shape = (S // ranks, B, H) if mode == "column" else (S, B, H // ranks)
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(10 * seed + rank)
    ).requires_grad_()


@contextlib.contextmanager
def _patched(on: bool = True) -> Iterator[list[str]]:
    """Inside, the linears are patched; yields a list that grows with each overlapped call."""
    calls: list[str] = []

    def counted(name: str, mode: str) -> Any:
        real = getattr(seam, name)

        def call(*args: Any, **named: Any) -> Any:
            calls.append(mode)
            return real(*args, **named)

        return mock.patch.object(seam, name, call)

    patches.revert(*LINEARS)
    set_config(FluidConfig(tp_overlap="on" if on else "off"))
    gathers, scatters = (
        counted("all_gather_matmul", "column"),
        counted("matmul_reduce_scatter", "row"),
    )
    with gathers, scatters, patches.patched(*LINEARS):
        yield calls
    set_config(None)


def _start(ranks: int) -> None:
    logging.getLogger("megatron").setLevel(logging.ERROR)
    tiny_gpt.parallel(tensor_model_parallel_size=ranks)


@on_ranks(2)
def test_every_gradient_is_right_and_goes_into_main_grad_where_megatron_fuses_it(
    rank: int, ranks: int
) -> None:
    _start(ranks)
    group = world_group()
    for mode in ("column", "row"):
        for fused, marked, bias in ((False, True, True), (True, True, False), (True, False, True)):
            linear, case = _build(mode, bias=bias), f"{mode}, fused {fused}, marked {marked}"
            linear.gradient_accumulation_fusion = fused
            weight = linear.weight
            if fused:
                weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight, 7.0), True
            if fused and marked:
                weight.grad_added_to_main_grad = False
            tensors = {"weight": weight, **({"bias": linear.bias} if bias else {})}
            total = dict.fromkeys(tensors, torch.zeros((), dtype=torch.float64))
            for microbatch in range(2):
                x = _input(mode, rank, ranks, microbatch)
                with _patched() as calls:
                    out, _ = linear(x)
                    upstream = torch.randn(
                        out.shape, generator=torch.Generator().manual_seed(99 - rank - microbatch)
                    )
                    out.backward(upstream)
                assert calls == [mode], case
                expected = whole_linear(mode, group, {"x": x, **tensors}, upstream)
                assert x.grad is not None
                _close(out, expected["out"], f"{case}: output")
                _close(x.grad, expected["x"], f"{case}: dx")
                total = {name: sofar + expected[name] for name, sofar in total.items()}
                if fused:
                    weight.overwrite_main_grad = False  # the first microbatch's to say
                    assert (weight.grad is not None) == marked, (
                        f"{case}: a hook of Megatron's waits only for the mark"
                    )
                    assert getattr(weight, "grad_added_to_main_grad", None) is (
                        True if marked else None
                    ), case
            _close(weight.main_grad if fused else weight.grad, total["weight"], f"{case}: dW")
            if bias:
                _close(linear.bias.grad, total["bias"], f"{case}: db")


def _close(found: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-5, atol=2e-5, msg=lambda m: f"{what}: {m}"
    )


@on_ranks(2)
def test_a_linear_computes_what_a_subclass_an_instance_or_a_quantiser_put_into_it(
    rank: int, ranks: int
) -> None:
    _start(ranks)

    def adding(impl: Any) -> Any:
        return functools.wraps(impl)(lambda *args, **named: impl(*args, **named) + 1000)

    def subclass(of: type) -> type:
        """Its own implementation, which calls that of the class."""
        return type(
            of.__name__.partition("P")[0], (of,), {"_forward_impl": adding(of._forward_impl)}
        )

    Row, Column = map(subclass, (layers.RowParallelLinear, layers.ColumnParallelLinear))
    instance = _build("row")
    instance._forward_impl = adding(instance._forward_impl)
    real = layers.linear_with_grad_accumulation_and_async_allreduce
    quantising = adding(real)
    for mode, linear, gemm, overlapped in (
        ("row", _build("row", Row), real, []),
        ("row", instance, real, []),
        # Which is asked, and asks the overlapped form in turn.
        ("column", _build("column", Column), real, ["column"]),
        ("row", _build("row"), quantising, []),
        ("column", _build("column"), quantising, []),
        ("row", _build("row"), real, ["row"]),
    ):
        x = _input(mode, rank, ranks).detach()
        found = []
        for on in (False, True):
            # While it runs, as ModelOpt does.
            with _patched(on) as calls, mock.patch.object(layers, real.__name__, gemm):
                found.append(linear(x)[0])
            assert calls == (overlapped if on else []), (type(linear), gemm)
        torch.testing.assert_close(found[1], found[0])
    reasons = [reason for _, on, reason, _ in startup.features() if not on]
    for told in (
        "Row: its _forward_impl is not Megatron's own",
        "RowParallelLinear: its _forward_impl is not Megatron's own",
        "RowParallelLinear: its GEMM is not Megatron's own",
        "ColumnParallelLinear: its GEMM is not Megatron's own",
    ):
        assert any(reason.startswith(told) for reason in reasons), (told, reasons)
