"""Megatron's SelfAttention with its projections beside the exchanges: against the same module with
projections around exchanged core attention, and against Megatron's own on the whole sequence.
Transformer Engine's classes are stand-ins (te_attention.py); the real ones:
tests/gpu/test_attention_kinds.py.
"""

import dataclasses
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.patches.attention import self_attention
from tests.support.launch import on_ranks, run_ranks
from tests.support.self_attention_world import (
    Case,
    angles_of,
    build,
    check_shares,
    count_calls,
    error_of,
    fuse,
    start,
    step,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")


def _compare(rank: int, ranks: int, cases: list[Case]) -> None:
    alone, length = start(ranks), 6 * ranks
    everything, rows = torch.arange(length), SequenceLayout(length, ranks, "zigzag").positions(rank)
    for case in cases:
        exact = dataclasses.replace(case, fused=False, deferred=False, recompute=False)
        whole = build(dataclasses.replace(exact, dtype=torch.float32), 1, "auto", alone)
        whole.to(case.dtype).float()  # its weights are rounded, not its arithmetic
        angles = angles_of(case, length)
        reference = step(whole, exact, everything, angles, length, torch.float32)
        today = build(exact, ranks, "collective")
        assert self_attention.overlapped(today) is None
        before = step(today, exact, rows, angles, length)
        ours = build(case, ranks, "rounds")
        fired = fuse(ours) if case.fused else []
        assert self_attention.overlapped(ours) == "rounds"
        calls = count_calls()
        found = step(ours, case, rows, angles, length)
        get_backward_scheduler().disable()
        forwards = case.microbatches * (2 if case.recompute else 1)
        assert calls() == forwards, f"{case}: {calls()} overlapped calls of {forwards}"
        assert len(found) >= 2 + len(list(ours.parameters())) - len(case.frozen)
        if case.fused:
            assert len(fired) == 2 * case.microbatches, "hooks fire once a weight and backward"
            assert all(
                linear.weight.grad_added_to_main_grad
                for linear in (ours.linear_qkv, ours.linear_proj)
            ), case
        before_errors = check_shares(before, reference, rows, case.dtype, case)
        errors = check_shares(found, reference, rows, case.dtype, case)
        # In 16 bits both are off by roundings of their own, and ours must not be further off.
        for name, error in errors.items():
            assert error < 1.5 * before_errors[name] + 5e-3, f"{case} {name}"


def _both(**fields: Any) -> list[Case]:
    """In Megatron's local spec and in Transformer Engine's."""
    return [Case(te=te, **fields) for te in (False, True)]


BF16, WINDOW = torch.bfloat16, ("window_size", (3, 0))
LAYER_NORM, GATE = ("normalization", "LayerNorm"), ("attention_output_gate", True)
OFFSET = ("softmax_type", "learnable")
CORE_RECOMPUTE = ("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"])
YARN = (("yarn_rotary_scaling_factor", 8.0), ("yarn_mscale", 1.0), ("yarn_mscale_all_dim", None))
CASES = [
    *_both(groups=1, norms=True), *_both(groups=2), *_both(groups=8, norms=True),
    *_both(rotated=0, causal=False, bias=False), Case(rotated=4, norms=True),
    Case(rotated=8, interleaved=True, groups=4), Case(te=True, rotated=4, interleaved=True),
    Case(te=True, fused=True, microbatches=3),
    Case(fused=True, microbatches=2, deferred=True, groups=1),
    Case(deferred=True, microbatches=2, norms=True),
    Case(recompute=True, microbatches=2, norms=True), Case(te=True, recompute=True, norms=True),
    Case(te=True, frozen=("linear_qkv.weight", "linear_proj.bias")),
    Case(frozen=("linear_proj.weight", "linear_qkv.bias"), norms=True),
    Case(te=True, settings=(("apply_rope_fusion", False), ("no_rope_freq", [1, 0]))),
    *_both(dtype=BF16, norms=True, groups=1), *_both(dtype=BF16, norms=True, groups=4),
    Case(te=True, dtype=BF16, fused=True, microbatches=2),
    *(Case(te=True, dtype=dtype, settings=(LAYER_NORM,)) for dtype in (torch.float32, BF16)),
]  # fmt: skip
# What models have besides plain softmax attention: gpt-oss (offset, window, YaRN), Qwen3-Next
# (gate, partial rotation), Llama 4 (L2 norm), GPT with LayerNorms.
KINDS = [
    *_both(settings=(OFFSET,)), *_both(settings=(OFFSET, WINDOW), groups=8),
    *_both(settings=(("softmax_type", "off-by-one"),), groups=1),
    *_both(settings=(WINDOW,), norms=True),
    Case(settings=(OFFSET, *YARN), recompute=True, microbatches=2),
    Case(te=True, settings=YARN, norms=True), *_both(settings=(GATE,), norms=True, rotated=4),
    Case(settings=(GATE,), groups=1, bias=False, recompute=True),
    Case(te=True, settings=(GATE,), groups=8, fused=True, microbatches=2),
    Case(settings=(GATE,), deferred=True, microbatches=2),
    Case(te=True, settings=(GATE,), dtype=BF16),
    *_both(settings=(LAYER_NORM,), norms=True, groups=4),
    Case(te=True, settings=(LAYER_NORM, OFFSET), norms=True, dtype=BF16),
    Case(settings=(LAYER_NORM,), norms=True, groups=8, microbatches=2),
    *_both(settings=(("qk_l2_norm", True),)), *_both(settings=CORE_RECOMPUTE, norms=True),
    Case(settings=(*CORE_RECOMPUTE, OFFSET, LAYER_NORM), norms=True),
    Case(bias=False, settings=(("add_qkv_bias", True),)),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "cases"), [(4, CASES), (2, KINDS)], ids=["basic", "kinds"])
