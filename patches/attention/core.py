"""Context parallelism in Megatron's self-attention with `cp_comm_type="a2a"`: heads and sequence
exchanged by megatron_fluid.

Each rank gives its part of the sequence with all heads for the whole sequence with a part of the
heads (Ulysses), attends, and exchanges back: over symmetric memory inside an NVLink domain, else
one all-to-all each way (attention.exchanged). What attends is Megatron's choice: torch's scaled
dot-product attention in the local specs, whose own class refuses more than one context-parallel
rank; in Transformer Engine's specs its DotProductAttention, built for one context-parallel rank and
a share of the heads. What that cannot serve, call by call (packed sequences, padding masks), keeps
Transformer Engine's own exchange.

This is the core attention by itself; where settings allow it, the projections around it are
overlapped too (self_attention.py).

Megatron's context-parallel layout is a zig-zag: the sequence is cut into 2C chunks, and rank r of C
holds chunks r and 2C - 1 - r, so that all have equal work under a causal mask.

Legend: S whole sequence, s = S / C a rank's part, b batch, n query heads, g key and value heads, D
head dim.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_fluid.config import CP_BACKENDS, current_config
from megatron_fluid.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fluid.attention.attention_kernels import CoreCase, CoreKernel
    from megatron_fluid.attention.exchange.protocol import HeadExchange

__all__ = [
    "TE_LIMITS",
    "TELimit",
    "TERequest",
    "core_kernel",
    "dot_product_attention",
    "exchanges_of",
    "te_dot_product_attention",
    "te_limit",
    "withdraw_note",
]

_KIND = "a2a"
_FEATURE = "context-parallel attention"


class _Exchanges:
    """The exchanges of one attention module, made for its heads; one for each length of sequence.

    Args:
        config: the module's configuration; heads are counted per tensor-parallel rank.
        tensor_group, context_group: the process groups.
        own_path: whether Megatron's own attention serves context parallelism, as Transformer
            Engine's does and the local one does not.
    """

    def __init__(self, config: Any, tensor_group: Any, context_group: Any, own_path: bool) -> None:
        from megatron_fluid.attention.layouts import HeadLayout

        self.group, ranks, shares = context_group, context_group.size(), tensor_group.size()
        heads, key_value_heads = (
            config.num_attention_heads // shares,
            max(1, config.num_query_groups // shares),
        )
        if heads % ranks:
            raise ConfigError.of(
                "num_attention_heads",
                f"{heads} per tensor-parallel rank",
                f"a multiple of context_parallel_size ({ranks}), which splits the heads with "
                f"cp_comm_type={_KIND}",
            )
        self.heads = HeadLayout(heads, key_value_heads, config.kv_channels, ranks)
        self.own_path = own_path
        self.nvlink_unsupported_reason = _why_not_nvlink(context_group, config.kv_channels)
        if current_config().cp_backend == "nvlink" and self.nvlink_unsupported_reason is not None:
            from megatron_fluid.patches.attention.limits import setting_limit

            limit = setting_limit(
                config
            )  # of the overlapped projections, without which there are no peer rounds
            allowed = ", ".join(self.other_backends(rounds=limit is None))
            raise ConfigError.of(
                "cp_backend", "nvlink", f"{allowed}: {self.nvlink_unsupported_reason}"
            )
        self._of_length = functools.lru_cache(maxsize=8)(self._make)

    def other_backends(self, rounds: bool = False) -> list[str]:
        """The values of cp_backend that serve this module where one asked for by name does not.

        Args:
            rounds: whether peer rounds are among them, which the module around it decides.
        """
        served = {
            "nvlink": self.nvlink_unsupported_reason is None,
            "rounds": rounds,
            "megatron": self.own_path,
        }
        return [backend for backend in CP_BACKENDS if served.get(backend, True)]

    @property
    def nvlink(self) -> bool:
        """Whether heads move over symmetric memory."""
        return self.nvlink_unsupported_reason is None and current_config().cp_backend not in (
            "rounds",
            "collective",
        )

    @property
    def key_value_heads(self) -> int:
        """How many key and value heads this rank's attention is given."""
        part = self.heads.part(self.group.rank())
        return len(part.kv_heads) if part.uniform else len(part.q_heads)

    def of(self, query: Tensor) -> HeadExchange:
        """The exchange for this query [s, b, n, D]."""
        return self._of_length(query.size(0), query.size(1) * query.element_size())

    def _make(self, rows: int, batch_bytes: int) -> HeadExchange:
        from megatron_fluid.attention.exchange.collective import CollectiveExchange
        from megatron_fluid.attention.layouts import SequenceLayout

        ranks = self.heads.world
        if rows % 2:
            raise ConfigError.of(
                "seq_length", rows * ranks, f"a multiple of 2 * context_parallel_size ({2 * ranks})"
            )
        sequence = SequenceLayout(rows * ranks, ranks, "zigzag")
        if not self.nvlink:
            return CollectiveExchange(self.group, self.heads, sequence)
        from megatron_fluid.attention.exchange.buffers import shared_head_buffers
        from megatron_fluid.attention.exchange.symmetric import SymmetricExchange, choose_groups

        groups = choose_groups(self.heads, sequence.length, 1, batch_bytes)
        heads = dataclasses.replace(self.heads, groups=groups)
        return SymmetricExchange(shared_head_buffers(self.group), heads, sequence)


