"""Megatron's SelfAttention as the tests of its patch build and run it: one module of fixed weights
under any setting, in Megatron's local spec or in Transformer Engine's, whose classes are stand-ins
here, as it needs a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BATCH",
    "HEADS",
    "HIDDEN",
    "STRADDLING",
    "WIDTH",
    "Case",
    "angles_of",
    "build",
    "count_calls",
    "error_of",
    "fuse",
    "patched_core",
    "start",
    "step",
]

HEADS, WIDTH, BATCH, HIDDEN = 8, 8, 2, 48
STRADDLING = 12  # with 6 key/value heads, a rank of 4 has 3 heads of 2 of them


@dataclasses.dataclass(frozen=True)
class Case:
    """One module: Megatron's local spec, or Transformer Engine's by stand-ins."""

    te: bool = False
    heads: int = HEADS
    groups: int = 2
    rotated: int = WIDTH
    interleaved: bool = False
    norms: bool = False
    bias: bool = True
    causal: bool = True
    dtype: torch.dtype = torch.float32
    fused: bool = False
    deferred: bool = False
    recompute: bool = False
    microbatches: int = 1
    frozen: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


class _Linear(nn.Module):
    """What Megatron's TELayerNormColumnParallelLinear and TERowParallelLinear hold, by Transformer
    Engine 2.20's names."""

    def __init__(
        self, inputs: int, outputs: int, *, config: Any, bias: bool, skip_bias_add: bool, **_: Any
    ) -> None:
        super().__init__()
        self.config, self.use_bias, self.te_return_bias = config, bias, skip_bias_add and bias
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else torch.empty(0)
        self.te_quant_params, self.fuse_wgrad_accumulation, self.is_first_microbatch = (
            None,
            False,
            True,
        )
        self.calls = 0

    def _rows(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        bias = self.bias if self.use_bias and not self.te_return_bias else None
        return F.linear(
            self._rows(x), self.weight, bias
        ), self.bias if self.te_return_bias else None


class _NormLinear(_Linear):
    def __init__(self, inputs: int, outputs: int, *, config: Any, **rest: Any) -> None:
        super().__init__(inputs, outputs, config=config, **rest)
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs))
        self.layer_norm_bias = (
            nn.Parameter(torch.empty(inputs)) if config.normalization == "LayerNorm" else None
        )
        self.normalization, self.eps = config.normalization, config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def _rows(self, x: Tensor) -> Tensor:
        gamma = self.layer_norm_weight.float() + (1 if self.zero_centered_gamma else 0)
        wide = x.float()
        if self.normalization == "RMSNorm":
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gamma).to(
                x.dtype
            )
        assert self.layer_norm_bias is not None
        return F.layer_norm(
            wide, wide.shape[-1:], gamma, self.layer_norm_bias.float(), self.eps
        ).to(x.dtype)


class _Core(nn.Module):
    """Has the constructor, the call and the softmax offset of Megatron's TEDotProductAttention, and
    knows no context parallelism."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        num_splits=None,
        cp_comm_type="p2p",
        pg_collection=None,
    ):
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        self.config, self.heads, self.groups = (
            config,
            config.num_attention_heads,
            config.num_query_groups,
        )
        self.calls, self.dropout, self.scale = 0, config.attention_dropout, softmax_scale
        self.window = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            self.window = config.window_size
        self.softmax_offset = None
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(self.heads)
        elif config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.heads))

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type,
        attention_bias=None,
        packed_seq_params=None,
        num_splits=None,
    ):
        self.calls += 1
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        assert (query.size(2), key.size(2)) == (self.heads, self.groups)
        if self.heads not in (
            HEADS,
            STRADDLING,
        ):  # a share: as Transformer Engine's get_qkv_layout takes it without a copy
            assert all(t.is_contiguous() for t in (query, key, value))
            offsets = [t.storage_offset() for t in (query, key, value)]
            assert offsets in ([0, 0, 0], [0, query.numel(), query.numel() + key.numel()])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        causal = attn_mask_type.name == "causal"
        if self.window is None and self.softmax_offset is None and not packed:
            from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

            dropout = self.dropout if self.training else 0.0
            with get_cuda_rng_tracker().fork():
                y = F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal, enable_gqa=True, dropout_p=dropout, scale=self.scale
                )
            return y.permute(2, 0, 1, 3).flatten(2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        scale = query.size(3) ** -0.5 if self.scale is None else self.scale
        scores = (q @ k.transpose(2, 3)).float() * scale
        row = torch.arange(query.size(0))
        distance = row[:, None] - row[None, :]
        seen = distance >= 0 if causal else distance == distance
        if self.window is not None:
            before, after = self.window
            seen = seen & (distance <= before) & (distance >= -after)
        if packed:
            of = _sequence_of(packed_seq_params, query.size(0))
            seen = seen & (of[:, None] == of[None, :]) & (of >= 0)[None, :]
            seen[of < 0, 0] = True  # padding sees something, and what it gives is dropped
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.softmax_offset is not None:
            sink = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], 3)
        y = scores.softmax(3)[..., : query.size(0)].to(v.dtype) @ v
        if packed:
            return (y * (of >= 0)[:, None]).squeeze(0).transpose(0, 1).flatten(1)
        return y.permute(2, 0, 1, 3).flatten(2)


def _sequence_of(packed: Any, length: int) -> Tensor:
    """The sequence of each row of a pack; -1 of padding."""
    of = torch.full((length,), -1)
    bounds = zip(packed.cu_seqlens_q_padded[:-1], packed.cu_seqlens_q.diff(), strict=True)
    for index, (begin, count) in enumerate(bounds):
        of[int(begin) : int(begin + count)] = index
    return of


class _TENorm(nn.Module):
    """Transformer Engine's RMSNorm: its weight may be stored less one."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size)), eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        gamma = self.weight.float() + (1 if self.zero_centered_gamma else 0)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gamma).to(
            x.dtype
        )


