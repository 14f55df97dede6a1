"""What differs between the Megatron-Core versions that are supported: settings and symbols that
older ones lack or name otherwise, and settings of newer ones that this package does not know.

Settings that a version lacks are added to TransformerConfig with the value that means "not asked
for", by rows of the patch table, so that no reader of a configuration has to ask for the version.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from megatron_fluid.patches.engine.patch import Patch
from megatron_fluid.patches.known_settings import KNOWN_FAMILIES, KNOWN_SETTINGS

__all__ = [
    "SETTING_PATCHES",
    "in_prediction",
    "inference_mode",
    "is_grouped_tensor",
    "layer_name",
    "unknown_setting",
]

_CONFIG = "megatron.core.transformer.transformer_config"
_ADDED: dict[str, Any] = {  # setting: its value where a Megatron-Core from 0.16 on lacks it
    "cuda_graph_modules": property(lambda config: config.cuda_graph_scope or None),
    "delay_offload_until_cuda_graph": False,
    "expert_gtp_weight_remat_size": 1,
    "moe_expert_rank_capacity_factor": None,
    "moe_mlp_glu_interleave_size": None,
    "moe_ncclep_zero_copy": False,
    "moe_paged_stash": False,
    "moe_single_grouped_bias": False,
    "moe_single_grouped_weight": False,
    "overlap_dispatch_backward_with_experts_wgrad": False,
    "use_transformer_engine_op_fuser": False,
}


def _lacks(setting: str) -> bool:
    fields = sys.modules[_CONFIG].TransformerConfig.__dataclass_fields__
    return setting not in fields


def _value(setting: str, original: Any) -> Any:
    return _ADDED[setting]


SETTING_PATCHES = tuple(
    Patch(
        name=f"setting {setting}",
        target=f"{_CONFIG}:TransformerConfig.{setting}",
        replacement=functools.partial(_value, setting),
        reason="this Megatron-Core has no such setting; readers find its default",
        adds=True,
        when=functools.partial(_lacks, setting),
        condition="where Megatron-Core is older than this setting",
        group="Settings of newer versions",
    )
    for setting in _ADDED
)


@functools.cache
def inference_mode() -> Callable[[], bool]:
    """What says whether Megatron runs inference; never before 0.18, which does not say so."""
    try:
        return importlib.import_module("megatron.core.inference.utils").InferenceMode.is_active
    except (ImportError, AttributeError):
        return lambda: False


def in_prediction(layer: Any) -> bool:
    """Whether an MoE layer belongs to multi-token prediction; not before 0.17, which does not say
    so."""
    return getattr(layer, "is_mtp_layer", False)


def layer_name(layer: Any) -> str:
    """An MoE layer's name in messages."""
    return f"{'MTP ' if in_prediction(layer) else ''}MoE layer {layer.layer_number}"


def is_grouped_tensor(parameter: Any) -> bool:
    """Whether Megatron takes a parameter for Transformer Engine's packed experts."""
    from megatron.core import fp8_utils

    return getattr(fp8_utils, "is_grouped_tensor", lambda parameter: False)(parameter)


@functools.cache
def _unknown_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """Fields of Megatron's own configuration classes; those of a framework's subclass are its
    own affair."""
    own = [c for c in kind.__mro__ if c.__module__.startswith("megatron.core.")]
    names = {name for c in own for name in inspect.get_annotations(c)} - KNOWN_SETTINGS
    names = {name for name in names if not name.startswith(KNOWN_FAMILIES)}
    return [f for f in dataclasses.fields(kind) if f.name in names]


def unknown_setting(config: Any, others: str = "-") -> str | None:
    """The first setting of a configuration that this package does not know and whose value is not
    its default, as `setting=value: reason`; or None. others: how settings begin that concern other
    layers."""
    kind: type = type(config)
    for field in _unknown_fields(kind) if dataclasses.is_dataclass(kind) else ():
        value, default = getattr(config, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        concerns = not field.name.startswith(others)
        if concerns and value is not default and value != default:
            return f"{field.name}={value!r}: a setting that megatron_fluid does not know"
    return None
