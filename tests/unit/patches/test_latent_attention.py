"""CPU mode's core of latent attention, whose heads have two sizes, beside torch's attention."""

import math

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnMaskType

from megatron_fluid.patches.cpu.latent_attention import LatentDotProductAttention
from tests.support.launch import on_ranks

S, B, HEADS, K, V = 6, 2, 3, 10, 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU mode is for machines without a GPU")
@on_ranks(1)
def test_it_is_attention_with_values_narrower_than_keys(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel()
    config = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=HEADS, kv_channels=8,
        attention_dropout=0.0, masked_softmax_fusion=False, apply_rope_fusion=False,
        transformer_impl="local",
    )  # fmt: skip
    scale = 0.7 / math.sqrt(K)
    core = LatentDotProductAttention(
        config, 1, AttnMaskType.causal, "self", k_channels=K, v_channels=V, softmax_scale=scale
    ).eval()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    # As the layer hands them over: pieces of wider tensors.
    query = torch.randn(S, B, HEADS, K, requires_grad=True)
    wide = torch.randn(S, B, HEADS, K + V, requires_grad=True)
    key, value = wide.split([K, V], dim=-1)
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)
    grad = torch.randn(S, B, HEADS * V)

    out = core(query, key, value, mask[None, None])
    grads = torch.autograd.grad(out, (query, wide), grad)

    heads_first = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    reference = torch.nn.functional.scaled_dot_product_attention(
        *heads_first, attn_mask=~mask, scale=scale
    )
    reference = reference.permute(2, 0, 1, 3).reshape(S, B, HEADS * V)
    torch.testing.assert_close(out, reference)
    expected = torch.autograd.grad(reference, (query, wide), grad)
    for got, want in zip(grads, expected, strict=True):
        assert want.abs().max() > 0.1
        torch.testing.assert_close(got, want)
