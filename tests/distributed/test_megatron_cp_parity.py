"""Megatron under context parallelism by a2a, alone and with the other parallelisms: it trains as on
one rank."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.launch import run_ranks
from tests.support.megatron_world import SEQUENCES, STEPS, Case, run_cases

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its worlds are gloo's")

NORMS = (("qk_layernorm", True),)
WHOLE_ROWS = (("sequence_parallel", False),)
KINDS = (
    ("attention_output_gate", True),
    ("softmax_type", "learnable"),
    ("window_size", (5, 0)),
    ("add_qkv_bias", True),
    ("num_moe_experts", None),
    ("moe_ffn_hidden_size", None),
)
LATENT = (
    ("multi_latent_attention", True),
    *(("q_lora_rank", 16), ("kv_lora_rank", 12), ("qk_head_dim", 8), ("v_head_dim", 8)),
    *(("qk_pos_emb_head_dim", 4), ("qk_layernorm", True), ("num_query_groups", 4)),
)
CORE_RECOMPUTE = (("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
RECOMPUTE = (
    ("recompute_granularity", "full"),
    ("recompute_method", "uniform"),
    ("recompute_num_layers", 1),
)
REFERENCES = [
    Case("one rank"),
    Case("one rank, q/k norm", model=NORMS),
    Case("one rank, kinds", model=KINDS),
    Case("one rank, latent", model=LATENT),
]
# 4 heads and 2 key/value heads: on 4 ranks two share each key/value head.
SPLITS = {
    2: [
        Case("CP2, q/k norm, core recompute", cp=2, model=NORMS, how=CORE_RECOMPUTE),
        Case("CP2, q/k norm, full recompute", cp=2, model=NORMS, how=RECOMPUTE),
        Case(
            "CP2, overlapped reduction and gather",
            cp=2,
            distributed=("distributed_optimizer", "overlap"),
        ),
        Case("CP2, latent", cp=2, model=LATENT, distributed=("distributed_optimizer",)),
        Case("CP2, latent, main_grad", cp=2, model=LATENT, distributed=("overlap",), fused=True),
        Case("CP2, gradients added to main_grad", cp=2, distributed=("overlap",), fused=True),
    ],
    4: [
        Case("CP4 EP4", cp=4, ep=4),
        Case("CP4, q/k norm", cp=4, model=NORMS),
        Case("CP2 TP2 EP2", cp=2, tp=2, ep=2),
        Case(
            "CP2 TP2, the same without sequence parallelism",
            cp=2,
            tp=2,
            model=KINDS,
            how=WHOLE_ROWS,
        ),
        Case("CP2 TP2, gate, offset, window", cp=2, tp=2, model=KINDS),
        Case("CP2 PP2 EP2", cp=2, pp=2, ep=2, distributed=("distributed_optimizer",)),
        Case("CP2 EP4, overlapped MoE", cp=2, ep=4, backend="rounds"),
    ],
}
LAYERS = 2


def _overlapped_calls(case: Case, world: int) -> int:
    """How often a rank's self-attentions run beside their projections; 0 where they keep
    Megatron's."""
    microbatches = SEQUENCES // (world // (case.tp * case.pp * case.cp))
    return STEPS * microbatches * LAYERS // case.pp * (2 if case.how == RECOMPUTE else 1)


@pytest.mark.slow
def test_losses_and_gradient_norms_are_those_of_one_rank(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = str(tmp_path_factory.mktemp("initial"))
    [alone] = run_ranks(run_cases, 1, REFERENCES, folder, timeout_s=200)
    by_model = {case.model: alone[case.name] for case in REFERENCES}
    for world, cases in SPLITS.items():
        for runs in run_ranks(run_cases, world, cases, folder, timeout_s=200):
            for case in cases:
                run, reference = runs[case.name], by_model[case.model]
                calls = _overlapped_calls(case, world)
                assert run.attention == ["rounds"] * (LAYERS // case.pp), case.name
                assert run.attention_calls == calls, case.name
                assert run.gradient_norms == pytest.approx(reference.gradient_norms, rel=2e-5), (
                    case.name
                )
                if not math.isnan(run.losses[0]):
                    assert run.losses == pytest.approx(reference.losses, rel=2e-5), case.name
                    assert run.losses[-1] < run.losses[0], (
                        "nothing was learnt, so a lost gradient could hide"
                    )
