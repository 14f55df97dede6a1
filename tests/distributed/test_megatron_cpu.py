"""CPU mode: however Megatron splits a model over gloo ranks, it trains as on one. It is undone."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from tests.support.before_patches import patched_and_reverted
from tests.support.launch import run_ranks
from tests.support.megatron_world import SEQUENCES, STEPS, Case, Run, run_cases

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a GPU"
)

SHARED = (("moe_shared_expert_intermediate_size", 24),)
FOUR_LAYERS = (("num_layers", 4),)
BF16 = (("bf16", True),)
SELECTIVE = ("recompute_granularity", "selective")
MOE_RECOMPUTE = SELECTIVE, ("recompute_modules", ["core_attn", "moe"])
CORE_RECOMPUTE = SELECTIVE, ("recompute_modules", ["core_attn"])
BESIDE = (("moe_shared_expert_overlap", True),)
NORMS = (("qk_layernorm", True),)
WHOLE_ROWS = (("sequence_parallel", False),)
KINDS = (
    ("attention_output_gate", True), ("softmax_type", "learnable"), ("window_size", (5, 0)),
    ("add_qkv_bias", True), ("num_moe_experts", None), ("moe_ffn_hidden_size", None),
)  # fmt: skip
LATENT = (
    ("multi_latent_attention", True),
    *(("q_lora_rank", 16), ("kv_lora_rank", 12), ("qk_head_dim", 8), ("v_head_dim", 8)),
    *(("qk_pos_emb_head_dim", 4), ("qk_layernorm", True), ("num_query_groups", 4)),
)
FULL_RECOMPUTE = (
    ("recompute_granularity", "full"),
    ("recompute_method", "uniform"),
    ("recompute_num_layers", 1),
)
SHARDED, OVERLAP = ("distributed_optimizer",), ("overlap",)

# The same mathematics on one rank; every case below is held against the one with its model
# settings.
MODELS = (), SHARED, BF16, FOUR_LAYERS, NORMS, KINDS, LATENT
REFERENCES = [Case(f"one rank, {dict(model)}", model=model) for model in MODELS]
TWO_RANKS = [
    Case("EP2", ep=2), Case("EP2, overlapped MoE", ep=2, backend="rounds"),
    Case("EP2, recompute", ep=2, how=MOE_RECOMPUTE),
    Case("EP2, distributed optimizer, overlap", ep=2, distributed=SHARDED + OVERLAP),
    Case("EP2, overlapped gradient reduction", ep=2, distributed=OVERLAP),
    Case("DP2", distributed=()), Case("TP2 with sequence parallelism", tp=2), Case("PP2", pp=2),
    Case("EP2, overlapped shared experts", ep=2, model=SHARED, how=BESIDE),
    Case("TP2, shared experts", tp=2, model=SHARED), Case("EP2, bf16", ep=2, model=BF16),
    Case("CP2, q/k norm, core recompute", cp=2, model=NORMS, how=CORE_RECOMPUTE),
    Case("CP2, q/k norm, full recompute", cp=2, model=NORMS, how=FULL_RECOMPUTE),
    Case("CP2, overlapped reduction and gather", cp=2, distributed=SHARDED + OVERLAP),
    Case("CP2, latent, main_grad", cp=2, model=LATENT, distributed=OVERLAP, fused=True),
    Case("CP2, gradients added to main_grad", cp=2, distributed=OVERLAP, fused=True),
]  # fmt: skip
# 4 heads and 2 key/value heads: on 4 ranks two share each key/value head.
FOUR_RANKS = [
    Case("TP2 CP2 EP4", tp=2, cp=2, ep=4),
    Case("PP2 EP2, distributed optimizer", pp=2, ep=2, distributed=SHARDED),
    Case(
        "PP2 VPP2 EP2, overlapped MoE",
        pp=2,
        vpp=2,
        ep=2,
        model=FOUR_LAYERS,
        distributed=SHARDED + OVERLAP,
        backend="rounds",
    ),
    Case("CP4, q/k norm", cp=4, model=NORMS),
    Case("CP2 TP2, no sequence parallelism", cp=2, tp=2, model=KINDS, how=WHOLE_ROWS),
    Case("CP2 TP2, gate, offset, window", cp=2, tp=2, model=KINDS),
    Case("CP2 PP2 EP2", cp=2, pp=2, ep=2, distributed=SHARDED),
    Case("CP2 EP4, overlapped MoE", cp=2, ep=4, backend="rounds"),
]
LAYERS = 2


def _overlapped_calls(case: Case, world: int) -> int:
    """How often self-attentions run beside their projections under context parallelism."""
    microbatches = SEQUENCES // (world // (case.tp * case.pp * case.cp))
    return STEPS * microbatches * LAYERS // case.pp * (2 if case.how == FULL_RECOMPUTE else 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Run]]:
    """Every case, on all its ranks; a world for every four cases. (Megatron's objects hold the
    process groups of earlier cases, whose threads wake again and again.)"""
    folder = str(tmp_path_factory.mktemp("initial"))
    found: dict[str, list[Run]] = {}
    for world_size, cases in ((1, REFERENCES), (2, TWO_RANKS), (4, FOUR_RANKS)):
        for some in itertools.batched(cases, 4):
            ranks = run_ranks(run_cases, world_size, some, folder)
            found.update({case.name: [runs[case.name] for runs in ranks] for case in some})
    return found


@pytest.mark.parametrize("case", TWO_RANKS + FOUR_RANKS, ids=lambda case: case.name)
def test_a_split_model_trains_as_on_one_rank(case: Case, runs: dict[str, list[Run]]) -> None:
    reference = runs[next(r.name for r in REFERENCES if r.model == case.model)][0]
    tolerance = 2e-2 if case.model == BF16 else 2e-5
    for run in runs[case.name]:
        # The norm is over all parameters: a gradient that is lost, doubled or wrong anywhere moves
        # it.
        assert run.gradient_norms == pytest.approx(reference.gradient_norms, rel=tolerance)
        if not math.isnan(run.losses[0]):
            assert run.losses == pytest.approx(reference.losses, rel=tolerance)
        if case.cp > 1:
            assert run.attention == ["rounds"] * (LAYERS // case.pp)
            assert run.attention_calls == _overlapped_calls(case, len(runs[case.name]))
    assert any(not math.isnan(run.losses[0]) for run in runs[case.name])


def test_the_tolerances_see_the_training(runs: dict[str, list[Run]]) -> None:
    for reference in REFERENCES:
        losses = runs[reference.name][0].losses
        assert losses[0] == pytest.approx(math.log(64), rel=0.05)
        assert losses[-1] < losses[0] * (1 - 2 * (2e-2 if reference.model == BF16 else 2e-5))


def test_revert_gives_torch_and_megatron_back(tmp_path: Path) -> None:
    (found,) = run_ranks(patched_and_reverted, 1, str(tmp_path))
    assert set(found["during"]) >= {
        *("torch.cuda.Stream", "torch.Tensor.record_stream", "modes", "stance"),
        *("torch.distributed.barrier", "random._set_cuda_rng_state", "attention.__init__"),
    }
    assert found["after"] == []
    assert found["cuda is refused again"]
