"""Which transport a group gets on a machine, and what is left of it once it is closed."""

import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm import workspace as workspace_module
from megatron_fluid.comm.agreement import Agreement, agreement
from megatron_fluid.low_latency import open_transport
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.open_transport import collective_backend
from tests.support.launch import run_ranks, run_ranks_outcomes, world_group
from tests.support.simulated_workspace import SimulatedWorkspace


@pytest.mark.parametrize(("config", "cuda", "expected"), [
    ("cpu:gloo,cuda:nccl", True, "nccl"),
    ("cpu:gloo,cuda:nccl", False, "gloo"),
    ("cuda:nccl", True, "nccl"),
    ("cpu:gloo,cuda:gloo", True, "gloo"),
    ("cpu:gloo", True, "gloo"),
])  # fmt: skip
def test_the_backend_is_that_of_the_machines_devices(
    config: str, cuda: bool, expected: str
) -> None:
    with (
        mock.patch.object(dist, "get_backend_config", return_value=config),
        mock.patch.object(dist, "get_backend", return_value="undefined"),
        mock.patch.object(torch.cuda, "is_available", return_value=cuda),
    ):
        assert collective_backend(mock.Mock()) == expected


def _auto(rank: int, world: int, blind: int | None, wanted: str = "auto") -> tuple[str, str]:
    """What "auto" takes on two hosts of two GPUs; rank `blind` cannot see its neighbour's."""
    group = world_group()
    with (
        mock.patch("socket.gethostname", return_value=f"host{rank // 2}"),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=rank % 2),
        mock.patch.object(torch.cuda, "device_count", return_value=2),
        mock.patch.object(torch.cuda, "can_device_access_peer", return_value=rank != blind),
        mock.patch.object(open_transport, "collective_backend", return_value="nccl"),
    ):
        return open_transport.choose_transport(
            wanted, group, Layout(4, 8, 2, world, 1, 16, 32, 0), None, True
        )


def test_auto_falls_back_everywhere_where_one_domain_cannot_map_memory() -> None:
    assert {name for name, _ in run_ranks(_auto, 4, None)} == {"nvlink+nccl"}
    ((name, reason),) = set(run_ranks(_auto, 4, 3))
    assert name == "nccl"
    assert "nor nvlink+nccl: GPU 1 cannot access the memory of GPU 0 (rank 2)" in reason


def _close(rank: int, world: int, case: str) -> tuple[bool, bool]:
    """(whether the memory was given back, whether this rank waited for others)."""
    group = world_group()
    space = SimulatedWorkspace(world, timeout_s=30.0 if case == "all is well" else 1.0).rank(rank)
    space.errors.peers = agreement(group)

    def device_finishes(device: torch.device) -> None:
        if case == "rank 0 gives up" and rank == 0:
            space.errors.words[1, 0] = 1 << 62

    agreement(group).barrier("begin")
    if case == "rank 1 is lost" and rank == 1:
        time.sleep(3)
    with (
        mock.patch.object(workspace_module, "synchronize", device_finishes),
        mock.patch.object(Agreement, "read", autospec=True, side_effect=Agreement.read) as waited,
    ):
        space.close()
    dist.barrier()  # the group is as it was
    return space.allocated_bytes() == 0, waited.called


def test_closing_never_hangs_and_all_ranks_do_the_same() -> None:
    assert run_ranks(_close, 2, "all is well") == [(True, True)] * 2
    assert run_ranks(_close, 2, "rank 0 gives up") == [(False, False), (False, True)]
    assert run_ranks(_close, 2, "rank 1 is lost") == [(False, True)] * 2


def test_two_levels_by_name_are_refused_on_every_rank_where_one_domain_cannot() -> None:
    assert set(run_ranks(_auto, 4, None, "nvlink+nccl")) == {("nvlink+nccl", "")}
    for outcome in run_ranks_outcomes(_auto, 4, 3, "nvlink+nccl"):
        said = str(outcome.error)
        assert re.search(r"ConfigError: .*found 'nvlink\+nccl'.*cannot access the memory", said)
