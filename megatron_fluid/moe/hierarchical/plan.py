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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.p2p_rounds import P2PRounds, bounded_collective
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.experts import RowGroups
from megatron_fluid.moe.hierarchical.model import Form
from megatron_fluid.moe.rounds.plan import Permutation, local_experts
from megatron_fluid.topology import HostLayout

__all__ = [
    "Batch",
    "HierarchicalPlan",
    "Piece",
    "gather_ids",
    "hosts_of_choices",
    "make_plan",
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
        batches: in the order in which they are computed.
    """

    rank: int
    num_tokens: int
    top_k: int
    num_local_experts: int
    pieces: Sequence[Piece]
    batches: Sequence[Batch]


class _Sizes:
    """Of one group: room for the most tokens that any rank has had, by top-k."""

    def __init__(self) -> None:
        self.room: dict[int, int] = {}


def gather_ids(
    ids: Tensor, num_experts: int, rounds: P2PRounds, operation: str
) -> tuple[Tensor, list[int]]:
    """The choices of all ranks. Collective; waits for the device.

    One all-gather, of two bytes a choice below 2**15 experts. Where a rank has more tokens than any
    had before, there is a second one.

    Args:
        ids: expert of each choice, -1 where it is dropped. [T, K] integers

    Returns:
        [W, C, K] of ids' device, -1 beyond a rank's tokens; the number of tokens of each rank. [W]

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
    header = torch.full((1,), tokens, dtype=torch.int32, device=ids.device).view(torch.uint8)
    while True:
        room = sizes.room.get(top_k, 0)
        rows = ids.new_full((room, top_k), -1, dtype=narrow)
        fits = min(tokens, room)
        rows[:fits] = ids[:fits].to(narrow)
        mine = torch.cat([header, rows.reshape(-1).view(torch.uint8)])
        every = mine.new_empty((world, mine.numel()))

        def start(every: Tensor = every, mine: Tensor = mine) -> dist.Work | None:
            return dist.all_gather_into_tensor(
                every.view(-1), mine, group=rounds.group, async_op=True
            )

        bounded_collective(rounds, operation, start)
        counts: list[int] = every[:, :4].contiguous().view(torch.int32).view(-1).tolist()
        if max(counts) <= room:
            choices = every[:, 4:].contiguous().view(narrow).view(world, room, top_k)
            return choices[:, : max(counts)].long(), counts
        sizes.room[top_k] = -(-max(counts) // 64) * 64


def rows_between_hosts(ids: Tensor, num_experts: int, layout: HostLayout) -> list[int]:
    """How many tokens of each rank cross to other hosts in one dispatch: for each token, the hosts
    other than its own that have an expert for it.

    Args:
        ids: of all ranks. [W, C, K]
    """
    hosts = hosts_of_choices(ids, num_experts, layout)
    own = torch.tensor(layout.hosts, device=ids.device).view(-1, 1)
    crossing = torch.zeros_like(hosts[..., 0], dtype=torch.int64)
    for host in range(layout.num_hosts):
        crossing += (hosts == host).any(-1) & (own != host)
    found: list[int] = crossing.sum(1).tolist()
    return found


def hosts_of_choices(ids: Tensor, num_experts: int, layout: HostLayout) -> Tensor:
    """The host of each choice, -1 where it is dropped."""
    per_rank = local_experts(num_experts, len(layout.hosts))
    table = torch.tensor([*layout.hosts, -1], device=ids.device)
    return table[torch.where(ids < 0, len(layout.hosts), ids // per_rank)]


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
    ranks_of = torch.where(ids < 0, -1, ids // per_rank)
    hosts_of = hosts_of_choices(ids, num_experts, layout)
    crosses = torch.tensor([host != here for host in layout.hosts], device=device).view(-1, 1)
    gateways = torch.tensor([layout.gateway(s, here) for s in range(world)], device=device)

    # The piece of each token that has an expert on this host, `steps` for the others. [W, C]
    to_here = (hosts_of == here).any(-1)
    chunk = _chunk_of(to_here, chunks)
    piece = torch.where(to_here, torch.where(crosses, chunk + 1, 0), steps).view(-1)

    held = torch.where((gateways == rank).view(-1, 1).expand(world, most).reshape(-1), piece, steps)
    held_order = held.argsort(stable=True)
    held_piece = held[held_order]
    sources = torch.arange(world, device=device).view(-1, 1).expand(world, most).reshape(-1)
    held_counts = _count(held * world + sources, steps * world, held < steps)
    begins = _count(held, steps, held < steps).cumsum(0)
    begins = torch.cat([begins.new_zeros(1), begins])[held_piece]
    hand_orders, hand_counts = [], []
    for member in members:
        goes = (ranks_of == member).any(-1).view(-1)[held_order] & (held_piece < steps)
        order = torch.where(goes, held_piece, steps).argsort(stable=True)
        hand_orders.append(order - begins[order])
        hand_counts.append(_count(held_piece, steps, goes))

    to_me = (ranks_of == rank).any(-1).view(-1)
    arrival = torch.where(to_me, piece * world + gateways[sources], steps * world)
    arrived_order = arrival.argsort(stable=True)
    arrival_counts = _count(arrival, steps * world, to_me)
    local = ids.view(-1, top_k)[arrived_order] - rank * per_rank
    keys = torch.where((local < 0) | (local >= per_rank), per_rank, local)
    arrived_piece = piece[arrived_order]
    expert_counts = _count(
        arrived_piece.view(-1, 1) * per_rank + keys,
        steps * per_rank,
        (keys < per_rank) & (arrived_piece < steps).view(-1, 1),
    )

    mine = hosts_of[rank, : counts[rank]]
    to_hosts = torch.stack([(mine == host).any(-1) for host in range(layout.num_hosts)])
    send_orders = (~to_hosts).to(torch.uint8).argsort(dim=1, stable=True)

    tables = [held_counts, arrival_counts, expert_counts, *hand_counts, to_hosts.sum(1)]
    flat = torch.cat([table.view(-1) for table in tables]).tolist()  # the one read of the device

    def take(length: int) -> list[int]:
        nonlocal flat
        found, flat = flat[:length], flat[length:]
        return found

    held_table, arrival_table = take(steps * world), take(steps * world)
    expert_table = take(steps * per_rank)
    hand_table = [take(steps) for _ in members]
    to_host_counts = take(layout.num_hosts)
    pieces = []
    at_held, at_hand = 0, [0] * len(members)
    for step in range(steps):
        by_source = held_table[step * world : (step + 1) * world]
        by_gateway = arrival_table[step * world : (step + 1) * world]
        num_held, own = sum(by_source), step == 0
        tokens = held_order[at_held : at_held + num_held] - rank * most if own else None
        hands = []
        for index, member in enumerate(members):
            size = hand_table[index][step]
            hands.append((member, hand_orders[index][at_hand[index] : at_hand[index] + size]))
            at_hand[index] += size
        pieces.append(
            Piece(
                tokens,
                [] if own else _sends(layout, rank, send_orders, to_host_counts, step - 1, chunks),
                [] if own else [(s, n) for s, n in enumerate(by_source) if n],
                num_held,
                hands,
                [(member, by_gateway[member]) for member in members],
            )
        )
        at_held += num_held
    batches = _batches(pieces, keys, expert_table, per_rank, form, device)
    return HierarchicalPlan(rank, counts[rank], top_k, per_rank, pieces, batches)


def _batches(
    pieces: Sequence[Piece], keys: Tensor, counts: Sequence[int], experts: int, form: Form,
    device: torch.device,
) -> list[Batch]:  # fmt: skip
    """What this rank computes, in its order.

    Args:
        keys: local expert of each choice of the tokens that arrive, `experts` for those of other
            ranks; tokens in the order of the pieces. [n, K]
        counts: rows of each piece for each expert. [S * El]
    """
    by_piece = [list(counts[p * experts : (p + 1) * experts]) for p in range(len(pieces))]
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


def _count(keys: Tensor, size: int, where: Tensor) -> Tensor:
    """How often each of 0 .. size - 1 occurs among keys[where], without reading the device."""
    keys = torch.where(where, keys, size).reshape(-1)
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
