"""The shape and settings of a SelfAttention layer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.config import FieldsConfig
from megatron_fluid.errors import ConfigError

__all__ = ["EXCHANGE_NAMES", "AttentionConfig"]

EXCHANGE_NAMES = ("auto", "symmetric", "rounds")


@dataclass(frozen=True)
class AttentionConfig(FieldsConfig):
    """The shape and settings of self-attention.

    Attributes:
        hidden_size: H.
        num_heads: query heads Hq, a multiple of the context-parallel size.
        num_kv_heads: key/value heads Hkv, a divisor of Hq, and a multiple or a divisor of the
            ranks; Hq by default.
        head_dim: D; H / Hq by default.
        qkv_bias, output_bias: whether the projections have biases.
        qk_norm: RMS norm of queries and keys over D, before rotation.
        norm_eps: its epsilon.
        rotary: rotary position embedding, or None.
        causal: query i sees keys j <= i; else all.
        window: sliding window: query i sees keys j with i - window < j (and j < i + window).
        dropout: of the attention probabilities, in training mode. Each rank draws its own heads'
            masks from its own generator.
        scale: of the scores; 1 / sqrt(D) by default.
        sequence_layout: "contiguous" or "zigzag", see layouts.SequenceLayout.
        kernel: "auto", "sdpa" or "te", see attention_kernels.choose_kernel.
        exchange: "symmetric" (symmetric memory inside one NVLink domain), "rounds" (P2P rounds over
            any transport), or "auto", the first that can.
        head_groups: groups into which a rank's key/value heads are cut, so that one moves while
            another is attended; None: as many as pay.
        dx_chunks: pieces of rows in which backward computes, and rounds exchange, input gradients;
            None takes FluidConfig's.
        overlap: whether exchanges overlap with projections and attention. False: plain all-to-all
            collectives, the same parameters.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rotary: Rotary | None = None
    causal: bool = True
    window: int | None = None
    dropout: float = 0.0
    scale: float | None = None
    sequence_layout: str = "contiguous"
    kernel: str = "auto"
    exchange: str = "auto"
    head_groups: int | None = None
    dx_chunks: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        self.check_fields()
        if self.rotary is not None and not isinstance(self.rotary, Rotary):
            raise ConfigError.of("rotary", self.rotary, "a Rotary, or None")
        if self.norm_eps < 0.0:
            raise ConfigError.of("norm_eps", self.norm_eps, "0 or more")
        if self.scale is not None and not self.scale > 0.0:
            raise ConfigError.of("scale", self.scale, "a number above 0, or None")
        for name in ("hidden_size", "head_dim", "num_kv_heads", "head_groups"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError.of(name, getattr(self, name), "an integer of at least 1")
        if self.head_dim is None:
            if self.num_heads < 1 or self.hidden_size % self.num_heads:
                allowed = f"divisors of hidden_size {self.hidden_size}"
                raise ConfigError.of(
                    "num_heads", self.num_heads, f"{allowed} where head_dim is not given"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        assert self.head_dim is not None
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.rotary is not None and self.rotary.dim > self.head_dim:
            raise ConfigError.of("rotary.dim", self.rotary.dim, f"at most head_dim {self.head_dim}")
        if self.window is not None and self.window < 1:
            raise ConfigError.of("window", self.window, "None or at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError.of("dropout", self.dropout, "0 <= dropout < 1")
        if self.exchange not in EXCHANGE_NAMES:
            raise ConfigError.of("exchange", self.exchange, ", ".join(EXCHANGE_NAMES))
        if self.head_groups not in (None, 1) and not self.overlap:
            raise ConfigError.of("head_groups", self.head_groups, "1 with overlap=False")
        if self.exchange == "symmetric" and not self.overlap:
            raise ConfigError.of("exchange", self.exchange, "auto or rounds with overlap=False")
        chunks = 1 if self.dx_chunks is None else self.dx_chunks
        if not 1 <= chunks <= 1024:
            raise ConfigError.of("dx_chunks", chunks, "1 to 1024, or None")
        SequenceLayout(0, 1, self.sequence_layout)
