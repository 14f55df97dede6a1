"""Self-attention over a context-parallel group, on plain torch.

group = dist.new_group(...)
attention = SelfAttention(4096, 32, num_kv_heads=8, group=group, rotary=Rotary(128),
                          dtype=torch.bfloat16, device="cuda")
y = attention(x)                    # x, y [S / W, B, 4096]: this rank's shard of the sequence
loss(y).backward()
sum_gradients(attention.parameters(), group)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from megatron_fluid.attention.attention_kernels import CoreCase, choose_kernel
from megatron_fluid.attention.config import AttentionConfig
from megatron_fluid.attention.exchange.buffers import HeadBuffers
from megatron_fluid.attention.exchange.registry import EXCHANGES, open_exchange
from megatron_fluid.attention.layouts import HeadLayout, SequenceLayout
from megatron_fluid.attention.one_rank import one_rank_attention
from megatron_fluid.attention.overlap import AttentionCall, AttentionWeights, overlapped_attention
from megatron_fluid.attention.packed import Rotary, RotaryTable
from megatron_fluid.attention.tables import cached_tables
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.comm.layers import (
    Form,
    check_input,
    compare_settings,
    compare_shapes,
    copy_sharing,
)
from megatron_fluid.comm.waits import group_waits
from megatron_fluid.config import current_config, shows_fields_of
from megatron_fluid.cuda.devices import capturing
from megatron_fluid.errors import ConfigError

__all__ = ["SelfAttention", "sum_gradients"]


@cached_tables(8)
def _table(rotary: Rotary, length: int, device: torch.device, dtype: torch.dtype) -> RotaryTable:
    return rotary.table(length, device, dtype)


# One object a shape, so that what follows from it is made once.
_sequence = functools.lru_cache(maxsize=64)(SequenceLayout)


def _has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than its forward and backward."""
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks)


