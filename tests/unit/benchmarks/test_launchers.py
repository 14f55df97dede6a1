"""Finding this process's rank in the environments of several launchers."""

from __future__ import annotations

import pytest

from benchmarks.harness.launchers import NodeLaunch, RankLaunch, detect_launch
from megatron_fluid.errors import ConfigError

LOCAL = ("127.0.0.1", 29500)


def environment(prefix: str = "", **variables: object) -> dict[str, str]:
    return {prefix + name: str(value) for name, value in variables.items()}


def test_each_launcher_is_understood() -> None:
    env = environment(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, MASTER_ADDR="a", MASTER_PORT=7)
    assert detect_launch(env) == RankLaunch(5, 8, 1, "a", 7, "torchrun")
    env = environment("OMPI_COMM_WORLD_", RANK=3, SIZE=4, LOCAL_RANK=3)
    assert detect_launch(env) == RankLaunch(3, 4, 3, *LOCAL, "mpirun")
    launch = detect_launch(
        environment(NODE_RANK=1, WORLD_SIZE=16, WORLD_LOCAL_SIZE=8, MASTER_ADDR="10.0.0.1")
    )
    assert launch == NodeLaunch(1, 16, 8, "10.0.0.1", 29500)
    assert launch.rank(2) == RankLaunch(10, 16, 2, "10.0.0.1", 29500, "nodes")
    assert detect_launch({"PATH": "/bin"}) is None


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (environment(RANK="x", WORLD_SIZE=2), "RANK"),
        (environment(RANK=2, WORLD_SIZE=2), "RANK"),
        (environment(NODE_RANK=0, WORLD_LOCAL_SIZE=8), "WORLD_SIZE"),
        (environment(NODE_RANK=2, WORLD_SIZE=16, WORLD_LOCAL_SIZE=8), "NODE_RANK"),
        (environment(NODE_RANK=0, WORLD_SIZE=16, WORLD_LOCAL_SIZE=8), "MASTER_ADDR"),
        (
            environment("OMPI_COMM_WORLD_", RANK=9, SIZE=16, LOCAL_SIZE=8),
            "MASTER_ADDR: not set, with 8 of 16 ranks on this node",
        ),
        (environment(PMI_RANK=0, PMI_SIZE=4, MPI_LOCALNRANKS=2), "MASTER_ADDR"),
    ],
)
def test_what_is_wrong_is_named(env: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        detect_launch(env)
