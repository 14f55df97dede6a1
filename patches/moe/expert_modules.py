"""Megatron's expert modules: which of them the overlapped path can bypass, with their activation,
and where their parameters lie.

Asked before a layer's first call, and again where its experts have changed (own_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations, fp8_utils
from megatron.core.fusions import fused_bias_geglu
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.moe.activations import Activation, Variant, resolve_activation
from megatron_fluid.patches import versions
from megatron_fluid.patches.engine.module_hooks import ModuleHooks, is_foreign

__all__ = [
    "activation_name",
    "descends",
    "expert_modules_reason",
    "linears_of",
    "resolve",
    "share_storage",
]

# (config.activation_func, config.gated_linear_unit): name of the Activation. Megatron
# compares the function object, and so does this.
_ACTIVATIONS: dict[tuple[Callable[..., Any], bool], str] = {
    (F.silu, True): "swiglu",
    (F.gelu, True): "geglu",
    (F.silu, False): "silu",
    (F.gelu, False): "gelu",
    (F.relu, False): "relu",
    (activations.squared_relu, False): "relu2",
}
_QUICK_GELU = (activations.quick_gelu, fused_bias_geglu.quick_gelu)  # Megatron has it twice


def activation_name(config: TransformerConfig) -> str | None:
    """Name of the activation that `config` asks for, or None where the overlapped path has none."""
    if config.activation_func in _QUICK_GELU:
        return "quick_geglu" if config.gated_linear_unit else "quick_gelu"
    return _ACTIVATIONS.get((config.activation_func, bool(config.gated_linear_unit)))


def resolve(config: TransformerConfig, grouped: bool = False) -> Activation:
    """The activation that `config` asks for; activation_name must know it.

    Args:
        grouped: of a TEGroupedMLP, which alone reads moe_mlp_glu_interleave_size.
    """
    name = activation_name(config)
    assert name is not None
    if not config.gated_linear_unit:
        return resolve_activation(name)
    interleave = (config.moe_mlp_glu_interleave_size or 0) if grouped else 0
    limit, offset = config.activation_func_clamp_value, float(config.glu_linear_offset)
    return resolve_activation(name, variant=Variant(limit, offset, interleave))


def _te_linear_types() -> tuple[type, ...]:
    """Transformer Engine's expert linears, where it is installed: their weights are plain
    parameters too."""
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        return ()
    names = [
        f"TE{kind}Parallel{grouped}Linear"
        for kind in ("Column", "Row")
        for grouped in ("", "Grouped")
    ]
    found = (getattr(extension, name, None) for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def linears_of(experts: torch.nn.Module) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that hold fc1 and fc2: El of each in SequentialMLP, one of each in
    TEGroupedMLP."""
    if isinstance(experts, SequentialMLP):
        locals_ = list(experts.local_experts)
        return [e.linear_fc1 for e in locals_], [e.linear_fc2 for e in locals_]
    return [experts.linear_fc1], [experts.linear_fc2]  # type: ignore[list-item]


