"""Megatron's attention under context parallelism, against Megatron's own on the whole sequence."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.attention.layouts import SequenceLayout
from tests.support.launch import run_ranks
from tests.support.self_attention_world import start
from tests.support.te_attention import patched_core

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

HEADS, WIDTH, BATCH = 8, 8, 2


def _setup(ranks: int, groups: int, **settings: Any) -> Any:
    """Parallel state, and the configuration for this many context-parallel ranks."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    start(ranks)
    return TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        attention_dropout=0.0,
        context_parallel_size=ranks,
        **{"cp_comm_type": "a2a", **settings},
    )


def _compare(rank: int, ranks: int) -> dict[str, float]:
    """Largest difference of outputs and gradients, relative to the largest value, for each case."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    worst = {}
    for groups in (1, 2, HEADS):
        for kind in ("causal", "none", "mask", "mask per sequence", "layer scaling"):
            config = _setup(ranks, groups, apply_query_key_layer_scaling=kind == "layer scaling")
            whole_config = copy.copy(config)
            whole_config.context_parallel_size = 1
            mask_type = AttnMaskType.no_mask if kind == "none" else AttnMaskType.causal
            whole = DotProductAttention(whole_config, 2, mask_type, "self")
            split = DotProductAttention(config, 2, mask_type, "self", cp_comm_type="a2a")
            assert type(whole) is DotProductAttention and type(split) is not DotProductAttention
            assert isinstance(split, DotProductAttention)

            torch.manual_seed(groups)
            length = 6 * ranks
            shapes = [(length, BATCH, n, WIDTH) for n in (HEADS, groups, groups)]
            inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            mask = None
            if kind.startswith("mask"):
                mask = torch.rand(BATCH if "sequence" in kind else 1, 1, length, length) < 0.5
                mask[:, :, 3] = True  # a position that may look nowhere

            rows = SequenceLayout(length, ranks, "zigzag").positions(rank)

            def mine(x: torch.Tensor, rows: torch.Tensor = rows) -> torch.Tensor:
                return x.detach()[rows]

            expected = whole(*inputs, mask)
            upstream = torch.randn_like(expected)
            expected.backward(upstream)
            parts = [mine(x).requires_grad_() for x in inputs]
            part_mask = (
                None if mask is None else mine(mask.movedim(2, 0)).movedim(0, 2).contiguous()
            )
            found = split(*parts, part_mask)
            found.backward(mine(upstream))
            pairs = [
                (found, expected),
                *((part.grad, x.grad) for part, x in zip(parts, inputs, strict=True)),
            ]
            worst[f"{kind}, {groups} groups"] = max(
                float((a - mine(b)).abs().max() / b.abs().max())
                for a, b in pairs  # type: ignore[union-attr]
            )
    return worst


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_the_whole_sequence(ranks: int) -> None:
    for worst in run_ranks(_compare, ranks):
        assert worst == pytest.approx(dict.fromkeys(worst, 0.0), abs=5e-6)


def _refusals(rank: int, ranks: int) -> dict[str, str]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.errors import ConfigError

    said = {}

    def attempt(
        name: str,
        mask_type: Any = AttnMaskType.causal,
        kind: str | None = "a2a",
        cp_backend: str = "auto",
        **settings: Any,
    ) -> None:
        config = _setup(ranks, 2, **settings)
        set_config(FluidConfig(cp_backend=cp_backend))
        with pytest.raises(ConfigError) as caught:
            DotProductAttention(config, 1, mask_type, "self", cp_comm_type=kind)
        said[name] = str(caught.value)

    attempt("p2p", kind="p2p")
    attempt("default", kind=None)
    attempt("padding", mask_type=AttnMaskType.padding)
    attempt("nvlink", cp_backend="nvlink")
    attempt("nvlink, no rounds", cp_backend="nvlink", test_mode=True)
    set_config(FluidConfig(cp_backend="megatron"))
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        DotProductAttention(_setup(ranks, 2), 1, AttnMaskType.causal, "self", cp_comm_type="a2a")
    set_config(None)
    attention = DotProductAttention(
        _setup(ranks, 2), 1, AttnMaskType.causal, "self", cp_comm_type="a2a"
    )
    q, k = torch.zeros(4, 1, HEADS, WIDTH), torch.zeros(4, 1, 2, WIDTH)
    for name, extra in (
        ("bias", {"attention_bias": q}),
        ("packed", {"packed_seq_params": object()}),
    ):
        with pytest.raises(ConfigError) as caught:
            attention(q, k, k, None, **extra)
        said[name] = str(caught.value)
    with pytest.raises(ConfigError) as caught:
        attention(q[:3], k[:3], k[:3], None)
    said["odd"] = str(caught.value)
    return said


def test_what_it_does_not_compute_is_refused_by_name() -> None:
    for said in run_ranks(_refusals, 2):
        names = {
            "p2p": "cp_comm_type: found 'p2p'",
            "default": "cp_comm_type: found None",
            "padding": "attn_mask_type: found 'padding'",
            "nvlink": "cp_backend: found 'nvlink', allowed: auto, rounds, collective: symmetric "
            "memory is on CUDA devices",
            "nvlink, no rounds": "cp_backend: found 'nvlink', allowed: auto, collective: symmetric "
            "memory is on CUDA devices",
            "bias": "attention_bias",
            "packed": "packed_seq_params",
            "odd": "seq_length: found 6",
        }
        assert said.keys() == names.keys()
        for name, text in names.items():
            assert said[name].startswith(text), said[name]


def _te(rank: int, ranks: int) -> dict[str, Any]:
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches import features as recorded
    from megatron_fluid.patches import startup_report as startup

    Patched, causal = patched_core(), AttnMaskType.causal
    found: dict[str, Any] = {}
    set_config(FluidConfig(cp_backend="collective"))
    split = Patched(_setup(ranks, 2), 1, causal, "self", cp_comm_type="a2a")
    assert isinstance(split, Patched.__base__) and type(split) is not Patched
    assert not list(split.children())
    inputs = [torch.randn(4, BATCH, n, WIDTH) for n in (HEADS, 2, 2)]
    split.eval()
    split(*inputs, None, causal)
    assert not split.alone(1).training and split.calls == 0
    with pytest.raises(AssertionError):  # of the stand-in itself
        split(*inputs, None, causal, packed_seq_params=SimpleNamespace(qkv_format="sbhd"))
    assert split.calls == 1, "packs of another format are Transformer Engine's own affair"

    set_config(FluidConfig())
    cases: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "p2p": (causal, "p2p", {}),
        "mask": (AttnMaskType.padding, "a2a", {}),
        "clip": (causal, "a2a", {"qk_clip": True}),
        "cpu": (causal, "a2a", {}),
    }
    for name, (mask, kind, settings) in cases.items():
        recorded._features.clear()
        config = _setup(ranks, 2, **settings)
        assert type(Patched(config, 1, mask, "self", cp_comm_type=kind)) is Patched
        [(feature, on, found[name], count)] = startup.features()
        assert (feature, on, count) == ("context-parallel attention", False, 1)
        if name != "cpu":
            set_config(FluidConfig(cp_backend="nvlink"))
            with pytest.raises(ConfigError, match="cp_backend: found 'nvlink'"):
                Patched(config, 1, mask, "self", cp_comm_type=kind)
            set_config(FluidConfig())
    return found


def test_transformer_engines_attention_is_exchanged_or_the_reason_is_told() -> None:
    """Its results: test_self_attention_patch.py."""
    for found in run_ranks(_te, 2):
        assert {name: text.partition(": ")[2] for name, text in found.items()} == {
            "p2p": "cp_comm_type='p2p': p2p, all_gather and a2a+p2p are other algorithms than a2a, "
            "which is served",
            "mask": "attn_mask_type='padding': a mask of padding or an arbitrary one is not "
            "exchanged",
            "clip": "qk_clip=True: logits are recorded by Megatron's own module",
            "cpu": "symmetric memory is on CUDA devices, not on cpu",
        }
