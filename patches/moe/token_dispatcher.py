"""Our exchange under anybody's experts: a token dispatcher behind Megatron's own interface.

Where a setting or a module rules out the fused path but not this exchange (limits.py), the layer
runs Megatron's forward, and FluidTokenDispatcher takes the place of its token dispatcher. The
experts are SeparateExperts, or Megatron's modules, called as ever: Transformer Engine's in any
precision, sequential ones, with biases, with adapters, offloaded. Between them and the transports
stand two differentiable functions (megatron_fluid/moe/open_exchange.py).

    dispatch_preprocess   choices of the routing map
    token_dispatch        the dispatch
    dispatch_postprocess  rows padded where the experts want full tiles
    combine_preprocess    the padding taken off
    token_combine         the combine
    combine_postprocess   shared experts

Shapes: S sequence, B batch, T = S * B tokens of this rank, K top-k, E experts, El of this rank, H
hidden, N rows for this rank's experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor

from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.errors import FluidError
from megatron_fluid.moe.backends import Backend
from megatron_fluid.moe.open_exchange import OpenExchange
from megatron_fluid.patches import versions
from megatron_fluid.patches.moe.exchange import chosen_of
from megatron_fluid.patches.moe.separate_experts import PhaseByPhase
from megatron_fluid.patches.step_log import TOKEN_COUNTS

__all__ = ["FluidTokenDispatcher", "install"]


@dataclass
class _Call:
    """One call of a layer, from dispatch_preprocess to combine_postprocess.

    Attributes:
        opened: the exchange.
        shape: of the hidden states. [S, B, H]
        dtypes: of the hidden states, and of the router's probabilities.
        result: dtype of the experts' results, which under autocast is another.
        counts: rows of each local expert, once they have arrived. [El]
        places: of each row its index among the padded ones, or None without padding. [N]
    """

    opened: OpenExchange
    shape: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]
    result: torch.dtype | None = None
    counts: list[int] = field(default_factory=list)
    places: Tensor | None = None


def install(layer: MoELayer, path_of: Callable[[MoELayer], Any]) -> None:
    """Put a FluidTokenDispatcher in the place of the layer's token dispatcher, if it is not there
    already. path_of: as for FluidTokenDispatcher."""
    current: Any = layer.token_dispatcher
    if not (isinstance(current, FluidTokenDispatcher) and current.serves(layer)):
        layer.token_dispatcher = FluidTokenDispatcher(layer, path_of)


class FluidTokenDispatcher(MoETokenDispatcher):
    """Megatron's interface of a token dispatcher over this package's transports. Calls that it does
    not serve (inference; a layer that keeps Megatron's path after all) go to Megatron's dispatcher.

    Args:
        layer: whose dispatcher this is to be; its present one is kept for those calls.
        path_of: what serves a layer, a PhaseByPhase where this dispatcher does. A function of a
            module, which a copy of the layer shares. Collective in the layer's first call.

    Attributes:
        stock: Megatron's dispatcher.
    """

    def __init__(self, layer: MoELayer, path_of: Callable[[MoELayer], Any]) -> None:
        stock: Any = layer.token_dispatcher
        stock = getattr(stock, "stock", stock)
        groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        super().__init__(layer.config, groups)
        self.stock: MoETokenDispatcher = stock
        self.shared_experts = stock.shared_experts
        self.cudagraph_attrs = stock.cudagraph_attrs
        self._layer, self._path_of = weakref.ref(layer), path_of
        # The 1F1B expert overlap frees the memory of what enters a phase after it: Megatron's own
        # phases pass copies on.
        self._frees_inputs = bool(layer.config.overlap_moe_expert_parallel_comm)
        self._call: _Call | None = None  # None: the call that runs is Megatron's

    def serves(self, layer: MoELayer) -> bool:
        """Whether this is that layer's, and not a copy of another's."""
        return self._layer() is layer

    def set_shared_experts(self, shared_experts: Any) -> None:
        super().set_shared_experts(shared_experts)
        self.stock.set_shared_experts(shared_experts)

    @tells_peers
    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[S, B, H], bool [T, E], [T, E] -> what token_dispatch takes."""
        exchange = None if versions.inference_mode()() else self._exchange()
        self._call = None
        if exchange is None:
            return self.stock.dispatch_preprocess(tokens, routing_map, probs)  # type: ignore[no-any-return]
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(tokens)
        flat = tokens.reshape(-1, tokens.shape[-1])
        ids, chosen = chosen_of(self._served(), probs, routing_map)
        if TOKEN_COUNTS.recording:
            TOKEN_COUNTS.add(exchange, ids, exchange.shape.num_experts)
        transport = exchange.plan(flat, ids, chosen, experts=None, again=False)()
        dtypes = tokens.dtype, probs.dtype
        self._call = _Call(OpenExchange(transport), tokens.shape, dtypes)
        return flat.clone() if self._frees_inputs else flat, chosen

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """-> rows [N, H], their probabilities [N]"""
        call = self._call
        if call is None:
            return self.stock.token_dispatch(hidden_states, probs)  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        rows = call.opened.dispatch(hidden_states, probs)
        call.counts = rows.counts
        if shared is not None:
            shared.linear_fc1_forward_and_act(rows.tokens)
        return rows.tokens, rows.probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> rows of expert 0, of expert 1, ... [N, H], rows of each on the host [El], their
        probabilities [N]; N with the padding."""
        call = self._call
        if call is None:
            return self.stock.dispatch_postprocess(hidden_states, probs)  # type: ignore[no-any-return]
        counts = call.counts
        if self.config.moe_router_padding_for_quantization:
            # Megatron's dispatchers pad each source's rows with tokens of probability 0, and send
            # them. Rows of zeros that never travel contribute as little.
            multiple = get_align_size_for_quantization(self.config) or 1
            padded = [-(-count // multiple) * multiple for count in counts]
            call.places = _places(counts, padded, hidden_states.device)
            hidden_states = _spread(hidden_states, call.places, sum(padded))
            probs = _spread(probs, call.places, sum(padded))
            counts = padded
        elif self._frees_inputs:
            hidden_states = hidden_states.clone()
        return hidden_states, torch.tensor(counts), probs.to(call.dtypes[1])

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' results -> rows [N, H]"""
        call = self._call
        if call is None:
            return self.stock.combine_preprocess(hidden_states)  # type: ignore[no-any-return]
        if call.places is not None:
            hidden_states = hidden_states.index_select(0, call.places)
        call.result = hidden_states.dtype
        return hidden_states.to(call.dtypes[0])

    def token_combine(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """rows [N, H] -> what combine_postprocess takes"""
        call = self._call
        if call is None:
            return self.stock.token_combine(hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        shared = self.shared_experts
        if shared is not None:
            shared.wait_current_stream()
        combined = call.opened.combine(hidden_states)
        if shared is not None:
            shared.linear_fc2_forward(combined)
            shared.post_forward_comm()
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """-> [S, B, H], with the shared experts that run beside the exchange"""
        call, self._call = self._call, None
        if call is None:
            return self.stock.combine_postprocess(hidden_states)  # type: ignore[no-any-return]
        output = hidden_states.view(call.shape).to(call.result)
        return output if self.shared_experts is None else output + self.shared_experts.get_output()

    def _exchange(self) -> Backend | None:
        """What moves the layer's tokens, or None where Megatron does. Collective in the layer's
        first call."""
        path = self._path_of(self._served())
        return path.exchange if isinstance(path, PhaseByPhase) else None

    def _served(self) -> MoELayer:
        """The layer.

        Raises:
            FluidError: this is a copy, whose layer is not the one that it was made for.
        """
        layer = self._layer()
        if layer is None or layer.token_dispatcher is not self:
            raise FluidError("this token dispatcher was copied: call the copied layer's forward")
        return layer


def _places(counts: Sequence[int], padded: Sequence[int], device: torch.device) -> Tensor:
    """Of each row its index where every expert's rows are followed by padding. int64 [N]"""
    rows, begins = torch.tensor(counts), torch.tensor(padded).cumsum(0)
    shifts = torch.cat([begins.new_zeros(1), begins[:-1]]) - (rows.cumsum(0) - rows)
    places = torch.arange(int(rows.sum())) + shifts.repeat_interleave(rows)
    return places.to(device, non_blocking=True)


def _spread(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """rows [N, ...] at their places among `count` rows, zeros elsewhere."""
    return rows.new_zeros((count, *rows.shape[1:])).index_copy(0, places, rows)
