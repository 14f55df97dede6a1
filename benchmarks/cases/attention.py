"""Shapes of the attention benchmarks, and what they run: ours, Megatron's with Transformer Engine,
and the floor.

Shapes: S positions of the whole sequence, s = S / W rows of a rank, B batch, H hidden, D head dim,
W ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.attention.attention_kernels import CoreCase, choose_kernel
from megatron_fluid.attention.layer import SelfAttention
from megatron_fluid.attention.packed import Rotary

__all__ = [
    "CASES",
    "TINY",
    "AttentionCase",
    "MegatronAttention",
    "NormedAttention",
    "attention_floor",
    "fluid_attention",
    "forward_call",
    "megatron_attention",
    "megatron_rotations",
    "start_megatron",
    "step_call",
]


@dataclass(frozen=True)
class AttentionCase:
    """Causal self-attention with its RMS norm, no biases, batch 1."""

    hidden: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int = 128
    settings: tuple[tuple[str, Any], ...] = ()
    """Of Megatron's configuration: such a case has Megatron's modules alone."""
    latent: bool = False

    @property
    def of_megatron(self) -> bool:
        """Whether the case is measured with Megatron's modules alone."""
        return self.latent or bool(self.settings)


_UNBIASED = {"add_bias_linear": False, "gradient_accumulation_fusion": False}
_GPT_OSS = (("softmax_type", "learnable"), ("window_size", (127, 0)), ("add_bias_linear", True))
_NEXT = (("attention_output_gate", True), ("qk_layernorm", True))
_LATENT = (
    ("qk_layernorm", True),
    ("q_lora_rank", 1536),
    ("kv_lora_rank", 512),
    ("qk_head_dim", 128),
    ("qk_pos_emb_head_dim", 64),
    ("v_head_dim", 128),
    ("rope_type", "yarn"),
)

CASES = {
    "mixtral-8x7b-4096": AttentionCase(4096, 32, 8, 4096),
    "mixtral-8x7b-16384": AttentionCase(4096, 32, 8, 16384),
    "mixtral-8x7b-65536": AttentionCase(4096, 32, 8, 65536),
    "qwen3-30b-a3b-16384": AttentionCase(2048, 32, 4, 16384),
    "mha-128-16384": AttentionCase(7168, 128, 128, 16384),
    "gpt-oss-20b-4096": AttentionCase(2880, 64, 8, 4096, 64, _GPT_OSS),
    "gpt-oss-20b-16384": AttentionCase(2880, 64, 8, 16384, 64, _GPT_OSS),
    "qwen3-next-80b-4096": AttentionCase(2048, 16, 2, 4096, 256, _NEXT),
    "qwen3-next-80b-16384": AttentionCase(2048, 16, 2, 16384, 256, _NEXT),
    "deepseek-v3-4096": AttentionCase(7168, 128, 128, 4096, 128, _LATENT, latent=True),
    "deepseek-v3-16384": AttentionCase(7168, 128, 128, 16384, 128, _LATENT, latent=True),
}
_TINY_LATENT = (
    *(("qk_layernorm", True), ("q_lora_rank", 32), ("kv_lora_rank", 16), ("qk_head_dim", 8)),
    *(("qk_pos_emb_head_dim", 4), ("v_head_dim", 8), ("rope_type", "yarn")),
)
TINY = {
    "tiny": AttentionCase(64, 8, 2, 64, 8),
    "tiny-mha": AttentionCase(64, 8, 8, 32, 8),
    "tiny-gate": AttentionCase(64, 8, 2, 64, 8, _NEXT),
    "tiny-latent": AttentionCase(64, 8, 8, 64, 8, _TINY_LATENT, latent=True),
}


class NormedAttention(nn.Module):
    """RMS norm, then SelfAttention: x [s, B, H] -> [s, B, H]."""

    def __init__(self, hidden: int, attention: SelfAttention) -> None:
        super().__init__()
        weight = attention.linear_qkv.weight
        self.norm = nn.RMSNorm(hidden, device=weight.device, dtype=weight.dtype)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(self.norm(x))
        return y


def fluid_attention(
    case: AttentionCase, device: torch.device, rotary: bool = False, **settings: Any
) -> NormedAttention:
    """Our attention on the default group, in Megatron's zig-zag layout; weights from a fixed seed,
    alike on every rank."""
    attention = SelfAttention(
        case.hidden,
        case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        group=dist.group.WORLD,
        rotary=Rotary(case.head_dim) if rotary else None,
        sequence_layout="zigzag",
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        **settings,
    )
    generator = torch.Generator(device=device).manual_seed(7)
    with torch.no_grad():
        for linear in (attention.linear_qkv, attention.linear_proj):
            linear.weight.normal_(std=0.02, generator=generator)
    return NormedAttention(case.hidden, attention)


def start_megatron(te: bool = True, **sizes: int) -> str | None:
    """Build Megatron's process groups anew; why Megatron (``te``: with Transformer Engine) cannot
    be measured, or None."""
    if te and importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        if te:
            import transformer_engine.pytorch  # noqa: F401
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    return None


