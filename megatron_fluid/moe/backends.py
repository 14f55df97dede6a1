"""The transports of MoE layers, one row each in BACKENDS, and the choice between them.

Triton is imported only by what needs it: rounds need torch alone.

Shapes: T tokens of this rank, K top-k, H hidden.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.call import computed_dtype
from megatron_fluid.moe.choose import ExchangeCase, choose_transport, nvlink_layer_reason
from megatron_fluid.moe.config import MoEConfig
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.hierarchical.plan import plan_hierarchical
from megatron_fluid.moe.hierarchical.transport import HierarchicalTransport
from megatron_fluid.moe.local.transport import LocalTransport, plan_local
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.rounds.transport import RoundsTransport
from megatron_fluid.moe.transport import TokenTransport

__all__ = ["BACKENDS", "Backend", "LayerShape", "MakeTransport", "choose_backend"]


type ExpertPair = tuple[ExpertWeights, ExpertWeights, Activation]  # fc1, fc2, activation
type MakeTransport = Callable[[], TokenTransport]

_LOGGER = logging.getLogger("megatron_fluid")


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a backend has to know of a layer, once.

    Attributes:
        group: the expert-parallel group.
        num_experts, top_k, ffn: E, K and F.
        name: of the layer, for errors and to identify exchanges.
        dx_chunks: as in MoEConfig.
        capacity_factor: of bounded mode, None for exact mode.
        capacity_setting: the setting that an overflow is raised under before the next optimizer
            step; None: the next forward raises it.
        room: how many times the tokens of the first call buffers are made for.
    """

    group: dist.ProcessGroup
    num_experts: int
    top_k: int
    ffn: int
    name: str
    dx_chunks: int = 1
    capacity_factor: float | None = None
    capacity_setting: str | None = None
    room: int = 1


class ServedLayer(Protocol):
    """What the choice of a backend asks of a layer."""

    config: MoEConfig
    rounds: P2PRounds
    activation: Activation
    weight1: nn.Parameter


class Backend:
    """How one layer moves its tokens, standalone or Megatron's, with experts that this package
    computes or others. It holds no state of any call, and not the layer. One call::

        make = backend.plan(x, ids, probs, experts=..., again=recompute)
        y = run_experts(call, make())                     # or OpenExchange(make())

    A recomputation repeats all but the plan.

    Attributes:
        name: as in MoEConfig.backend.
        ascending: whether sums depend on the order of a token's choices, and Megatron's is wanted:
            experts in ascending order.
        exact_over: where tokens go, if this has neither bounded mode nor fp8.
    """

    name: str
    ascending = False
    exact_over: str | None = None

    def __init__(self, shape: LayerShape, rounds: P2PRounds) -> None:
        self.shape, self.rounds = shape, rounds

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        """Route one call: what is returned makes its transport, and that of its recomputation.

        Args:
            x: tokens. [T, H]
            ids: integers, -1 where dropped. [T, K]
            probs: [T, K]
            experts: fc1, fc2 and activation; None where others compute them.
            again: whether the plan serves a recomputation, too.
        """
        raise NotImplementedError

    def check_overflow(self) -> None:
        """Raise FluidError where the capacity was exceeded."""


class _Local(Backend):
    name = "local"

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        activation, stacked, dtype = None, False, x.dtype
        if experts is not None:
            fc1, fc2, activation = experts
            stacked, dtype = fc1.stack is not None and fc2.stack is not None, computed_dtype(x)
        routed = x, ids, probs, self.shape.num_experts
        plan = plan_local(*routed, activation=activation, stacked=stacked, dtype=dtype)
        return functools.partial(LocalTransport, plan)


class _Nvlink(Backend):
    name = "nvlink"

    def __init__(self, shape: LayerShape, rounds: P2PRounds) -> None:
        # Only this path needs Triton.
        from megatron_fluid.moe.nvlink import buffers, transport

        super().__init__(shape, rounds)
        sizes = shape.ffn, shape.top_k, shape.num_experts
        self.sized = buffers.SizedBuffers(shape.group, *sizes, shape.room)
        self._transport = transport

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nvlink:
        # A copy shares the buffers: they are used by one layer after the other.
        copied = copy.copy(self)
        copied.sized = copy.copy(self.sized)
        return copied

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        buffers, capacity = self.sized.of(x.shape[0], x.shape[1], computed_dtype(x)), None
        if (factor := self.shape.capacity_factor) is not None:
            if self.shape.capacity_setting is None:
                buffers.check_overflow()
            else:
                buffers.raise_overflow(factor, self.shape.capacity_setting)
            capacity = buffers.bounded_rows(factor)
        handle, grow = None, self.sized.grow
        if again:
            handle = self._transport.plan_nvlink(buffers, ids, probs, capacity, grow=grow)
            assert self.sized.buffers is not None
            buffers = self.sized.buffers
        make = self._transport.NvlinkTransport
        return functools.partial(make, buffers, ids, handle, capacity, grow)

    def check_overflow(self) -> None:
        if self.sized.buffers is not None:
            self.sized.buffers.check_overflow()


class _Hierarchical(Backend):
    name = "hierarchical"
    exact_over = "several hosts"

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        row_bytes, name = x.shape[1] * computed_dtype(x).itemsize, self.shape.name
        plan = plan_hierarchical(ids, self.shape.num_experts, self.rounds, row_bytes, name)
        return functools.partial(HierarchicalTransport, plan, self.rounds, name)


class _Rounds(Backend):
    name = "rounds"
    ascending, exact_over = True, "rounds"

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        shape, operation = self.shape, f"{self.shape.name} row counts"
        plan = ExactPlan.from_topk(ids, shape.num_experts, self.rounds, operation)
        return functools.partial(RoundsTransport, plan, self.rounds, shape.name, shape.dx_chunks)


BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (_Local, _Nvlink, _Hierarchical, _Rounds)
}


def choose_backend(layer: ServedLayer, wanted: str) -> type[Backend]:
    """What moves the tokens of a layer. Collective over its group the first time.

    Args:
        wanted: as for moe.choose.choose_transport.

    Raises:
        ConfigError: an unknown name, or one that is unavailable; "experts" and "megatron" are for
            Megatron's layers.
    """
    weight, activation = layer.weight1, layer.activation
    # A callable may bear the name of a kernel that computes something else.
    name = activation.name if activation.built_in else f"{activation.name}, the caller's own"
    case = ExchangeCase(
        group=layer.rounds.group,
        domains=lambda: layer.rounds.domains,
        on_gpu=weight.device.type == "cuda",
        nvlink_reason=nvlink_layer_reason(
            layer.config.hidden_size, name, weight.dtype, weight.device
        ),
    )
    transport, reason = choose_transport(wanted, case)
    assert transport is not None
    if transport == "rounds" and case.on_gpu and reason is not None:
        _warn_of_rounds(reason)
    return BACKENDS[transport]


@functools.cache
def _warn_of_rounds(reason: str) -> None:
    _LOGGER.warning(
        "moe_backend=auto takes round-robin P2P exchanges: no symmetric memory (%s)", reason
    )
