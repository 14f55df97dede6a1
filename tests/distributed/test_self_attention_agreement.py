"""Which path Megatron's SelfAttention takes: agreed on by the ranks of a group in a layer's first
forward, whatever one of them finds in its modules; and what comes upon them later.
"""

import copy
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.training import activation_logging, dgrad_logging

from megatron_fluid import patches
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import startup_report as startup
from megatron_fluid.patches.attention import self_attention
from megatron_fluid.patches.layer_specs import FluidSelfAttention
from tests.support.launch import on_ranks, run_ranks
from tests.support.self_attention_world import Case, Pair, build, start

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")


def _hook(*_: Any) -> None:
    """Stands for any hook."""


def _replace_method(module: Any, name: str) -> None:
    plain = getattr(module, name)
    setattr(module, name, lambda *args, **rest: plain(*args, **rest))


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
    "a hook is registered on linear_qkv": lambda a: a.linear_qkv.register_forward_hook(_hook),
    "a forward pre-hook is registered on core_attention": lambda a: (
        a.core_attention.register_forward_pre_hook(_hook)
    ),
    "a hook is registered on linear_proj": lambda a: a.linear_proj.register_full_backward_hook(
        _hook
    ),
    "linear_proj.forward was replaced on the instance": lambda a: _replace_method(
        a.linear_proj, "forward"
    ),
    "linear_proj was replaced": _replace_module,
    "linear_qkv._forward_impl was replaced": lambda a: _replace_method(
        a.linear_qkv, "_forward_impl"
    ),
    "SelfAttention.get_query_key_value_tensors was replaced": lambda a: _replace_method(
        a, "get_query_key_value_tensors"
    ),
}
# Only before the first forward, and only after it.
EARLIER = CHANGES | {"its _Around keeps its own exchange": _wrap_core}
LATER = CHANGES | {"linear_qkv became a Quantised": _replace_class}


@on_ranks(2)
def test_what_one_rank_finds_in_the_first_forward_keeps_megatrons_projections_on_all(
    rank: int, ranks: int
) -> None:
    start(ranks)
    said = self_attention.DECISIONS.report.said
    for found, change in EARLIER.items():
        # A module of a class that is known stands for the one that it replaced.
        overlapped = found == "linear_proj was replaced"
        for who in (range(ranks), [1]):
            both = Pair(rank, ranks)
            if rank in who:
                change(both.ours)
            said.clear()
            both.compare(overlapped)
            both.compare(overlapped)
            told = found if rank in who else f"rank 1 of the group: {found}"
            assert sorted(said) == ([] if overlapped else [told])
            assert (self_attention.overlapped(both.ours) is not None) == overlapped
    both = Pair(rank, ranks)
    if rank:
        linear = both.ours.linear_proj
        linear.__class__ = type("Adapter", (type(linear),), {})
    both.compare(False)


@on_ranks(2)
def test_rounds_by_name_are_refused_on_all_ranks_for_what_one_finds_in_the_first_forward(
    rank: int, ranks: int
) -> None:
    start(ranks)
    both = Pair(rank, ranks, "rounds")
    if rank == 1:
        both.ours.linear_qkv.register_forward_hook(_hook)
    with pytest.raises(ConfigError) as caught:
        both.compare(False)
    reason = "a hook is registered on linear_qkv"
    told = reason if rank else f"rank 1 of the group: {reason}"
    assert str(caught.value) == f"cp_backend: found 'rounds', allowed: auto, collective: {told}"


@on_ranks(2)
def test_without_the_forwards_patch_nothing_is_said_to_be_overlapped_but_a_specs_module(
    rank: int, ranks: int
) -> None:
    start(ranks)
    patches.disable("self-attention")
    recorded._features.clear()
    build(Case(), ranks, "auto")
    reason = "the patch self-attention is left out: turned off by the user"
    noted = startup.features()
    assert ("overlapped attention", False, reason, 1) in noted
    # Heads move all the same.
    assert {feature for feature, on, *_ in noted if on} == {"context-parallel attention"}
    with pytest.raises(ConfigError) as caught:
        build(Case(), ranks, "rounds")
    assert str(caught.value) == f"cp_backend: found 'rounds', allowed: auto, collective: {reason}"
    of_spec = build(Case(), ranks, "rounds", module=FluidSelfAttention)
    assert self_attention.overlapped(of_spec) == "rounds"


