"""Which self-attentions of Megatron, and which of their calls, are overlapped; what is said of
those that are not. Rotation tables, and the layer spec without patches."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention

from megatron_fluid import patches
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.attention import self_attention
from megatron_fluid.patches.attention.rotary_tables import rotary_table
from megatron_fluid.patches.layer_specs import FluidSelfAttention, with_fluid_attention
from tests.support.launch import on_ranks
from tests.support.self_attention_world import (
    WIDTH,
    Case,
    Pair,
    angles_of,
    build,
    count_calls,
    start,
    step,
)

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


def _said() -> tuple[bool, str]:
    """Whether the attention that was built last is overlapped, and the reason."""
    feature = self_attention.DECISIONS.feature
    [found] = [(on, why) for name, on, why, _ in startup.features() if name == feature]
    recorded._features.clear()
    return found


@on_ranks(2)
def test_what_is_not_overlapped_is_told_with_the_reason_or_refused_where_it_was_asked_for(
    rank: int, ranks: int
) -> None:
    alone = start(ranks)
    recorded._features.clear()
    for wanted, case in LEFT.items():
        asked = next((name for name in ("collective", "megatron") if name in wanted), "auto")
        attention = build(case, ranks, asked)
        on, reason = _said()
        assert not on and reason.startswith(wanted), (wanted, reason)
        assert self_attention.overlapped(attention) is None, wanted
        if asked == "auto" and not case.te:
            refused = "cp_backend: found 'rounds', allowed: auto, collective: "
            with pytest.raises(ConfigError, match=refused):
                build(case, ranks, "rounds")
        recorded._features.clear()

    assert self_attention.overlapped(build(Case(), ranks, "auto")) == "rounds", "on a CPU"
    assert len(startup.features()) == 1
    assert _said() == (True, "heads move in peer rounds, beside the projections")

    for name, base, says in (
        ("linear_qkv", ColumnParallelLinear, "linear_qkv is a Odd, which may compute more than a"),
        ("k_layernorm", torch.nn.RMSNorm, "k_layernorm is a Odd; "),
    ):
        attention = build(Case(norms=True), ranks, "auto")
        getattr(attention, name).__class__ = type("Odd", (base,), {})
        recorded._features.clear()
        assert self_attention.DECISIONS.announce(attention).backend is None
        assert _said()[1].startswith(says)

    assert self_attention.overlapped(build(Case(), 1, "auto", alone)) is None
    assert not startup.features(), "there is nothing to exchange on one rank"
    set_config(FluidConfig())


@on_ranks(2)
def test_calls_that_are_not_overlapped_are_told_and_computed_as_before(
    rank: int, ranks: int
) -> None:
    start(ranks)
    both = Pair(rank, ranks, "rounds")
    angles, crooked = both.angles, both.angles.clone()
    crooked[..., 0] += 1
    both.compare(True)
    both.compare(True, rotary_pos_emb=(angles, angles))
    both.compare(False, mask=both.mask)
    both.compare(False, rotary_pos_emb=(angles, angles * 2))
    both.compare(False, rotary_pos_emb=crooked)
    both.compare(True, rotary_pos_emb=angles * 2)
    both.compare(True, rotary_pos_emb=None)
    # as for a module that was built before the patches were applied
    self_attention.DECISIONS.forget()
    self_attention.leave(both.today)
    both.compare(True)
    count = count_calls()
    packed = SimpleNamespace(qkv_format="sbhd")
    cross = SimpleNamespace(is_dynamic_batching=lambda: False)
    with pytest.raises(ConfigError, match="packed_seq_params"):  # as Megatron's local core says
        both.ours(both.x, None, rotary_pos_emb=angles, packed_seq_params=packed)
    with pytest.raises(AttributeError, match="is_decode_only"):  # in Megatron's own forward
        both.ours(both.x, None, inference_context=cross)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        both.ours(both.x, None, rotary_pos_emb=angles)
    assert count() == 0
    said = sorted(self_attention.DECISIONS.report.said)
    assert [text.partition(":")[0] for text in said] == [
        "attention_mask is given",
        "autocast or inference is on",
        "inference_context is given",
        "packed_seq_params is given, which Megatron's local attention refuses",
        "queries and keys have rotations of their own",
        "rotations are not by pairs",
    ]


def _part(rank: int, ranks: int, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of the angles, and the different ones of each position [S, WIDTH / 2]."""
    start(ranks)
    length = 4 * ranks
    angles = angles_of(case, length)
    assert angles is not None
    half = angles[:, 0, 0, ::2] if case.interleaved else angles[:, 0, 0, : WIDTH // 2]
    return angles[SequenceLayout(length, ranks, "zigzag").positions(rank)], half


@pytest.mark.parametrize("interleaved", [False, True])
@on_ranks(2)
def test_layers_share_one_table_of_rotations_in_a_forward(
    rank: int, ranks: int, interleaved: bool
) -> None:
    part, half = _part(rank, ranks, Case(interleaved=interleaved))
    group = parallel_state.get_context_parallel_group()
    first, second = torch.nn.Identity(), torch.nn.Identity()  # two layers
    for dtype, exact in ((torch.float32, False), (BF16, False), (BF16, True)):
        how = dtype, group, interleaved, exact
        table = rotary_table(part, *how, reader=first)
        assert table is not None and table.interleaved == interleaved
        assert table.cos.dtype == torch.float32
        # Megatron's unfused rotation rounds them to the activations' type.
        seen = torch.float32 if exact else dtype
        assert torch.equal(table.cos, half.cos().to(seen).float())
        assert torch.equal(table.sin, half.sin().to(seen).float())
        assert rotary_table(part.detach(), *how, reader=second) is table, "one a forward"
        again = rotary_table(part.detach(), *how, reader=second)  # recomputes
        assert again is not None and again is not table and torch.equal(again.cos, table.cos)
        assert rotary_table(part, *how, reader=first) is again


@pytest.mark.parametrize("how", ["data", "numpy", "inference mode"])
@on_ranks(2)
def test_rotations_follow_angles_that_were_rewritten_in_place(
    rank: int, ranks: int, how: str
) -> None:
    angles, half = _part(rank, ranks, Case())
    group, layer = parallel_state.get_context_parallel_group(), torch.nn.Identity()
    with torch.inference_mode(how == "inference mode"):
        part = angles.clone()
    for factor in (1.0, 2.0, 0.5):
        with torch.inference_mode(how == "inference mode"):
            if how == "numpy":
                part.numpy()[:] = (factor * angles).numpy()
            else:
                (part.data if how == "data" else part).copy_(factor * angles)
        table = rotary_table(part, torch.float32, group, False, True, reader=layer)
        assert table is not None and torch.equal(table.cos, (factor * half).cos()), factor


def _of_spec(spec: Any, config: Any, _: Any, *args: Any, **rest: Any) -> Any:
    return spec.module(config, spec.submodules, *args, **rest)


@on_ranks(2)
def test_the_layer_spec_gives_the_same_without_a_patch(rank: int, ranks: int) -> None:
    start(ranks)
    case = Case(norms=True)
    names = ("context-parallel-attention", "self-attention-init", "self-attention")
    length = 4 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    results = []
    for patched in (True, False):
        (patches.apply_all if patched else lambda: patches.revert(*names))()
        assert all(patches.is_applied(name) == patched for name in names)
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        outer = with_fluid_attention(spec).submodules.self_attention
        assert outer.module is FluidSelfAttention
        attention = build(case, ranks, "rounds", module=functools.partial(_of_spec, outer))
        assert isinstance(attention, SelfAttention)
        assert self_attention.overlapped(attention) == "rounds"
        count = count_calls()
        results.append(step(attention, case, rows, angles_of(case, length), length))
        assert count() == 1
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
