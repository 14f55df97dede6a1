"""Which path Megatron's SelfAttention takes: agreed on by the ranks of a group in a layer's first
forward, whatever one of them finds in its modules; and what comes upon them later.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from tests.support.launch import run_ranks
from tests.support.self_attention_world import (
    BATCH,
    HIDDEN,
    Case,
    angles_of,
    build,
    count_calls,
    start,
)

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")


def _replace_forward(attention: Any) -> None:
    plain = attention.linear_proj.forward
    attention.linear_proj.forward = lambda *args: plain(*args)


def _replace_module(attention: Any) -> None:
    attention.linear_proj = copy.copy(attention.linear_proj)


class _Around(torch.nn.Module):
    """Runs a core attention, and could do more."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self.inner = core

    def forward(self, *args: Any, **rest: Any) -> Any:
        return self.inner(*args, **rest)


def _wrap_core(attention: Any) -> None:
    attention.core_attention = _Around(attention.core_attention)


def _replace_class(attention: Any) -> None:
    linear = attention.linear_qkv
    linear.__class__ = type("Quantised", (type(linear),), {})


# What may come upon a module, and how it is told of.
CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook is registered on linear_qkv": lambda a: a.linear_qkv.register_forward_hook(
        lambda *_: None
    ),
    "a forward pre-hook is registered on core_attention": lambda a: (
        a.core_attention.register_forward_pre_hook(lambda *_: None)
    ),
    "a hook is registered on linear_proj": lambda a: a.linear_proj.register_full_backward_hook(
        lambda *_: None
    ),
    "linear_proj.forward was replaced on the instance": _replace_forward,
    "linear_proj was replaced": _replace_module,
}
# Only before the first forward, and only after it.
EARLIER = CHANGES | {"its _Around keeps its own exchange": _wrap_core}
LATER = CHANGES | {"linear_qkv became a Quantised": _replace_class}


class _Changed:
    """One module of each backend with the same weights, and an input; ``compare`` says how ours
    went."""

    def __init__(self, rank: int, ranks: int, backend: str = "auto") -> None:
        case = Case(bias=False)
        self.ours, self.today = build(case, ranks, backend), build(case, ranks, "collective")
        length = 6 * ranks
        rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
        self.x = torch.randn(length, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))[
            rows
        ]
        angles = angles_of(case, length)
        assert angles is not None
        self.angles = angles[rows]

    def compare(self, overlapped: bool) -> None:
        count = count_calls()
        y = self.ours(self.x, None, rotary_pos_emb=self.angles)[0]
        assert count() == overlapped
        torch.testing.assert_close(
            y, self.today(self.x, None, rotary_pos_emb=self.angles)[0], rtol=1e-5, atol=1e-5
        )


def _changed_before(rank: int, ranks: int) -> list[str]:
    from megatron_fluid.patches.attention import self_attention

    start(ranks)
    said = []
    for found, change in EARLIER.items():
        for who in (range(ranks), [1]):
            both = _Changed(rank, ranks)
            if rank in who:
                change(both.ours)
            self_attention.DECISIONS.report.said.clear()
            # A module of a class that is known stands for the one that it replaced.
            both.compare(found == "linear_proj was replaced")
            both.compare(found == "linear_proj was replaced")
            said += sorted(self_attention.DECISIONS.report.said)
            assert (self_attention.overlapped(both.ours) is None) == bool(
                self_attention.DECISIONS.report.said
            )
    both = _Changed(rank, ranks)
    both.ours.linear_proj.__class__ = (
        type("Adapter", (type(both.ours.linear_proj),), {}) if rank else type(both.ours.linear_proj)
    )
    both.compare(False)
    return said


def _refused_by_name(rank: int, ranks: int) -> str:
    start(ranks)
    both = _Changed(rank, ranks, "rounds")
    if rank == 1:
        both.ours.linear_qkv.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError) as caught:
        both.compare(False)
    return str(caught.value)


def test_rounds_by_name_are_refused_on_all_ranks_for_what_one_finds_in_the_first_forward() -> None:
    first, second = run_ranks(_refused_by_name, 2)
    reason = "a hook is registered on linear_qkv"
    expected = "cp_backend: found 'rounds', allowed: auto, collective: "
    assert second == expected + reason and first == f"{expected}rank 1 of the group: {reason}"


def _without_the_patch(rank: int, ranks: int) -> list[Any]:
    from megatron_fluid import patches
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches import features as recorded
    from megatron_fluid.patches import startup_report as startup
    from megatron_fluid.patches.attention import self_attention
    from megatron_fluid.patches.layer_specs import FluidSelfAttention

    start(ranks)
    patches.disable("self-attention")
    recorded._features.clear()
    build(Case(), ranks, "auto")
    noted = startup.features()
    with pytest.raises(ConfigError) as caught:
        build(Case(), ranks, "rounds")
    of_spec = build(Case(), ranks, "rounds", module=FluidSelfAttention)
    return [noted, str(caught.value), self_attention.overlapped(of_spec)]


