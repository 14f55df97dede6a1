"""What Megatron's CUDA graphs hold of an MoE layer, and the router inside its partial graphs
(`--cuda-graph-impl transformer_engine` with the modules moe_router and moe_preprocess), the experts
outside of them.

With these modules Megatron captures a layer up to the router, or up to the preprocessing of its
dispatcher. In a replay it leaves what was captured in the layer's `cudagraph_tensor_store` and
calls the layer, whose `route` and `shared_experts_compute` then return it. The overlapped
path needs the routing map of the graph: with moe_preprocess, too, the graph ends after the router,
and the map leaves it as an attribute of the dispatcher.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["Held", "capture", "held_by_graphs", "routing_map_of"]

_ATTRIBUTE = "fluid_routing_map"  # of the token dispatcher
_ROUTER = {"moe_router", "moe_preprocess"}


class Held(enum.Enum):
    """What CUDA graphs hold of an MoE layer: nothing; the router, and perhaps the preprocessing of
    the token dispatcher; the whole layer; a whole iteration; or phases that only Megatron's own
    forward runs one by one."""

    NOTHING = enum.auto()
    ROUTER = enum.auto()
    LAYER = enum.auto()
    ITERATION = enum.auto()
    PHASES = enum.auto()

    @property
    def experts(self) -> bool:
        """Whether experts are in a graph, as part of a layer or of an iteration."""
        return self in (Held.LAYER, Held.ITERATION)


def held_by_graphs(config: TransformerConfig) -> Held:
    """What CUDA graphs hold of the MoE layers of this configuration."""
    impl = config.cuda_graph_impl
    if impl in ("none", "full_iteration"):
        return Held.NOTHING if impl == "none" else Held.ITERATION
    modules = {module.name for module in config.cuda_graph_modules or ()}
    router = modules & _ROUTER
    if impl == "local" and router:
        return Held.PHASES
    # With impl local the graph of attn is the whole layer's.
    if not modules or "moe" in modules or (impl == "local" and "attn" in modules):
        return Held.LAYER
    if not modules <= {"attn", "mlp", "mamba"} | _ROUTER:
        return Held.PHASES
    return Held.ROUTER if router else Held.NOTHING


def routing_map_of(layer: MoELayer, found: Tensor | None) -> Tensor:
    """The routing map of this call, bool [T, E]: `found`, what `layer.route` gave, or where that is
    None the one that came out of the graph."""
    return getattr(layer.token_dispatcher, _ATTRIBUTE) if found is None else found


def capture(
    layer: MoELayer, original: Callable[..., Any], hidden_states: Tensor, mask: Tensor | None
) -> Any:
    """The forward of a layer while a graph is captured that holds its router. With moe_router
    alone it is Megatron's, `original`, which ends after the router. With moe_preprocess, too, it
    ends there, and gives the outputs of a graph that ends after the preprocessing."""
    if all(module.name != "moe_preprocess" for module in layer.config.cuda_graph_modules):
        return original(layer, hidden_states, padding_mask=mask)
    from megatron.core.transformer.moe.moe_utils import MoECudaGraphPartialCaptureSignal

    mask = None if mask is None else mask.transpose(0, 1).bool()
    shared = layer.shared_experts_compute(hidden_states)
    probs, routing_map = layer.route(hidden_states, mask)
    dispatcher: Any = layer.token_dispatcher
    dispatcher.cudagraph_attrs = [_ATTRIBUTE]
    setattr(dispatcher, _ATTRIBUTE, routing_map)
    outputs = {"hidden_states": hidden_states, "probs": probs}
    signal = MoECudaGraphPartialCaptureSignal(layer, "preprocess", **outputs)
    return signal.get_early_return_outputs(hidden_states, shared)
