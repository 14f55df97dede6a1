"""Which of Megatron's tensor-parallel linears are overlapped, and what is said of the others."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches import tensor_parallel


def _linear(ranks: int = 2, offloading: object = None) -> Any:
    return SimpleNamespace(
        tp_group=SimpleNamespace(size=lambda: ranks), config=SimpleNamespace(_cpu_offloading_context=offloading)
    )


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"sequence_parallel": False}, "without --sequence-parallel"),
        ({"frozen": True}, "its weight is frozen"),
        ({"dtype": torch.bfloat16}, "its input is torch.bfloat16, its weight torch.float32"),
        ({"autocast": True}, "autocast decides"),
        ({"offloading": object()}, "offloaded"),
    ],
)
def test_a_linear_that_is_not_overlapped_says_why(
    monkeypatch: pytest.MonkeyPatch, mode: str, change: dict[str, Any], reason: str | None
) -> None:
    said: list[str] = []
    monkeypatch.setattr(tensor_parallel, "note", lambda linear, on, reason: said.append(reason))
    monkeypatch.setattr(tensor_parallel, "current_config", lambda: FluidConfig(tp_overlap=mode))
    weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=not change.get("frozen", False))
    a = torch.zeros(2, 1, 4, dtype=change.get("dtype", torch.float32))
    autocast = torch.autocast("cpu", torch.bfloat16) if change.get("autocast") else contextlib.nullcontext()
    with autocast:
        fits = tensor_parallel._linear_fits(
            _linear(offloading=change.get("offloading")), weight, a, change.get("sequence_parallel", True)
        )
    assert fits is (reason is None)
    assert said == [] if reason is None else reason in said[0]


def test_experts_linears_keep_megatrons_path_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run with --sequence-parallel they were reported as linears without it."""
    monkeypatch.setattr(tensor_parallel, "note", lambda *_: pytest.fail("said something"))
    linear, a = _linear(), torch.zeros(2, 1, 4)
    linear.explicit_expert_comm, linear.input_is_parallel = True, True
    linear.sequence_parallel, linear.weight = True, torch.nn.Parameter(torch.zeros(4, 4))
    column = tensor_parallel.column_forward_impl(lambda self, input, weight, **_: "Megatron's")  # type: ignore[arg-type, return-value]
    assert column(linear, input=a, weight=linear.weight, sequence_parallel=False) == "Megatron's"
    assert tensor_parallel.row_forward(lambda self, input_: "Megatron's")(linear, a) == "Megatron's"


def test_where_there_is_nothing_to_overlap_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, "note", lambda *_: pytest.fail("said something"))
    weight, a = torch.nn.Parameter(torch.zeros(4, 4)), torch.zeros(2, 1, 4)
    assert not tensor_parallel._linear_fits(_linear(ranks=1), weight, a, True)
    set_config(FluidConfig(tp_overlap="off"))
    try:
        assert not tensor_parallel._linear_fits(_linear(), weight, a, True)
    finally:
        set_config(None)
