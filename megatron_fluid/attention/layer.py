"""Self-attention over a context-parallel group, on plain torch.

group = dist.new_group(...)
attention = SelfAttention(4096, 32, num_kv_heads=8, group=group, rotary=Rotary(128),
dtype=torch.bfloat16, device="cuda") y = attention(x)                    # x, y [S / W, B, 4096]:
this rank's shard of the sequence loss(y).backward() sum_gradients(attention.parameters(), group)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.attention.attention_kernels import CoreCase, choose_kernel
from megatron_fluid.attention.exchange.buffers import HeadBuffers, shared_head_buffers
from megatron_fluid.attention.exchange.rounds import HeadExchange, RoundsExchange
from megatron_fluid.attention.exchange.symmetric import (
    SymmetricExchange,
    choose_groups,
    heads_unsupported_reason,
)
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.overlap import AttentionCall, AttentionWeights, overlapped_attention
from megatron_fluid.attention.packed import Rotary, RotaryTable
from megatron_fluid.attention.table_cache import cached_tables
from megatron_fluid.attention.unoverlapped import plain_attention
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.copies import copy_sharing
from megatron_fluid.comm.p2p_rounds import P2PRounds, shared_rounds
from megatron_fluid.comm.symmetric import symmetric_unsupported_reason
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError

__all__ = ["EXCHANGES", "SelfAttention", "sum_gradients"]

EXCHANGES = ("auto", "symmetric", "rounds")


@cached_tables(8)
def _table(rotary: Rotary, length: int, device: torch.device, dtype: torch.dtype) -> RotaryTable:
    return rotary.table(length, device, dtype)


_grouped = functools.lru_cache(maxsize=64, typed=True)(
    lambda heads, groups: dataclasses.replace(heads, groups=groups)
)
# One object a shape, so that what follows from it is made once.
_sequence = functools.lru_cache(maxsize=64)(SequenceLayout)
_exchange = functools.lru_cache(maxsize=64)(SymmetricExchange)


class SelfAttention(nn.Module):
    """Multi-head, grouped-query or multi-query self-attention under Ulysses sequence parallelism.

    Each rank of ``group`` holds a shard of the positions and all weights. The parameters have
    Megatron's names and row order: ``linear_qkv`` [(Hq + 2 Hkv) D, H], ``linear_proj`` [H, Hq D],
    ``q_layernorm`` and ``k_layernorm`` [D]. Their gradients are this rank's share:
    ``sum_gradients`` adds them up over the group.

    Args:
        hidden_size: H.
        num_heads: query heads Hq, a multiple of the group's size.
        num_kv_heads: key/value heads Hkv, a divisor of Hq, also fewer than ranks; Hq by default.
        head_dim: D; H / Hq by default.
        group: the context-parallel process group; None: the whole sequence is here.
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
        kernel: "auto", "sdpa", "flash_attn" or "te", see core_attention.choose_kernel.
        exchange: who moves heads and rows: "symmetric" (symmetric memory inside one NVLink domain),
            "rounds" (P2P rounds over any transport), or "auto", the first that can.
        head_groups: pieces into which a rank's key/value heads are cut, so that one moves while
            another is attended; None: as many as pay.
        output_chunks: pieces of rows in which rounds bring the attention output back; one is
            projected while the next moves.
        dx_chunks: pieces of rows in which backward computes, and rounds exchange, input gradients;
            by default the configuration's.
        overlap: True: exchanges in rounds beside computation. False: plain all-to-all collectives,
            the same parameters.
        rounds: the P2P rounds to use; by default those that all layers of ``group`` share. Making
            them is collective.
        scheduler: where dW is queued while it is enabled; by default ``get_backward_scheduler()``.
        device, dtype: of the parameters.
        name: for errors and traces.

    Raises:
        ConfigError: a setting that cannot be met, by name.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        group: dist.ProcessGroup | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        rotary: Rotary | None = None,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        sequence_layout: str = "contiguous",
        kernel: str = "auto",
        exchange: str = "auto",
        head_groups: int | None = None,
        output_chunks: int = 1,
        dx_chunks: int | None = None,
        overlap: bool = True,
        rounds: P2PRounds | None = None,
        scheduler: WeightGradScheduler | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "attention",
    ) -> None:
        super().__init__()
        if head_dim is None:
            if hidden_size % num_heads:
                raise ConfigError.of(
                    "num_heads",
                    num_heads,
                    f"divisors of hidden_size {hidden_size} where head_dim is not given",
                )
            head_dim = hidden_size // num_heads
        world = 1 if group is None else group.size()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.overlap = overlap
        self.heads = HeadLayout(num_heads, kv_heads, head_dim, world)
        self.head_groups = head_groups
        if rotary is not None and rotary.dim > head_dim:
            raise ConfigError.of("rotary.dim", rotary.dim, f"at most head_dim {head_dim}")
        if window is not None and window < 1:
            raise ConfigError.of("window", window, "None or at least 1")
        if not 0.0 <= dropout < 1.0:
            raise ConfigError.of("dropout", dropout, "0 <= dropout < 1")
        if exchange not in EXCHANGES:
            raise ConfigError.of("exchange", exchange, ", ".join(EXCHANGES))
        if exchange == "symmetric" and (rounds is not None or not overlap):
            found = (
                "auto or rounds with `rounds`"
                if rounds is not None
                else "auto or rounds with overlap=False"
            )
            raise ConfigError.of("exchange", exchange, found)
        if rounds is not None and not overlap:
            raise ConfigError.of("rounds", "peer rounds", "None with overlap=False")
        self.dx_chunks = current_config().dx_chunks if dx_chunks is None else dx_chunks
        self.output_chunks = output_chunks
        for setting in ("output_chunks", "dx_chunks"):
            value = getattr(self, setting)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError.of(setting, value, "an integer of at least 1")
        SequenceLayout(0, world, sequence_layout)
        self.group, self.name = group, name
        self.causal, self.window, self.dropout, self.scale = causal, window, dropout, scale
        self.rotary, self.sequence_layout, self.kernel, self.norm_eps = (
            rotary,
            sequence_layout,
            kernel,
            norm_eps,
        )
        self.scheduler = get_backward_scheduler() if scheduler is None else scheduler
        made: dict[str, object] = {"device": device, "dtype": dtype}
        self.linear_qkv = nn.Linear(hidden_size, self.heads.qkv_rows, bias=qkv_bias, **made)  # type: ignore[arg-type]
        self.linear_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=output_bias, **made)  # type: ignore[arg-type]
        self.q_layernorm = nn.RMSNorm(head_dim, norm_eps, **made) if qk_norm else None  # type: ignore[arg-type]
        self.k_layernorm = nn.RMSNorm(head_dim, norm_eps, **made) if qk_norm else None  # type: ignore[arg-type]
        choose_kernel(kernel, self._case(self.linear_qkv.weight))
        self.rounds: P2PRounds | None = rounds if overlap else None
        self.domain: HeadBuffers | None = None
        if group is not None and world > 1 and overlap and rounds is None:
            reason = self._why_not_symmetric(group, exchange)
            if reason is None:
                self.domain = shared_head_buffers(group)
            elif exchange == "symmetric":
                raise ConfigError.of("exchange", exchange, f"auto, rounds: {reason}")
            else:
                self.rounds = shared_rounds(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfAttention:
        """A layer with parameters of its own; process group, transport and scheduler are one for
        all layers."""
        return copy_sharing(self, memo, self.group, self.rounds, self.domain, self.scheduler)

    @property
    def head_groups(self) -> int | None:
        """As the argument; may be given anew, and holds from the next call on."""
        return self._head_groups

    @head_groups.setter
    def head_groups(self, groups: int | None) -> None:
        if not self.overlap and groups not in (None, 1):
            raise ConfigError.of("head_groups", groups, "1 with overlap=False")
        self.heads = _grouped(self.heads, 1 if groups is None else groups)
        self._head_groups = groups

    def _why_not_symmetric(self, group: dist.ProcessGroup, exchange: str) -> str | None:
        """Why heads are not exchanged over symmetric memory; None if they are. Collective on
        GPUs."""
        if exchange == "rounds":
            return "rounds were asked for"
        if self.linear_qkv.weight.device.type != "cuda":
            return (
                f"symmetric memory is on CUDA devices, not on {self.linear_qkv.weight.device.type}"
            )
        return heads_unsupported_reason(
            self.heads.head_dim, torch.bfloat16
        ) or symmetric_unsupported_reason(group)

    def _case(self, like: Tensor) -> CoreCase:
        dropout = self.dropout if self.training else 0.0
        return CoreCase(
            self.heads.head_dim,
            like.dtype,
            like.device.type,
            self.causal,
            self.window,
            self.scale,
            dropout,
        )

    def weights(self) -> AttentionWeights:
        """The parameters as the plain functions take them."""
        return AttentionWeights(
            self.linear_qkv.weight,
            self.linear_proj.weight,
            self.linear_qkv.bias,
            self.linear_proj.bias,
            None if self.q_layernorm is None else self.q_layernorm.weight,
            None if self.k_layernorm is None else self.k_layernorm.weight,
        )

    def call(self, x: Tensor, sequence_length: int | None = None) -> AttentionCall:
        """The layout, transport and kernel of a forward of ``x``; see ``forward``."""
        if x.dim() != 3 or x.shape[2] != self.linear_qkv.in_features:
            raise ConfigError.of(
                f"{self.name} input",
                tuple(x.shape),
                f"[local rows, batch, {self.linear_qkv.in_features}]",
            )
        world = self.heads.world
        rank = 0 if self.group is None else self.group.rank()
        length = x.shape[0] * world if sequence_length is None else sequence_length
        sequence = _sequence(length, world, self.sequence_layout)
        if sequence.local_length(rank) != x.shape[0]:
            expected = f"{sequence.local_length(rank)} on rank {rank} for sequence_length {length} over {world} ranks"
            raise ConfigError.of(f"{self.name} local rows", x.shape[0], expected)
        case = self._case(x)
        table = None if self.rotary is None else _table(self.rotary, length, x.device, x.dtype)
        heads = self.heads
        exchange: HeadExchange
        if self.domain is not None:
            if self.head_groups is None:
                heads = _grouped(heads, choose_groups(heads, length, x.shape[1], x.element_size()))
            exchange = _exchange(self.domain, heads, sequence)
        else:
            exchange = RoundsExchange(self.rounds, heads, sequence, rank)
        return AttentionCall(
            heads,
            sequence,
            exchange,
            choose_kernel(self.kernel, case),
            case,
            table,
            self.output_chunks,
            self.dx_chunks,
            self.norm_eps,
            self.name,
        )

    def forward(self, x: Tensor, sequence_length: int | None = None) -> Tensor:
        """Attend.

        Args:
            x: [s, B, H], this rank's rows of the sequence.
            sequence_length: positions of the whole sequence; by default s times the ranks. Give it
                where that is not divisible: the first shards (zigzag: chunks) are then one position
                longer.

        Returns:
            [s, B, H].

        Under autocast, x and the weights are cast to its dtype, and dW is not queued but computed
        in this layer's backward.

        Raises:
            ConfigError: sizes that do not fit.
            PeerTimeoutError: a peer did not answer in time.
        """
        weights, scheduler = self.weights(), self.scheduler
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            cast = AttentionWeights(*(None if t is None else t.to(dtype) for t in weights.all()))  # type: ignore[arg-type]
            with torch.autocast(x.device.type, enabled=False):
                return self._attend(x.to(dtype), cast, sequence_length, None)
        return self._attend(x, weights, sequence_length, scheduler)

    def _attend(
        self,
        x: Tensor,
        weights: AttentionWeights,
        sequence_length: int | None,
        scheduler: WeightGradScheduler | None,
    ) -> Tensor:
        call = self.call(x, sequence_length)
        if self.overlap:
            return overlapped_attention(x, weights, call, scheduler)
        return plain_attention(x, weights, call, self.group)

    def extra_repr(self) -> str:
        h = self.heads
        return (
            f"heads={h.num_heads}, kv_heads={h.num_kv_heads}, head_dim={h.head_dim}, "
            f"ranks={h.world}, causal={self.causal}, "
            f"window={self.window}, layout={self.sequence_layout}, overlap={self.overlap}"
        )


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Add up the gradients of parameters that every rank of ``group`` holds, in place, in one
    all-reduce per dtype.

    A parameter without a gradient counts as zero, so that ranks with and without rows agree.
    """
    if group is None or group.size() == 1:
        return
    kinds: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, []).append(parameter)
    for members in kinds.values():
        for parameter in members:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat(
            [parameter.grad.reshape(-1) for parameter in members if parameter.grad is not None]
        )
        dist.all_reduce(flat, group=group)
        for parameter, piece in zip(members, flat.split([p.numel() for p in members]), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(piece.view_as(parameter.grad))
