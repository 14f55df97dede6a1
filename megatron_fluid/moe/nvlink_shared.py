"""One symmetric workspace a process group, and one domain a layer shape on it, for all layers of a model.

Layers use the same buffers one after the other, so a model of any depth holds them once.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from megatron_fluid.comm.symmetric import SymmetricWorkspace, is_destroyed, why_not_symmetric
from megatron_fluid.config import current_config
from megatron_fluid.kernels.grouped_gemm import sends_rows
from megatron_fluid.moe.nvlink_domain import NvlinkDomain
from megatron_fluid.moe.nvlink_schedule import NO_OVERLAP, Schedule, choose_schedule

__all__ = ["close_domains", "shared_domain", "supports_nvlink"]

# By group, not by its name, which may come back after destroy_process_group.
_reasons: weakref.WeakKeyDictionary[dist.ProcessGroup, str | None] = weakref.WeakKeyDictionary()
_workspaces: dict[dist.ProcessGroup, SymmetricWorkspace] = {}
_domains: dict[tuple, NvlinkDomain] = {}
_chosen: dict[tuple, Schedule] = {}


def supports_nvlink(group: dist.ProcessGroup) -> str | None:
    """None when the NVLink path can serve `group`, else the reason. Collective the first time."""
    if group not in _reasons:
        _reasons[group] = why_not_symmetric(group)
    return _reasons[group]


@torch.inference_mode(False)
def shared_domain(
    group: dist.ProcessGroup,
    max_tokens: int,
    hidden: int,
    ffn: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype = torch.bfloat16,
    schedule: Schedule | None = None,
    stream: int = 0,
) -> NvlinkDomain:
    """The domain of this shape on the group's workspace. Collective the first time: all ranks ask in the same order.

    schedule None takes the one that rank 0 chooses for the shape. Layers that communicate at the same time on two streams take
    different `stream`s. Raises ConfigError, naming why, where the ranks cannot map each other's memory.
    """
    if schedule is None:
        shape = (max_tokens, hidden, ffn, top_k, num_experts)
        if (group, *shape, dtype) not in _chosen:
            sends = torch.cuda.is_available() and sends_rows(torch.device("cuda", torch.cuda.current_device()), dtype)
            _chosen[group, *shape, dtype] = _choose(group, *shape, sends)
        schedule = _chosen[group, *shape, dtype]
    key = (group, max_tokens, hidden, top_k, num_experts, dtype, schedule, stream)
    domain = _domains.get(key)
    if domain is None:
        workspace = _workspaces.get(group)
        if workspace is None:
            for old in [other for other in _workspaces if is_destroyed(other)]:
                _forget(old)  # its memory goes with the last layer that has a domain of it
            workspace = _workspaces[group] = SymmetricWorkspace(group, current_config().timeout_s)
        domain = _domains[key] = NvlinkDomain(
            workspace, max_tokens, hidden, top_k, num_experts, dtype, stream=stream, schedule=schedule
        )
    return domain


def close_domains(group: dist.ProcessGroup) -> None:
    """Give back the symmetric memory that MoE layers of `group` share. Collective; a layer that still has a domain of it is not to be
    called again. Nothing happens where there is none.
    """
    workspace = _workspaces.get(group)
    if workspace is not None:
        workspace.close()
    _forget(group)


def _forget(group: dist.ProcessGroup) -> None:
    _workspaces.pop(group, None)
    for table in (_domains, _chosen):
        for key in [key for key in table if key[0] is group]:
            del table[key]  # type: ignore[attr-defined]


def _choose(
    group: dist.ProcessGroup, max_tokens: int, hidden: int, ffn: int, top_k: int, num_experts: int, sends: bool
) -> Schedule:
    """choose_schedule on the group's first rank, for all: ranks with other schedules would wait for each other in vain."""
    found = [NO_OVERLAP]
    if dist.get_rank(group) == 0:
        ranks = dist.get_world_size(group)
        found = [choose_schedule(max_tokens, hidden, ffn, top_k, num_experts, ranks, sends)]
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    return found[0]
