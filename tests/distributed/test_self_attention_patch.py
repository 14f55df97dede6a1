"""Megatron's SelfAttention with its projections beside the exchanges: against the same module with
projections around exchanged core attention, and against Megatron's own on the whole sequence.
Transformer Engine's classes are stand-ins (self_attention_world.py); the real ones:
tests/gpu/test_attention.py.
"""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from tests.support.launch import run_ranks
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.self_attention_world import (
    BATCH,
    HEADS,
    HIDDEN,
    STRADDLING,
    WIDTH,
    Case,
    angles_of,
    build,
    count_calls,
    error_of,
    fuse,
    start,
    step,
)

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")


def _compare(rank: int, ranks: int, cases: list[Case]) -> None:
    from megatron_fluid.backward.weight_grads import get_backward_scheduler
    from megatron_fluid.patches.attention import self_attention

    alone = start(ranks)
    length = 6 * ranks
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
        assert found.keys() == before.keys() == reference.keys(), case
        assert len(found) >= 2 + len(list(ours.parameters())) - len(case.frozen)
        if case.fused:
            assert len(fired) == 2 * case.microbatches, "hooks fire once a weight and backward"
            assert all(
                linear.weight.grad_added_to_main_grad
                for linear in (ours.linear_qkv, ours.linear_proj)
            ), case
        for name, expected in reference.items():
            mine, theirs = found[name], before[name]
            if name[:2] in ("y ", "dx"):
                expected = expected[rows]
            else:
                mine, theirs = mine.float().clone(), theirs.float().clone()
                dist.all_reduce(mine)
                dist.all_reduce(theirs)
            assert expected.abs().max() > 1e-3, f"{case} {name}: nothing to be seen"
            error, before_error = (error_of(t, expected, case.dtype) for t in (mine, theirs))
            # In 16 bits both are off by roundings of their own, and ours must not be further off.
            limit = 2e-6 if case.dtype == torch.float32 else 1.5 * before_error + 5e-3
            assert error < limit, (
                f"{case} {name}: off by {error:.2e}, today's path by {before_error:.2e}"
            )
            assert before_error < 3e-2, f"{case} {name}: today's path is off by {before_error:.2e}"


BF16 = torch.bfloat16
CASES = [
    *(
        Case(te=te, groups=groups, norms=norms)
        for te in (False, True)
        for groups, norms in ((1, True), (2, False), (8, True))
    ),
    *(Case(te=te, rotated=0, causal=False, bias=False) for te in (False, True)),
    Case(rotated=4, norms=True),
    Case(rotated=8, interleaved=True, groups=4),
    Case(te=True, rotated=4, interleaved=True),
    Case(te=True, fused=True, microbatches=3),
    Case(fused=True, microbatches=2, deferred=True, groups=1),
    Case(deferred=True, microbatches=2, norms=True),
    Case(recompute=True, microbatches=2, norms=True),
    Case(te=True, recompute=True, norms=True),
    Case(te=True, frozen=("linear_qkv.weight", "linear_proj.bias")),
    Case(frozen=("linear_proj.weight", "linear_qkv.bias"), norms=True),
    Case(te=True, settings=(("apply_rope_fusion", False), ("no_rope_freq", [1, 0]))),
    *(
        Case(te=te, dtype=BF16, norms=True, groups=groups)
        for te in (False, True)
        for groups in (1, 4)
    ),
    Case(te=True, dtype=BF16, fused=True, microbatches=2),
    *(Case(te=te, heads=STRADDLING, groups=6, norms=True) for te in (False, True)),
    *(
        Case(te=True, dtype=dtype, settings=(("normalization", "LayerNorm"),))
        for dtype in (torch.float32, BF16)
    ),
]

