"""One symmetric workspace a process group, and one domain a layer shape on it, for all layers of a
model.

Layers use the same buffers one after the other, so a model of any depth holds them once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.config import current_config
from megatron_fluid.kernels.grouped_gemm import sends_rows
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule, choose_schedule

__all__ = ["shared_buffers"]


@torch.inference_mode(False)
def shared_buffers(
    group: dist.ProcessGroup,
    max_tokens: int,
    hidden: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.bfloat16,
    schedule: Schedule | None = None,
    stream: int = 0,
) -> NvlinkBuffers:
    """The domain of this shape on the group's workspace. Collective the first time: all ranks ask
    in the same order.

    schedule None takes the one that rank 0 chooses for the shape. Layers that communicate at the
    same time on two streams take different `stream`s. Raises ConfigError, naming why, where the
    ranks cannot map each other's memory.
    """
    shape = (max_tokens, hidden, ffn, top_k, num_experts)
    if schedule is None:
        schedule = group_resource(
            group, ("moe schedule", *shape, dtype), lambda: _choose(group, *shape, _sends(dtype))
        )
    chosen = schedule

    def make() -> NvlinkBuffers:
        workspace = group_resource(
            group,
            "moe workspace",
            lambda: SymmetricWorkspace(group, current_config().timeout_s),
            close=SymmetricWorkspace.close,
        )
        return NvlinkBuffers(
            workspace, max_tokens, hidden, top_k, num_experts, dtype, stream=stream, schedule=chosen
        )

    key = ("moe buffers", max_tokens, hidden, top_k, num_experts, dtype, schedule, stream)
    return group_resource(group, key, make)


def _sends(dtype: torch.dtype) -> bool:
    """Whether this GPU's grouped GEMMs can send the rows of their results."""
    if not torch.cuda.is_available():
        return False
    return sends_rows(torch.device("cuda", torch.cuda.current_device()), dtype)


def _choose(
    group: dist.ProcessGroup,
    max_tokens: int,
    hidden: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    sends: bool,
) -> Schedule:
    """choose_schedule on the group's first rank, for all: ranks with other schedules would wait for
    each other in vain."""
    found = [NO_OVERLAP]
    if dist.get_rank(group) == 0:
        ranks = dist.get_world_size(group)
        found = [choose_schedule(max_tokens, hidden, ffn, top_k, num_experts, ranks, sends)]
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    return found[0]
