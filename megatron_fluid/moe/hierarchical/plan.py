"""The two-level routing plan: which token crosses to which host, and which rank there hands it on.

A token that has experts on another host crosses once, to the rank with its sender's local index
(the gateway), which hands it on to the ranks that compute it. Two hosts of two ranks, a token of
rank 0 with experts on ranks 1, 2 and 3::

    rank 0 --(own host)--> rank 1
    rank 0 --(network)---> rank 2 --(its host)--> rank 3

Tokens move in pieces, which every rank cuts alike: those that stay on their host are piece 0, those
that cross are cut into pieces 1 .. chunks. They are computed in batches. Some experts compute the
own host's tokens while the first piece crosses, the others while the last results cross back, so
that a matrix is read once for all of them (model.Form)::

    own tokens, first experts | piece 1 | ... | piece chunks | own tokens, other experts

Every rank knows the choices of all ranks and works the whole plan out alone. The host reads the
device once.

Legend: W ranks, M hosts, L ranks of this host, T tokens of this rank, C most tokens of any rank, K
top-k, E experts, El experts of one rank, S pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.p2p_rounds import P2PRounds, bounded_collective
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.hierarchical.model import Form
from megatron_fluid.moe.rounds.plan import Permutation, local_experts
from megatron_fluid.topology import HostLayout

__all__ = [
    "Batch",
    "HierarchicalPlan",
    "Piece",
    "Wishes",
    "gather_ids",
    "hosts_of_choices",
    "make_plan",
    "reached_hosts",
    "rows_between_hosts",
]


@dataclass(frozen=True)
class Piece:
    """What one rank does with one piece. Index tensors are int64, on the tokens' device.

    Attributes:
        tokens: of own pieces, this rank's tokens in it. [n]
        sends: of crossing pieces, (gateway, this rank's tokens for its host) by host.
        receives: of crossing pieces, (source, number of tokens) by rank: rows are held in this
            order.
        num_held: tokens that this rank hands on.
        hands: (rank of this host, positions among the held tokens) by rank, this one included.
        arrivals: (gateway, number of tokens) by rank of this host, this one included.
    """

    tokens: Tensor | None
    sends: Sequence[tuple[int, Tensor]]
    receives: Sequence[tuple[int, int]]
    num_held: int
    hands: Sequence[tuple[int, Tensor]]
    arrivals: Sequence[tuple[int, int]]

    @property
    def crosses(self) -> bool:
        return self.tokens is None

    @property
    def num_arrived(self) -> int:
        return sum(count for _, count in self.arrivals)


@dataclass(frozen=True)
class Batch:
    """What one rank computes at once.

    Attributes:
        pieces: whose tokens, one piece after the other; all must have arrived.
        permutation: of those tokens' choices of this rank's experts.
        begin, end: which of its rows; others are another batch's, of the same pieces.
        groups: the division of rows begin .. end - 1 among the experts.
        last: whether the results of the pieces are complete with it.
    """

    pieces: tuple[int, ...]
    permutation: Permutation
    begin: int
    end: int
    groups: RowGroups
    last: bool = True


@dataclass(frozen=True)
class HierarchicalPlan:
    """One call's routing, replayed by backward and recomputation.

    Attributes:
        rank: this rank in the group.
        num_tokens: T. top_k: K.
        pieces: own tokens, then those that cross in their order. [S]
        joined: whether all of them are computed at once.
        make_batches: gives `batches`, once.
    """

    rank: int
    num_tokens: int
    top_k: int
    num_local_experts: int
    pieces: Sequence[Piece]
    joined: bool
    make_batches: Callable[[], Sequence[Batch]] = field(repr=False)

    @functools.cached_property
    def batches(self) -> Sequence[Batch]:
        """In the order in which they are computed. Made when first asked for: by then pieces are on
        their way."""
        return self.make_batches()


class _Sizes:
    """Of one group: room for the most tokens that any rank has had, by top-k."""

    def __init__(self) -> None:
        self.room: dict[int, int] = {}


@dataclass(frozen=True)
class Wishes:
    """What decides on the form of a call beside its choices: the same on all ranks once gathered.

    Attributes:
        learns: whether a backward may follow, on any rank.
        by_bytes: whether bytes alone decide, and no times (the setting `deterministic`), on any
            rank.
    """

    learns: bool
    by_bytes: bool


def gather_ids(
    ids: Tensor, num_experts: int, rounds: P2PRounds, operation: str, learns: bool | None = None
) -> tuple[Tensor, list[int], Wishes]:
    """The choices of all ranks. Collective; waits for the device.

    One all-gather, of two bytes a choice below 2**15 experts. Where a rank has more tokens than any
    had before, there is a second one.

    Args:
        ids: expert of each choice, -1 where it is dropped. [T, K] integers
        learns: whether a backward may follow on this rank; None: where gradients are recorded. A
            layer says it that may be checkpointed, whose first pass records none.

    Returns:
        [W, C, K] of ids' device, -1 beyond a rank's tokens; the number of tokens of each rank [W];
        what ranks wish.

    Raises:
        ConfigError: ids is not [T, K].
        PeerTimeoutError: a rank does not take part.
    """
    if ids.dim() != 2 or ids.dtype.is_floating_point:
        found = f"{ids.dtype} {list(ids.shape)}"
        raise ConfigError.of("ids", found, "integers of shape [tokens, top-k]")
    sizes = group_resource(rounds.group, "moe hierarchical sizes", _Sizes)
    (tokens, top_k), world = ids.shape, rounds.world_size
    narrow = torch.int16 if num_experts < 2**15 else torch.int32
    learns = torch.is_grad_enabled() if learns is None else learns
    header = 4 * tokens + 2 * current_config().deterministic + learns
    while True:
        room = sizes.room.get(top_k, 0)
        fits = min(tokens, room) * top_k
        # Bytes of 255 are choices of -1.
        mine = ids.new_full((4 + room * top_k * narrow.itemsize,), 255, dtype=torch.uint8)
        mine[:4].view(torch.int32).fill_(header)
        mine[4:].view(narrow)[:fits].copy_(ids.reshape(-1)[:fits])
        every = mine.new_empty((world, mine.numel()))

        def start(every: Tensor = every, mine: Tensor = mine) -> dist.Work | None:
            return dist.all_gather_into_tensor(
                every.view(-1), mine, group=rounds.group, async_op=True
            )

        bounded_collective(rounds, operation, start)
        headers: list[int] = every[:, :4].contiguous().view(torch.int32).view(-1).tolist()
        counts = [header // 4 for header in headers]
        if max(counts) <= room:
            choices = every[:, 4:].contiguous().view(narrow).view(world, room, top_k)
            wishes = Wishes(any(h & 1 for h in headers), any(h & 2 for h in headers))
            return choices[:, : max(counts)].long(), counts, wishes
        sizes.room[top_k] = -(-max(counts) // 64) * 64


def rows_between_hosts(ids: Tensor, num_experts: int, layout: HostLayout) -> list[int]:
    """How many tokens of each rank cross to other hosts in one dispatch: for each token, the hosts
    other than its own that have an expert for it.

    Args:
        ids: of all ranks. [W, C, K]
    """
    reached = reached_hosts(hosts_of_choices(ids, num_experts, layout), layout)
    to_hosts: list[list[int]] = reached.sum(1).tolist()
    return [sum(to) - to[own] for to, own in zip(to_hosts, layout.hosts, strict=True)]


def hosts_of_choices(ids: Tensor, num_experts: int, layout: HostLayout) -> Tensor:
    """The host of each choice, -1 where it is dropped."""
    ranks = _ranks_of_choices(ids, local_experts(num_experts, len(layout.hosts)))
    if layout.hosts == tuple(range(len(layout.hosts))):
        return ranks
    table = torch.tensor([*layout.hosts, -1], device=ids.device)
    return table[ranks]


def _ranks_of_choices(ids: Tensor, per_rank: int) -> Tensor:
    """The rank of each choice, -1 where it is dropped. A CPU shifts many times faster than it
    divides."""
    if per_rank & (per_rank - 1) == 0:
        return ids.clamp(min=-1) >> (per_rank.bit_length() - 1)
    return ids.clamp(min=-1).div(per_rank, rounding_mode="floor")


def reached_hosts(hosts: Tensor, layout: HostLayout) -> Tensor:
    """Which hosts have an expert for each token: of hosts_of_choices [..., K] -> bool [..., M]"""
    shape = (*hosts.shape[:-1], 1 + layout.num_hosts)
    found = torch.zeros(shape, dtype=torch.bool, device=hosts.device)
    return found.scatter_(-1, hosts + 1, True)[..., 1:]


class _Orders(NamedTuple):
    """Tokens of all ranks, as numbers rank * C + token, in the orders in which this rank has them,
    and their counts by piece and rank [S * W] or piece [S], on the device.

    Attributes:
        held: those that this rank hands on.
        hands: for each rank of this host, positions of its tokens among the held ones, by piece;
            None where all are this rank's, as those that arrive then are, too.
        arrived: those that this rank computes.
    """

    held: Tensor
    held_counts: Tensor
    hands: list[Tensor] | None
    hand_counts: list[Tensor]
    arrived: Tensor
    arrival_counts: Tensor | None


def _orders(
    ids: Tensor, ranks_of: Tensor, piece: Tensor, steps: int, layout: HostLayout, rank: int
) -> _Orders:
    """piece: of each token that has an expert on this host, `steps` for the others. [W * C]"""
    (world, most, _), device = ids.shape, ids.device
    here, members = layout.hosts[rank], layout.members[layout.hosts[rank]]
    sources = torch.arange(world, device=device).repeat_interleave(most, output_size=world * most)
    if len(members) == 1:
        order = piece.argsort(stable=True)
        return _Orders(
            order, _counted(piece * world + sources, steps * world), None, [], order, None
        )
    gateways = torch.tensor([layout.gateway(s, here) for s in range(world)], device=device)
    held = torch.where((gateways == rank)[sources], piece, steps)
    held_order = held.argsort(stable=True)
    held_piece = held[held_order]
    held_counts = _counted(held * world + sources, steps * world)
    begins = _counted(held, steps).cumsum(0)
    begins = torch.cat([begins.new_zeros(1), begins])[held_piece]
    hand_orders, hand_counts = [], []
    for member in members:
        goes = (ranks_of == member).any(-1).view(-1)[held_order] & (held_piece < steps)
        handed = torch.where(goes, held_piece, steps)
        order = handed.argsort(stable=True)
        hand_orders.append(order - begins[order])
        hand_counts.append(_counted(handed, steps))
    to_me = (ranks_of == rank).any(-1).view(-1)
    arrival = torch.where(to_me, piece * world + gateways[sources], steps * world)
    arrived = arrival.argsort(stable=True)
    counts = _counted(arrival, steps * world)
    return _Orders(held_order, held_counts, hand_orders, hand_counts, arrived, counts)


def make_plan(
    ids: Tensor, counts: Sequence[int], num_experts: int, layout: HostLayout, rank: int, form: Form
) -> HierarchicalPlan:
    """The plan of one rank. No communication.

    Args:
        ids, counts: as gather_ids gives them.
        form: the same on all ranks.
    """
    world, most, top_k = ids.shape
    per_rank, device = local_experts(num_experts, world), ids.device
    here, members = layout.hosts[rank], layout.members[layout.hosts[rank]]
    chunks = form.chunks
    steps = chunks + 1
    reached = reached_hosts(hosts_of_choices(ids, num_experts, layout), layout)
    crosses = torch.tensor([[host != here] for host in layout.hosts], device=device)
    to_here = reached[..., here]
    crossed = crosses.long()  # the piece of each token that comes here. [W, 1] or [W, C]
    if chunks > 1:
        crossed = crossed * (_chunk_of(to_here, chunks) + 1)
    piece = torch.where(to_here, crossed, steps).view(-1)
    ranks_of = _ranks_of_choices(ids, per_rank)
    orders = _orders(ids, ranks_of, piece, steps, layout, rank)

    keys = torch.where(ranks_of == rank, ids - rank * per_rank, per_rank)
    keys = keys.view(-1, top_k)[orders.arrived]
    arrived_piece = piece[orders.arrived].view(-1, 1)
    by_expert = _counted(arrived_piece * (per_rank + 1) + keys, steps * (per_rank + 1))

    to_hosts = reached[rank, : counts[rank]].t()
    send_orders = (~to_hosts).to(torch.uint8).argsort(dim=1, stable=True)

    tables = [orders.held_counts, by_expert, to_hosts.sum(1), *orders.hand_counts]
    if orders.arrival_counts is not None:
        tables.append(orders.arrival_counts)
    flat = torch.cat(tables).tolist()  # the one read of the device

    def take(length: int, rows: int = 1) -> list[list[int]]:
        nonlocal flat
        found, flat = flat[: length * rows], flat[length * rows :]
        return [found[begin : begin + length] for begin in range(0, length * rows, length)]

    held_table, expert_table = take(world, steps), take(per_rank + 1, steps)
    (to_host_counts,) = take(layout.num_hosts)
    hand_table = take(steps, len(orders.hand_counts))
    arrival_table = held_table if orders.arrival_counts is None else take(world, steps)
    pieces = []
    at_held, at_hand = 0, [0] * len(members)
    for step in range(steps):
        by_source, by_gateway = held_table[step], arrival_table[step]
        num_held, own = sum(by_source), step == 0
        tokens = orders.held[at_held : at_held + num_held] - rank * most if own else None
        if orders.hands is None:
            hands, arrivals = [(rank, torch.arange(num_held, device=device))], [(rank, num_held)]
        else:
            hands, arrivals = [], [(member, by_gateway[member]) for member in members]
            for index, (member, order) in enumerate(zip(members, orders.hands, strict=True)):
                size = hand_table[index][step]
                hands.append((member, order[at_hand[index] : at_hand[index] + size]))
                at_hand[index] += size
        pieces.append(
            Piece(
                tokens,
                [] if own else _sends(layout, rank, send_orders, to_host_counts, step - 1, chunks),
                [] if own else [(s, n) for s, n in enumerate(by_source) if n],
                num_held,
                hands,
                arrivals,
            )
        )
        at_held += num_held
    expert_table = [of_piece[:per_rank] for of_piece in expert_table]
    given = [(pieces, keys, expert_table, per_rank, form, device)]
    # Once: the plan lives until the backward, the keys of all choices need not.
    return HierarchicalPlan(
        *(rank, counts[rank], top_k, per_rank, pieces, form.joined), lambda: _batches(*given.pop())
    )


def _batches(
    pieces: Sequence[Piece], keys: Tensor, by_piece: list[list[int]], experts: int, form: Form,
    device: torch.device,
) -> list[Batch]:  # fmt: skip
    """What this rank computes, in its order.

    Args:
        keys: local expert of each choice of the tokens that arrive, `experts` for those of other
            ranks; tokens in the order of the pieces. [n, K]
        by_piece: rows of each piece for each expert. [S][El]
    """
    arrived = [piece.num_arrived for piece in pieces]

    def batch(which: tuple[int, ...]) -> tuple[Permutation, list[int]]:
        begin, tokens = sum(arrived[: which[0]]), sum(arrived[index] for index in which)
        rows = [sum(column) for column in zip(*(by_piece[index] for index in which), strict=True)]
        order = keys[begin : begin + tokens].reshape(-1).argsort(stable=True)
        return Permutation.of(order, sum(rows), torch.Size((tokens, keys.shape[1]))), rows

    if form.joined:
        every = tuple(range(len(pieces)))
        permutation, rows = batch(every)
        return [Batch(every, permutation, 0, sum(rows), _groups(rows, device))]
    permutation, rows = batch((0,))
    first = form.experts_first(experts)
    split, none = sum(rows[:first]), [0] * experts
    before, after = rows[:first] + none[first:], none[:first] + rows[first:]
    found = [Batch((0,), permutation, 0, split, _groups(before, device), first == experts)]
    for index in range(1, len(pieces)):
        crossed, of_experts = batch((index,))
        groups = _groups(of_experts, device)
        found.append(Batch((index,), crossed, 0, sum(of_experts), groups))
    if first < experts:
        found.append(Batch((0,), permutation, split, sum(rows), _groups(after, device)))
    return found


def _chunk_of(wanted: Tensor, parts: int) -> Tensor:
    """Cut the wanted tokens of each row into so many nearly equal parts, in order: the part of
    each. Part k begins at wanted token k * n // parts. [W, C]"""
    position = wanted.long().cumsum(1)
    total = position[:, -1:] if wanted.shape[1] else position.new_ones((wanted.shape[0], 1))
    return (position * parts - 1).div(total.clamp(min=1), rounding_mode="floor")


def _counted(keys: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 occurs, without reading the device; larger keys count for
    nothing."""
    keys = keys.clamp(max=size).reshape(-1)
    return torch.zeros(size + 1, dtype=torch.int64, device=keys.device).scatter_add_(
        0, keys, torch.ones_like(keys)
    )[:size]


def _groups(counts: Sequence[int], device: torch.device) -> RowGroups:
    groups = RowGroups.of_counts(counts)
    if device.type == "cuda":
        groups.offsets = groups.offsets.pin_memory().to(device, non_blocking=True)
    return groups


def _sends(
    layout: HostLayout, rank: int, orders: Tensor, counts: Sequence[int], chunk: int, chunks: int
) -> list[tuple[int, Tensor]]:
    """(gateway, tokens) of one crossing piece, by host."""
    found = []
    for host, count in enumerate(counts):
        begin, end = chunk * count // chunks, (chunk + 1) * count // chunks
        if host != layout.hosts[rank] and end > begin:
            found.append((layout.gateway(rank, host), orders[host, begin:end]))
    return found
