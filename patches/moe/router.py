"""The choices of Megatron's router as it makes them, [T, K], without the dense maps [T, E] that it
makes of them.

Everything of the router runs as it is: gating, z-loss, top-k, aux losses, expert bias. Only the
function that scatters the chosen probabilities into maps is asked for them as they are, for which
it has an argument (`dense_output`). Where the maps are needed, or another function makes them, the
router is left alone.

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, H hidden.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["route", "topk_routing"]

# While `wanted`, the next routing in this thread is to be compact; it leaves its choices in `ids`.
_request = threading.local()


def topk_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `topk_routing_with_score_function`: as Megatron's, but for the routing that `route`
    asks for."""

    @functools.wraps(original)
    def fluid_topk_routing(
        logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not getattr(_request, "wanted", False):
            return original(logits, *args, **kwargs)
        _request.wanted = False
        learning = torch.is_grad_enabled()
        # Without gradients Megatron leaves the chosen of a token unsorted. Their order is the order
        # in which rows are summed, and a recomputation shall find the same sums.
        with torch.enable_grad():
            logits = logits if learning else logits.detach()
            probs, ids = original(logits, *args, **kwargs, dense_output=True)
        _request.ids = ids
        if not _request.counted:
            return probs, ids
        counted = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        return probs, counted.scatter_(1, ids, True)

    return fluid_topk_routing


def route(
    layer: MoELayer, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """`layer.route(hidden_states, padding_mask)`, compact where that changes nothing.

    Args:
        layer: whose router is asked.
        hidden_states: [S, B, H].
        padding_mask: [S, B] bool, or None.

    Returns:
        (probs [T, K], the experts chosen, integers [T, K], True), the chosen of a token best first;
        or Megatron's (probs [T, E], routing_map bool [T, E], False).
    """
    _request.ids = None
    _request.wanted = _can_be_compact(layer)
    _request.counted = _request.wanted and layer.router.enable_expert_bias
    try:
        probs, routing_map = layer.route(hidden_states, padding_mask)
        ids = _request.ids
    finally:
        _request.wanted, _request.ids = False, None
    return (probs, routing_map, False) if ids is None else (probs, ids, True)


def _can_be_compact(layer: MoELayer) -> bool:
    """Whether nothing but the count for the expert bias needs the dense maps."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.router import TopKRouter

    router: Any = layer.router
    config = layer.config
    return (
        type(router) is TopKRouter
        and type(layer).route is MoELayer.route
        and config.moe_expert_capacity_factor is None  # drops by the maps
        and not config.moe_router_fusion  # Transformer Engine's kernel makes maps alone
        and router.router_replay is None
        and not router._forward_hooks
        and not {"forward", "routing"} & router.__dict__.keys()
        and "route" not in layer.__dict__
    )