@contextlib.contextmanager
def cp_backend(name: str) -> Iterator[None]:
    """Attention that Megatron builds inside exchanges by this backend ("megatron": its own)."""
    from megatron_fluid.config import FluidConfig, set_config

    set_config(FluidConfig(cp_backend=name))
    try:
        yield
    finally:
        set_config(None)


class MegatronAttention(nn.Module):
    """Megatron's SelfAttention with its norm: inside Transformer Engine's linear, or before it."""

    def __init__(
        self, module: nn.Module, norm: nn.Module | None, rotations: Tensor | None = None
    ) -> None:
        super().__init__()
        self.module, self.norm, self.rotations = module, norm, rotations

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.norm is None else self.norm(x)
        y: Tensor = self.module(rows, None, rotary_pos_emb=self.rotations)[0]
        return y


def megatron_rotations(case: AttentionCase) -> Tensor:
    """The angles of this rank's rows [s, 1, 1, D], as Megatron gives them to its layers."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    angles: Tensor = RotaryEmbedding(case.head_dim, 1.0)(case.length)
    return angles


def megatron_attention(
    case: AttentionCase,
    device: torch.device,
    backend: str,
    te: bool = True,
    overlap: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    rotations: Tensor | None = None,
    **settings: Any,
) -> MegatronAttention:
    """Megatron's SelfAttention with cp_comm_type a2a.

    Args:
        backend: as in FluidConfig.cp_backend.
        te: with Transformer Engine, else of Megatron's local spec.
        overlap: False: with Megatron's projections, also where they could be overlapped.
        rotations: angles of this rank's rows [s, 1, 1, dim], as Megatron gives them to its layers.
        settings: further ones of its configuration.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megatron_fluid.patches.attention import self_attention

    heads = {} if case.latent else {"num_query_groups": case.kv_heads, "kv_channels": case.head_dim}
    config = (MLATransformerConfig if case.latent else TransformerConfig)(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        normalization="RMSNorm",
        context_parallel_size=dist.get_world_size(),
        cp_comm_type="a2a",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,
        **{**_UNBIASED, **heads, **dict(case.settings), **settings},
    )
    norms = config.qk_layernorm
    if te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=norms, multi_latent_attention=case.latent
        ).submodules.self_attention
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=norms, multi_latent_attention=case.latent, normalization="RMSNorm"
        ).submodules.self_attention
    with cp_backend(backend):
        module = build_module(spec, config=config, layer_number=1, cp_comm_type="a2a").to(
            device=device, dtype=dtype
        )
    if not overlap:
        self_attention.leave(module)
    # Latent attention's projections have no norm in them.
    norm = (
        None
        if te and not case.latent
        else nn.RMSNorm(case.hidden, config.layernorm_epsilon, device=device, dtype=dtype)
    )
    return MegatronAttention(module, norm, rotations)


class _Floor(nn.Module):
    """Norm, both projections and the attention kernel, on tensors that are where they should be;
    nothing moves."""

    def __init__(self, case: AttentionCase, device: torch.device, kernel: str) -> None:
        super().__init__()
        world = dist.get_world_size()
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        dim, heads, kv = case.head_dim, case.heads // world, max(1, case.kv_heads // world)
        self.rows = case.length // world

        def parameter(*shape: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * scale)

        self.w_qkv = parameter((case.heads + 2 * case.kv_heads) * dim, case.hidden, scale=0.02)
        self.w_out = parameter(case.hidden, case.heads * dim, scale=0.02)
        self.q = parameter(case.length, 1, heads, dim)
        self.k, self.v = parameter(case.length, 1, kv, dim), parameter(case.length, 1, kv, dim)
        self.gathered = parameter(self.rows, 1, case.heads * dim)
        self.norm: nn.Module = nn.RMSNorm(case.hidden, device=device, dtype=dtype)
        if kernel == "te":
            import transformer_engine.pytorch as te

            self.norm = te.RMSNorm(case.hidden).to(device).bfloat16()
        self.case = CoreCase(dim, dtype, device.type)
        self.kernel = choose_kernel(kernel, self.case)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = nn.functional.linear(self.norm(x), self.w_qkv)
        # Views, because Transformer Engine takes its slow path for parameters.
        q, k, v = (t.view(t.shape) for t in (self.q, self.k, self.v))
        attended = self.kernel(q, k, v, self.case)
        return qkv, attended, nn.functional.linear(self.gathered, self.w_out)


def attention_floor(case: AttentionCase, device: torch.device, kernel: str) -> nn.Module:
    """The same arithmetic without any exchange, by this attention kernel ("te": with Transformer
    Engine's norm too)."""
    return _Floor(case, device, kernel)


def forward_call(module: Callable[[Tensor], Any], x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return module(x)

    return run


def step_call(module: nn.Module, x: Tensor) -> Callable[[], object]:
    """Forward and backward; gradients are let go."""
    parameters, upstream = [*module.parameters(), x], None

    def run() -> None:
        nonlocal upstream
        y = module(x)
        results = y if isinstance(y, tuple) else (y,)
        if upstream is None:
            upstream = [torch.randn_like(t) for t in results]
        torch.autograd.backward(results, upstream)
        for parameter in parameters:
            parameter.grad = None

    return run
