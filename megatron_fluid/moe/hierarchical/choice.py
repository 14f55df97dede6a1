"""In how many pieces the tokens of a call cross to other hosts, and when they are computed.

On CPUs: the form of least predicted time (model.py), from the measured wire (wire.py) and the
machine's figures. On GPUs, and with `FluidConfig.deterministic`, the number of pieces follows from
bytes alone, so that the same call always sums in the same order.

Legend: W ranks, C most tokens of a rank, K top-k, E experts, El experts of one rank, H hidden, F1 /
F widths of an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.moe.expert_weights import ExpertWeights
from megatron_fluid.moe.hierarchical.model import Form, Wire, Work, best_form, chunks_for
from megatron_fluid.moe.hierarchical.plan import Wishes, hosts_of_choices, reached_hosts
from megatron_fluid.moe.hierarchical.wire import host_wire
from megatron_fluid.moe.rounds.plan import local_experts
from megatron_fluid.plan.machine import REFERENCE, Machine, agreed_machine
from megatron_fluid.topology import HostLayout

__all__ = ["ExpertCost", "ExpertShape", "choose_form", "expert_cost"]

# Core time of a piece for Python, messages, gathers and sums. Measured:
# docs/tuning_notes.md#experts-over-several-hosts-on-cpus
_PIECE_S = 2e-3


class ExpertShape(NamedTuple):
    """Widths H, F1 and F of an expert, and the dtype of its matrices."""

    hidden: int
    fc1_width: int
    ffn: int
    dtype: torch.dtype

    @classmethod
    def of(cls, fc1: ExpertWeights, fc2: ExpertWeights) -> ExpertShape:
        return cls(fc1.in_width, fc1.out_width, fc2.in_width, fc1.params[0].dtype)


class ExpertCost(NamedTuple):
    """Seconds of fc1 and fc2 for each row, of reading all matrices of a rank once, and of a piece
    beside them."""

    row_s: float
    pass_s: float
    piece_s: float = _PIECE_S


def expert_cost(machine: Machine, shape: ExpertShape, experts: int) -> ExpertCost:
    """Return what so many experts of a rank cost on a machine."""
    weights = shape.hidden * (shape.fc1_width + shape.ffn)
    read = experts * weights * shape.dtype.itemsize
    return ExpertCost(2.0 * weights / machine.flops_per_s, read / machine.bytes_per_s)


def choose_form(
    ids: Tensor, counts: Sequence[int], num_experts: int, rounds: P2PRounds, row_bytes: int,
    experts: ExpertShape | None, wishes: Wishes,
) -> Form:  # fmt: skip
    """Return the form of one call, the same on all ranks. Collective over the group.

    Args:
        ids, counts: of all ranks. [W, C, K], [W]
        row_bytes: of one token.
        experts: None where they are not known: bytes alone decide.
        wishes: as gather_ids gives them.
    """
    layout, top_k = HostLayout(tuple(rounds.domains)), ids.shape[2]
    if experts is None or ids.device.type != "cpu" or wishes.by_bytes:
        # The rank with most tokens, as if each went to as many other hosts as it can.
        most = max(counts) * min(top_k, layout.num_hosts - 1)
        return Form(chunks_for(most * row_bytes, ids.device.type))
    wire = host_wire(rounds)
    machine = agreed_machine(rounds.group, "cpu") or REFERENCE["cpu"]
    cost = expert_cost(machine, experts, local_experts(num_experts, rounds.world_size))
    # Rounded: calls that are nearly the same share one computation.
    own, crossing, tokens = (float(f"{n:.3g}") for n in _rows(ids, num_experts, layout))
    return _form_for(own, crossing, tokens, row_bytes, top_k, cost, wire, wishes.learns)


@functools.lru_cache(1024)
def _form_for(
    own: float, crossing: float, tokens: float, row_bytes: int, top_k: int, cost: ExpertCost,
    wire: Wire, learns: bool,
) -> Form:  # fmt: skip
    passes = works(own, crossing, tokens, row_bytes, top_k, cost)
    return best_form(passes if learns else passes[:1], wire)


def works(
    own: float, crossing: float, tokens: float, row_bytes: int, top_k: int, cost: ExpertCost
) -> tuple[Work, Work]:
    """Return forward and backward of one call on one rank, without routing and activations.

    Args:
        own, crossing: expert rows of tokens of its own host, and of other hosts.
        tokens: number of tokens that cross.
        row_bytes: of one token.
    """
    rows, probs = tokens * row_bytes, tokens * top_k * 4
    own_s, crossing_s = own * cost.row_s, crossing * cost.row_s
    each = {"piece_s": cost.piece_s, "pass_s": cost.pass_s}
    forward = Work(own_s, crossing_s, rows + probs, rows, **each)
    after_s = own_s + crossing_s
    backward = Work(own_s, crossing_s, rows, rows + probs, after_s, **each)
    return forward, backward


def _rows(ids: Tensor, num_experts: int, layout: HostLayout) -> tuple[float, float, float]:
    """Return averages of a rank: expert rows of tokens that stay on their host, expert rows of
    tokens that cross, and tokens that cross."""
    hosts, world = hosts_of_choices(ids, num_experts, layout), len(layout.hosts)
    own = torch.tensor(layout.hosts, device=ids.device).view(-1, 1, 1)
    counted = torch.stack([(hosts == own).sum(), (hosts >= 0).sum()])
    stays, kept, *to_hosts = torch.cat(
        [counted, reached_hosts(hosts, layout).sum(1).view(-1)]
    ).tolist()
    at_home = sum(
        to_hosts[rank * layout.num_hosts + host] for rank, host in enumerate(layout.hosts)
    )
    return stays / world, (kept - stays) / world, (sum(to_hosts) - at_home) / world