def _why_not_nvlink(group: Any, head_dim: int) -> str | None:
    """Why heads cannot be exchanged over symmetric memory; None if they can. Collective over the
    group on GPUs."""
    import torch

    if not torch.cuda.is_initialized():  # in CPU mode is_available() may say otherwise
        return "symmetric memory is on CUDA devices"
    from megatron_fluid.attention.exchange.symmetric import heads_unsupported_reason
    from megatron_fluid.comm.symmetric import symmetric_unsupported_reason

    return heads_unsupported_reason(head_dim, torch.bfloat16) or symmetric_unsupported_reason(group)


def _context_parallel_group(pg_collection: Any) -> Any:
    group = getattr(pg_collection, "cp", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()


def _tensor_parallel_group(pg_collection: Any) -> Any:
    group = getattr(pg_collection, "tp", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def _note(on: bool, reason: str) -> None:
    from megatron_fluid.patches.startup_report import note_feature

    note_feature(_FEATURE, on, reason)


def _served_by(exchanges: _Exchanges) -> str:
    if exchanges.nvlink:
        return "heads move over NVLink"
    return f"one all-to-all each way: {exchanges.nvlink_unsupported_reason or f'cp_backend={current_config().cp_backend}'}"


def withdraw_note(exchanges: _Exchanges) -> None:
    """Take back that a core attention exchanges heads: the module around it does."""
    from megatron_fluid.patches.startup_report import withdraw_feature

    withdraw_feature(_FEATURE, True, _served_by(exchanges))


def exchanges_of(core: Any) -> _Exchanges | None:
    """The exchanges of a core attention that megatron_fluid has taken over, else None."""
    return getattr(core, "exchanges", None)


def core_kernel(core: Any, groups: int) -> CoreKernel:
    """The attention kernel of such a core attention, causal or none as it was built, for this
    rank's heads in so many head groups."""
    from megatron_fluid.attention.attention_kernels import CoreKernel

    make = _te_kernel if "alone" in core.__dict__ else _local_kernel
    return CoreKernel(type(core).__name__, lambda case: None, make(core, groups))


# ---- the local specs
# ---------------------------------------------------------------------------------------------------------
def dot_product_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DotProductAttention.__init__`: with several context-parallel ranks the object becomes
    the class below."""

    @functools.wraps(original)
    def fluid_init(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        rest = (
            layer_number,
            attn_mask_type,
            attention_type,
            attention_dropout,
            softmax_scale,
            cp_comm_type,
            pg_collection,
        )
        if config.context_parallel_size == 1 or current_config().cp_backend == "megatron":
            original(self, config, *rest)  # which refuses more than one rank
            return
        _check(config, attn_mask_type, layer_number, cp_comm_type)
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        original(self, alone, *rest)
        self.config = config
        self.exchanges = _Exchanges(
            config, self.tp_group, _context_parallel_group(pg_collection), own_path=False
        )
        self.__class__ = _local_class()
        _note(True, _served_by(self.exchanges))

    return fluid_init


def _check(config: Any, attn_mask_type: Any, layer_number: int, cp_comm_type: str | None) -> None:
    """Refuse what this attention does not compute, by name."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import is_layer_window_attention

    where = "context parallelism without Transformer Engine"
    if cp_comm_type != _KIND:
        raise ConfigError.of("cp_comm_type", cp_comm_type, f"{_KIND} for {where}")
    if config.multi_latent_attention:
        raise ConfigError.of("multi_latent_attention", True, f"False for {where}")
    if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.arbitrary):
        raise ConfigError.of(
            "attn_mask_type", attn_mask_type.name, f"causal, no_mask or arbitrary for {where}"
        )
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        raise ConfigError.of("window_size", config.window_size, f"None for {where}")
    if config.softmax_type != "vanilla":
        raise ConfigError.of("softmax_type", config.softmax_type, f"vanilla for {where}")


@functools.cache
def _local_class() -> type:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class AllToAllDotProductAttention(DotProductAttention):
        """Scaled dot-product attention over a sequence that context-parallel ranks hold in
        parts."""

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
        ) -> Tensor:
            """Query [s, b, n, D], key and value [s, b, g, D], mask [b or 1, 1, s, S] with True
            where not to look.

            Without a mask it is causal or none, as `attn_mask_type` was at construction (Megatron
            ignores the one here). Returns [s, b, n * D].
            """
            if packed_seq_params is not None:
                raise ConfigError.of(
                    "packed_seq_params", "packed sequences", f"none with cp_comm_type={_KIND}"
                )
            if attention_bias is not None:
                raise ConfigError.of("attention_bias", "a bias", f"none with cp_comm_type={_KIND}")
            from megatron_fluid.attention.exchanged import exchanged_attention

            exchange = self.exchanges.of(query)
            mask = None if attention_mask is None else _whole_mask(exchange, attention_mask)
            attend = functools.partial(_scaled_dot_product, self, mask)
            return exchanged_attention(exchange, query, key, value, attend)

    return AllToAllDotProductAttention


def _scaled_dot_product(
    self: Any, hidden: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """[S, b, heads, D] each, and where not to look, [b or 1, 1, S, S] -> [S, b, heads, D]."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.transformer.enums import AttnMaskType

    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    mask = None
    if hidden is not None:
        # A position that may look nowhere looks everywhere alike, as under Megatron's finite mask
        # value: its scores are 0.
        nowhere = hidden.all(dim=-1, keepdim=True)
        q = q.masked_fill(nowhere, 0.0)
        mask = ~hidden | nowhere
    dropout = self.attention_dropout.p if self.training else 0.0
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and self.attn_mask_type == AttnMaskType.causal,
        dropout_p=dropout,
        # Megatron divides the scale by the layer's number here and multiplies by it inside softmax.
        scale=self.softmax_scale
        * (self.layer_number if self.config.apply_query_key_layer_scaling else 1),
        enable_gqa=q.size(1) != k.size(1),
    )
    if dropout and not self.config.sequence_parallel:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            context = attend()
    else:
        context = attend()
    return context.permute(2, 0, 1, 3).contiguous()


def _local_kernel(core: Any, groups: int) -> Callable[[Tensor, Tensor, Tensor, CoreCase], Tensor]:
    return lambda q, k, v, case: _scaled_dot_product(core, None, q, k, v)


def _whole_mask(exchange: Any, mask: Tensor) -> Tensor:
    """Every rank's rows [b or 1, 1, s, S] gathered and put in order: [b or 1, 1, S, S] bool."""
    import torch

    rows = mask.to(torch.uint8).movedim(2, 0).contiguous()  # gloo and NCCL know no bool
    gathered = rows.new_empty((exchange.heads.world * rows.size(0), *rows.shape[1:]))
    torch.distributed.all_gather_into_tensor(gathered, rows, group=exchange.group)
    whole = torch.empty_like(gathered)
    whole[exchange.sequence.order(mask.device)] = gathered
    return whole.movedim(0, 2).bool()


# ---- Transformer Engine's specs
# ----------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class TERequest:
    """What Megatron asks of Transformer Engine's attention."""

    config: Any
    attn_mask_type: Any
    attention_type: str
    cp_comm_type: str | None
    own_channels: bool


@dataclasses.dataclass(frozen=True)
class TELimit:
    """A setting under which Transformer Engine keeps its own exchange: its name, when that is, and
    why."""

    setting: str
    hit: Callable[[TERequest], bool]
    reason: str


TE_LIMITS: tuple[TELimit, ...] = (
    TELimit(
        "cp_backend",
        lambda r: current_config().cp_backend == "megatron",
        "Megatron's own path was asked for",
    ),
    TELimit(
        "cp_comm_type",
        lambda r: r.cp_comm_type != _KIND,
        "p2p, all_gather and a2a+p2p are other algorithms",
    ),
    TELimit(
        "attention_type", lambda r: r.attention_type != "self", "cross-attention has two sequences"
    ),
    TELimit(
        "multi_latent_attention",
        lambda r: bool(r.config.multi_latent_attention or r.own_channels),
        "latent attention has heads of two sizes",
    ),
    TELimit(
        "attn_mask_type",
        lambda r: r.attn_mask_type.name not in ("causal", "no_mask"),
        "a mask of padding or of one's own is not exchanged",
    ),
    TELimit(
        "softmax_type",
        lambda r: r.config.softmax_type != "vanilla",
        "its offset is a parameter of all heads",
    ),
    TELimit(
        "fp8_dot_product_attention",
        lambda r: bool(r.config.fp8_dot_product_attention or r.config.fp8_multi_head_attention),
        "heads are exchanged in the activations' precision",
    ),
    TELimit(
        "qk_clip",
        lambda r: bool(r.config.qk_clip or r.config.log_max_attention_logit),
        "logits are recorded by Megatron's own module",
    ),
)


def te_limit(request: TERequest) -> str | None:
    """The first setting under which Transformer Engine keeps its own exchange, and why; None if
    there is none."""
    return next(
        (f"{limit.setting}: {limit.reason}" for limit in TE_LIMITS if limit.hit(request)), None
    )


def te_dot_product_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `TEDotProductAttention.__init__`: with context parallelism by a2a the object becomes the
    class below.

    It stays what Megatron built, and holds beside it, out of the module tree (so that no checkpoint
    sees it), the same attention for one context-parallel rank and this rank's heads (of a head
    group).
    """

    @functools.wraps(original)
    def fluid_init(
        self: Any,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = "p2p",
        pg_collection: Any = None,
    ) -> None:
        base: Any = type(self)

        def build(module: Any, settings: Any) -> None:
            original(
                module,
                settings,
                layer_number,
                attn_mask_type,
                attention_type,
                attention_dropout,
                softmax_scale,
                k_channels,
                v_channels,
                num_splits,
                cp_comm_type,
                pg_collection,
            )

        build(self, config)
        if config.context_parallel_size == 1:
            return
        own_channels = k_channels is not None or v_channels is not None
        reason = te_limit(
            TERequest(config, attn_mask_type, attention_type, cp_comm_type, own_channels)
        )
        asked = current_config().cp_backend
        if reason is not None and asked in ("nvlink", "rounds", "collective"):
            raise ConfigError.of("cp_backend", asked, f"auto, megatron: {reason}")
        if reason is not None:
            _note(False, f"Transformer Engine's own exchange: {reason}")
            return
        shared = _tensor_parallel_group(pg_collection), _context_parallel_group(pg_collection)
        exchanges = _Exchanges(config, *shared, own_path=True)
        if not exchanges.nvlink and asked == "auto":
            _note(
                False, f"Transformer Engine's own exchange: {exchanges.nvlink_unsupported_reason}"
            )
            return
        shares = _tensor_parallel_group(pg_collection).size()

        @functools.cache
        def alone(groups: int) -> Any:
            settings = copy.copy(config)
            settings.context_parallel_size = 1
            settings.num_attention_heads = (
                config.num_attention_heads // exchanges.heads.world // groups
            )
            settings.num_query_groups = exchanges.key_value_heads // groups * shares
            inner = base.__new__(base)
            build(inner, settings)
            return inner

        alone(1)  # what it does not take is said now
        self.__dict__["exchanges"], self.__dict__["alone"] = exchanges, alone
        self.__dict__["mask_type"] = attn_mask_type
        self.__class__ = _te_class(base)
        _note(True, _served_by(exchanges))

    return fluid_init


def _te_kernel(core: Any, groups: int) -> Callable[[Tensor, Tensor, Tensor, CoreCase], Tensor]:
    inner, exchanges, mask_type = core.alone(groups), core.exchanges, core.mask_type
    heads = exchanges.heads.num_heads // exchanges.heads.world // groups
    key_value_heads = exchanges.key_value_heads // groups

    def run(q: Tensor, k: Tensor, v: Tensor, case: CoreCase) -> Tensor:
        if inner.training != core.training:
            inner.train(core.training)
        # Transformer Engine chooses its kernel by layout too: it is given that of its own path,
        # each tensor for itself. Over symmetric memory they arrive so (SymmetricExchange, apart),
        # and nothing is copied here.
        length, dim = q.shape[0], q.shape[3]
        queries = q.reshape(length, -1, heads, dim).contiguous()
        keys, values = (t.reshape(length, -1, key_value_heads, dim).contiguous() for t in (k, v))
        attended: Tensor = inner(queries, keys, values, None, mask_type)
        return attended

    return run


@functools.cache
def _te_class(base: type) -> type:
    class AllToAllTEDotProductAttention(base):  # type: ignore[misc, valid-type]
        """Transformer Engine's attention between two exchanges by megatron_fluid."""

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            attn_mask_type: Any,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
            num_splits: int | None = None,
        ) -> Tensor:
            """Query [s, b, n, D], key and value [s, b, g, D] -> [s, b, n * D]; as Megatron's where
            it is packed or masked."""
            plain = (
                attn_mask_type.name in ("causal", "no_mask")
                and query.dim() == 4
                and query.size(0) == key.size(0)
            )
            if packed_seq_params is not None or attention_bias is not None or not plain:
                result: Tensor = super().forward(
                    query,
                    key,
                    value,
                    attention_mask,
                    attn_mask_type,
                    attention_bias,
                    packed_seq_params,
                    num_splits,
                )
                return result
            from megatron_fluid.attention.exchanged import exchanged_attention

            exchange = self.exchanges.of(query)
            inner = self.alone(exchange.heads.groups)
            if inner.training != self.training:
                inner.train(self.training)

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                attended: Tensor = inner(q, k, v, None, attn_mask_type, num_splits=num_splits)
                return attended

            return exchanged_attention(exchange, query, key, value, attend)

    return AllToAllTEDotProductAttention
