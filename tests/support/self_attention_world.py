"""Megatron's SelfAttention as the tests of its patch build and run it: one module of fixed weights
under any setting in Megatron's local spec or Transformer Engine's (stand-ins for its classes)."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import checkpoint, model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches.attention import self_attention
from tests.support.te_attention import (
    HEADS,
    Linear,
    NormLinear,
    TELayerNorm,
    TENorm,
    know_stand_ins,
    patched_core,
)

WIDTH, BATCH, HIDDEN = 8, 2, 48


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


def _spec(case: Case) -> Any:
    settings = dict(case.settings)
    kind, l2 = settings.get("normalization", "RMSNorm"), bool(settings.get("qk_l2_norm"))
    if not case.te:
        return get_gpt_layer_local_submodules(
            qk_layernorm=case.norms, normalization=kind, qk_l2_norm=l2
        ).self_attention.submodules

    norm = (TELayerNorm if kind == "LayerNorm" else TENorm) if case.norms else None
    if l2:
        norm = L2Norm
    return SelfAttentionSubmodules(
        linear_qkv=NormLinear, core_attention=patched_core(), linear_proj=Linear, q_layernorm=norm,
        k_layernorm=norm,
    )  # fmt: skip


def _config(case: Case, ranks: int) -> Any:
    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": case.heads,
        "num_query_groups": case.groups, "kv_channels": WIDTH, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "context_parallel_size": ranks, "cp_comm_type": "a2a",
        "add_bias_linear": case.bias, "qk_layernorm": case.norms,
        "rotary_interleaved": case.interleaved, "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16, "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True, "normalization": "RMSNorm", "persist_layer_norm": False,
        "layernorm_zero_centered_gamma": case.te,
    }  # fmt: skip
    settings |= dict(case.settings)
    # Megatron's GPTModel puts these on the configuration.
    yarn = {name: settings.pop(name) for name in list(settings) if name.startswith("yarn_")}
    config = TransformerConfig(**settings)
    for name, value in yarn.items():
        setattr(config, name, value)
    return config


def start(ranks: int) -> Any:
    """Parallel state, patches, and a group of this rank alone."""
    torch.set_num_threads(1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=ranks)
        know_stand_ins()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    tensor = parallel_state.get_tensor_model_parallel_group()
    return ProcessGroupCollection(tp=tensor, cp=tensor)


def build(case: Case, ranks: int, backend: str, groups: Any = None, module: Any = None) -> Any:
    """Megatron's SelfAttention with weights of a fixed seed; ``groups``: its process groups, by
    default those of parallel state."""
    how = {"cp_backend": backend, "defer_weight_grads": case.deferred}
    set_config(FluidConfig(dx_chunks=2, **how))  # type: ignore[arg-type]
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


def angles_of(case: Case, length: int) -> Tensor | None:
    if not case.rotated:
        return None
    rotary = RotaryEmbedding(
        WIDTH, case.rotated / WIDTH, case.interleaved, use_cpu_initialization=True
    )
    return rotary.get_emb(length)


def step(
    attention: Any, case: Case, rows: Tensor, angles: Tensor | None, length: int,
    dtype: torch.dtype | None = None, packed: Any = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Outputs, input gradients and parameter gradients (or what was added to main_grad) of some
    microbatches. `rows` are this rank's, of ``length``; `angles` those of all positions, with
    `packed` (PackedSeqParams) of one sequence. `dtype`: computed in, if not the case's."""
    part = angles if angles is None or packed is not None else angles[rows]
    more = {} if packed is None else {"packed_seq_params": packed}
    shape = length, BATCH if packed is None else 1, attention.config.hidden_size
    found: dict[str, Tensor] = {}
    for microbatch in range(case.microbatches):
        generator = torch.Generator().manual_seed(50 + microbatch)
        inputs, upstream = (torch.randn(shape, generator=generator) for _ in range(2))
        dtype = dtype or case.dtype
        inputs, upstream = (t[rows].to(case.dtype).to(dtype) for t in (inputs, upstream))
        x = inputs.requires_grad_()

        def call(hidden: Tensor, rotations: Tensor | None) -> Tensor:
            y, bias = attention(hidden, None, rotary_pos_emb=rotations, **more)
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


def fuse(attention: Any) -> list[Tensor]:
    """Give the projections main_grads, as Megatron's DDP does, and have them decided about anew;
    gives the hooks' record."""
    fired: list[Tensor] = []
    for linear in (attention.linear_qkv, attention.linear_proj):
        of_te, of_megatron = "fuse_wgrad_accumulation", "gradient_accumulation_fusion"
        setattr(linear, of_te if hasattr(linear, of_te) else of_megatron, True)
        weight = linear.weight
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(fired.append)
    set_config(FluidConfig(cp_backend="rounds", dx_chunks=2))
    self_attention.DECISIONS.announce(attention)
    set_config(None)
    return fired


def error_of(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The largest difference as a share of the largest value; in 16 bits root mean squares."""
    a, b = found.double(), expected.double()
    if dtype.itemsize == 2:
        return float(((a - b).square().mean() / b.square().mean()).sqrt())
    return float((a - b).abs().max() / b.abs().max())


def check_shares(
    found: dict[str, Tensor], whole: dict[str, Tensor], rows: Tensor, dtype: torch.dtype, case: Any
) -> dict[str, float]:
    """Raise where this rank's rows, or the sum of all ranks' shares of a gradient, are not those of
    the module on the whole sequence; gives how far off they are. Collective."""
    assert found.keys() == whole.keys(), case
    errors = {}
    limit = 3e-2 if dtype.itemsize == 2 else 2e-6
    for name, expected in whole.items():
        mine = found[name].float().clone()
        if name[:2] in ("y ", "dx"):
            expected = expected[rows]
        else:
            dist.all_reduce(mine)
        assert expected.abs().max() > 1e-3, f"{case} {name}: nothing to be seen"
        errors[name] = error_of(mine, expected, dtype)
        assert errors[name] < limit, f"{case} {name}: off by {errors[name]:.2e}"
    return errors


class Pair:
    """One module of each backend with the same weights, ``today`` around the exchange of heads; and
    this rank's rows of an input, as Megatron hands them over, with their angles."""

    def __init__(self, rank: int, ranks: int, backend: str = "auto") -> None:
        case, length = Case(bias=False), 6 * ranks
        self.ours, self.today = build(case, ranks, backend), build(case, ranks, "collective")
        rows = SequenceLayout(length, ranks, "zigzag").positions(rank)
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, BATCH, HIDDEN, generator=generator)[rows]
        angles = angles_of(case, length)
        assert angles is not None
        self.angles = angles[rows]
        self.mask = torch.ones(length, length).triu(1).bool()[rows][None, None]

    def compare(self, overlapped: bool, mask: Tensor | None = None, **rotations: Any) -> None:
        """Both give the same, ours overlapped or not. rotations: by default the angles."""
        rotations = {"rotary_pos_emb": self.angles, **rotations}
        count = count_calls()
        y = self.ours(self.x, mask, **rotations)[0]
        assert count() == overlapped
        expected = self.today(self.x, mask, **rotations)[0]
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def count_calls() -> Any:
    """How many overlapped calls have run since."""
    count = 0
    real = self_attention.OverlappedAttention.forward

    def counted(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return real(self, *args)

    self_attention.OverlappedAttention.forward = counted  # type: ignore[method-assign]

    def stop() -> int:
        self_attention.OverlappedAttention.forward = real  # type: ignore[method-assign]
        return count

    return stop
