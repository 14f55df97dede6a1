"""The exchange of a Megatron layer: its backend, and the maps of Megatron's router as backends take
them, as the chosen experts of each token and their probabilities.

Shapes: T tokens, K top-k, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.backends import BACKENDS, Backend, LayerShape
from megatron_fluid.moe.room import LayerRoom
from megatron_fluid.patches import versions
from megatron_fluid.patches.arguments import microbatch_room
from megatron_fluid.patches.moe.limits import batch_invariant, bounds_rows
from megatron_fluid.patches.moe.own_experts import routes_as_megatron
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["chosen_of", "make_backend"]


def make_backend(layer: MoELayer, config: FluidConfig, name: str, *, fused: bool) -> Backend:
    """Make what moves the tokens of a layer, from call to call.

    Args:
        config: the settings that the layer keeps.
        name: one of BACKENDS.
        fused: whether the layer is fused; only then dX is chunked, and calls may be captured in a
            CUDA graph over symmetric memory.
    """
    c = layer.config
    captured = fused and name == "nvlink" and bounds_rows(c)
    shape = LayerShape(
        group=real_group(layer.ep_group),
        num_experts=int(c.num_moe_experts),
        top_k=_top_k(layer),
        ffn=int(c.moe_ffn_hidden_size),
        name=versions.layer_name(layer),
        dx_chunks=config.dx_chunks if fused else 1,
        captured=LayerRoom() if captured else None,
        batch_invariant=batch_invariant(c, config),
        room=microbatch_room(),
    )
    return BACKENDS[name](shape, shared_rounds(layer.ep_group, config.timeout_s))


def chosen_of(
    layer: MoELayer, probs: Tensor, routing_map: Tensor, columns: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The choices in the maps [T, E] of a layer's router: by a kernel on a GPU, else by torch.
    Differentiable in probs. The host does not wait for a GPU.

    Args:
        columns: the experts in the order in which ranks keep them, None for their own. [E]

    Returns:
        (indices in that order, ascending, -1 where a token has fewer [T, K]; fp32 probs [T, K],
        fp64 ones stay)

    Raises:
        RuntimeError: a router that is not Megatron's chose more experts of a token than K; on a GPU
            an assertion fails there.
    """
    top_k = _top_k(layer)
    if layer.config.moe_pad_expert_input_to_capacity:
        # Choices of probability 0 only pad: they contribute nothing to a result or a gradient.
        routing_map = routing_map & (probs.detach() != 0)
    if not routes_as_megatron(layer.router):
        text = f"a router that is not Megatron's chose more experts than moe_router_topk={top_k}"
        torch._assert_async((routing_map.sum(dim=1) <= top_k).all(), text)
    if probs.is_cuda:
        from megatron_fluid.moe.fused_router import chosen_of as by_kernel

        return by_kernel(probs, routing_map, top_k, columns)
    if columns is not None:
        probs, routing_map = probs.index_select(1, columns), routing_map.index_select(1, columns)
    # Stable: the chosen experts in ascending order, then the others.
    kept, ids = routing_map.int().sort(dim=1, descending=True, stable=True)
    kept, ids = kept[:, :top_k], ids[:, :top_k]
    chosen = probs.gather(1, ids)
    wide = torch.promote_types(chosen.dtype, torch.float32)
    return torch.where(kept != 0, ids, -1), chosen.to(wide)


def _top_k(layer: MoELayer) -> int:
    router: Any = layer.router  # Megatron's has read moe_router_topk when it was built
    return int(router.topk if routes_as_megatron(router) else layer.config.moe_router_topk)
