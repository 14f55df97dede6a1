"""Megatron's SelfAttention with its projections beside the exchanges: against the same module with projections around exchanged core
attention, and against Megatron's own on the whole sequence. Transformer Engine's classes are stand-ins, as it needs a GPU; the real ones:
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
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fluid.attention.layouts import SequenceLayout
from tests.launch import run_ranks
from tests.machine import NEEDS_INTERPRETER

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

HEADS, WIDTH, BATCH, HIDDEN = 8, 8, 2, 48
STRADDLING = 12  # with 6 key/value heads, a rank of 4 has 3 heads of 2 of them


@dataclasses.dataclass(frozen=True)
class Case:
    """One module: Megatron's local spec, or Transformer Engine's by stand-ins."""

    te: bool = False
    heads: int = HEADS
    groups: int = 2
    rotated: int = WIDTH
    interleaved: bool = False
    norms: bool = False
    bias: bool = True
    causal: bool = True
    dtype: torch.dtype = torch.float32
    fused: bool = False
    deferred: bool = False
    recompute: bool = False
    microbatches: int = 1
    frozen: tuple[str, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


class _Linear(nn.Module):
    """What Megatron's TELayerNormColumnParallelLinear and TERowParallelLinear hold, by Transformer Engine 2.20's names."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool, skip_bias_add: bool, **_: Any) -> None:
        super().__init__()
        self.config, self.use_bias, self.te_return_bias = config, bias, skip_bias_add and bias
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else torch.empty(0)
        self.te_quant_params, self.fuse_wgrad_accumulation, self.is_first_microbatch = None, False, True
        self.calls = 0

    def _rows(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        bias = self.bias if self.use_bias and not self.te_return_bias else None
        return F.linear(self._rows(x), self.weight, bias), self.bias if self.te_return_bias else None


class _NormLinear(_Linear):
    def __init__(self, inputs: int, outputs: int, *, config: Any, **rest: Any) -> None:
        super().__init__(inputs, outputs, config=config, **rest)
        self.layer_norm_weight = nn.Parameter(torch.empty(inputs))
        self.layer_norm_bias = nn.Parameter(torch.empty(inputs)) if config.normalization == "LayerNorm" else None
        self.normalization, self.eps = config.normalization, config.layernorm_epsilon
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def _rows(self, x: Tensor) -> Tensor:
        gamma = self.layer_norm_weight.float() + (1 if self.zero_centered_gamma else 0)
        wide = x.float()
        if self.normalization == "RMSNorm":
            return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gamma).to(x.dtype)
        assert self.layer_norm_bias is not None
        return F.layer_norm(wide, wide.shape[-1:], gamma, self.layer_norm_bias.float(), self.eps).to(x.dtype)


class _Core(nn.Module):
    """Has the constructor and the call of Megatron's TEDotProductAttention, and knows no context parallelism."""

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None,
        k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p", pg_collection=None,
    ):  # fmt: skip
        super().__init__()
        self.config, self.heads, self.groups = config, config.num_attention_heads, config.num_query_groups
        self.calls = 0

    def forward(
        self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None,
        num_splits=None,
    ):  # fmt: skip
        self.calls += 1
        assert (query.size(2), key.size(2)) == (self.heads, self.groups)
        if self.heads not in (
            HEADS,
            STRADDLING,
        ):  # a share: as Transformer Engine's get_qkv_layout takes it without a copy
            assert all(t.is_contiguous() for t in (query, key, value))
            offsets = [t.storage_offset() for t in (query, key, value)]
            assert offsets in ([0, 0, 0], [0, query.numel(), query.numel() + key.numel()])
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        causal = attn_mask_type.name == "causal"
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class _TENorm(nn.Module):
    """Transformer Engine's RMSNorm: its weight may be stored less one."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden_size)), eps
        self.zero_centered_gamma = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        gamma = self.weight.float() + (1 if self.zero_centered_gamma else 0)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gamma).to(x.dtype)


def _know_stand_ins() -> None:
    """Let the patch take the stand-ins for Transformer Engine's classes."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from megatron_fluid.patches import attention_limits

    attention_limits._qkv_types = lambda: (ColumnParallelLinear, _NormLinear)
    attention_limits._projection_types = lambda: (RowParallelLinear, _Linear)
    attention_limits._norm_types = lambda: (nn.RMSNorm, _TENorm)


