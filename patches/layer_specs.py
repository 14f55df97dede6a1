"""Layer specs: the overlapped MoE layer and attention by Megatron's own means, without any patch.

`get_fluid_custom_layers(config)` is Megatron's spec for that configuration with `FluidMoELayer` in
the place of MoELayer and, for context parallelism, `FluidSelfAttention` with an `exchanged(...)`
core attention in the place of its self-attention. Their methods are the replacements that the patch
table names, on the same parameters.

    model = GPTModel(config, transformer_layer_spec=get_fluid_custom_layers(config), ...)
    --spec megatron_fluid.patches.layer_specs get_fluid_custom_layers  (megatron.training)
    --spec megatron_fluid.patches.layer_specs fluid_layer_spec         (also pretrain_gpt.py)
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)
from megatron.core.utils import get_pg_rank

from megatron_fluid import patches

__all__ = [
    "FluidMoELayer",
    "FluidSelfAttention",
    "FluidTransformerLayer",
    "exchanged",
    "fluid_layer_spec",
    "get_fluid_custom_layers",
    "with_fluid_attention",
    "with_fluid_moe",
]

logger = logging.getLogger("megatron_fluid")


def _without_patches(base: Any, name: str, *rows: str) -> Any:
    """A subclass of one of Megatron's classes whose methods are the replacements in these rows of
    the patch table. A row that is applied has replaced the method of the class itself."""
    table = {patch.name: patch for patch in patches.PATCHES}
    methods = dict(_method(base, table[row]) for row in rows)
    return type(name, (base,), {"needs_no_patch": True, "__module__": __name__, **methods})


def _method(base: Any, patch: patches.Patch) -> tuple[str, Callable[..., Any]]:
    attribute = patch.target.rpartition(".")[2]
    replace = functools.cache(patch.factory)

    @functools.wraps(getattr(base, attribute), assigned=("__name__", "__doc__"))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        stock = getattr(base, attribute)
        if attribute == "__init__":  # of a class with two bases, that of the other one
            mro = type(self).__mro__
            own: Any = next(kind for kind in mro if vars(kind).get("__init__") is method)
            stock = super(own, type(self)).__init__
        run = stock if patches.is_applied(patch.name) else replace(stock)
        return run(self, *args, **kwargs)

    return attribute, method


# Parameters, state dicts and arguments are those of Megatron's classes. ConfigError: a backend that
# was asked for by name is unavailable.
FluidMoELayer = _without_patches(
    MoELayer, "FluidMoELayer", "moe-layer-init", "moe-layer", "moe-experts", "moe-delayed-gradients"
)
FluidSelfAttention = _without_patches(
    SelfAttention, "FluidSelfAttention", "self-attention-init", "self-attention"
)


class FluidTransformerLayer(TransformerLayer):
    """A TransformerLayer that takes its submodules from its configuration: what a spec made without
    one is built from.

    The layer's number decides (by `config.moe_layer_freq`) whether it is a dense or an MoE layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int = 1,
        **kwargs: Any,
    ) -> None:
        if submodules is None:
            number, groups = layer_number, kwargs.get("pg_collection")
            if kwargs.get("add_layer_offset", True) and not kwargs.get("is_mtp_layer"):
                stage = None if groups is None else get_pg_rank(groups.pp)
                number += get_transformer_layer_offset(config, kwargs.get("vp_stage"), stage)
            layers = get_gpt_decoder_layer_specs(config, **_spec_options(config))
            submodules = with_fluid_attention(with_fluid_moe(layers[number - 1])).submodules
        super().__init__(config, submodules, layer_number, **kwargs)


fluid_layer_spec = ModuleSpec(module=FluidTransformerLayer)
"""The spec of a layer that reads its own configuration when it is built."""