def test_outputs_and_every_gradient_are_those_of_todays_path_and_of_the_whole_sequence(
    ranks: int, cases: list[Case]
) -> None:
    run_ranks(_compare, ranks, cases)


@on_ranks(2)
def test_dropout_draws_what_it_draws_around_the_exchanged_core_attention(
    rank: int, ranks: int
) -> None:
    """Outputs and gradients under attention dropout are those of projections around the exchanged
    core attention, to the last random number; another seed gives others."""
    start(ranks)
    length = 6 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    dropout = ("attention_dropout", 0.4)
    cases = [
        *_both(settings=(dropout,), groups=2), *_both(settings=(dropout,), groups=8),
        Case(settings=(dropout, WINDOW)), Case(settings=(dropout,), recompute=True),
        *_both(settings=(dropout, *CORE_RECOMPUTE)),
    ]  # fmt: skip
    for case in cases:
        plain = dataclasses.replace(case, settings=case.settings[:1], recompute=False)
        if WINDOW in case.settings:
            plain = case
        results = []
        for which, backend, seed in (
            (plain, "collective", 7),
            (case, "rounds", 7),
            (case, "rounds", 8),
        ):
            attention = build(which, ranks, backend)
            model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
            results.append(step(attention, which, rows, angles_of(which, length), length))
        before, ours, others = results
        for name, expected in before.items():
            assert error_of(ours[name], expected, case.dtype) < 2e-6, f"{case} {name}"
        assert error_of(others["y 0"], before["y 0"], case.dtype) > 1e-3, case


@on_ranks(2)
def test_a_changed_p_of_dropout_takes_effect_in_the_next_forward_and_its_backward(
    rank: int, ranks: int
) -> None:
    start(ranks)
    length = 6 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    for settings in ((), (WINDOW,), (OFFSET,), CORE_RECOMPUTE):
        for earlier, p in ((0.0, 0.4), (0.4, 0.0)):
            results = []
            for backend, built in (("collective", p), ("collective", earlier), ("rounds", earlier)):
                case = Case(bias=False, settings=(("attention_dropout", built), *settings))
                attention, angles = build(case, ranks, backend), angles_of(case, length)
                if p:  # else it is changed before the first forward
                    step(attention, case, rows, angles, length)
                for module in attention.modules():
                    if isinstance(module, torch.nn.Dropout):
                        module.p = p
                attention.zero_grad()
                model_parallel_cuda_manual_seed(7, force_reset_rng=True)
                results.append(step(attention, case, rows, angles, length))
            for found in results[1:]:
                for name, expected in results[0].items():
                    assert error_of(found[name], expected, case.dtype) < 2e-6, (case, p, name)