def _spec(case: Case) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.attention import SelfAttentionSubmodules

    from megatron_fluid.patches.attention import te_dot_product_attention

    if not case.te:
        norm = dict(case.settings).get("normalization", "RMSNorm")
        return get_gpt_layer_local_submodules(qk_layernorm=case.norms, normalization=norm).self_attention.submodules

    class Patched(_Core):
        __init__ = te_dot_product_attention(_Core.__init__)  # type: ignore[assignment]

    norm = _TENorm if case.norms else None
    return SelfAttentionSubmodules(
        linear_qkv=_NormLinear, core_attention=Patched, linear_proj=_Linear, q_layernorm=norm, k_layernorm=norm
    )


def _config(case: Case, ranks: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": case.heads, "num_query_groups": case.groups, "kv_channels": WIDTH,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "context_parallel_size": ranks, "cp_comm_type": "a2a",
        "add_bias_linear": case.bias, "qk_layernorm": case.norms, "rotary_interleaved": case.interleaved,
        "params_dtype": case.dtype, "bf16": case.dtype == torch.bfloat16, "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True, "normalization": "RMSNorm", "persist_layer_norm": False,
        "layernorm_zero_centered_gamma": case.te,
    }  # fmt: skip
    return TransformerConfig(**settings | dict(case.settings))


def _start(ranks: int) -> Any:
    """Parallel state, patches, and a group of this rank alone."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import megatron_fluid  # noqa: F401

    torch.set_num_threads(1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        _know_stand_ins()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    return ProcessGroupCollection(tp=tensor, cp=tensor)


def _build(case: Case, ranks: int, backend: str, groups: Any = None, module: Any = None) -> Any:
    """Megatron's SelfAttention with weights of a fixed seed; ``groups``: its process groups, by default those of parallel state."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_fluid.config import FluidConfig, set_config

    set_config(FluidConfig(cp_backend=backend, defer_weight_grads=case.deferred, dx_chunks=2))
    mask = AttnMaskType.causal if case.causal else AttnMaskType.no_mask
    config = _config(case, ranks)
    attention = (module or SelfAttention)(
        config, _spec(case), 1, attn_mask_type=mask, cp_comm_type="a2a", pg_collection=groups
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            around = 1.0 if "norm" in name and not case.te else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + around)
            parameter.requires_grad_(name not in case.frozen)
    attention.to(case.dtype)
    set_config(None)
    return attention


def _angles(case: Case, length: int) -> Tensor | None:
    if not case.rotated:
        return None
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(WIDTH, case.rotated / WIDTH, case.interleaved, use_cpu_initialization=True)
    return rotary.get_emb(length)


