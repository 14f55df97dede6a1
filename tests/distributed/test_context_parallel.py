"""Megatron's attention under context parallelism, against Megatron's own on the whole sequence."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import startup_report as startup
from tests.support.launch import on_ranks
from tests.support.self_attention_world import start
from tests.support.te_attention import patched_core

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

HEADS, WIDTH, BATCH = 8, 8, 2
CAUSAL = AttnMaskType.causal


def _setup(ranks: int, groups: int, **settings: Any) -> Any:
    """Parallel state, and the configuration for this many context-parallel ranks."""
    start(ranks)
    return TransformerConfig(
        num_layers=2, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=groups,
        attention_dropout=0.0, context_parallel_size=ranks, **{"cp_comm_type": "a2a", **settings},
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_outputs_and_gradients_are_those_of_the_whole_sequence(rank: int, ranks: int) -> None:
    for groups in (1, 2, HEADS):
        for kind in ("causal", "none", "mask", "mask per sequence", "layer scaling"):
            config = _setup(ranks, groups, apply_query_key_layer_scaling=kind == "layer scaling")
            whole_config = copy.copy(config)
            whole_config.context_parallel_size = 1
            mask_type = AttnMaskType.no_mask if kind == "none" else CAUSAL
            whole = DotProductAttention(whole_config, 2, mask_type, "self")
            split = DotProductAttention(config, 2, mask_type, "self", cp_comm_type="a2a")
            assert type(whole) is DotProductAttention and type(split) is not DotProductAttention
            assert isinstance(split, DotProductAttention)

            torch.manual_seed(groups)
            length = 6 * ranks
            shapes = [(length, BATCH, n, WIDTH) for n in (HEADS, groups, groups)]
            inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
            rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
            mask = part_mask = None
            if kind.startswith("mask"):
                mask = torch.rand(BATCH if "sequence" in kind else 1, 1, length, length) < 0.5
                mask[:, :, 3] = True  # a position that may look nowhere
                part_mask = mask[:, :, rows].contiguous()

            expected = whole(*inputs, mask)
            upstream = torch.randn_like(expected)
            expected.backward(upstream)
            parts = [x.detach()[rows].requires_grad_() for x in inputs]
            found = split(*parts, part_mask)
            found.backward(upstream[rows])
            found = [found.detach(), *(part.grad for part in parts)]
            for mine, all_rows in zip(found, [expected, *(x.grad for x in inputs)], strict=True):
                error = (mine - all_rows.detach()[rows]).abs().max() / all_rows.abs().max()
                assert error < 5e-6, f"{kind}, {groups} groups"


REFUSED: dict[str, dict[str, Any]] = {
    "cp_comm_type: found 'p2p'": {"kind": "p2p"},
    "cp_comm_type: found None": {"kind": None},
    "attn_mask_type: found 'padding'": {"mask_type": AttnMaskType.padding},
    "cp_backend: found 'nvlink', allowed: auto, rounds, collective: symmetric memory is on CUDA "
    "devices": {"cp_backend": "nvlink"},
    "cp_backend: found 'nvlink', allowed: auto, collective: symmetric memory is on CUDA devices": {
        "cp_backend": "nvlink",
        "test_mode": True,  # no rounds
    },
}


@on_ranks(2)
def test_what_it_does_not_compute_is_refused_by_name(rank: int, ranks: int) -> None:
    def attention(
        mask_type: Any = CAUSAL, kind: str | None = "a2a", cp_backend: str = "auto", **settings: Any
    ) -> Any:
        config = _setup(ranks, 2, **settings)
        set_config(FluidConfig(cp_backend=cp_backend))
        return DotProductAttention(config, 1, mask_type, "self", cp_comm_type=kind)

    for said, asked in REFUSED.items():
        with pytest.raises(ConfigError, match=f"^{said}"):
            attention(**asked)
    with pytest.raises(AssertionError, match="only supported by TEDotProductAttention"):
        attention(cp_backend="megatron")
    core = attention()
    q, k = torch.zeros(4, 1, HEADS, WIDTH), torch.zeros(4, 1, 2, WIDTH)
    for name, value in (("attention_bias", q), ("packed_seq_params", object())):
        with pytest.raises(ConfigError, match=f"^{name}"):
            core(q, k, k, None, **{name: value})
    with pytest.raises(ConfigError, match="^seq_length: found 6"):
        core(q[:3], k[:3], k[:3], None)


LEFT_TO_TE: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "cp_comm_type='p2p': p2p, all_gather and a2a+p2p are other algorithms than a2a, which is "
    "served": (CAUSAL, "p2p", {}),
    "attn_mask_type='padding': a mask of padding or an arbitrary one is not exchanged": (
        *(AttnMaskType.padding, "a2a"),
        {},
    ),
    "qk_clip=True: logits are recorded by Megatron's own module": (
        CAUSAL,
        "a2a",
        {"qk_clip": True},
    ),
    "symmetric memory is on CUDA devices, not on cpu": (CAUSAL, "a2a", {}),
}


@on_ranks(2)
def test_transformer_engines_attention_is_exchanged_or_the_reason_is_told(
    rank: int, ranks: int
) -> None:
    """Its results: test_self_attention_patch.py."""
    Patched = patched_core()
    set_config(FluidConfig(cp_backend="collective"))
    split = Patched(_setup(ranks, 2), 1, CAUSAL, "self", cp_comm_type="a2a")
    assert isinstance(split, Patched.__base__) and type(split) is not Patched
    assert not list(split.children())
    inputs = [torch.randn(4, BATCH, n, WIDTH) for n in (HEADS, 2, 2)]
    split.eval()
    split(*inputs, None, CAUSAL)
    assert not split.alone(1).training and split.calls == 0
    with pytest.raises(AssertionError):  # of the stand-in itself
        split(*inputs, None, CAUSAL, packed_seq_params=SimpleNamespace(qkv_format="sbhd"))
    assert split.calls == 1, "packs of another format are Transformer Engine's own affair"

    for reason, (mask, kind, settings) in LEFT_TO_TE.items():
        set_config(FluidConfig())
        recorded._features.clear()
        config = _setup(ranks, 2, **settings)
        assert type(Patched(config, 1, mask, "self", cp_comm_type=kind)) is Patched
        [(feature, on, told, count)] = startup.features()
        assert (feature, on, count) == ("context-parallel attention", False, 1)
        assert told.partition(": ")[2] == reason
        if not reason.startswith("symmetric memory"):
            set_config(FluidConfig(cp_backend="nvlink"))
            with pytest.raises(ConfigError, match="cp_backend: found 'nvlink'"):
                Patched(config, 1, mask, "self", cp_comm_type=kind)
