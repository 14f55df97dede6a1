"""Megatron's latent attention (MLA) under context parallelism by a2a: outputs, input gradients and
every weight gradient against the same module on the whole sequence. Transformer Engine's core
attention is a stand-in (te_attention.py).
"""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.attention import latent
from megatron_fluid.patches.attention.core import exchanges_of
from tests.support import self_attention_world
from tests.support.launch import on_ranks
from tests.support.self_attention_world import check_shares, patched_core, start, step

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

HIDDEN, HEADS = 32, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One module; its heads have 12 columns for queries and keys, ``values`` for values."""

    te: bool = False
    values: int = 8
    rope: str = "rope"
    q_rank: int | None = 16
    norms: bool = True
    causal: bool = True
    dtype: torch.dtype = torch.float32
    settings: tuple[tuple[str, Any], ...] = ()


MODULES = ["core_attn", "mla_up_proj"]
RECOMPUTED = ("recompute_granularity", "selective"), ("recompute_modules", MODULES)
CASES = [
    Case(), Case(te=True), Case(rope="yarn", q_rank=None, norms=False),
    Case(te=True, rope="yarn", values=12), Case(te=True, values=6, norms=False, causal=False),
    Case(values=16, settings=(("softmax_type", "learnable"),)),
    Case(te=True, settings=(("window_size", (3, 0)),)), Case(settings=RECOMPUTED),
    Case(te=True, dtype=torch.bfloat16, rope="yarn"),
]  # fmt: skip


def _build(case: Case, ranks: int, groups: Any = None, backend: str = "auto") -> Any:
    settings: dict[str, Any] = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
        "q_lora_rank": case.q_rank, "kv_lora_rank": 12, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
        "v_head_dim": case.values, "rope_type": case.rope, "rotary_scaling_factor": 4.0,
        "mscale": 0.8, "mscale_all_dim": 0.9, "original_max_position_embeddings": 16,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "context_parallel_size": ranks,
        "cp_comm_type": "a2a", "add_bias_linear": False, "qk_layernorm": case.norms,
        "params_dtype": case.dtype, "bf16": case.dtype == torch.bfloat16,
        "gradient_accumulation_fusion": False, "normalization": "RMSNorm",
        "persist_layer_norm": False, "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "transformer_impl": "local",
    }  # fmt: skip
    config = MLATransformerConfig(**settings | dict(case.settings))
    spec = get_gpt_layer_local_spec(
        qk_layernorm=case.norms, multi_latent_attention=True, normalization="RMSNorm"
    )
    submodules = spec.submodules.self_attention.submodules
    if case.te:
        submodules = dataclasses.replace(submodules, core_attention=patched_core())
    set_config(FluidConfig(cp_backend=backend))
    mask = AttnMaskType.causal if case.causal else AttnMaskType.no_mask
    attention = MLASelfAttention(
        config, submodules, 1, attn_mask_type=mask, cp_comm_type="a2a", pg_collection=groups
    )
    set_config(None)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + around)
    return attention.to(case.dtype)


@pytest.mark.parametrize(("ranks", "backend"), [(2, "collective"), (4, "rounds")])
@on_ranks()
def test_it_is_that_of_the_whole_sequence(rank: int, ranks: int, backend: str) -> None:
    """Of projections up that are overlapped ("rounds"), or around the exchange of heads."""
    alone, length = start(ranks), 6 * ranks
    everything, rows = torch.arange(length), SequenceLayout(length, ranks, "zigzag").positions(rank)
    for case in CASES:
        whole = _build(dataclasses.replace(case, dtype=torch.float32), 1, alone)
        whole.to(case.dtype).float()  # its weights are rounded, not its arithmetic
        plain = self_attention_world.Case(bias=False, dtype=case.dtype)
        reference = step(whole, plain, everything, None, length, torch.float32)
        ours = _build(case, ranks, backend=backend)
        exchanges = exchanges_of(ours.core_attention)
        assert exchanges is not None
        assert (exchanges.heads.head_dim, exchanges.heads.value_dim) == (12, case.values)
        found = step(ours, plain, rows, None, length)
        assert len(found) == 2 + len(list(ours.parameters()))
        overlapped = backend == "rounds" and not dict(case.settings).get("recompute_modules")
        path = latent.DECISIONS.get(ours).path
        assert (path is not None) == overlapped, case
        check_shares(found, reference, rows, case.dtype, case)
    count = {(feature, on): n for feature, on, _, n in startup.features()}
    gathered = len(CASES) - 1 if backend == "rounds" else 0
    # The core attention that Megatron builds first and drops is not told of.
    assert count.get(("context-parallel attention", True), 0) == len(CASES) - gathered
    assert count.get(("overlapped latent attention", True), 0) == gathered