class _TELayerNorm(_TENorm):
    """Transformer Engine's LayerNorm: its weight may be stored less one."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, eps)
        self.bias = nn.Parameter(torch.empty(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        gamma = self.weight.float() + (1 if self.zero_centered_gamma else 0)
        wide = x.float()
        centered = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        return (centered * scale * gamma + self.bias.float()).to(x.dtype)


def _know_stand_ins() -> None:
    """Let the patch take the stand-ins for Transformer Engine's classes."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_fluid.patches.attention import head_norms
    from megatron_fluid.patches.attention import limits as attention_limits

    stand_ins = {"RMSNorm": _TENorm, "LayerNorm": _TELayerNorm}
    attention_limits._qkv_types = lambda: (ColumnParallelLinear, _NormLinear)
    attention_limits._projection_types = lambda: (RowParallelLinear, _Linear)
    head_norms.of_transformer_engine = lambda *names: tuple(stand_ins[name] for name in names)


def patched_core() -> type:
    """The stand-in for Transformer Engine's core attention, with the patch of its constructor."""
    from megatron_fluid.patches.attention.transformer_engine import te_dot_product_attention

    class Patched(_Core):
        __init__ = te_dot_product_attention(_Core.__init__)  # type: ignore[assignment]

    return Patched


def _spec(case: Case) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.torch_norm import L2Norm

    if not case.te:
        norm = dict(case.settings).get("normalization", "RMSNorm")
        return get_gpt_layer_local_submodules(
            qk_layernorm=case.norms,
            normalization=norm,
            qk_l2_norm=bool(dict(case.settings).get("qk_l2_norm")),
        ).self_attention.submodules

    layer_norm = dict(case.settings).get("normalization") == "LayerNorm"
    norm = (_TELayerNorm if layer_norm else _TENorm) if case.norms else None
    if dict(case.settings).get("qk_l2_norm"):
        norm = L2Norm
    return SelfAttentionSubmodules(
        linear_qkv=_NormLinear,
        core_attention=patched_core(),
        linear_proj=_Linear,
        q_layernorm=norm,
        k_layernorm=norm,
    )


def _config(case: Case, ranks: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": case.heads,
        "num_query_groups": case.groups,
        "kv_channels": WIDTH,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "context_parallel_size": ranks,
        "cp_comm_type": "a2a",
        "add_bias_linear": case.bias,
        "qk_layernorm": case.norms,
        "rotary_interleaved": case.interleaved,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
        "normalization": "RMSNorm",
        "persist_layer_norm": False,
        "layernorm_zero_centered_gamma": case.te,
    }
    settings |= dict(case.settings)
    # Megatron's GPTModel puts these on the configuration.
    yarn = {name: settings.pop(name) for name in list(settings) if name.startswith("yarn_")}
    config = TransformerConfig(**settings)
    for name, value in yarn.items():
        setattr(config, name, value)
    return config


