"""The NVLink buffers that the layers of a process group share: one symmetric workspace for each
group, NvlinkBuffers for each layer shape on it, and the size and schedule that the ranks agree on.

Layers use the same buffers one after the other, so a model of any depth holds them once.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.groups import group_resource, wait_timeout_s
from megatron_fluid.comm.symmetric import SymmetricWorkspace
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.grouped_gemm.launch import sends_rows
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule, choose_schedule
from megatron_fluid.plan.machine import machine_named

__all__ = ["agreed_buffers", "shared_buffers"]


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
    by_choice: bool = False,
) -> NvlinkBuffers:
    """The buffers of this shape on the group's workspace. Collective the first time: all ranks ask
    in the same order.

    schedule None takes the one that rank 0 chooses for the shape. by_choice: combines send single
    rows, so that a token's sum has the order of its choices, whatever the ranks. Raises ConfigError
    where the ranks cannot map each other's memory.
    """
    shape = (max_tokens, hidden, ffn, top_k, num_experts)
    if schedule is None:
        schedule = group_resource(
            group, ("moe schedule", *shape, dtype), lambda: _choose(group, shape, dtype)
        )
    chosen = schedule = dataclasses.replace(schedule, sent_rows=by_choice or schedule.sent_rows)

    given = (max_tokens, hidden, top_k, num_experts, dtype)

    def make() -> NvlinkBuffers:
        workspace = group_resource(
            group,
            "moe workspace",
            lambda: SymmetricWorkspace(group, wait_timeout_s(group)),
            close=SymmetricWorkspace.close,
        )
        return NvlinkBuffers(workspace, *given, schedule=chosen)

    return group_resource(group, ("moe buffers", *given, schedule), make)


def _choose(
    group: dist.ProcessGroup, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> Schedule:
    """Return the schedule that the group's first rank chooses. Ranks with different schedules would
    wait for each other until their time limits."""

    def found() -> tuple[Schedule, str]:
        if dist.get_rank(group):
            return NO_OVERLAP, ""
        # Whether this GPU's grouped GEMMs can send the rows of their results.
        sends = torch.cuda.is_available() and sends_rows(
            torch.device("cuda", torch.cuda.current_device()), dtype
        )
        try:
            figures = machine_named(current_config().machine)
        except ConfigError as error:
            return NO_OVERLAP, str(error)
        return choose_schedule(*shape, dist.get_world_size(group), sends, figures), ""

    chosen, failure = agreement(group).first("schedule of an MoE layer", found())
    if failure:
        raise ConfigError(failure)
    schedule: Schedule = chosen
    return schedule


def agreed_buffers(
    group: dist.ProcessGroup, tokens: int, hidden: int, ffn: int, top_k: int, num_experts: int, *,
    dtype: torch.dtype, by_choice: bool, factor: int = 1,
) -> NvlinkBuffers:  # fmt: skip
    """shared_buffers for `factor` times the tokens of the rank that has most, `tokens` being those
    of this one. Collective."""
    sizes = agreement(group).gather("tokens of an MoE layer", tokens)
    most = max(*sizes, 1) * factor
    shape = most, hidden, ffn, top_k, num_experts
    return shared_buffers(group, *shape, dtype=dtype, by_choice=by_choice)