def get_fluid_custom_layers(
    config: TransformerConfig | None = None, vp_stage: int | None = None
) -> TransformerBlockSubmodules | ModuleSpec:
    """A layer spec for `GPTModel(config, transformer_layer_spec=...)` with the overlapped MoE layer
    and attention; of Transformer Engine's modules where `config.transformer_impl` says so and it is
    installed.

    Args:
        config: the model's configuration. Without it, each layer reads its own when it is built.
        vp_stage: virtual pipeline stage, as for Megatron's get_gpt_decoder_block_spec.

    Returns:
        With a configuration the block's submodules (the layers of this pipeline stage), without one
        a ModuleSpec.
    """
    if config is None:
        return fluid_layer_spec
    # megatron.training hands a callable spec its model configuration.
    model = getattr(config, "transformer", config)
    block = get_gpt_decoder_block_spec(model, vp_stage=vp_stage, **_spec_options(model))
    return with_fluid_attention(with_fluid_moe(block))


def _spec_options(config: TransformerConfig) -> dict[str, Any]:
    """What Megatron's functions of specs take from a configuration."""
    wanted = config.transformer_impl == "transformer_engine"
    if wanted and not HAVE_TE:
        _warn_of_local_modules()
    return {
        "use_transformer_engine": wanted and HAVE_TE,
        "normalization": config.normalization,
        "qk_l2_norm": config.qk_l2_norm,
    }


@functools.cache
def _warn_of_local_modules() -> None:
    logger.warning(
        "transformer_impl='transformer_engine' is the default, but it is not installed: local "
        "modules are used"
    )


def _each_layer(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Let a function of a layer's spec take a block's, too."""

    @functools.wraps(change)
    def of_layer_or_block(spec: Any) -> Any:
        if isinstance(spec, TransformerBlockSubmodules):
            layers = [change(layer) for layer in spec.layer_specs or ()]
            return dataclasses.replace(spec, layer_specs=layers)
        return change(spec)

    return of_layer_or_block


def _with_submodule(spec: ModuleSpec, **submodule: Any) -> ModuleSpec:
    submodules: Any = spec.submodules
    return dataclasses.replace(spec, submodules=dataclasses.replace(submodules, **submodule))


@_each_layer
def with_fluid_moe(spec: Any) -> Any:
    """A copy of one of Megatron's specs (a layer's or a block's) with FluidMoELayer in the place of
    MoELayer."""
    mlp = getattr(spec.submodules, "mlp", None)
    if isinstance(mlp, functools.partial) and mlp.func is MoELayer:
        return _with_submodule(
            spec, mlp=functools.partial(FluidMoELayer, *mlp.args, **mlp.keywords)
        )
    if isinstance(mlp, ModuleSpec) and mlp.module is MoELayer:
        return _with_submodule(spec, mlp=dataclasses.replace(mlp, module=FluidMoELayer))
    return spec


# Core attention, and the patch that would serve it.
_CORES: dict[Any, str] = {DotProductAttention: "context-parallel-attention"}
if HAVE_TE:
    _CORES[TEDotProductAttention] = "context-parallel-te-attention"


@functools.cache
def exchanged(core: Any) -> Any:
    """A core attention (Megatron's DotProductAttention or TEDotProductAttention) whose exchange is
    megatron_fluid's.

    With one context-parallel rank, or where the configuration is not served, its objects are the
    original's.
    """
    return _without_patches(core, "ExchangedAttention", _CORES[core])


@_each_layer
def with_fluid_attention(spec: Any) -> Any:
    """A copy of one of Megatron's specs (a layer's or a block's) with `exchanged` core attention
    and FluidSelfAttention around it, where both are Megatron's."""
    outer: Any = getattr(spec.submodules, "self_attention", None)
    core = getattr(getattr(outer, "submodules", None), "core_attention", None)
    if core not in _CORES:
        return spec
    outer = _with_submodule(outer, core_attention=exchanged(core))
    if outer.module is SelfAttention:
        outer = dataclasses.replace(outer, module=FluidSelfAttention)
    return _with_submodule(spec, self_attention=outer)