def _changed_after(rank: int, ranks: int) -> str:
    start(ranks)
    for found, change in LATER.items():
        both = Pair(rank, ranks)
        both.compare(True)
        change(both.ours)
        changed = f"attention 1 (rank {rank}) was changed after its first forward: {found}"
        with pytest.raises(ConfigError, match=re.escape(changed)):
            both.compare(False)
        patches.reset_layers()
        self_attention.leave(both.today)
        # A module of a class that is known stands for the one that it replaced.
        both.compare(found == "linear_proj was replaced")
    both = Pair(rank, ranks)
    both.compare(True)
    # Around the whole layer: run whichever way it goes.
    both.ours.register_forward_hook(_hook)
    both.ours.register_forward_pre_hook(_hook)
    both.compare(True)
    shared_rounds(both.ours.pg_collection.cp, 4.0)
    if rank:
        both.ours.linear_qkv.register_forward_hook(_hook)
    with pytest.raises(ConfigError if rank else PeerTimeoutError) as alone:
        both.ours(both.x, None, rotary_pos_emb=both.angles)
    return str(alone.value)


def test_a_change_after_the_first_forward_is_an_error_by_name_until_layers_are_reset() -> None:
    waited, changed = run_ranks(_changed_after, 2)
    assert waited.startswith("rank 0: no answer from peer 1 in attention of layer 1")
    for text in (waited, changed):
        assert "(rank 1) was changed after its first forward: a hook is registered on" in text


@pytest.mark.parametrize(("kind", "name"), [
    (SelfAttention, "get_query_key_value_tensors"),
    (ColumnParallelLinear, "_forward_impl"),
    (RowParallelLinear, "_forward_impl"),
    ("megatron.core.transformer.attention", "apply_rotary_pos_emb"),
    ("megatron.core.models.common.embeddings.rope_utils", "_apply_rotary_pos_emb_bshd"),
])  # fmt: skip
@on_ranks(2)
def test_what_is_replaced_on_a_class_or_in_a_module_is_not_bypassed(
    rank: int, ranks: int, kind: type | str, name: str
) -> None:
    start(ranks)
    earlier, later = Pair(rank, ranks), Pair(rank, ranks)
    later.compare(True)
    _replace_method(sys.modules[kind] if isinstance(kind, str) else kind, name)
    earlier.compare(False)
    with pytest.raises(ConfigError, match=f"after its first forward: .*{name} was replaced"):
        later.compare(False)


@on_ranks(2)
def test_an_epsilon_of_norms_that_changes_takes_effect_and_another_rotation_is_an_error(
    rank: int, ranks: int
) -> None:
    start(ranks)
    for name in ("rotary_interleaved", "_yarn_concentration_factor"):
        both, case = Pair(rank, ranks), Case(bias=False, norms=True)
        both.ours, both.today = (build(case, ranks, how) for how in ("rounds", "collective"))
        for eps in ((1e-5, 1e-5), (1.0, 1.0), (1.0, 0.1), (0.1, 0.1)):
            for attention in (both.ours, both.today):
                attention.q_layernorm.eps, attention.k_layernorm.eps = eps
            both.compare(True)
        owner = both.ours if name in vars(both.ours) else both.ours.config
        setattr(owner, name, 2.0)
        with pytest.raises(ConfigError, match=f"after its first forward: .*{name}"):
            both.compare(False)


@on_ranks(2)
def test_iterations_in_which_megatron_saves_activations_are_its_own_and_the_others_are_not(
    rank: int, ranks: int
) -> None:
    # Without Transformer Engine Megatron has None among these, and saves nothing.
    linears = ColumnParallelLinear, RowParallelLinear
    activation_logging.LINEAR_TYPES = dgrad_logging.LINEAR_TYPES = linears
    start(ranks)
    for earlier in (True, False):
        both = Pair(rank, ranks)
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
    told = "Megatron saves activations or their gradients (linear_proj's first)"
    assert sorted(self_attention.DECISIONS.report.said) == [told]
