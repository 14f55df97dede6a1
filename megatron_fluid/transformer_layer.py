"""A transformer layer on plain torch: context-parallel attention, expert-parallel MoE.

    layer = TransformerLayer(4096, 32, 14336, num_experts=8, top_k=2, cp_group=group,
                             ep_group=group, dtype=torch.bfloat16, device="cuda")
    y = layer(x)                        # x, y [S / W, B, 4096]: this rank's rows of the sequence
    loss(y).backward()
    layer.sum_replicated_gradients()    # before the optimizer step

With ``overlap=False`` the same parameters run over plain all-to-all collectives: the baseline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.attention.config import AttentionConfig
from megatron_fluid.attention.layer import SelfAttention, sum_gradients
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.comm.groups import group_or_lone_rank
from megatron_fluid.comm.layers import check_input, compare_settings, copy_sharing
from megatron_fluid.config import FieldsConfig, shows_fields_of
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.config import MoEConfig
from megatron_fluid.moe.layer import MoEBaseline, MoELayer
from megatron_fluid.moe.sharding import (
    Group,
    clip_grad_norm_,
    fill,
    group_of,
    is_sharded,
    local_part,
)

__all__ = ["TransformerLayer", "TransformerLayerConfig"]

_ATTENTION_SEED = 3087  # apart from the experts' draws
_NORMS: dict[str, Callable[..., nn.Module]] = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}


@dataclass(frozen=True)
class TransformerLayerConfig(FieldsConfig):
    """The shape and settings of a TransformerLayer.

    A field that AttentionConfig or MoEConfig also has means the same there, and so do
    ``attention_dropout``, ``attention_kernel`` and ``attention_exchange``.

    Attributes:
        rope_theta: base of the rotary position embedding; None for no position embedding.
        rotary_dim: rotated dimensions of a head; all by default.
        norm: "rmsnorm" or "layernorm", of both sublayers' inputs.
        norm_eps: its epsilon, also of q/k norm.
        overlap: whether exchanges overlap with computation. False: plain all-to-all collectives.
    """

    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float | None = 10000.0
    rotary_dim: int | None = None
    causal: bool = True
    window: int | None = None
    attention_dropout: float = 0.0
    sequence_layout: str = "contiguous"
    attention_kernel: str = "auto"
    attention_exchange: str = "auto"
    head_groups: int | None = None
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    activation: str | Callable[[Tensor], Tensor] = "swiglu"
    score_function: str = "softmax"
    aux_loss_coefficient: float = 0.0
    shared_ffn_hidden_size: int = 0
    init_std: float = 0.02
    dx_chunks: int | None = None
    overlap: bool = True
    pre_softmax: bool = False
    scaling: float | None = None
    router_dtype: str | None = None

    def __post_init__(self) -> None:
        self.check_fields()
        if self.rotary_dim is not None and self.rotary_dim < 2:
            allowed = "even numbers of at least 2, or None for head_dim"
            raise ConfigError.of("rotary_dim", self.rotary_dim, allowed)
        if self.norm not in _NORMS:
            raise ConfigError.of("norm", self.norm, ", ".join(_NORMS))
        heads = self.num_attention_heads
        if self.head_dim is None:
            if heads < 1 or self.hidden_size % heads:
                allowed = f"divisors of hidden_size {self.hidden_size}, or head_dim beside it"
                raise ConfigError.of("num_attention_heads", heads, allowed)
            object.__setattr__(self, "head_dim", self.hidden_size // heads)

    def _shared(self, other: type) -> dict[str, Any]:
        """The fields that ``other`` has too."""
        names = {field.name for field in dataclasses.fields(other)}
        return {name: value for name, value in vars(self).items() if name in names}

    def attention(self) -> AttentionConfig:
        theta, dim = self.rope_theta, self.rotary_dim or self.head_dim or 0
        fields = self._shared(AttentionConfig) | {
            "num_heads": self.num_attention_heads,
            "rotary": None if theta is None else Rotary(dim, theta),
            "dropout": self.attention_dropout,
            "kernel": self.attention_kernel,
            "exchange": self.attention_exchange,
            "head_groups": self.head_groups if self.overlap else None,
        }
        return AttentionConfig(**fields)

    def moe(self) -> MoEConfig:
        return MoEConfig(**self._shared(MoEConfig))


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then + experts(norm(.)). Collective over
    both groups.

    Args:
        shape: a TransformerLayerConfig, a dictionary of its fields, or its first five fields.
        ep_group: the expert-parallel group, or a DeviceMesh of one dimension; None in a process
            that runs alone, without torch.distributed.
        cp_group: the context-parallel group; None: each rank has whole sequences.
        scheduler: as SelfAttention's.
        layer_id: number of the layer; names its exchanges and seeds its experts, so each layer of a
            model needs its own.
        device, dtype: of the parameters.
        fields: further fields of TransformerLayerConfig, by name.

    Raises:
        ConfigError: a setting that cannot be met, by name.
    """

    @shows_fields_of(TransformerLayerConfig)
    @tells_peers
    def __init__(
        self,
        *shape: TransformerLayerConfig | Mapping[str, Any] | int,
        ep_group: Group = None,
        cp_group: dist.ProcessGroup | None = None,
        scheduler: WeightGradScheduler | None = None,
        layer_id: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **fields: Any,
    ) -> None:
        super().__init__()
        self.config = config = TransformerLayerConfig.of(*shape, **fields)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        norm, size = _NORMS[config.norm], config.hidden_size
        self.cp_group, self.ep_group = cp_group, group_or_lone_rank(group_of(ep_group))
        self.input_layernorm = norm(size, eps=config.norm_eps, **made)
        name = f"layer {layer_id} attention"
        self.self_attention = SelfAttention(
            config.attention(), group=cp_group, scheduler=scheduler, name=name, **made
        )
        self.pre_mlp_layernorm = norm(size, eps=config.norm_eps, **made)
        experts = MoELayer if config.overlap else MoEBaseline
        self.mlp = experts(config.moe(), ep_group, layer_id=layer_id, **made)
        compare_settings(self.ep_group, type(self).__name__, vars(config))
        self.layer_id = layer_id
        if not self.mlp.weight1.is_meta:
            self.init_weights()

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformerLayer:
        """A layer with parameters of its own and the same process groups."""
        return copy_sharing(self, memo, self.cp_group, self.ep_group)

    @torch.no_grad()
    def init_weights(self, seed: int = 1234) -> None:
        """Draw all parameters from generators of this layer alone, alike on any number of ranks,
        also sharded by FSDP2. A layer that was built on the meta device calls it after to_empty."""
        attention, std = self.self_attention, self.config.init_std
        norms = attention.q_layernorm, attention.k_layernorm
        for norm in (self.input_layernorm, self.pre_mlp_layernorm, *norms):
            if isinstance(norm, nn.RMSNorm | nn.LayerNorm):
                norm.reset_parameters()
        for number, linear in enumerate((attention.linear_qkv, attention.linear_proj)):
            like = local_part(linear.weight)
            generator = torch.Generator(device=like.device)
            generator.manual_seed((seed + _ATTENTION_SEED + self.layer_id) * 1_000_003 + number)
            whole = torch.empty(linear.weight.shape, device=like.device, dtype=like.dtype)
            fill(linear.weight, whole.normal_(std=std, generator=generator))
            if linear.bias is not None:
                linear.bias.zero_()
        self.mlp.init_weights(seed)

    def forward(self, x: Tensor, sequence_length: int | None = None) -> Tensor:
        """x [s, B, H], this rank's rows -> [s, B, H]; for ``sequence_length`` see
        SelfAttention.forward."""
        hidden = self.self_attention.config.hidden_size
        if x.dim() != 3 or x.shape[2] != hidden:
            allowed = f"[local rows, batch, {hidden}]"
            raise ConfigError.of("input of TransformerLayer", tuple(x.shape), allowed)
        if (x.dtype, x.device) != self.self_attention._taken:
            check_input("input of TransformerLayer", x, self.self_attention.weights().w_qkv)
        x = x + self.self_attention(self.input_layernorm(x), sequence_length)
        return x + self.mlp(self.pre_mlp_layernorm(x))

    def extra_repr(self) -> str:
        cp_ranks = 1 if self.cp_group is None else self.cp_group.size()
        ranks = f"cp_ranks={cp_ranks}, ep_ranks={self.ep_group.size()}"
        return f"hidden_size={self.config.hidden_size}, {ranks}, overlap={self.config.overlap}"

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters that every rank holds whole: all but the experts of several ranks."""
        return [p for p in self.parameters() if not is_sharded(p)]

    def sum_replicated_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        """Add up the gradients of ``replicated_parameters`` over ``group``, by default the
        context-parallel group, without one ``ep_group``.

        Every rank sees its rows alone, so a gradient of a weight that all ranks hold is a sum over
        ranks. Experts need nothing: their rank has seen the tokens of all ranks of ``ep_group``.

        Raises:
            ConfigError: a rank of ``group`` is not in ``ep_group``, over which experts are divided:
                experts there have seen other tokens.
        """
        default = self.ep_group if self.cp_group is None else self.cp_group
        group = default if group is None else group
        if group.size() > 1 and self.ep_group.size() > 1:
            ranks, experts = map(dist.get_process_group_ranks, (group, self.ep_group))
            if not set(ranks) <= set(experts):
                allowed = f"a part of ep_group, {experts}: experts of other ranks have other tokens"
                raise ConfigError.of("ranks of sum_replicated_gradients", ranks, allowed)
        sum_gradients(self.replicated_parameters(), group)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients by their norm over all ranks' experts, after
        `sum_replicated_gradients`; see megatron_fluid.clip_grad_norm_ for a whole model.
        Collective."""
        return clip_grad_norm_(self, max_norm, norm_type)
