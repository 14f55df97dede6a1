"""Sizes of a decode-time all-to-all, checked once: everything that shapes its buffers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fluid.errors import ConfigError

__all__ = ["Layout", "round_up"]


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Shapes of one AllToAll, the same on every rank.

    max_num_tokens: C, tokens that one data-parallel group may bring. num_experts,
    experts_per_token: E and K. world_size, dp_size: W ranks, in W / dp_size groups of dp_size ranks
    that hold the same tokens. hidden_dim: H elements of a row; hidden_dim_bytes: bytes of a
    dispatched row, a multiple of 16; hidden_dim_scale_bytes: bytes of its scales, a multiple of 4,
    0 for none. combine_bytes: bytes of one element of the expert output, 2 for bf16 and fp16.
    """

    max_num_tokens: int
    num_experts: int
    experts_per_token: int
    world_size: int
    dp_size: int
    hidden_dim: int
    hidden_dim_bytes: int
    hidden_dim_scale_bytes: int
    combine_bytes: int = 2

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, object, bool, str], ...] = (
            ("max_num_tokens", self.max_num_tokens, self.max_num_tokens >= 1, "at least 1"),
            ("world_size", self.world_size, self.world_size >= 1, "at least 1"),
            (
                "num_experts",
                self.num_experts,
                self.num_experts >= 1 and self.num_experts % max(self.world_size, 1) == 0,
                f"a positive multiple of world_size ({self.world_size})",
            ),
            (
                "experts_per_token",
                self.experts_per_token,
                1 <= self.experts_per_token <= min(16, self.num_experts),
                f"1 to {min(16, self.num_experts)}",
            ),
            (
                "dp_size",
                self.dp_size,
                self.dp_size >= 1 and self.world_size % self.dp_size == 0,
                f"a divisor of world_size ({self.world_size})",
            ),
            ("hidden_dim", self.hidden_dim, self.hidden_dim >= 1, "at least 1"),
            (
                "hidden_dim_bytes",
                self.hidden_dim_bytes,
                self.hidden_dim_bytes >= 16 and self.hidden_dim_bytes % 16 == 0,
                "a positive multiple of 16",
            ),
            (
                "hidden_dim_scale_bytes",
                self.hidden_dim_scale_bytes,
                self.hidden_dim_scale_bytes >= 0 and self.hidden_dim_scale_bytes % 4 == 0,
                "a multiple of 4, 0 for no scales",
            ),
            (
                "hidden_dim",
                self.hidden_dim,
                self.hidden_dim * self.combine_bytes % 16 == 0,
                f"rows of the expert output in multiples of 16 bytes, {16 // self.combine_bytes} "
                "elements",
            ),
        )
        for setting, found, fits, allowed in checks:
            if not fits:
                raise ConfigError.of(setting, found, allowed)

    @property
    def num_sources(self) -> int:
        """D: groups of ranks that bring tokens."""
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
        """Word of a landed row at which its scales begin."""
        return round_up(self.row_words, 4)

    @property
    def pitch(self) -> int:
        """Words of a landed row, 16-byte aligned."""
        return self.scale_at + round_up(self.scale_words, 4)

    @property
    def parity_words(self) -> int:
        """Words of one of the two dispatch buffers: rows, expert ids, weights, counts."""
        entries = self.max_rows * self.experts_per_token
        return round_up(self.max_rows * self.pitch + 2 * entries + self.world_size, 4)

    @property
    def inbox_elements(self) -> int:
        """Elements of both combine buffers."""
        return 2 * self.world_size * self.max_num_tokens * self.hidden_dim

    @property
    def small(self) -> int:
        """Sources of at most so many tokens get their expert rows one by one where weights come
        with the combine."""
        return min(16, self.max_num_tokens)

    @property
    def row_inbox_elements(self) -> int:
        """Elements of both buffers of such rows."""
        return 2 * self.small * self.experts_per_token * self.hidden_dim

    def symmetric_bytes(self) -> int:
        """Symmetric memory of one rank, without the flags: dispatch, combine and weight buffers,
        two of each."""
        weights = 2 * self.world_size * self.max_num_tokens * self.experts_per_token * 4
        elements = self.inbox_elements + self.row_inbox_elements
        return 2 * self.parity_words * 4 + elements * self.combine_bytes + weights

    def scratch_bytes(self) -> int:
        """Ordinary device memory of one rank."""
        return 4 * self.max_rows * self.experts_per_token
