"""Calls of the experts over each transport in one line, as the tests make them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.moe.activations import Activation, resolve_activation
from megatron_fluid.moe.autograd import StartedCall, prepare, run_experts, start_experts
from megatron_fluid.moe.call import ExpertCall
from megatron_fluid.moe.expert_rows import InPlace
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.local.transport import LocalTransport, plan_local
from megatron_fluid.moe.rounds.transport import RoundsTransport

type Function = str | Activation | Callable[[Tensor], Tensor]


def local_moe(
    x: Tensor, ids: Tensor, probs: Tensor, w1: Any, w2: Any, activation: Function = "swiglu",
    *, plan: Any = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """Over one rank. settings: fields of ExpertCall."""
    experts = w1.num_experts if isinstance(w1, ExpertWeights) else len(w1)
    given = {"probs": probs, "w1": w1, "w2": w2, "num_experts": experts, **settings}
    call = ExpertCall(x=x, activation=activation, **given)
    if plan is None:
        tokens, found = prepare(call)
        stacked = found.fc1.stack is not None and found.fc2.stack is not None
        act = resolve_activation(activation)
        plan = plan_local(
            x, ids, probs, experts, activation=act, stacked=stacked, dtype=tokens.dtype
        )
    return run_experts(call, LocalTransport(plan))


def nvlink_moe(
    buffers: Any, x: Tensor, ids: Tensor, probs: Tensor, w1: Any, w2: Any,
    activation: Function = "swiglu", capacity: int | None = None,
    *, handle: Any = None, grow: Any = None, **settings: Any,
) -> Tensor:  # fmt: skip
    """Over NVLink."""
    from megatron_fluid.moe.nvlink.transport import NvlinkTransport

    given = {"w1": w1, "w2": w2, "num_experts": buffers.local_experts, **settings}
    call = ExpertCall(x=x, probs=probs, activation=activation, **given)
    return run_experts(call, NvlinkTransport(buffers, ids, handle, capacity, grow))


def start_rounds(
    x: Tensor, probs: Tensor | None, plan: Any, w1: Any, w2: Any, activation: Function,
    rounds: P2PRounds, dx_chunks: int = 1, **settings: Any,
) -> StartedCall:  # fmt: skip
    """Over rounds: tokens [T, H] and probabilities [T, K], or rows [N, H] and [N]."""
    given = {"w1": w1, "w2": w2, "num_experts": plan.num_local_experts, **settings}
    call = ExpertCall(x=x, probs=probs, activation=activation, **given)
    name = settings.get("name", "moe")
    transport = RoundsTransport(plan, rounds, name, dx_chunks, settings.get("scheduler"))
    return start_experts(call, transport)


def overlapped_moe(
    x: Tensor, probs: Tensor | None, plan: Any, w1: Any, w2: Any, activation: Function,
    rounds: P2PRounds, dx_chunks: int = 1, **settings: Any,
) -> Tensor:  # fmt: skip
    """start_rounds, finished at once."""
    return start_rounds(x, probs, plan, w1, w2, activation, rounds, dx_chunks, **settings).finish()


def hierarchical_moe(
    x: Tensor, probs: Tensor, plan: Any, w1: Any, w2: Any, activation: Function, rounds: P2PRounds,
    **settings: Any,
) -> Tensor:  # fmt: skip
    """Over several hosts."""
    from megatron_fluid.moe.hierarchical.transport import HierarchicalTransport

    given = {"w1": w1, "w2": w2, "num_experts": plan.num_local_experts, **settings}
    call = ExpertCall(x=x, probs=probs, activation=activation, **given)
    name = settings.get("name", "moe")
    transport = HierarchicalTransport(plan, rounds, name, settings.get("scheduler"))
    return run_experts(call, transport)


def expert_rows(
    rows: Tensor, probs: Tensor | None, counts: Sequence[int], w1: Any, w2: Any,
    activation: Function = "swiglu", **settings: Any,
) -> Tensor:  # fmt: skip
    """Rows that are sorted by expert already."""
    given = {"w1": w1, "w2": w2, "num_experts": len(counts), **settings}
    call = ExpertCall(x=rows, probs=probs, activation=activation, **given)
    return run_experts(call, InPlace(counts))