def test_without_the_forwards_patch_nothing_is_said_to_be_overlapped_but_a_specs_module() -> None:
    for noted, refused, of_spec in run_ranks(_without_the_patch, 2):
        reason = "the patch self-attention is left out: turned off by the user"
        assert ("overlapped attention", False, reason, 1) in noted
        assert not any(on for feature, on, *_ in noted if feature == "overlapped attention")
        assert any(on for feature, on, *_ in noted if feature == "context-parallel attention"), (
            "heads move all the same"
        )
        assert refused == f"cp_backend: found 'rounds', allowed: auto, collective: {reason}"
        assert of_spec == "rounds"


def test_what_one_rank_finds_in_the_first_forward_keeps_megatrons_projections_on_all() -> None:
    first, second = run_ranks(_changed_before, 2)
    told = [found for found in EARLIER if found != "linear_proj was replaced"]
    assert second == [found for found in told for _ in range(2)]
    assert first == [text for found in told for text in (found, f"rank 1 of the group: {found}")]


def _changed_after(rank: int, ranks: int) -> tuple[list[str], str, float]:
    from megatron_fluid import patches
    from megatron_fluid.comm.p2p_rounds import shared_rounds
    from megatron_fluid.patches.attention import self_attention

    start(ranks)
    refused: list[str] = []
    for change in LATER.values():
        both = _Changed(rank, ranks)
        both.compare(True)
        change(both.ours)
        with pytest.raises(ConfigError) as caught:
            both.compare(False)
        refused.append(str(caught.value))
        patches.reset_layers()
        self_attention.leave(both.today)
        # A module of a class that is known stands for the one that it replaced.
        both.compare("linear_proj was replaced" in refused[-1])
    both = _Changed(rank, ranks)
    both.compare(True)
    # Around the whole layer: run whichever way it goes.
    both.ours.register_forward_hook(lambda *_: None)
    both.ours.register_forward_pre_hook(lambda *_: None)
    both.compare(True)
    shared_rounds(both.ours.pg_collection.cp, 4.0)
    if rank:
        both.ours.linear_qkv.register_forward_hook(lambda *_: None)
    began = time.monotonic()
    with pytest.raises(ConfigError if rank else PeerTimeoutError) as alone:
        both.ours(both.x, None, rotary_pos_emb=both.angles)
    return refused, str(alone.value), time.monotonic() - began


def test_a_change_after_the_first_forward_is_an_error_by_name_until_layers_are_reset() -> None:
    (refused, waited, seconds), (others, changed, _) = run_ranks(_changed_after, 2)
    for rank, texts in enumerate((refused, others)):
        for found, text in zip(LATER, texts, strict=True):
            assert f"attention 1 (rank {rank}) was changed after its first forward: {found}" in text
    assert waited.startswith("rank 0: no answer from peer 1 in attention of layer 1")
    for text in (waited, changed):
        assert "(rank 1) was changed after its first forward: a hook is registered on" in text
    assert seconds < 20


def _saved(rank: int, ranks: int) -> list[str]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.training import activation_logging, dgrad_logging

    from megatron_fluid.patches.attention import self_attention

    # Without Transformer Engine Megatron has None among these, and saves nothing.
    activation_logging.LINEAR_TYPES = dgrad_logging.LINEAR_TYPES = (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    start(ranks)
    for earlier in (True, False):
        both = _Changed(rank, ranks)
        if earlier:
            both.compare(True)
        activation_logging.enable_activation_logging([both.ours], "")
        both.compare(False)
        activation_logging.disable_activation_logging()
        saved = activation_logging._LOGGER._activations_state_dict.pop("model_chunk0")
        assert torch.equal(saved["linear_qkv/input0"], both.x) and "linear_proj/output0" in saved
        both.compare(True)
        dgrad_logging.enable_dgrad_logging([both.ours], "")
        both.ours(both.x, None, rotary_pos_emb=both.angles)[0].sum().backward()
        dgrad_logging.disable_dgrad_logging()
        assert "linear_qkv/output0" in dgrad_logging._LOGGER._dgrads_state_dict.pop("model_chunk0")
        both.compare(True)
    return sorted(self_attention.DECISIONS.report.said)


def test_iterations_in_which_megatron_saves_activations_are_its_own_and_the_others_are_not() -> (
    None
):
    (said,), (other,) = run_ranks(_saved, 2)
    assert said == other == "Megatron saves activations or their gradients (linear_proj's first)"
