"""The transports of MoE layers, one row each in BACKENDS, and the choice between them.

Triton is imported only by what needs it: rounds need torch alone.

Shapes: T tokens of this rank, K top-k, H hidden.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.moe.choose import ExchangeCase, choose_transport, nvlink_layer_reason
from megatron_fluid.moe.expert_weights import computed_dtype
from megatron_fluid.moe.hierarchical.plan import plan_hierarchical
from megatron_fluid.moe.hierarchical.transport import HierarchicalTransport
from megatron_fluid.moe.local.transport import LocalTransport, plan_local
from megatron_fluid.moe.rounds.all_to_all import AllToAllTransport
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.rounds.transport import RoundsTransport
from megatron_fluid.moe.transport import Backend, ExpertPair, LayerShape, MakeTransport

__all__ = [
    "BACKENDS",
    "AllToAllBackend",
    "Backend",
    "LayerShape",
    "MakeTransport",
    "choose_backend",
]


_LOGGER = logging.getLogger("megatron_fluid")


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
        plan = plan_local(
            *routed, activation=activation, stacked=stacked, dtype=dtype,
            in_order=self.shape.batch_invariant,
        )  # fmt: skip
        return functools.partial(LocalTransport, plan)


class _Nvlink(Backend):
    """The row of NvlinkBackend, which alone needs Triton and is imported when a layer is made."""

    name = "nvlink"

    def __new__(cls, shape: LayerShape, rounds: P2PRounds) -> Backend:  # type: ignore[misc]
        from megatron_fluid.moe.nvlink.transport import NvlinkBackend

        return NvlinkBackend(shape, rounds)


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
        plan = ExactPlan.from_topk(
            ids, shape.num_experts, self.rounds, operation, in_order=shape.batch_invariant
        )
        return self._transport(plan)

    def _transport(self, plan: ExactPlan) -> MakeTransport:
        shape = self.shape
        return functools.partial(RoundsTransport, plan, self.rounds, shape.name, shape.dx_chunks)


class AllToAllBackend(_Rounds):
    """MoEBaseline's, which no layer chooses."""

    name = "all_to_all"

    def _transport(self, plan: ExactPlan) -> MakeTransport:
        return functools.partial(AllToAllTransport, plan, self.rounds, self.shape.name)


BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (_Local, _Nvlink, _Hierarchical, _Rounds)
}


def choose_backend(layer: Any, wanted: str) -> type[Backend]:
    """What moves the tokens of a layer. Collective over its group the first time.

    Args:
        layer: a MoELayer.
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
        batch_invariant=layer.batch_invariant,
    )
    setting = "backend" if layer.config.backend else "moe_backend"
    transport, reason = choose_transport(wanted, case, setting)
    assert transport is not None
    if transport == "rounds" and case.on_gpu and reason is not None:
        _warn_of_rounds(reason)
    return BACKENDS[transport]


@functools.cache
def _warn_of_rounds(reason: str) -> None:
    _LOGGER.warning(
        "moe_backend=auto takes round-robin P2P exchanges: no symmetric memory (%s)", reason
    )