def expert_modules_reason(experts: torch.nn.Module) -> str | None:
    """Why these expert modules cannot be bypassed, or None.

    A class that Megatron does not build itself (a LoRA wrapper, a quantised linear, a subclass) may
    compute something else than a plain linear, so that only the classes known here are taken over.
    """
    if type(experts) not in (SequentialMLP, TEGroupedMLP):
        name = type(experts).__name__
        return f"experts are a {name}; SequentialMLP and TEGroupedMLP can be taken over"
    config: Any = experts.config
    mlps: list[Any] = [*experts.local_experts] if isinstance(experts, SequentialMLP) else [experts]
    for index, mlp in enumerate(mlps):
        if mlp is not experts and type(mlp) is not MLP:
            return f"local_experts.{index} is a {type(mlp).__name__}, not Megatron's MLP"
        if mlp.config is not config:
            return f"local_experts.{index} has another config than the experts"
        if mlp.activation_func is not config.activation_func:
            return "activation_func of the experts was replaced"
    known = (ColumnParallelLinear, RowParallelLinear, *_te_linear_types())
    for linear in (linear for linears in linears_of(experts) for linear in linears):
        if type(linear) not in known:
            name = type(linear).__name__
            return f"an expert's linear is a {name}, which may compute more than a linear"
        if "_forward_impl" in vars(linear) or is_foreign(
            getattr(type(linear), "_forward_impl", None)
        ):
            return "_forward_impl of an expert's linear was replaced"
        if getattr(linear, "te_quant_params", None) is not None:
            return "an expert's linear has its own quantisation recipe"
    fused = config.bias_activation_fusion and isinstance(experts, SequentialMLP)
    if fused and config.add_bias_linear and config.activation_func_clamp_value is not None:
        return "SequentialMLP's fused activation clamps before it adds the bias"
    modules = ModuleHooks(experts=experts)
    if (reason := modules.replaced() or modules.overridden() or modules.foreign()) is not None:
        return reason
    if is_foreign(layers.linear_with_grad_accumulation_and_async_allreduce):
        return "the GEMM of Megatron's linears was replaced (by a quantiser, say)"
    weights, biases = _names_of(experts, "weight"), _names_of(experts, "bias")
    if missing := [name for name, there in weights if not there]:
        return f"an expert's linear has no parameter {missing[0]!r}"
    if {there for _, there in biases} != {bool(config.add_bias_linear)}:
        return f"biases of the experts' linears, with add_bias_linear={config.add_bias_linear}"
    for name, parameter in experts.named_parameters():
        if (reason := _unreadable(parameter)) is not None:
            return f"experts.{name} is a {reason}"
        if hasattr(parameter, "__fsdp_param__"):
            return f"experts.{name} is Megatron-FSDP's, whose gradient buffers come and go"
    if len({parameter.requires_grad for parameter in experts.parameters()}) > 1:
        return "some expert weights are frozen and some are not"
    return None


def _names_of(experts: torch.nn.Module, kind: str) -> list[tuple[str, bool]]:
    """The names of the experts' parameters of a kind, "weight" or "bias", in each of their linears,
    and whether each is there."""
    held = [linear._parameters for linears in linears_of(experts) for linear in linears]
    packed = any(parameters.get(kind) is not None for parameters in held)
    names = [kind]
    if isinstance(experts, TEGroupedMLP) and not packed:
        names = [f"{kind}{i}" for i in range(experts.num_local_experts)]
    return [(name, parameters.get(name) is not None) for parameters in held for name in names]


def _unreadable(parameter: Any) -> str | None:
    """What a parameter is whose values cannot be read where they lie, or None."""
    kind = type(parameter)
    if not versions.is_grouped_tensor(parameter):
        if kind is torch.nn.Parameter and type(parameter.data) is torch.Tensor:
            return None
        if kind is type(parameter.data):
            return f"{kind.__name__}, not an nn.Parameter"
        return f"{type(parameter.data).__name__}, not a plain tensor"
    values: Any = getattr(parameter, "rowwise_data", None)
    if kind is not fp8_utils.GroupedTensor or type(values) is not torch.Tensor:
        return f"{kind.__name__} without rowwise_data of its own"
    if parameter.quantizer is not None or values.dtype != parameter.dtype:
        return f"{kind.__name__} of quantised values"
    if values.numel() != parameter.numel() or not values.is_contiguous():
        return f"{kind.__name__} of parts that do not lie one after the other"
    return None


def descends(weights: tuple[torch.nn.Parameter, ...]) -> bool:
    """Whether matrices share a storage, and the last one comes before the first."""
    first, last = weights[0], weights[-1]
    same = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and last.storage_offset() < first.storage_offset()


def _owns_storage(weight: torch.nn.Parameter) -> bool:
    storage = weight.untyped_storage()
    # Two hold it: the parameter, and the Python object `storage`.
    return storage.nbytes() == weight.nbytes and torch._C._storage_Use_Count(storage._cdata) == 2


def share_storage(weights: tuple[torch.nn.Parameter, ...]) -> None:
    """Move parameters that each own a storage into a common one. Parameters inside a larger buffer
    stay there, and so do those whose memory others hold, too: torch's FSDP2, which goes on
    gathering into it, or a model that shares weights."""
    kinds = {(weight.shape, weight.dtype, weight.is_contiguous()) for weight in weights}
    owned = all(map(_owns_storage, weights))
    if len(weights) == 1 or len(kinds) != 1 or not weights[0].is_contiguous() or not owned:
        return
    # Leave inference mode: an evaluation must not turn parameters into inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        stack = weights[0].new_empty((len(weights), *weights[0].shape))
        for place, weight in zip(stack, weights, strict=True):
            place.copy_(weight)
            weight.data = place