WINDOW = ("window_size", (3, 0))
LAYER_NORM, GATE = ("normalization", "LayerNorm"), ("attention_output_gate", True)
CORE_RECOMPUTE = ("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"])
YARN = (("yarn_rotary_scaling_factor", 8.0), ("yarn_mscale", 1.0), ("yarn_mscale_all_dim", None))
# What models have besides plain softmax attention: gpt-oss (offset, window, YaRN), Qwen3-Next
# (gate, partial rotation), Llama 4 (L2 norm), GPT with LayerNorms.
KINDS = [
    *(
        Case(te=te, settings=(("softmax_type", kind), *more), groups=groups)
        for te in (False, True)
        for kind, more, groups in (
            ("learnable", (), 2),
            ("learnable", (WINDOW,), 8),
            ("off-by-one", (), 1),
        )
    ),
    *(Case(te=te, settings=(WINDOW,), norms=True) for te in (False, True)),
    Case(settings=(("softmax_type", "learnable"), *YARN), recompute=True, microbatches=2),
    Case(te=True, settings=YARN, heads=STRADDLING, groups=6, norms=True),
    Case(te=True, settings=(("softmax_type", "learnable"),), heads=STRADDLING, groups=6),
    *(Case(te=te, settings=(GATE,), norms=True, rotated=4) for te in (False, True)),
    Case(settings=(GATE,), groups=1, bias=False, recompute=True),
    Case(te=True, settings=(GATE,), groups=8, fused=True, microbatches=2),
    Case(settings=(GATE,), deferred=True, microbatches=2, heads=STRADDLING, groups=6),
    Case(te=True, settings=(GATE,), dtype=BF16),
    *(Case(te=te, settings=(LAYER_NORM,), norms=True, groups=4) for te in (False, True)),
    Case(te=True, settings=(LAYER_NORM, ("softmax_type", "learnable")), norms=True, dtype=BF16),
    Case(settings=(LAYER_NORM,), norms=True, heads=STRADDLING, groups=6, microbatches=2),
    *(Case(te=te, settings=(("qk_l2_norm", True),)) for te in (False, True)),
    *(Case(te=te, settings=CORE_RECOMPUTE, norms=True) for te in (False, True)),
    Case(settings=(*CORE_RECOMPUTE, ("softmax_type", "learnable"), LAYER_NORM), norms=True),
    Case(bias=False, settings=(("add_qkv_bias", True),)),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_softmaxes_gates_windows_and_norms_are_those_of_the_whole_sequence(ranks: int) -> None:
    run_ranks(_compare, ranks, KINDS, timeout_s=200)


def _dropout(rank: int, ranks: int) -> None:
    """Outputs and gradients under attention dropout are those of projections around the exchanged
    core attention, to the last random number; another seed gives others."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    start(ranks)
    length = 6 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    dropout = ("attention_dropout", 0.4)
    cases = (
        *(
            Case(te=te, settings=(dropout,), groups=groups)
            for te in (False, True)
            for groups in (2, 8)
        ),
        Case(settings=(dropout, WINDOW)),
        Case(settings=(dropout,), recompute=True),
        *(Case(te=te, settings=(dropout, *CORE_RECOMPUTE)) for te in (False, True)),
    )
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_dropout_draws_what_it_draws_around_the_exchanged_core_attention(ranks: int) -> None:
    run_ranks(_dropout, ranks, timeout_s=120)


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_every_gradient_are_those_of_todays_path_and_of_the_whole_sequence(
    ranks: int,
) -> None:
    run_ranks(_compare, ranks, CASES, timeout_s=120)


# What is said of modules whose projections stay Megatron's, and how those are built.
LEFT: dict[str, Case] = {
    "test_mode=True: ": Case(settings=(("test_mode", True),)),
    "mrope_section=[2, 1, 1]: ": Case(settings=(("mrope_section", [2, 1, 1]),)),
    "cp_backend=collective was asked for": Case(),
    "cp_backend=megatron was asked for": Case(te=True),
    "its Patched keeps its own exchange": Case(te=True),
}


def _left(rank: int, ranks: int) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches import overlap_decision
    from megatron_fluid.patches import startup_report as startup
    from megatron_fluid.patches.attention import self_attention

    alone = start(ranks)

    def said() -> tuple[bool, str]:
        [(on, reason)] = [
            (on, why)
            for feature, on, why, _ in startup.features()
            if feature == self_attention.DECISIONS.feature
        ]
        return on, reason

    for wanted, case in LEFT.items():
        overlap_decision._features.clear()
        asked = next(
            (backend for backend in ("collective", "megatron") if backend in wanted), "auto"
        )
        attention = build(case, ranks, asked)
        on, reason = said()
        assert (
            not on and reason.startswith(wanted) and self_attention.overlapped(attention) is None
        ), (wanted, reason)
        if asked == "auto" and not case.te:
            with pytest.raises(
                ConfigError, match="cp_backend: found 'rounds', allowed: auto, collective: "
            ):
                build(case, ranks, "rounds")

    def again(attention: Any) -> str:
        overlap_decision._features.clear()
        assert self_attention.DECISIONS.announce(attention).backend is None
        return said()[1]

    overlap_decision._features.clear()
    attention = build(Case(), ranks, "auto")
    assert self_attention.overlapped(attention) == "rounds", "on a CPU"
    assert startup.features() == [
        (
            self_attention.DECISIONS.feature,
            True,
            "heads move in peer rounds, beside the projections",
            1,
        )
    ]
    attention.linear_proj.forward = attention.linear_proj.forward
    assert again(attention) == "linear_proj.forward was replaced on the instance"
    attention = build(Case(), ranks, "auto")
    attention.linear_qkv.__class__ = type("Adapter", (ColumnParallelLinear,), {})
    assert again(attention) == "linear_qkv is a Adapter, which may compute more than a linear"
    attention = build(Case(norms=True), ranks, "auto")
    attention.k_layernorm.__class__ = type("Odd", (torch.nn.RMSNorm,), {})
    assert again(attention).startswith("k_layernorm is a Odd; ")

    overlap_decision._features.clear()
    assert self_attention.overlapped(build(Case(), 1, "auto", alone)) is None
    assert not startup.features(), "there is nothing to exchange on one rank"
    set_config(FluidConfig())


def test_what_is_not_overlapped_is_told_with_the_reason_or_refused_where_it_was_asked_for() -> None:
    run_ranks(_left, 2)


def _calls(rank: int, ranks: int) -> list[str]:
    """What is said of single calls; their results are compared with those of a module that is never
    overlapped."""
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches.attention import self_attention

    start(ranks)
    case = Case(bias=False)
    ours, today = build(case, ranks, "rounds"), build(case, ranks, "collective")
    length = 6 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    x = torch.randn(length, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))[rows]
    angles = angles_of(case, length)
    assert angles is not None
    part, other = angles[rows], (angles * 2)[rows]
    crooked = part.clone()
    crooked[..., 0] += 1
    mask = torch.ones(length, length).triu(1).bool()[rows][None, None]

    def compare(overlapped: bool, mask: Tensor | None = None, rotations: Any = part) -> None:
        count = count_calls()
        with torch.no_grad():
            y = ours(x, mask, rotary_pos_emb=rotations)[0]
        assert count() == overlapped
        with torch.no_grad():
            expected = today(x, mask, rotary_pos_emb=rotations)[0]
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)

    compare(True)
    compare(True, rotations=(part, part))
    compare(False, mask=mask)
    compare(False, rotations=(part, other))
    compare(False, rotations=crooked)
    compare(True, rotations=other)
    compare(True, rotations=None)
    # as for a module that was built before the patches were applied
    self_attention.DECISIONS.forget()
    self_attention.leave(today)
    compare(True)
    count = count_calls()
    packed, cross = (
        SimpleNamespace(qkv_format="sbhd"),
        SimpleNamespace(is_dynamic_batching=lambda: False),
    )
    with pytest.raises(
        ConfigError, match="packed_seq_params"
    ):  # as the core attention of the local spec says
        ours(x, None, rotary_pos_emb=part, packed_seq_params=packed)
    with pytest.raises(AttributeError, match="is_decode_only"):  # in Megatron's own forward
        ours(x, None, inference_context=cross)
    assert count() == 0
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        count = count_calls()
        ours(x, None, rotary_pos_emb=part)
        assert count() == 0
    return sorted(self_attention.DECISIONS.report.said)


def _tables(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state

    from megatron_fluid.patches.attention.rotary_tables import rotary_table

    start(ranks)
    length = 4 * ranks
    for interleaved in (False, True):
        angles = angles_of(Case(interleaved=interleaved), length)
        assert angles is not None
        part = angles[SequenceLayout(length, ranks, "zigzag").positions(rank)]
        half = angles[:, 0, 0, ::2] if interleaved else angles[:, 0, 0, : WIDTH // 2]
        group = parallel_state.get_context_parallel_group()
        for dtype, exact in ((torch.float32, False), (BF16, False), (BF16, True)):
            table = rotary_table(part, dtype, group, interleaved, exact)
            assert (
                table is not None
                and table.interleaved == interleaved
                and table.cos.dtype == torch.float32
            )
            seen = (
                torch.float32 if exact else dtype
            )  # Megatron's unfused rotation rounds them to the activations' type
            assert torch.equal(table.cos, half.cos().to(seen).float())
            assert torch.equal(table.sin, half.sin().to(seen).float())
            assert rotary_table(part.detach(), dtype, group, interleaved, exact) is table, (
                "as in a recomputation"
            )
        part.mul_(2)
        changed = rotary_table(part, BF16, group, interleaved, True)
        assert changed is not None and torch.equal(changed.cos, (2 * half).cos())


def test_rotations_of_the_whole_sequence_are_made_once_of_the_ranks_parts() -> None:
    run_ranks(_tables, 2)


def test_calls_that_are_not_overlapped_are_told_and_computed_as_before() -> None:
    for said in run_ranks(_calls, 2):
        assert [text.partition(":")[0] for text in said] == [
            "attention_mask is given",
            "autocast or inference is on",
            "inference_context is given",
            "packed_seq_params is given",
            "queries and keys have rotations of their own",
            "rotations are not by pairs",
        ]


def _of_spec(spec: Any, config: Any, _: Any, *args: Any, **rest: Any) -> Any:
    return spec.module(config, spec.submodules, *args, **rest)


def _by_spec(rank: int, ranks: int) -> None:
    from megatron.core.transformer.attention import SelfAttention

    from megatron_fluid import patches
    from megatron_fluid.patches.attention.self_attention import overlapped
    from megatron_fluid.patches.layer_specs import FluidSelfAttention, with_fluid_attention

    start(ranks)
    case = Case(norms=True)
    names = ("context-parallel-attention", "self-attention-init", "self-attention")
    length = 4 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    results = []
    for patched in (True, False):
        (patches.apply_all if patched else lambda: patches.revert(*names))()
        assert all(patches.is_applied(name) == patched for name in names)
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        outer = with_fluid_attention(spec).submodules.self_attention
        assert outer.module is FluidSelfAttention
        attention = build(case, ranks, "rounds", module=functools.partial(_of_spec, outer))
        assert isinstance(attention, SelfAttention) and overlapped(attention) == "rounds"
        count = count_calls()
        results.append(step(attention, case, rows, angles_of(case, length), length))
        assert count() == 1
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_the_layer_spec_gives_the_same_without_a_patch() -> None:
    run_ranks(_by_spec, 2)


class _Group:
    """A process group of a thread."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def _leaves_what_is_predicted_slower(module: Any, dtype: torch.dtype) -> None:
    """By figures of a machine a call is overlapped where that is predicted to be faster; without
    figures always."""
    from megatron_fluid.patches.attention import self_attention
    from megatron_fluid.plan.machine import reference_machine

    path = self_attention.DECISIONS.settle(module).path
    assert path is not None and path.machine is None
    batch = 3
    x = torch.zeros(4, batch, module.config.hidden_size, dtype=dtype)
    assert path.unsupported_reason(x, None) is None
    work = path.work(4, batch, dtype.itemsize)
    length = 4 * path.heads.world
    channels = path.heads.num_heads // path.heads.world * path.heads.head_dim
    seen = length / 2 if path.causal else length
    assert work.core_flops == 2 * 2 * batch * length * seen * channels
    assert work.qkv_columns == module.linear_qkv.weight.shape[0] - (
        work.output_columns if path.output_gate else 0
    )
    assert work.output_columns == module.linear_proj.weight.shape[1]
    machine = reference_machine("cuda", path.heads.world)
    assert machine.copies is not None
    # Where memory is slow the passes of the exchange alone are; where a peer costs the host much
    # the pieces are.
    slow_memory = dataclasses.replace(machine, bytes_per_s=1.0, operation_s=0.0)
    pieces = dataclasses.replace(machine, units=1, flops_per_s=1.0, operation_s=0.0)
    try:
        path.machine = slow_memory
        assert path.unsupported_reason(x, None) is None
        path.machine = pieces
        if work.by_copies:
            told = path.unsupported_reason(x, None)
            assert told is not None and "is predicted to take" in told and "nvlink" in told
    finally:
        path.machine = None


def _symmetric(_: int, __: int, ranks: int, cases: list[Case]) -> None:
    """Modules of `ranks` ranks, run by a thread each over simulated symmetric memory, against one
    on the whole sequence."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fluid.attention.exchange import symmetric
    from megatron_fluid.patches import overlap_decision
    from megatron_fluid.patches.attention import core as core_patch
    from megatron_fluid.patches.attention import overlapped, self_attention
    from megatron_fluid.patches.attention.rotary_tables import rotary_table
    from tests.unit.attention.test_symmetric_exchange import ThreadBuffers, run_threads

    alone = start(1)
    length = 6 * ranks
    everything, sequence = torch.arange(length), SequenceLayout(length, ranks, "zigzag")
    domains: dict[Any, ThreadBuffers] = {}
    core_patch.nvlink_reason = lambda *_: None
    overlapped.shared_head_buffers = domains.__getitem__
    overlap_decision.exchange = lambda mine, group, *_: [mine] * group.size()
    symmetric._COPY_ENGINE_BYTES = 256  # so that there are several head groups
    for case in cases:
        whole = build(case, 1, "auto", alone)
        angles = angles_of(case, length)
        reference = step(whole, case, everything, angles, length)
        if angles is not None:
            table = rotary_table(angles, case.dtype, alone.cp, case.interleaved, True)
            overlapped.rotary_table = lambda *_, table=table: table
        groups = [_Group(rank, ranks) for rank in range(ranks)]
        modules = [
            build(case, ranks, "nvlink", ProcessGroupCollection(tp=alone.tp, cp=group))
            for group in groups
        ]
        assert [self_attention.overlapped(module) for module in modules] == ["nvlink"] * ranks
        _leaves_what_is_predicted_slower(modules[0], case.dtype)
        for transport in ("sm_push", "copy_engine"):

            def body(
                domain: ThreadBuffers,
                case: Case = case,
                modules: list[Any] = modules,
                groups: list[_Group] = groups,
                angles: Tensor | None = angles,
            ) -> tuple[dict[str, Tensor], int]:
                domains[groups[domain.rank]] = domain
                module = modules[domain.rank]
                module.zero_grad(set_to_none=True)
                self_attention.DECISIONS.settle(
                    module
                ).path._call.cache_clear()  # which hold the domain of the mover before
                found = step(module, case, sequence.positions(domain.rank), angles, length)
                return found, module.core_attention.alone.cache_info().currsize if case.te else 0

            count = count_calls()
            results = run_threads(ranks, transport, body)
            assert count() == ranks * case.microbatches
            for name, expected in reference.items():
                for rank, (found, _) in enumerate(results):
                    mine, theirs = found[name], expected
                    if name[:2] in ("y ", "dx"):
                        theirs = expected[sequence.positions(rank)]
                    else:
                        mine = torch.stack([other[name] for other, _ in results]).sum(0)
                    assert error_of(mine, theirs, case.dtype) < 2e-6, (
                        f"{case} {transport} {name} of rank {rank}"
                    )
            if case.te and case.groups == HEADS:
                assert results[0][1] == 2, (
                    "attention of a head group is another module than that of all heads"
                )


SYMMETRIC = [
    Case(norms=True, groups=8, microbatches=2),
    Case(groups=1, interleaved=True, bias=False),
    Case(te=True, groups=8),
    Case(te=True, groups=4, norms=True),
    Case(te=True, groups=1, rotated=0, causal=False),
    Case(te=True, heads=STRADDLING, groups=6),
    # With 8 key/value heads in several head groups, each with its own offsets. (Megatron's local
    # attention with an offset asks for CUDA, to which a CPU answers in the main thread alone.)
    Case(te=True, groups=8, settings=(("softmax_type", "learnable"), LAYER_NORM), norms=True),
    Case(te=True, groups=8, settings=(("softmax_type", "learnable"), GATE)),
    Case(groups=8, settings=(GATE,), norms=True),
    Case(te=True, groups=8, settings=(GATE, *CORE_RECOMPUTE), norms=True, rotated=4),
]


@NEEDS_INTERPRETER
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_symmetric_memory_it_is_the_same(ranks: int) -> None:
    run_ranks(_symmetric, 1, ranks, SYMMETRIC, timeout_s=200)
