"""Finding this process's rank in the environments of several launchers."""

from __future__ import annotations

import pytest

from megatron_fluid.comm.launch_environment import NodeLaunch, RankLaunch, detect_launch
from megatron_fluid.errors import ConfigError


def test_torchrun() -> None:
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
    }
    assert detect_launch(env) == RankLaunch(5, 8, 1, "a", 7, "torchrun")


def test_open_mpi() -> None:
    env = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    }
    assert detect_launch(env) == RankLaunch(3, 4, 3, "127.0.0.1", 29500, "mpirun")


def test_one_launch_a_node() -> None:
    env = {
        "NODE_RANK": "1",
        "WORLD_SIZE": "16",
        "WORLD_LOCAL_SIZE": "8",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    launch = detect_launch(env)
    assert launch == NodeLaunch(1, 16, 8, "10.0.0.1", 29500)
    assert launch.rank(2) == RankLaunch(10, 16, 2, "10.0.0.1", 29500, "nodes")


def test_nothing_launched_it() -> None:
    assert detect_launch({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"NODE_RANK": "0", "WORLD_LOCAL_SIZE": "8"}, "WORLD_SIZE"),
        (
            {"NODE_RANK": "2", "WORLD_SIZE": "16", "WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "a"},
            "NODE_RANK",
        ),
        ({"NODE_RANK": "0", "WORLD_SIZE": "16", "WORLD_LOCAL_SIZE": "8"}, "MASTER_ADDR"),
        (
            {
                "OMPI_COMM_WORLD_RANK": "9",
                "OMPI_COMM_WORLD_SIZE": "16",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
            },
            "MASTER_ADDR: not set, with 8 of 16 ranks on this node",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "MASTER_ADDR"),
    ],
)
def test_what_is_wrong_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        detect_launch(env)