def _step(
    attention: Any, case: Case, rows: Tensor, angles: Tensor | None, length: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs, input gradients and parameter gradients (or what was added to main_grad) of some microbatches.

    Args:
        rows: this rank's, of ``length``.
        angles: of all positions.
        dtype: that the module computes in, if not the case's.
    """
    from megatron.core.tensor_parallel.random import checkpoint

    from megatron_fluid.backward.weight_grads import get_backward_scheduler

    part = None if angles is None else angles[rows]
    found: dict[str, Tensor] = {}
    for microbatch in range(case.microbatches):
        generator = torch.Generator().manual_seed(50 + microbatch)
        inputs, upstream = (torch.randn(length, BATCH, HIDDEN, generator=generator) for _ in range(2))
        dtype = dtype or case.dtype
        inputs, upstream = (t[rows].to(case.dtype).to(dtype) for t in (inputs, upstream))
        x = inputs.requires_grad_()

        def call(hidden: Tensor, rotations: Tensor | None) -> Tensor:
            y, bias = attention(hidden, None, rotary_pos_emb=rotations)
            assert (bias is not None) == case.bias
            return y if bias is None else y + bias

        y = checkpoint(call, False, x, part) if case.recompute else call(x, part)
        y.backward(upstream)
        get_backward_scheduler().finish_batch()
        assert x.grad is not None
        found |= {f"y {microbatch}": y.detach(), f"dx {microbatch}": x.grad}
    for name, parameter in attention.named_parameters():
        if getattr(parameter, "grad_added_to_main_grad", False):
            found[name] = parameter.main_grad
        elif parameter.grad is not None:
            found[name] = parameter.grad
    return found


def _fuse(attention: Any) -> list[Tensor]:
    """Give the projections main_grads, as Megatron's DDP does, and have them decided about anew; gives the hooks' record."""
    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.patches import self_attention

    fired: list[Tensor] = []
    for linear in (attention.linear_qkv, attention.linear_proj):
        name = (
            "fuse_wgrad_accumulation" if hasattr(linear, "fuse_wgrad_accumulation") else "gradient_accumulation_fusion"
        )
        setattr(linear, name, True)
        weight = linear.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(fired.append)
    set_config(FluidConfig(cp_backend="rounds", dx_chunks=2))
    self_attention.announce(attention)
    set_config(None)
    return fired


def _error(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The largest difference as a share of the largest value; in 16 bits root mean squares."""
    a, b = found.double(), expected.double()
    if dtype.itemsize == 2:
        return float(((a - b).square().mean() / b.square().mean()).sqrt())
    return float((a - b).abs().max() / b.abs().max())


def _compare(rank: int, ranks: int, cases: list[Case]) -> None:
    from megatron_fluid.backward.weight_grads import get_backward_scheduler
    from megatron_fluid.patches import self_attention

    alone = _start(ranks)
    length = 6 * ranks
    everything, rows = torch.arange(length), SequenceLayout(length, ranks, "zigzag").positions(rank)
    for case in cases:
        exact = dataclasses.replace(case, fused=False, deferred=False, recompute=False)
        whole = _build(dataclasses.replace(exact, dtype=torch.float32), 1, "auto", alone)
        whole.to(case.dtype).float()  # its weights are rounded, not its arithmetic
        angles = _angles(case, length)
        reference = _step(whole, exact, everything, angles, length, torch.float32)
        today = _build(exact, ranks, "collective")
        assert self_attention.overlapped(today) is None
        before = _step(today, exact, rows, angles, length)
        ours = _build(case, ranks, "rounds")
        fired = _fuse(ours) if case.fused else []
        assert self_attention.overlapped(ours) == "rounds"
        calls = _count_calls()
        found = _step(ours, case, rows, angles, length)
        get_backward_scheduler().disable()
        forwards = case.microbatches * (2 if case.recompute else 1)
        assert calls() == forwards, f"{case}: {calls()} overlapped calls of {forwards}"
        assert found.keys() == before.keys() == reference.keys(), case
        assert len(found) >= 2 + len(list(ours.parameters())) - len(case.frozen)
        if case.fused:
            assert len(fired) == 2 * case.microbatches, "hooks fire once a weight and backward"
            assert all(linear.weight.grad_added_to_main_grad for linear in (ours.linear_qkv, ours.linear_proj)), case
        for name, expected in reference.items():
            mine, theirs = found[name], before[name]
            if name[:2] in ("y ", "dx"):
                expected = expected[rows]
            else:
                mine, theirs = mine.float().clone(), theirs.float().clone()
                dist.all_reduce(mine)
                dist.all_reduce(theirs)
            assert expected.abs().max() > 1e-3, f"{case} {name}: nothing to be seen"
            error, before_error = (_error(t, expected, case.dtype) for t in (mine, theirs))
            # In 16 bits both are off by roundings of their own, and ours must not be further off.
            limit = 2e-6 if case.dtype == torch.float32 else 1.5 * before_error + 5e-3
            assert error < limit, f"{case} {name}: off by {error:.2e}, today's path by {before_error:.2e}"
            assert before_error < 3e-2, f"{case} {name}: today's path is off by {before_error:.2e}"


def _count_calls() -> Any:
    """How many overlapped calls have run since."""
    from megatron_fluid.patches import self_attention

    count = 0
    real = self_attention._Overlapped.forward

    def counted(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return real(self, *args)

    self_attention._Overlapped.forward = counted  # type: ignore[method-assign]

    def stop() -> int:
        self_attention._Overlapped.forward = real  # type: ignore[method-assign]
        return count

    return stop


BF16 = torch.bfloat16
CASES = [
    *(Case(te=te, groups=groups, norms=norms) for te in (False, True) for groups, norms in ((1, True), (2, False), (8, True))),
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
    *(Case(te=te, dtype=BF16, norms=True, groups=groups) for te in (False, True) for groups in (1, 4)),
    Case(te=True, dtype=BF16, fused=True, microbatches=2),
    *(Case(te=te, heads=STRADDLING, groups=6, norms=True) for te in (False, True)),
    *(Case(te=True, dtype=dtype, settings=(("normalization", "LayerNorm"),)) for dtype in (torch.float32, BF16)),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_every_gradient_are_those_of_todays_path_and_of_the_whole_sequence(ranks: int) -> None:
    run_ranks(_compare, ranks, CASES, timeout_s=120)


# What is said of modules whose projections stay Megatron's, and how those are built.
LEFT: dict[str, Case] = {
    "attention_dropout=0.1: ": Case(settings=(("attention_dropout", 0.1),)),
    "qk_l2_norm=True: ": Case(settings=(("qk_l2_norm", True),)),
    "recompute_modules=['core_attn']: ": Case(
        settings=(("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
    ),
    "q_layernorm is a LayerNorm": Case(norms=True, settings=(("normalization", "LayerNorm"),)),
    "cp_backend=collective was asked for": Case(),
    "cp_backend=megatron was asked for": Case(te=True),
    "its Patched keeps its own exchange": Case(te=True),
}


def _left(rank: int, ranks: int) -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from megatron_fluid.config import FluidConfig, set_config
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches import self_attention, startup

    alone = _start(ranks)

    def said() -> tuple[bool, str]:
        [(on, reason)] = [(on, why) for feature, on, why, _ in startup.features() if feature == self_attention.FEATURE]
        return on, reason

    for wanted, case in LEFT.items():
        startup._features.clear()
        asked = next((backend for backend in ("collective", "megatron") if backend in wanted), "auto")
        attention = _build(case, ranks, asked)
        on, reason = said()
        assert not on and reason.startswith(wanted) and self_attention.overlapped(attention) is None, (wanted, reason)
        if asked == "auto" and not case.te:
            with pytest.raises(
                ConfigError, match="cp_backend: found 'rounds', allowed: auto, nvlink, collective, megatron: "
            ):
                _build(case, ranks, "rounds")

    def again(attention: Any) -> str:
        startup._features.clear()
        assert self_attention.announce(attention) is None
        return said()[1]

    startup._features.clear()
    attention = _build(Case(), ranks, "auto")
    assert self_attention.overlapped(attention) == "rounds", "on a CPU"
    assert startup.features() == [
        (self_attention.FEATURE, True, "heads move in peer rounds, beside the projections", 1)
    ]
    attention.linear_proj.forward = attention.linear_proj.forward
    assert again(attention) == "linear_proj.forward was replaced on the instance"
    attention = _build(Case(), ranks, "auto")
    attention.linear_qkv.__class__ = type("Adapter", (ColumnParallelLinear,), {})
    assert again(attention) == "linear_qkv is a Adapter, which may compute more than a linear"
    attention = _build(Case(norms=True), ranks, "auto")
    attention.k_layernorm.eps = 1e-3
    assert again(attention) == "q_layernorm and k_layernorm differ in epsilon"

    startup._features.clear()
    assert self_attention.overlapped(_build(Case(), 1, "auto", alone)) is None
    assert not startup.features(), "there is nothing to exchange on one rank"
    set_config(FluidConfig())


def test_what_is_not_overlapped_is_told_with_the_reason_or_refused_where_it_was_asked_for() -> None:
    run_ranks(_left, 2)


def _calls(rank: int, ranks: int) -> list[str]:
    """What is said of single calls; their results are compared with those of a module that is never overlapped."""
    from megatron_fluid.errors import ConfigError
    from megatron_fluid.patches import self_attention

    _start(ranks)
    case = Case(bias=False)
    ours, today = _build(case, ranks, "rounds"), _build(case, ranks, "collective")
    length = 6 * ranks
    rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
    x = torch.randn(length, BATCH, HIDDEN, generator=torch.Generator().manual_seed(3))[rows]
    angles = _angles(case, length)
    assert angles is not None
    part, other = angles[rows], (angles * 2)[rows]
    crooked = part.clone()
    crooked[..., 0] += 1
    mask = torch.ones(length, length).triu(1).bool()[rows][None, None]

    def compare(overlapped: bool, mask: Tensor | None = None, rotations: Any = part) -> None:
        count = _count_calls()
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
    self_attention._paths.clear()  # as for a module that was built before the patches were applied
    compare(True)
    hook = ours.linear_qkv.register_forward_hook(lambda *_: None)
    compare(False)
    hook.remove()
    compare(True)
    replaced, ours.linear_qkv = ours.linear_qkv, _build(case, ranks, "rounds").linear_qkv
    compare(False)
    ours.linear_qkv = replaced
    count = _count_calls()
    packed, cross = SimpleNamespace(qkv_format="sbhd"), SimpleNamespace(is_dynamic_batching=lambda: False)
    with pytest.raises(ConfigError, match="packed_seq_params"):  # as the core attention of the local spec says
        ours(x, None, rotary_pos_emb=part, packed_seq_params=packed)
    with pytest.raises(AttributeError, match="is_decode_only"):  # in Megatron's own forward
        ours(x, None, inference_context=cross)
    assert count() == 0
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        count = _count_calls()
        ours(x, None, rotary_pos_emb=part)
        assert count() == 0
    return sorted(self_attention._said)


def _tables(rank: int, ranks: int) -> None:
    from megatron.core import parallel_state

    from megatron_fluid.patches.rotary_tables import rotary_table

    _start(ranks)
    length = 4 * ranks
    for interleaved in (False, True):
        angles = _angles(Case(interleaved=interleaved), length)
        assert angles is not None
        part = angles[SequenceLayout(length, ranks, "zigzag").positions(rank)]
        half = angles[:, 0, 0, ::2] if interleaved else angles[:, 0, 0, : WIDTH // 2]
        group = parallel_state.get_context_parallel_group()
        for dtype, exact in ((torch.float32, False), (BF16, False), (BF16, True)):
            table = rotary_table(part, dtype, group, interleaved, exact)
            assert table is not None and table.interleaved == interleaved and table.cos.dtype == torch.float32
            seen = torch.float32 if exact else dtype  # Megatron's unfused rotation rounds them to the activations' type
            assert torch.equal(table.cos, half.cos().to(seen).float())
            assert torch.equal(table.sin, half.sin().to(seen).float())
            assert rotary_table(part.detach(), dtype, group, interleaved, exact) is table, "as in a recomputation"
        part.mul_(2)
        changed = rotary_table(part, BF16, group, interleaved, True)
        assert changed is not None and torch.equal(changed.cos, (2 * half).cos())


def test_rotations_of_the_whole_sequence_are_made_once_of_the_ranks_parts() -> None:
    run_ranks(_tables, 2)


def test_calls_that_are_not_overlapped_are_told_and_computed_as_before() -> None:
    for said in run_ranks(_calls, 2):
        assert [text.partition(":")[0] for text in said] == [
            "a hook is registered on linear_qkv",
            "attention_mask is given",
            "autocast or inference is on",
            "inference_context is given",
            "its modules were replaced after it was built",
            "packed_seq_params is given",
            "queries and keys have rotations of their own",
            "rotations are not by pairs",
        ]


def _of_spec(spec: Any, config: Any, _: Any, *args: Any, **rest: Any) -> Any:
    return spec.module(config, spec.submodules, *args, **rest)


def _by_spec(rank: int, ranks: int) -> None:
    from megatron.core.transformer.attention import SelfAttention

    from megatron_fluid import patches
    from megatron_fluid.patches.layer_specs import FluidSelfAttention, with_fluid_attention
    from megatron_fluid.patches.self_attention import overlapped

    _start(ranks)
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
        attention = _build(case, ranks, "rounds", module=functools.partial(_of_spec, outer))
        assert isinstance(attention, SelfAttention) and overlapped(attention) == "rounds"
        count = _count_calls()
        results.append(_step(attention, case, rows, _angles(case, length), length))
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


def _leaves_little_work_alone(module: Any, dtype: torch.dtype) -> None:
    """`auto` takes the overlapped forward over NVLink where there is enough to compute, `nvlink` always."""
    from megatron_fluid.patches import self_attention

    path = self_attention._paths[module]
    batch = 3
    x = torch.zeros(4, batch, module.config.hidden_size, dtype=dtype)
    asked, least = path.config, self_attention._LEAST_FLOPS
    weights = module.linear_qkv.weight.numel() + module.linear_proj.weight.numel()
    length = 4 * path.heads.world
    seen = length / 2 if path.causal else length
    channels = path.heads.num_heads // path.heads.world * path.heads.head_dim
    flops = 2 * 4 * batch * weights + 2 * 2 * batch * length * seen * channels
    assert path.why_not(module, x, None) is None
    path.config = dataclasses.replace(asked, cp_backend="auto")
    try:
        assert "too little work" in path.why_not(module, x, None)
        for least_flops, told in ((flops * 1.01, True), (flops * 0.99, False)):
            self_attention._LEAST_FLOPS = least_flops
            assert (path.why_not(module, x, None) is not None) == told
    finally:
        path.config, self_attention._LEAST_FLOPS = asked, least


def _symmetric(_: int, __: int, ranks: int, cases: list[Case]) -> None:
    """Modules of `ranks` ranks, run by a thread each over simulated symmetric memory, against one on the whole sequence."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fluid.attention import symmetric
    from megatron_fluid.patches import attention as core_patch
    from megatron_fluid.patches import self_attention
    from megatron_fluid.patches.rotary_tables import rotary_table
    from tests.unit.test_attention_symmetric import ThreadDomain, run_threads

    alone = _start(1)
    length = 6 * ranks
    everything, sequence = torch.arange(length), SequenceLayout(length, ranks, "zigzag")
    domains: dict[Any, ThreadDomain] = {}
    core_patch._why_not_nvlink = lambda *_: None
    self_attention.shared_head_domain = domains.__getitem__
    symmetric._ENGINE_BYTES = 256  # so that there are several head groups
    for case in cases:
        whole = _build(case, 1, "auto", alone)
        angles = _angles(case, length)
        reference = _step(whole, case, everything, angles, length)
        if angles is not None:
            table = rotary_table(angles, case.dtype, alone.cp, case.interleaved, True)
            self_attention.rotary_table = lambda *_, table=table: table
        groups = [_Group(rank, ranks) for rank in range(ranks)]
        modules = [_build(case, ranks, "nvlink", ProcessGroupCollection(tp=alone.tp, cp=group)) for group in groups]
        assert [self_attention.overlapped(module) for module in modules] == ["nvlink"] * ranks
        _leaves_little_work_alone(modules[0], case.dtype)
        for mover in ("push", "engine"):

            def body(
                domain: ThreadDomain,
                case: Case = case,
                modules: list[Any] = modules,
                groups: list[_Group] = groups,
                angles: Tensor | None = angles,
            ) -> tuple[dict[str, Tensor], int]:
                domains[groups[domain.rank]] = domain
                module = modules[domain.rank]
                module.zero_grad(set_to_none=True)
                self_attention._paths[module]._call.cache_clear()  # which hold the domain of the mover before
                found = _step(module, case, sequence.positions(domain.rank), angles, length)
                return found, module.core_attention.alone.cache_info().currsize if case.te else 0

            count = _count_calls()
            results = run_threads(ranks, mover, body)
            assert count() == ranks * case.microbatches
            for name, expected in reference.items():
                for rank, (found, _) in enumerate(results):
                    mine, theirs = found[name], expected
                    if name[:2] in ("y ", "dx"):
                        theirs = expected[sequence.positions(rank)]
                    else:
                        mine = torch.stack([other[name] for other, _ in results]).sum(0)
                    assert _error(mine, theirs, case.dtype) < 2e-6, f"{case} {mover} {name} of rank {rank}"
            if case.te and case.groups == HEADS:
                assert results[0][1] == 2, "attention of a head group is another module than that of all heads"


SYMMETRIC = [
    Case(norms=True, groups=8, microbatches=2),
    Case(groups=1, interleaved=True, bias=False),
    Case(te=True, groups=8),
    Case(te=True, groups=4, norms=True),
    Case(te=True, groups=1, rotated=0, causal=False),
    Case(te=True, heads=STRADDLING, groups=6),
]


@NEEDS_INTERPRETER
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_symmetric_memory_it_is_the_same(ranks: int) -> None:
    run_ranks(_symmetric, 1, ranks, SYMMETRIC, timeout_s=200)
