"""A transformer layer on plain torch: attention over a context-parallel group, a mixture of experts
over an expert-parallel one.

    layer = TransformerLayer(4096, 32, 14336, num_experts=8, top_k=2, cp_group=group,
    ep_group=group, dtype=torch.bfloat16, device="cuda") y = layer(x)
    # x, y [S / W, B, 4096]: this rank's rows of the sequence loss(y).backward()
    layer.sum_replicated_gradients()              # before the optimizer step

With ``overlap=False`` the same parameters run over plain all-to-all collectives: the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.attention.layer import SelfAttention, sum_gradients
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.copies import copy_sharing
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.layer import MoEBaseline, MoEConfig, MoELayer

__all__ = ["TransformerLayer"]

_NORMS: dict[str, Callable[..., nn.Module]] = {"rmsnorm": nn.RMSNorm, "layernorm": nn.LayerNorm}


class _PlainMoE(MoEBaseline):
    """The all-to-all baseline with the weight layout of the overlapped layer, so that state dicts
    are interchangeable."""

    layout = "out_in"


class TransformerLayer(nn.Module):
    """Pre-norm transformer layer: x + attention(norm(x)), then + experts(norm(.)). Collective over
    both groups.

    Args:
        hidden_size: H.
        num_attention_heads: query heads, a multiple of the context-parallel size.
        ffn_hidden_size: width of each expert.
        num_experts: experts in all, a multiple of the expert-parallel size.
        top_k: experts of a token.
        ep_group: the expert-parallel group (of one rank at least).
        cp_group: the context-parallel group; None: each rank has whole sequences.
        num_kv_heads, head_dim, qk_norm, qkv_bias, causal, window, attention_dropout,
            sequence_layout, attention_kernel, attention_exchange, head_groups, output_chunks,
            scheduler: as SelfAttention's arguments.
        rope_theta: base of the rotary position embedding; None for no position embedding.
        rotary_dim: rotated dimensions of a head; all by default.
        norm: "rmsnorm" or "layernorm", of both sublayers' inputs; norm_eps: its epsilon, also of
            q/k norm.
        activation, score_function, aux_loss_coefficient, shared_ffn_hidden_size, init_std: as in
        moe.layer.MoEConfig.
        dx_chunks: pieces in which backward computes and sends input gradients; None takes
            FluidConfig's.
        overlap: True: exchanges in rounds beside computation. False: plain all-to-all collectives.
        layer_id: number of the layer; names its exchanges and seeds its experts, so each layer of a
            model needs its own.
        device, dtype: of the parameters.

    Raises:
        ConfigError: a setting that cannot be met, by name.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        ep_group: dist.ProcessGroup,
        cp_group: dist.ProcessGroup | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        qkv_bias: bool = False,
        rope_theta: float | None = 10000.0,
        rotary_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        attention_dropout: float = 0.0,
        sequence_layout: str = "contiguous",
        attention_kernel: str = "auto",
        attention_exchange: str = "auto",
        head_groups: int | None = None,
        output_chunks: int = 1,
        scheduler: WeightGradScheduler | None = None,
        norm: str = "rmsnorm",
        norm_eps: float = 1e-6,
        activation: str | Callable[[Tensor], Tensor] = "swiglu",
        score_function: str = "softmax",
        aux_loss_coefficient: float = 0.0,
        shared_ffn_hidden_size: int = 0,
        init_std: float = 0.02,
        dx_chunks: int | None = None,
        overlap: bool = True,
        layer_id: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise ConfigError.of("norm", norm, ", ".join(_NORMS))
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        if head_dim is None and num_attention_heads > 0:
            head_dim = hidden_size // num_attention_heads
        rotary = None if rope_theta is None else Rotary(rotary_dim or head_dim or 0, rope_theta)
        moe = MoEConfig(
            hidden_size,
            ffn_hidden_size,
            num_experts,
            top_k,
            activation=activation,
            score_function=score_function,
            aux_loss_coefficient=aux_loss_coefficient,
            shared_ffn_hidden_size=shared_ffn_hidden_size,
            dx_chunks=dx_chunks,
            init_std=init_std,
        )
        self.cp_group, self.ep_group, self.overlap = cp_group, ep_group, overlap
        self.input_layernorm = _NORMS[norm](hidden_size, eps=norm_eps, **made)
        self.self_attention = SelfAttention(
            hidden_size,
            num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            group=cp_group,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            rotary=rotary,
            causal=causal,
            window=window,
            dropout=attention_dropout,
            sequence_layout=sequence_layout,
            kernel=attention_kernel,
            exchange=attention_exchange,
            head_groups=head_groups if overlap else None,
            output_chunks=output_chunks,
            dx_chunks=dx_chunks,
            overlap=overlap,
            scheduler=scheduler,
            name=f"layer {layer_id} attention",
            **made,
        )
        self.pre_mlp_layernorm = _NORMS[norm](hidden_size, eps=norm_eps, **made)
        self.mlp = (MoELayer if overlap else _PlainMoE)(moe, ep_group, layer_id=layer_id, **made)
        self.init_weights(init_std, layer_id)

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformerLayer:
        """A layer with parameters of its own and the same process groups."""
        return copy_sharing(self, memo, self.cp_group, self.ep_group)

    @torch.no_grad()
    def init_weights(self, std: float, layer_id: int, seed: int = 4321) -> None:
        """Draw the attention's projections from a generator of this layer alone, alike on every
        rank."""
        for number, linear in enumerate(
            (self.self_attention.linear_qkv, self.self_attention.linear_proj)
        ):
            generator = torch.Generator(device=linear.weight.device).manual_seed(
                (seed + layer_id) * 1_000_003 + number
            )
            linear.weight.normal_(std=std, generator=generator)
            if linear.bias is not None:
                linear.bias.zero_()

    def forward(self, x: Tensor, sequence_length: int | None = None) -> Tensor:
        """x [s, B, H], this rank's rows -> [s, B, H]; for ``sequence_length`` see
        SelfAttention.forward."""
        hidden = self.self_attention.linear_qkv.in_features
        if x.dim() != 3 or x.shape[2] != hidden:
            raise ConfigError.of(
                "input of TransformerLayer", tuple(x.shape), f"[local rows, batch, {hidden}]"
            )
        x = x + self.self_attention(self.input_layernorm(x), sequence_length)
        return x + self.mlp(self.pre_mlp_layernorm(x))

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters that every rank holds whole: all but the routed experts'."""
        return [p for p in self.parameters() if getattr(p, "allreduce", True)]

    def sum_replicated_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        """Add up the gradients of ``replicated_parameters`` over ``group``, by default the
        context-parallel group.

        Every rank sees its rows alone, so a gradient of a weight that all ranks hold is a sum over
        ranks. Experts need nothing: their rank has seen the tokens of all.
        """
        sum_gradients(self.replicated_parameters(), self.cp_group if group is None else group)
