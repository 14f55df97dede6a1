"""The fallback over NCCL is watched: a wait that takes too long is reported, with a stream and events made of Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.low_latency import collective


class _Group:
    """Enough of a process group for the constructor."""


@pytest.mark.parametrize("capturing", [False, True])
def test_a_wait_over_nccl_is_watched_unless_it_is_captured(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    from megatron_fluid.low_latency.layout import Layout

    order: list[str] = []
    watched: list[tuple[Any, ...]] = []
    names = iter(("started", "finished"))

    class Event:
        def __init__(self) -> None:
            self.name = next(names)

        def record(self, stream: Any) -> None:
            order.append(self.name)

    monkeypatch.setattr(collective.dist, "get_rank", lambda group: 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monitor = SimpleNamespace(watch=lambda *arguments: watched.append(arguments))
    monkeypatch.setattr(collective, "get_monitor", lambda: monitor)
    transport = collective.Collective(Layout(2, 4, 1, 4, 1, 16, 32, 0), _Group(), torch.device("cpu"), 7.0)  # type: ignore[arg-type]
    transport.device, transport.name = torch.device("cuda", 0), "nccl"
    transport._works = [SimpleNamespace(wait=lambda: order.append("wait"))]  # type: ignore[list-item]
    transport._finish("dispatch")
    if capturing:
        assert order == ["wait"] and not watched
        return
    assert order == ["started", "wait", "finished"]
    ((lane, started, finished, timeout_s, error),) = watched
    assert (started.name, finished.name, timeout_s) == ("started", "finished", 7.0)
    found = error()
    assert isinstance(found, PeerTimeoutError) and lane == ("low_latency", 5)
    assert "rank 2: no answer from its group in low_latency.dispatch over nccl after 7 s" in str(found)
