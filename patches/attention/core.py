"""Context parallelism in Megatron's self-attention with `cp_comm_type="a2a"`: heads and sequence
exchanged by megatron_fluid, in the local specs.

Each rank gives its part of the sequence with all heads for the whole sequence with a part of the
heads (Ulysses), attends, and exchanges back: over symmetric memory inside an NVLink domain, else
one all-to-all each way (megatron_fluid.attention.exchange). Here torch's scaled dot-product
attention attends, in a class of Megatron's that by itself refuses more than one context-parallel
rank. Where the softmax has an offset or a window, Megatron's own local attention attends, built for
one context-parallel rank and this rank's heads. transformer_engine.py is the same for Transformer
Engine's specs.

This is the core attention alone; where settings allow it, the projections around it are overlapped
too (self_attention.py).

Megatron's context-parallel layout is a zig-zag: the sequence is cut into 2C chunks, and rank r of C
holds chunks r and 2C - 1 - r, so that all have equal work under a causal mask.

Legend: S whole sequence, s = S / C a rank's part, b batch, n query heads, g key and value heads, D
head dim, Dv that of values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from megatron_fluid.config import CHOICES, current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.attention.limits import EXCHANGED_COMM_TYPE, OVERLAP_LIMITS
from megatron_fluid.patches.features import FeatureReport
from megatron_fluid.patches.limits import first_reason
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_fluid.attention.exchange.protocol import HeadExchange
    from megatron_fluid.attention.layouts import HeadPart

__all__ = [
    "REPORT",
    "Exchanges",
    "attend_alone",
    "dot_product_attention",
    "exchanged",
    "exchanges_of",
    "softmax_offset",
    "take_over",
]

REPORT = FeatureReport("context-parallel attention")
# Queries, keys and values [S, B', heads, D or Dv], a CoreCase or None, and the softmax's offset.
type Kernel = Callable[..., Tensor]
# What a core attention for this rank's heads shares with the module's in every call, as it may
# change: the mode, submodules (with p of dropout, the window), and what Transformer Engine copies.
_SHARED = ("training", "_modules", "softmax_scale", "attention_dropout", "window_size")
_NONE = f"none with cp_comm_type={EXCHANGED_COMM_TYPE}"


class Exchanges:
    """The exchanges of one attention module, made for its heads; one for each length of sequence.

    Args:
        config: the module's configuration; heads are counted per tensor-parallel rank.
        pg_collection: Megatron's process groups, or None for those in force.
        own_path: whether Megatron's own attention serves context parallelism, as Transformer
            Engine's does and the local one does not.
        channels: widths of a head of queries and keys, and of one of values; None: kv_channels.

    Attributes:
        shares: how many tensor-parallel ranks share the heads.
        asked: the cp_backend in force when the module was built.
        nvlink_unsupported_reason: why symmetric memory cannot move them, or None.
    """

    def __init__(
        self,
        config: Any,
        pg_collection: Any,
        own_path: bool,
        channels: tuple[int, int] | None = None,
    ) -> None:
        from megatron_fluid.attention.layouts import HeadLayout

        self._group = _group_of(pg_collection, "cp", "get_context_parallel_group")
        ranks = self.group.size()
        shares = _group_of(pg_collection, "tp", "get_tensor_model_parallel_group").size()
        heads = config.num_attention_heads // shares
        key_value_heads = max(1, config.num_query_groups // shares)
        if heads % ranks:
            raise ConfigError.of(
                "num_attention_heads",
                f"{heads} per tensor-parallel rank",
                f"a multiple of context_parallel_size ({ranks}), which splits the heads with "
                f"cp_comm_type={EXCHANGED_COMM_TYPE}",
            )
        if key_value_heads % ranks and ranks % key_value_heads:
            found = f"{key_value_heads} per tensor-parallel rank"
            allowed = f"a multiple or a divisor of context_parallel_size ({ranks})"
            raise ConfigError.of("num_query_groups", found, allowed)
        of_keys, of_values = channels or (config.kv_channels, config.kv_channels)
        self.heads = HeadLayout(heads, key_value_heads, of_keys, ranks, value_dim=of_values)
        self.own_path, self.shares, fluid = own_path, shares, current_config()
        self.asked = fluid.cp_backend
        reason = self.nvlink_unsupported_reason = nvlink_reason(self.group, self.heads.unit)
        if self.asked == "nvlink" and reason is not None:
            # Without overlapped projections there are no rounds.
            others = self.other_backends(rounds=first_reason(OVERLAP_LIMITS, config, fluid) is None)
            raise ConfigError.of("cp_backend", "nvlink", f"{', '.join(others)}: {reason}")
        self._of_length = functools.lru_cache(maxsize=8)(self._make)

    @property
    def group(self) -> Any:
        """The context-parallel group as it is now."""
        return real_group(self._group)

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
        return [backend for backend in CHOICES["cp_backend"] if served.get(backend, True)]

    @property
    def nvlink(self) -> bool:
        """Whether heads move over symmetric memory."""
        return self.nvlink_unsupported_reason is None and self.asked not in ("rounds", "collective")

    def describe(self) -> str:
        """The start-up table's words for them."""
        if self.nvlink:
            return "heads move over NVLink"
        reason = self.nvlink_unsupported_reason or f"cp_backend={self.asked}"
        return f"one all-to-all each way: {reason}"

    @property
    def key_value_heads(self) -> int:
        """How many key and value heads this rank's attention is given."""
        part = self.heads.part(self.group.rank())
        return len(part.kv_heads)

    def of(self, query: Tensor, layout: str = "zigzag", rows: int | None = None) -> HeadExchange:
        """The exchange for this query [s, b, n, D], whose rows are cut by this layout; ``rows``: s,
        where the query has those of the whole sequence."""
        rows = query.size(0) if rows is None else rows
        return self._of_length(self.group, rows, query.size(1) * query.element_size(), layout)

    def _make(self, group: Any, rows: int, batch_bytes: int, layout: str) -> HeadExchange:
        from megatron_fluid.attention.exchange.registry import EXCHANGES, open_exchange
        from megatron_fluid.attention.layouts import SequenceLayout

        ranks = self.heads.world
        if rows % 2 and layout == "zigzag":
            raise ConfigError.of(
                "seq_length", rows * ranks, f"a multiple of 2 * context_parallel_size ({2 * ranks})"
            )
        sequence = SequenceLayout(rows * ranks, ranks, layout)
        name = "symmetric" if self.nvlink else "collective"
        connection = EXCHANGES[name].connect(group)
        return open_exchange(name, connection, self.heads, sequence, 1, batch_bytes)


