"""How many head groups attention over P2P rounds has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.attention.exchange.rounds import groups_between_hosts
from megatron_fluid.attention.layouts import HeadLayout


def _rounds(*hosts: int, device: str = "cuda") -> Any:
    return SimpleNamespace(domains=list(hosts), device=torch.device(device))


@pytest.mark.parametrize(
    ("rounds", "length", "groups"),
    [
        (None, 1 << 20, 1),
        (_rounds(0, 0), 1 << 20, 1),  # one host
        (_rounds(0, 1), 1024, 1),
        (_rounds(0, 1), 4096, 2),  # 8 MiB of output to each peer, 4 in a message
        (_rounds(0, 1), 1 << 20, 8),
        (_rounds(0, 1, device="cpu"), 1024, 8),
    ],
)
def test_heads_cross_in_groups_where_messages_stay_long(
    rounds: Any, length: int, groups: int
) -> None:
    heads = HeadLayout(32, 16, 128, 2)
    assert groups_between_hosts(rounds, heads, length, 1, 2) == groups


def test_groups_divide_the_key_and_value_heads_of_a_rank() -> None:
    rounds = _rounds(0, 1)
    assert groups_between_hosts(rounds, HeadLayout(36, 12, 128, 2), 1 << 20, 1, 2) == 2
    assert groups_between_hosts(rounds, HeadLayout(32, 2, 128, 2), 1 << 20, 1, 2) == 1
    assert groups_between_hosts(_rounds(0, 1, 2, 3), HeadLayout(32, 2, 128, 4), 1 << 20, 1, 2) == 1
