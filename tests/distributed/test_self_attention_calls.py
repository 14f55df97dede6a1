"""Which self-attentions of Megatron, and which of their calls, are overlapped; what is said of
those that are not. Rotation tables, and the layer spec without patches."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from tests.support.launch import run_ranks
from tests.support.self_attention_world import (
    BATCH,
    HIDDEN,
    WIDTH,
    Case,
    angles_of,
    build,
    count_calls,
    start,
    step,
)

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

BF16 = torch.bfloat16


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
    from megatron_fluid.patches import features as recorded
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
        recorded._features.clear()
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
        recorded._features.clear()
        assert self_attention.DECISIONS.announce(attention).backend is None
        return said()[1]

    recorded._features.clear()
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

    recorded._features.clear()
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
        first, second = torch.nn.Identity(), torch.nn.Identity()  # two layers
        for dtype, exact in ((torch.float32, False), (BF16, False), (BF16, True)):
            how = dtype, group, interleaved, exact
            table = rotary_table(part, *how, reader=first)
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
            assert rotary_table(part.detach(), *how, reader=second) is table, "one a forward"
            again = rotary_table(part.detach(), *how, reader=second)  # recomputes
            assert again is not None and again is not table and torch.equal(again.cos, table.cos)
            assert rotary_table(part, *how, reader=first) is again


def test_layers_share_one_table_of_rotations_in_a_forward() -> None:
    run_ranks(_tables, 2)


def _rewritten(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state

    from megatron_fluid.patches.attention.rotary_tables import rotary_table

    start(ranks)
    group, length = parallel_state.get_context_parallel_group(), 4 * ranks
    angles = angles_of(Case(), length)
    assert angles is not None
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    with torch.inference_mode():
        unversioned = angles[rows]
    parts = {"data": angles[rows], "numpy": angles[rows], "inference": unversioned}
    for how, part in parts.items():
        layer = torch.nn.Identity()
        for factor in (1.0, 2.0, 0.5):
            if how == "data":
                part.data.copy_(factor * angles[rows])
            elif how == "numpy":
                part.numpy()[:] = factor * angles[rows].numpy()
            else:
                with torch.inference_mode():
                    part.copy_(factor * angles[rows])
            table = rotary_table(part, torch.float32, group, False, True, reader=layer)
            expected = (factor * angles[:, 0, 0, : WIDTH // 2]).cos()
            assert table is not None and torch.equal(table.cos, expected), (how, factor)


def test_rotations_follow_angles_that_were_rewritten_in_place() -> None:
    run_ranks(_rewritten, 2)


def test_calls_that_are_not_overlapped_are_told_and_computed_as_before() -> None:
    for said in run_ranks(_calls, 2):
        assert [text.partition(":")[0] for text in said] == [
            "attention_mask is given",
            "autocast or inference is on",
            "inference_context is given",
            "packed_seq_params is given, which Megatron's local attention refuses",
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