class SelfAttention(nn.Module):
    """Multi-head, grouped-query or multi-query self-attention under Ulysses sequence parallelism.

    Each rank of ``group`` holds a shard of the positions and all weights. The parameters have
    Megatron's names and row order: ``linear_qkv`` [(Hq + 2 Hkv) D, H], ``linear_proj`` [H, Hq D],
    ``q_layernorm`` and ``k_layernorm`` [D]. Their gradients are this rank's share:
    ``sum_gradients`` adds them up over the group. Construction is collective over the group.

    Args:
        shape: an AttentionConfig, a dictionary of its fields, or hidden_size and num_heads.
        group: the context-parallel process group; None: the whole sequence is here.
        scheduler: where dW is queued while it is enabled; by default ``get_backward_scheduler()``.
        device, dtype: of the parameters.
        name: for errors and traces.
        fields: further fields of AttentionConfig, by name.

    Attributes:
        head_groups: as in AttentionConfig. A change takes effect at the next call.

    Raises:
        ConfigError: a setting that cannot be met, by name.
    """

    @shows_fields_of(AttentionConfig)
    @tells_peers
    def __init__(
        self,
        *shape: AttentionConfig | Mapping[str, Any] | int,
        group: dist.ProcessGroup | None = None,
        scheduler: WeightGradScheduler | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "attention",
        **fields: Any,
    ) -> None:
        super().__init__()
        self.config = config = AttentionConfig.of(*shape, **fields)
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        assert dim is not None and config.num_kv_heads is not None
        if isinstance(group, int):  # torch's answer to a rank outside a new group
            allowed = "a process group that this rank is in, or None"
            raise ConfigError.of("group", group, allowed)
        self.group, self.name = group, name
        world = 1 if group is None else group.size()
        self.head_groups = config.head_groups
        groups = 1 if self.head_groups is None else self.head_groups
        self.heads = HeadLayout(heads, config.num_kv_heads, dim, world, groups)
        dx_chunks = config.dx_chunks
        self.dx_chunks = current_config().dx_chunks if dx_chunks is None else dx_chunks
        self.scheduler = get_backward_scheduler() if scheduler is None else scheduler
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.linear_qkv = nn.Linear(hidden, self.heads.qkv_rows, bias=config.qkv_bias, **made)
        self.linear_proj = nn.Linear(heads * dim, hidden, bias=config.output_bias, **made)
        self.q_layernorm = nn.RMSNorm(dim, config.norm_eps, **made) if config.qk_norm else None
        self.k_layernorm = nn.RMSNorm(dim, config.norm_eps, **made) if config.qk_norm else None
        choose_kernel(config.kernel, self._case(self.linear_qkv.weight))
        self._last_call: tuple[tuple[Any, ...], AttentionCall] | None = None  # with its key
        self._taken: Form | None = None  # the last input's dtype and device that were looked at
        like = self.linear_qkv.weight
        where = {"dtype": like.dtype, "device": like.device.type}
        compare_settings(group, type(self).__name__, vars(config) | where)
        self.exchange, self.connection = self._connect()

    def _connect(self) -> tuple[str, Any]:
        """The exchange's name, and what it shares with other layers of the group."""
        asked, group, device = self.config.exchange, self.group, self.linear_qkv.weight.device.type
        if group is None or group.size() == 1:
            return "rounds", None
        if not self.config.overlap:
            return "collective", group
        wanted = "symmetric" if asked == "auto" else asked
        reason = EXCHANGES[wanted].unsupported_reason(group, self.heads.head_dim, device)
        if reason is not None and asked != "auto":
            raise ConfigError.of("exchange", asked, f"auto, rounds: {reason}")
        name = wanted if reason is None else "rounds"
        return name, EXCHANGES[name].connect(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> SelfAttention:
        """Copy the parameters; the copy shares process group, transport and scheduler."""
        shared = self.group, self.connection, self.scheduler, self._last_call, self.config
        return copy_sharing(self, memo, *shared)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SelfAttention:
        self._taken = None  # parameters may get another dtype or device
        return super()._apply(fn, recurse)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        self._taken = None  # with assign=True parameters may get another dtype or device
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def _check_input(self, x: Tensor) -> None:
        """Look at an input whose dtype or device is new."""
        self._taken = check_input(f"{self.name} input", x, self.linear_qkv.weight)

    @property
    def head_buffers(self) -> HeadBuffers | None:
        """The symmetric memory of the exchange; None where another one is used."""
        return self.connection if self.exchange == "symmetric" else None

    def _case(self, like: Tensor) -> CoreCase:
        config, device = self.config, like.device.type
        dropout = config.dropout if self.training else 0.0
        mask = config.causal, config.window, config.scale
        return CoreCase(self.heads.head_dim, like.dtype, device, *mask, dropout)

    def weights(self) -> AttentionWeights:
        """The parameters as the plain functions take them.

        Raises:
            ConfigError: a linear or a norm is wrapped or has hooks.
        """
        modules: dict[str, Any] = self._modules  # nn.Module's own look-up is slow on the host
        qkv, proj = modules["linear_qkv"], modules["linear_proj"]
        for linear in (qkv, proj):
            if type(linear) is not nn.Linear or _has_hooks(linear):
                self._check_modules()
        q_norm, k_norm = modules.get("q_layernorm"), modules.get("k_layernorm")
        norms: tuple[Any, ...] = () if q_norm is k_norm is None else (q_norm, k_norm)
        for norm in norms:
            plain = type(norm) is nn.RMSNorm and norm._parameters.get("weight") is not None
            if not plain or _has_hooks(norm):
                self._check_modules()
        return AttentionWeights(
            qkv.weight,
            proj.weight,
            qkv.bias,
            proj.bias,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
        )

    def _check_modules(self) -> None:
        """Refuse what would be ignored: the layer uses parameters, and calls no linear or norm."""
        kinds: dict[str, type] = {"linear_qkv": nn.Linear, "linear_proj": nn.Linear}
        if self.q_layernorm is not None or self.k_layernorm is not None:
            kinds |= {"q_layernorm": nn.RMSNorm, "k_layernorm": nn.RMSNorm}
        for name, allowed in kinds.items():
            module: Any = getattr(self, name)
            kind: type = type(module)
            if module is not None and is_parametrized(module):  # its class is one that torch makes
                kind = kind.__bases__[0]
            if kind is not allowed:
                found = kind.__qualname__
            elif module.weight is None:
                found = "no weight"
            elif _has_hooks(module):
                found = "hooks"
            else:
                continue
            used = "weight and bias" if allowed is nn.Linear else "weight and eps"
            raise ConfigError(
                f"{self.name}.{name}: found {found}, allowed: torch.nn.{allowed.__name__} without "
                f"hooks. {type(self).__name__} uses its {used}, and does not call it. Merge the "
                "change into the weight (torch.nn.utils.parametrize computes a weight from "
                f"others), or wrap or hook the whole {type(self).__name__}"
            )

    def call(self, x: Tensor, sequence_length: int | None = None) -> AttentionCall:
        """The layout, transport and kernel of a forward of ``x``; see ``forward``."""
        # All that it follows from; the last one serves until something changes.
        of_layer = self.connection, self.head_groups, self.dx_chunks, self.training, self.config
        key = self.exchange, x.shape, x.dtype, x.device, sequence_length, of_layer, self._norm_eps()
        last = self._last_call
        if last is None or last[0] != key or capturing():  # a capture keeps the tables it reads
            last = self._last_call = key, self._make_call(x, sequence_length)
        return last[1]

    def _norm_eps(self) -> tuple[float | None, ...]:
        """Epsilon of the norms of queries and keys, as far as there are norms."""
        modules: dict[str, Any] = self._modules
        norms = modules.get("q_layernorm"), modules.get("k_layernorm")
        return tuple([norm.eps for norm in norms if norm is not None])

    def _make_call(self, x: Tensor, sequence_length: int | None) -> AttentionCall:
        config, hidden = self.config, self.config.hidden_size
        if x.dim() != 3 or x.shape[2] != hidden:
            allowed = f"[local rows, batch, {hidden}]"
            raise ConfigError.of(f"{self.name} input", tuple(x.shape), allowed)
        heads = self.heads
        world, rank = heads.world, 0 if self.group is None else self.group.rank()
        length = x.shape[0] * world if sequence_length is None else sequence_length
        sequence = _sequence(length, world, config.sequence_layout)
        rows = sequence.local_length(rank)
        if rows != x.shape[0]:
            allowed = f"{rows} on rank {rank} for sequence_length {length} over {world} ranks"
            raise ConfigError.of(f"{self.name} local rows", x.shape[0], allowed)
        case, rotary = self._case(x), config.rotary
        q_eps, k_eps = self._norm_eps() or (config.norm_eps, config.norm_eps)
        if q_eps != k_eps:
            raise ConfigError.of(f"{self.name}.k_layernorm.eps", k_eps, f"{q_eps}, q_layernorm's")
        sizes = x.shape[1], x.element_size(), self.head_groups
        return AttentionCall(
            open_exchange(self.exchange, self.connection, heads, sequence, *sizes),
            choose_kernel(config.kernel, case),
            case,
            None if rotary is None else _table(rotary, length, x.device, x.dtype),
            self.dx_chunks,
            torch.finfo(x.dtype).eps if q_eps is None else q_eps,  # None: as in torch
            self.name,
        )

    @tells_peers
    def forward(self, x: Tensor, sequence_length: int | None = None) -> Tensor:
        """Self-attention of the whole sequence, for this rank's rows.

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
            ConfigError: sizes, a dtype or a device that does not fit; a linear or a norm that is
                wrapped or has hooks. On every rank: sequence_length, batch or dtype differ between
                ranks (on GPUs as in all_gather_matmul).
            PeerTimeoutError: a peer did not answer in time.
        """
        weights, scheduler = self.weights(), self.scheduler if self.config.overlap else None
        if (x.dtype, x.device) != self._taken:
            self._check_input(x)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            cast = AttentionWeights(*(None if t is None else t.to(dtype) for t in weights.all()))  # type: ignore[arg-type]
            with torch.autocast(x.device.type, enabled=False):
                x = x.to(dtype)
                return self._attend(x, cast, self.call(x, sequence_length), None)
        return self._attend(x, weights, self.call(x, sequence_length), scheduler)

    def _attend(
        self,
        x: Tensor,
        weights: AttentionWeights,
        call: AttentionCall,
        scheduler: WeightGradScheduler | None,
    ) -> Tensor:
        queues = scheduler is not None and scheduler.is_enabled()
        if self.group is not None:
            sizes = call.exchange.sequence.length, x.shape[1]
            what = f"{self.name}: sequence_length, batch"
            compare_shapes("SelfAttention", self.group, what, sizes, x)
        if call.exchange.heads.single and not queues:
            return one_rank_attention(x, weights, call)
        return overlapped_attention(x, weights, call, scheduler)

    @property
    def ranks_of_calls(self) -> int:
        """How many ranks come to a call."""
        return self.heads.world

    def extra_repr(self) -> str:
        h, c = self.heads, self.config
        sizes = f"hidden_size={c.hidden_size}, heads={h.num_heads}, kv_heads={h.num_kv_heads}"
        rank = 0 if self.group is None else self.group.rank()
        ranks = f"head_dim={h.head_dim}, ranks={h.world}, rank={rank}, exchange={self.exchange}"
        mask = f"kernel={c.kernel}, causal={c.causal}, window={c.window}"
        return f"{sizes}, {ranks}, {mask}, layout={c.sequence_layout}, overlap={c.overlap}"


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Add up the gradients of parameters that every rank of ``group`` holds, in place, in one
    all-reduce per dtype.

    A parameter without a gradient counts as zero, so that ranks with and without rows agree.
    """
    if group is None or group.size() == 1:
        return
    kinds: dict[torch.dtype, list[Tensor]] = {}
    found: dict[str, tuple[int, torch.dtype]] = {}
    for index, parameter in enumerate(parameters):
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            kinds.setdefault(parameter.dtype, []).append(parameter.grad)
            found[f"parameter {index}"] = parameter.numel(), parameter.dtype
    compare_settings(group, "sum_gradients", found)
    for gradients in kinds.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        group_waits(group).collective(
            "sum of replicated gradients",
            lambda: dist.all_reduce(flat, group=group, async_op=True),  # noqa: B023
        )
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
