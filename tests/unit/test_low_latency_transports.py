"""Which collectives a group has on this machine, also where it was made without naming a backend."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.low_latency.open_transport import collective_backend


@pytest.mark.parametrize(
    ("config", "cuda", "expected"),
    [
        ("cpu:gloo,cuda:nccl", True, "nccl"),
        ("cpu:gloo,cuda:nccl", False, "gloo"),
        ("cuda:nccl", True, "nccl"),
        ("cpu:gloo,cuda:gloo", True, "gloo"),
        ("cpu:gloo", True, "gloo"),
    ],
)
def test_the_backend_is_that_of_the_machines_devices(config: str, cuda: bool, expected: str) -> None:
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(dist, "get_backend", return_value="undefined"),
        mock.patch.object(torch.cuda, "is_available", return_value=cuda),
    ):
        assert collective_backend(mock.Mock()) == expected