def start(ranks: int) -> Any:
    """Parallel state, patches, and a group of this rank alone."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_fluid  # noqa: F401

    torch.set_num_threads(1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        _know_stand_ins()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    return ProcessGroupCollection(tp=tensor, cp=tensor)


def build(
    case: Case,
    ranks: int,
    backend: str,
    groups: Any = None,
    module: Any = None,
    machine: str = "auto",
) -> Any:
    """Megatron's SelfAttention with weights of a fixed seed; ``groups``: its process groups, by
    default those of parallel state; ``machine``: as in FluidConfig."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_fluid.config import FluidConfig, set_config

    how = {"cp_backend": backend, "defer_weight_grads": case.deferred, "machine": machine}
    set_config(FluidConfig(dx_chunks=2, **how))  # type: ignore[arg-type]
    mask = AttnMaskType.causal if case.causal else AttnMaskType.no_mask
    config = _config(case, ranks)
    attention = (module or SelfAttention)(
        config, _spec(case), 1, attn_mask_type=mask, cp_comm_type="a2a", pg_collection=groups
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            around = 1.0 if "norm" in name and not case.te else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + around)
            parameter.requires_grad_(name not in case.frozen)
    attention.to(case.dtype)
    set_config(None)
    return attention


def angles_of(case: Case, length: int) -> Tensor | None:
    if not case.rotated:
        return None
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(
        WIDTH, case.rotated / WIDTH, case.interleaved, use_cpu_initialization=True
    )
    return rotary.get_emb(length)


def step(
    attention: Any,
    case: Case,
    rows: Tensor,
    angles: Tensor | None,
    length: int,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Outputs, input gradients and parameter gradients (or what was added to main_grad) of some
    microbatches.

    Args:
        rows: this rank's, of ``length``.
        angles: of all positions.
        dtype: that the module computes in, if not the case's.
    """
    from megatron.core.tensor_parallel.random import checkpoint

    from megatron_fluid.backward.weight_grads import get_backward_scheduler

    part = None if angles is None else angles[rows]
    found: dict[str, Tensor] = {}
    for microbatch in range(case.microbatches):
        generator = torch.Generator().manual_seed(50 + microbatch)
        inputs, upstream = (
            torch.randn(length, BATCH, HIDDEN, generator=generator) for _ in range(2)
        )
        dtype = dtype or case.dtype
        inputs, upstream = (t[rows].to(case.dtype).to(dtype) for t in (inputs, upstream))
        x = inputs.requires_grad_()

        def call(hidden: Tensor, rotations: Tensor | None) -> Tensor:
            y, bias = attention(hidden, None, rotary_pos_emb=rotations)
            assert (bias is not None) == case.bias
            return y if bias is None else y + bias

        y = checkpoint(call, False, x, part) if case.recompute else call(x, part)
        y.backward(upstream)
        get_backward_scheduler().finish_batch()
        assert x.grad is not None
        found |= {f"y {microbatch}": y.detach(), f"dx {microbatch}": x.grad}
    for name, parameter in attention.named_parameters():
        if getattr(parameter, "grad_added_to_main_grad", False):
            found[name] = parameter.main_grad
        elif parameter.grad is not None:
            found[name] = parameter.grad
    return found


def fuse(attention: Any) -> list[Tensor]:
    """Give the projections main_grads, as Megatron's DDP does, and have them decided about anew;
    gives the hooks' record."""
    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.patches.attention import self_attention

    fired: list[Tensor] = []
    for linear in (attention.linear_qkv, attention.linear_proj):
        name = (
            "fuse_wgrad_accumulation"
            if hasattr(linear, "fuse_wgrad_accumulation")
            else "gradient_accumulation_fusion"
        )
        setattr(linear, name, True)
        weight = linear.weight
        weight.main_grad, weight.grad_added_to_main_grad = (
            torch.zeros_like(weight, dtype=torch.float32),
            False,
        )
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(fired.append)
    set_config(FluidConfig(cp_backend="rounds", dx_chunks=2))
    self_attention.DECISIONS.announce(attention)
    set_config(None)
    return fired


def error_of(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The largest difference as a share of the largest value; in 16 bits root mean squares."""
    a, b = found.double(), expected.double()
    if dtype.itemsize == 2:
        return float(((a - b).square().mean() / b.square().mean()).sqrt())
    return float((a - b).abs().max() / b.abs().max())


def count_calls() -> Any:
    """How many overlapped calls have run since."""
    from megatron_fluid.patches.attention import overlapped

    count = 0
    real = overlapped.OverlappedAttention.forward

    def counted(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return real(self, *args)

    overlapped.OverlappedAttention.forward = counted  # type: ignore[method-assign]

    def stop() -> int:
        overlapped.OverlappedAttention.forward = real  # type: ignore[method-assign]
        return count

    return stop
