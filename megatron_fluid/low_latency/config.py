"""The arguments of an AllToAll, checked once."""

from __future__ import annotations

import functools
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import shows_fields_of
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency.layout import Layout

__all__ = ["TRANSPORTS", "TWO_LEVEL_TRANSPORTS", "AllToAllConfig", "estimate_bytes"]

TRANSPORTS = ("auto", "nvlink", "nvshmem", "nccl", "gloo")
# The first moves inside a domain, the second between domains; internode only.
TWO_LEVEL_TRANSPORTS = ("nvlink+nvshmem", "nvlink+nccl", "nccl+nccl", "gloo+gloo")


@dataclass(frozen=True)
class AllToAllConfig:
    """Arguments of `AllToAll.intranode` and `AllToAll.internode`, in the order of pplx-kernels.

    Args:
        max_num_tokens to hidden_dim_scale_bytes: as in `Layout`; rank, world_size: must be those of
            the group.
        dp_size: ranks that hold the same tokens (tensor-parallel replicas), consecutive. Each sends
            every dp_size-th token, and each receives the combined result of all.
        group_name: name of a torch process group; "default" is the world.
        group: the process group itself; takes precedence over group_name.
        transport: "auto" picks one and `AllToAll.transport_report` says why. Any other value is
            used or refused.
        combine_dtype: dtype of `expert_y`, bf16 or fp16.
        timeout_s: bound on every wait for a peer; None takes the configuration's, or the group's.
        domain_size: consecutive ranks of one domain; None means the ranks of one host. Internode
            only.
        internode: ranks may be on several hosts.

    Raises:
        ConfigError: a size, transport or group that cannot be met.
    """

    max_num_tokens: int
    num_experts: int
    experts_per_token: int
    rank: int
    world_size: int
    dp_size: int
    hidden_dim: int
    hidden_dim_bytes: int
    hidden_dim_scale_bytes: int
    group_name: str = "default"
    _: KW_ONLY
    group: dist.ProcessGroup | None = None
    transport: str = "auto"
    combine_dtype: torch.dtype = torch.bfloat16
    timeout_s: float | None = None
    domain_size: int | None = None
    internode: bool = False

    def __post_init__(self) -> None:
        allowed = (*TRANSPORTS, *TWO_LEVEL_TRANSPORTS) if self.internode else TRANSPORTS
        if self.transport not in allowed:
            raise ConfigError.of("transport", self.transport, ", ".join(allowed))
        if self.domain_size is not None and not self.internode:
            none = "None for an intranode all-to-all"
            raise ConfigError.of("domain_size", self.domain_size, none)
        group, claimed = self.process_group, (self.rank, self.world_size)
        actual = (dist.get_rank(group), dist.get_world_size(group))
        if claimed != actual:
            raise ConfigError.of("rank and world_size", claimed, f"those of the group, {actual}")
        _ = self.layout
        if not (math.isfinite(self.wait_limit_s) and self.wait_limit_s > 0):
            allowed_s = "more than 0 seconds, and finite"
            raise ConfigError.of("timeout_s", self.wait_limit_s, allowed_s)

    @functools.cached_property
    def layout(self) -> Layout:
        """The sizes."""
        return Layout(
            self.max_num_tokens, self.num_experts, self.experts_per_token, self.world_size,
            self.dp_size, self.hidden_dim, self.hidden_dim_bytes, self.hidden_dim_scale_bytes,
            self.combine_dtype,
        )  # fmt: skip

    @functools.cached_property
    def process_group(self) -> dist.ProcessGroup:
        """`group`, or the group of name `group_name`."""
        if self.group is not None:
            return self.group
        if self.group_name == "default":
            if dist.group.WORLD is None:
                reason = "torch.distributed is not initialised; call init_process_group first"
                raise ConfigError(f"group: {reason}")
            return dist.group.WORLD
        c10d = dist.distributed_c10d
        try:
            return c10d._resolve_process_group(c10d.GroupName(self.group_name))
        except Exception as error:
            allowed = "'default' or the name of a torch process group"
            raise ConfigError.of("group_name", self.group_name, allowed) from error

    @functools.cached_property
    def wait_limit_s(self) -> float:
        """Seconds that any wait for a peer may take."""
        return wait_timeout_s(self.process_group, self.timeout_s)


@shows_fields_of(Layout)
def estimate_bytes(*sizes: int, **named_sizes: Any) -> dict[str, int]:
    """Bytes that an AllToAll over NVLink takes on one rank: {"symmetric", "scratch", "total"}.
    Allocates nothing. Takes the sizes of `Layout`, by position or by name."""
    layout = Layout(*sizes, **named_sizes)  # type: ignore[arg-type]
    symmetric, scratch = layout.symmetric_bytes(), layout.scratch_bytes()
    return {"symmetric": symmetric, "scratch": scratch, "total": symmetric + scratch}
