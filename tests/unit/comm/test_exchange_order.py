"""In which order an exchange over gloo starts its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound
from megatron_fluid.comm.waits import WaitName


def test_everything_is_asked_for_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[str, int | None]] = []

    def start(self: P2PRounds, name: WaitName, move: Any, tensors: Sequence[Any]) -> PendingRound:
        assert len(tensors) == 1
        begun.append(("receive" if move is dist.irecv else "send", name.peer))
        return PendingRound()

    monkeypatch.setattr(P2PRounds, "_start_gloo", start)
    rounds = object.__new__(P2PRounds)
    rounds.sent_bytes = [0, 0, 0]
    both, one = [torch.ones(2)], [torch.ones(3)]
    rounds.exchange("test", 0, [(1, both, both), (2, one, []), (0, [], one)])
    assert begun == [("receive", 1), ("receive", 0), ("send", 1), ("send", 2)]
    assert rounds.sent_bytes == [0, 8, 12]
