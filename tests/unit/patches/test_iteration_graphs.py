"""Letting go of the graphs of whole iterations."""

from __future__ import annotations

import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.patches.iteration_graphs import drop_iteration_graphs


class Graph:
    """One that was captured."""


def test_nothing_holds_a_graph_or_its_results_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    graph: Any = Graph()
    weakref.finalize(graph, order.append, "dropped")
    wrapper = SimpleNamespace(
        cuda_graph={"training": graph, "validation": None},
        result={"training": [graph], "validation": None},
    )
    module: Any = SimpleNamespace(FullCudaGraphWrapper=wrapper)
    monkeypatch.setitem(sys.modules, "megatron.core.full_cuda_graph", module)
    del graph
    drop_iteration_graphs()
    assert order == ["synchronize", "dropped"], "a graph that still runs is not dropped"
    assert wrapper.cuda_graph == wrapper.result == {"training": None, "validation": None}
    drop_iteration_graphs()
    assert len(order) == 2


def test_without_megatrons_module_nothing_is_asked_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core.full_cuda_graph", raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("no GPU is needed"))
    drop_iteration_graphs()
