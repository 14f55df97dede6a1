"""Which rank this process is, from the environment of its launcher.

Understood, first match wins: torchrun (RANK, WORLD_SIZE, LOCAL_RANK), Open MPI's mpirun
(OMPI_COMM_WORLD_*), MPICH and Intel MPI (PMI_*), and one launch a node with NODE_RANK, WORLD_SIZE,
WORLD_LOCAL_SIZE, MASTER_ADDR, MASTER_PORT, where each launched process starts WORLD_LOCAL_SIZE
ranks itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fluid.errors import ConfigError

__all__ = ["NodeLaunch", "RankLaunch", "detect_launch"]


@dataclass(frozen=True)
class RankLaunch:
    """This process is one rank. address: host and port of rank 0's store."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    launcher: str


@dataclass(frozen=True)
class NodeLaunch:
    """This process is one node's and starts ranks node_rank * local_size + i, i < local_size."""

    node_rank: int
    world_size: int
    local_size: int
    address: str
    port: int

    def rank(self, local_rank: int) -> RankLaunch:
        """Return the launch of one of this node's ranks."""
        rank, world = self.node_rank * self.local_size + local_rank, self.world_size
        return RankLaunch(rank, world, local_rank, self.address, self.port, "nodes")


_RANKED = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def detect_launch(environment: Mapping[str, str] | None = None) -> RankLaunch | NodeLaunch | None:
    """Return how this process was launched, or None if it is no part of a job.

    Raises:
        ConfigError: a variable is missing or is not a number.
    """
    env = os.environ if environment is None else environment
    for launcher, rank, size, local, on_node in _RANKED:
        if rank in env and size in env:
            found = _number(env, rank), _number(env, size), _number(env, local, _number(env, rank))
            if not 0 <= found[0] < found[1]:
                raise ConfigError.of(rank, found[0], f"0 to {size} - 1 = {found[1] - 1}")
            local_size = _number(env, on_node, found[1])
            if local_size < found[1] and "MASTER_ADDR" not in env:
                nodes = f"not set, with {local_size} of {found[1]} ranks on this node ({on_node})"
                raise ConfigError(f"MASTER_ADDR: {nodes}, allowed: the address of rank 0's node")
            return RankLaunch(*found, *_store(env), launcher)
    if "NODE_RANK" in env and "WORLD_LOCAL_SIZE" in env:
        ranks, local_size = _number(env, "WORLD_SIZE"), _number(env, "WORLD_LOCAL_SIZE")
        node = _number(env, "NODE_RANK")
        if local_size < 1 or ranks % local_size or not 0 <= node < ranks // local_size:
            raise ConfigError(
                f"NODE_RANK {node}, WORLD_SIZE {ranks}, WORLD_LOCAL_SIZE {local_size}: allowed: a "
                "world of whole nodes, NODE_RANK below WORLD_SIZE / WORLD_LOCAL_SIZE"
            )
        if ranks > local_size and "MASTER_ADDR" not in env:
            raise ConfigError("MASTER_ADDR: not set, allowed: the address of rank 0's node")
        return NodeLaunch(node, ranks, local_size, *_store(env))
    return None


def _store(env: Mapping[str, str]) -> tuple[str, int]:
    return env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT", 29500)


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ConfigError(f"{name}: not set, allowed: a whole number")
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError.of(name, text, "a whole number") from None
