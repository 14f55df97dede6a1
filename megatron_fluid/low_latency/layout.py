"""The arguments of an AllToAll, and the sizes among them, which shape its buffers; checked once."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist

from megatron_fluid.comm.groups import wait_timeout_s
from megatron_fluid.config import check_setting as check_general_setting
from megatron_fluid.errors import ConfigError

__all__ = [
    "TRANSPORTS",
    "TWO_LEVEL_TRANSPORTS",
    "AllToAllConfig",
    "Layout",
    "check_setting",
    "round_up",
]

TRANSPORTS = ("auto", "nvlink", "nvshmem", "nccl", "gloo")
# The first moves inside a domain, the second between domains; internode only.
TWO_LEVEL_TRANSPORTS = ("nvlink+nvshmem", "nvlink+nccl", "nccl+nccl", "gloo+gloo")


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def check_setting(name: str, value: object, least: int | None = None) -> None:
    """Raise ConfigError unless `value` is an int of at least `least`; without `least`, a bool.
    Equal values of other types are refused, too: 4.0 and 4 are one key of a dict."""
    if least is None:
        if not isinstance(value, bool):
            raise ConfigError.of(name, value, "True or False")
    elif isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError.of(name, value, f"an integer of at least {least}")


@dataclass(frozen=True)
class Layout:
    """Shapes of one AllToAll, the same on every rank.

    Attributes:
        max_num_tokens: C, tokens that one data-parallel group may send in a call.
        num_experts, experts_per_token: E and K.
        world_size, dp_size: W ranks in W / dp_size groups; the dp_size ranks of a group hold the
            same tokens.
        hidden_dim: H, elements of a row.
        hidden_dim_bytes: bytes of a dispatched row, a multiple of 16.
        hidden_dim_scale_bytes: bytes of a row's scales, a multiple of 4, 0 for none.
        combine_dtype: dtype of the expert output, bf16 or fp16.
        batch_invariant: combine takes the weights, and sums single rows in the order of k.
    """

    max_num_tokens: int
    num_experts: int
    experts_per_token: int
    world_size: int
    dp_size: int
    hidden_dim: int
    hidden_dim_bytes: int
    hidden_dim_scale_bytes: int
    combine_dtype: torch.dtype = torch.bfloat16
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "batch_invariant":
                check_setting(name, value)
            elif name != "combine_dtype":
                check_setting(name, value, 0 if name == "hidden_dim_scale_bytes" else 1)
        experts, k, most_k = self.num_experts, self.experts_per_token, min(16, self.num_experts)
        world, dp, element = self.world_size, self.dp_size, self.combine_dtype
        row, scale, hidden = self.hidden_dim_bytes, self.hidden_dim_scale_bytes, self.hidden_dim
        ranks, floats = f"world_size ({world})", element in (torch.bfloat16, torch.float16)
        checks = (
            ("combine_dtype", element, floats, "torch.bfloat16, torch.float16"),
            ("num_experts", experts, experts % world == 0, f"a positive multiple of {ranks}"),
            ("experts_per_token", k, k <= most_k, f"1 to {most_k}"),
            ("dp_size", dp, world % dp == 0, f"a divisor of {ranks}"),
            ("hidden_dim_bytes", row, row % 16 == 0, "a positive multiple of 16"),
            ("hidden_dim_scale_bytes", scale, scale % 4 == 0, "multiples of 4, or 0"),
            ("hidden_dim", hidden, hidden % 8 == 0, "a positive multiple of 8"),
        )
        for setting, value, fits, allowed in checks:
            if not fits:
                raise ConfigError.of(setting, value, allowed)

    @property
    def num_sources(self) -> int:
        """D: groups of ranks that send tokens."""
        return self.world_size // self.dp_size

    @property
    def local_experts(self) -> int:
        """L: experts of one rank."""
        return self.num_experts // self.world_size

    @property
    def max_rows(self) -> int:
        """R: rows that one expert can receive."""
        return self.max_num_tokens * self.num_sources

    def packed_rows(self, alignment: int = 1) -> int:
        """Rows that a packed out_expert_x must have: all that can arrive, every expert padded to
        `alignment` rows."""
        arrive = self.max_rows * min(self.experts_per_token, self.local_experts)
        return arrive + min(self.local_experts, arrive) * (alignment - 1)

    @property
    def row_words(self) -> int:
        return self.hidden_dim_bytes // 4

    @property
    def scale_words(self) -> int:
        return self.hidden_dim_scale_bytes // 4

    @property
    def scale_at(self) -> int:
        """Word of a received row at which its scales begin."""
        return round_up(self.row_words, 4)

    @property
    def pitch(self) -> int:
        """Words of a received row, 16-byte aligned."""
        return self.scale_at + round_up(self.scale_words, 4)

    @property
    def parity_words(self) -> int:
        """Words of one of the two dispatch buffers: rows, expert ids, weights, counts."""
        entries = self.max_rows * self.experts_per_token
        return round_up(self.max_rows * self.pitch + 2 * entries + self.world_size, 4)

    @property
    def small(self) -> int:
        """A source of at most this many tokens receives every expert's row by itself, where
        combine takes the weights."""
        return self.max_num_tokens if self.batch_invariant else min(16, self.max_num_tokens)


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
        batch_invariant: the sum over a token's experts has the same bits whatever the ranks and the
            transport: expert rows come back unsummed, which takes top-k times the bytes of sums.
            `combine` takes the weights, not `dispatch`. Not over nvshmem or two transports.

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
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        allowed = (*TRANSPORTS, *TWO_LEVEL_TRANSPORTS) if self.internode else TRANSPORTS
        if self.transport not in allowed:
            raise ConfigError.of("transport", self.transport, ", ".join(allowed))
        if self.batch_invariant and (self.transport == "nvshmem" or "+" in self.transport):
            why = "because it sums a token's rows before they cross, and batch_invariant is on"
            raise ConfigError.of("transport", self.transport, f"auto, nvlink, nccl or gloo, {why}")
        check_setting("internode", self.internode)
        if self.domain_size is not None:
            check_setting("domain_size", self.domain_size, 1)
        if self.domain_size is not None and not self.internode:
            none = "None for an intranode all-to-all"
            raise ConfigError.of("domain_size", self.domain_size, none)
        check_setting("rank", self.rank, 0)
        group, claimed = self.process_group, (self.rank, self.world_size)
        actual = (dist.get_rank(group), dist.get_world_size(group))
        if claimed != actual:
            raise ConfigError.of("rank and world_size", claimed, f"those of the group, {actual}")
        _ = self.layout
        check_general_setting("timeout_s", self.wait_limit_s)

    @functools.cached_property
    def layout(self) -> Layout:
        """The sizes."""
        return Layout(
            self.max_num_tokens, self.num_experts, self.experts_per_token, self.world_size,
            self.dp_size, self.hidden_dim, self.hidden_dim_bytes, self.hidden_dim_scale_bytes,
            self.combine_dtype, self.batch_invariant,
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