def nvlink_reason(group: Any, head_dim: int) -> str | None:
    """Why heads cannot be exchanged over symmetric memory; None if they can. Collective over the
    group on GPUs."""
    import torch

    from megatron_fluid.attention.exchange.symmetric import SymmetricExchange

    # In CPU mode is_available() may say otherwise.
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    return SymmetricExchange.unsupported_reason(group, head_dim, device)


def _group_of(pg_collection: Any, name: str, getter: str) -> Any:
    """A process group of the collection, or Megatron's own in force."""
    group = getattr(pg_collection, name, None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return getattr(parallel_state, getter)()


def exchanges_of(core: Any) -> Exchanges | None:
    """The exchanges of a core attention that megatron_fluid has taken over, else None."""
    return getattr(core, "exchanges", None)


def dot_product_attention(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DotProductAttention.__init__`: with several context-parallel ranks the object becomes
    the class below."""

    signature = inspect.signature(original)

    @functools.wraps(original)
    def fluid_init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.context_parallel_size == 1 or current_config().cp_backend == "megatron":
            original(self, config, *args, **kwargs)  # which refuses more than one rank
            return
        given = signature.bind(self, config, *args, **kwargs)
        given.apply_defaults()
        channels = getattr(self, "channels", None)
        thrown_away = config.multi_latent_attention and channels is None
        if not thrown_away:
            _check(config, given.arguments)
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        base: Any = type(self)
        original(self, alone, *args, **kwargs)
        self.config = config
        if thrown_away:  # Megatron builds another one for latent attention
            return
        of = given.arguments["pg_collection"]
        exchanges = Exchanges(config, of, own_path=False, channels=channels)
        take_over(self, _local_class(base), original, config, exchanges, *args, **kwargs)

    return fluid_init


def _check(config: Any, given: dict[str, Any]) -> None:
    """Refuse what this attention does not compute, by name."""
    from megatron.core.transformer.enums import AttnMaskType

    mask, kind = given["attn_mask_type"], given["cp_comm_type"]
    where = "context parallelism without Transformer Engine"
    if kind != EXCHANGED_COMM_TYPE:
        raise ConfigError.of("cp_comm_type", kind, f"{EXCHANGED_COMM_TYPE} for {where}")
    if mask not in (AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.arbitrary):
        allowed = f"causal, no_mask or arbitrary for {where}"
        raise ConfigError.of("attn_mask_type", mask.name, allowed)


def take_over(
    core: Any,
    taken: type,
    original: Callable[..., None],
    config: Any,
    exchanges: Exchanges,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Make a core attention an object of ``taken``. It holds beside it, out of the module tree (so
    that no checkpoint sees it), Megatron's core attention for one context-parallel rank and this
    rank's heads, as a function ``alone`` of the number of head groups; made once for each.

    Args:
        core: as Megatron built it.
        taken: a subclass of its class.
        original: Megatron's ``__init__`` of it.
        config: the module's configuration.
        exchanges: the module's.
        args, kwargs: what else ``original`` takes.
    """
    base: Any = type(core)

    @functools.cache
    def alone(groups: int) -> Any:
        settings = copy.copy(config)
        settings.context_parallel_size, settings.perform_initialization = 1, False
        ranks = exchanges.heads.world
        settings.num_attention_heads = config.num_attention_heads // ranks // groups
        settings.num_query_groups = exchanges.key_value_heads // groups * exchanges.shares
        inner: Any = base.__new__(base)
        original(inner, settings, *args, **kwargs)
        if hasattr(base, "take_channels"):
            inner.take_channels(exchanges.heads.head_dim, exchanges.heads.dv)
        # Its offset is a piece of the module's, call by call.
        inner._parameters.pop("softmax_offset", None)
        return inner

    # Past nn.Module's __setattr__: no part of the model.
    core.__dict__["exchanges"], core.__dict__["alone"] = exchanges, alone
    core.__class__ = taken
    REPORT.note(core, True, exchanges.describe())


def attend_alone(
    core: Any,
    groups: int,
    qkv: Iterable[Tensor],
    offset: Tensor | None,
    *rest: Any,
    flat: bool = False,
    **settings: Any,
) -> Tensor:
    """Attend by ``core.alone``, with this rank's heads in so many head groups.

    Args:
        qkv: [S, B', heads, D or Dv] each. Heads may count as batch entries, as ``packed.split``
            gives them.
        offset: of the softmax, where it is learnable. [heads of the head group]
        flat: the rows are a pack, which has no batch.
        rest, settings: what else its forward takes.
    """
    inner, exchanges = core.alone(groups), core.exchanges
    for name in _SHARED:
        if name in core.__dict__:
            inner.__dict__[name] = core.__dict__[name]
    of_keys = exchanges.key_value_heads // groups
    counts = exchanges.heads.num_heads // exchanges.heads.world // groups, of_keys, of_keys
    # Each for itself: Transformer Engine chooses its kernel by layout, too. Over symmetric memory
    # they arrive so (SymmetricExchange, apart), and nothing is copied here.
    parts = [
        t.reshape(len(t), -1, count, t.shape[3]).contiguous()
        for t, count in zip(qkv, counts, strict=True)
    ]
    parts = [t.squeeze(1) for t in parts] if flat else parts
    if offset is not None:
        inner.__dict__["softmax_offset"] = offset
    try:
        attended: Tensor = inner(*parts, *rest, **settings)
    finally:
        if offset is not None:
            del inner.__dict__["softmax_offset"]
    return attended


def exchanged(
    core: Any, exchange: HeadExchange, qkv: tuple[Tensor, Tensor, Tensor], kernel: Kernel
) -> Tensor:
    """Attend between two exchanges: each [s, b, heads, D or Dv] -> [s, b, n * Dv]."""
    from megatron_fluid.attention.exchanged import exchanged_attention

    offset = softmax_offset(core)

    def attend(part: HeadPart, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, None, None if offset is None else offset[part.head_slice])

    return exchanged_attention(exchange, *qkv, attend)


def softmax_offset(core: Any) -> Tensor | None:
    """The learnable offset in the softmax of a core attention, [n]; None where there is none, or
    one that is a constant."""
    offset: Tensor | None = core._parameters.get("softmax_offset")
    return offset


@functools.cache
def _local_class(base: type) -> type:
    class AllToAllDotProductAttention(base):  # type: ignore[misc, valid-type]
        """Scaled dot-product attention over a sequence that context-parallel ranks hold in
        parts."""

        ignores_masks = False

        def kernel(self, groups: int, packed: Any = None, mask: Tensor | None = None) -> Kernel:
            """What attends, with a mask of where not to look [b or 1, 1, S, S] or none."""

            def run(
                q: Tensor, k: Tensor, v: Tensor, case: Any, offset: Tensor | None = None
            ) -> Tensor:
                if self.softmax_offset is None and self.scale_mask_softmax.window_size is None:
                    return _scaled_dot_product(self, mask, q, k, v)
                attended = attend_alone(self, groups, (q, k, v), offset, mask)
                return attended.view(*q.shape[:3], v.shape[3])

            return run

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
            """Query [s, b, n, D], key [s, b, g, D] and value [s, b, g, Dv], mask [b or 1, 1, s, S]
            with True where not to look.

            Without a mask it is causal or none, as `attn_mask_type` was at construction (Megatron
            ignores the one here). Returns [s, b, n * Dv].
            """
            if packed_seq_params is not None:
                raise ConfigError.of("packed_seq_params", "packed sequences", _NONE)
            if attention_bias is not None:
                raise ConfigError.of("attention_bias", "a bias", _NONE)
            exchange = self.exchanges.of(query)
            mask = None if attention_mask is None else _whole_mask(exchange, attention_mask)
            kernel = self.kernel(exchange.heads.groups, mask=mask)
            return exchanged(self, exchange, (query, key, value), kernel)

    return AllToAllDotProductAttention


def _scaled_dot_product(
    self: Any, hidden: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """[S, b, heads, D] or of values Dv, and where not to look, [b or 1, 1, S, S] -> [S, b, heads,
    Dv]."""
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
    # Megatron divides the scale by the layer's number here and multiplies by it inside softmax.
    scaling = self.layer_number if self.config.apply_query_key_layer_scaling else 1
    settings = {
        "attn_mask": mask,
        "is_causal": mask is None and self.attn_mask_type == AttnMaskType.causal,
        "dropout_p": dropout,
        "scale": self.softmax_scale * scaling,
        "enable_gqa": q.size(1) != k.size(1),
    }
    forked = dropout and not self.config.sequence_parallel
    with tensor_parallel.get_cuda_rng_tracker().fork() if forked else contextlib.nullcontext():
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, **settings)
    return context.permute(2, 0, 1, 3).contiguous()


def _whole_mask(exchange: Any, mask: Tensor) -> Tensor:
    """Every rank's rows [b or 1, 1, s, S] gathered and put in order: [b or 1, 1, S, S] bool."""
    import torch

    rows = mask.to(torch.uint8).movedim(2, 0).contiguous()  # gloo and NCCL know no bool
    gathered = rows.new_empty((exchange.heads.world * rows.size(0), *rows.shape[1:]))
    torch.distributed.all_gather_into_tensor(gathered, rows, group=exchange.group)
    whole = torch.empty_like(gathered)
    whole[exchange.sequence.order(mask.device)] = gathered
    return whole.movedim(0, 2).bool()
