"""The two-level routing plan: which token crosses to which host, and which rank there hands it on.

A token that has experts on another host crosses once, to the rank with its sender's local index
(the gateway), which hands it on to the ranks that compute it. Two hosts of two ranks, a token of
rank 0 with experts on ranks 1, 2 and 3::

    rank 0 --(own host)--> rank 1
    rank 0 --(network)---> rank 2 --(its host)--> rank 3

Tokens move in pieces, which every rank cuts alike: those that stay on their host are piece 0, those
that cross are cut into pieces 1 .. chunks. They are computed in batches. Half of a rank's experts
compute the own host's tokens while the first piece crosses, the others while the last results cross
back, so that each of their matrices is read once for these tokens::

    own tokens, first experts | piece 1 | ... | piece chunks | own tokens, other experts

Every rank knows the choices of all ranks and works the whole plan out alone. The host reads the
device once.

Legend: W ranks, M hosts, L ranks of this host, T tokens of this rank, C most tokens of any rank, K
top-k, E experts, El experts of one rank, S pieces.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.groups import group_resource
from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.permute import Permutation, check_ids, local_experts
from megatron_fluid.topology import HostLayout

__all__ = [
    "Batch",
    "HierarchicalPlan",
    "Piece",
    "chunks_for",
    "gather_ids",
    "make_plan",
    "plan_hierarchical",
]

MOST_CHUNKS = 8
# A smaller piece costs more (latency, launches, small GEMMs) than it hides:
# docs/tuning_notes.md#slow-links
_LEAST_PIECE_BYTES = {"cuda": 4 * 2**20, "cpu": 2**20}


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
        piece: whose tokens, all of which must have arrived.
        permutation: of those tokens' choices of this rank's experts.
        rows: which of its rows; of piece 0 the others are another batch's.
        groups: their division among the experts.
        last: whether the results of the piece are complete with it.
    """

    piece: int
    permutation: Permutation
    rows: slice
    groups: RowGroups
    last: bool = True


@dataclass(frozen=True)
class HierarchicalPlan:
    """One call's routing, replayed by backward and recomputation.

    Attributes:
        rank: this rank in the group.
        num_tokens: T. top_k: K.
        pieces: own tokens, then those that cross in their order. [S]
        make_batches: gives `batches`, once.
    """

    rank: int
    num_tokens: int
    top_k: int
    num_local_experts: int
    pieces: Sequence[Piece]
    make_batches: Callable[[], Sequence[Batch]] = field(repr=False)

    @functools.cached_property
    def batches(self) -> Sequence[Batch]:
        """In the order in which they are computed. Made when first asked for: by then pieces are on
        their way."""
        return self.make_batches()


def gather_ids(
    ids: Tensor, num_experts: int, rounds: P2PRounds, operation: str
) -> tuple[Tensor, list[int]]:
    """The choices of all ranks. Collective; waits for the device.

    One all-gather, of two bytes a choice below 2**15 experts. Where a rank has more tokens than any
    had before, there is a second one.

    Args:
        ids: expert of each choice, -1 where it is dropped. [T, K] integers

    Returns:
        [W, C, K] of ids' device, -1 beyond a rank's tokens, and the number of tokens of each rank
        [W].

    Raises:
        ConfigError: ids is not [T, K].
        PeerTimeoutError: a rank does not take part.
    """
    check_ids(ids)
    # By top-k, room for the most tokens that any rank of the group has had.
    rooms = group_resource(rounds.group, "moe hierarchical sizes", dict[int, int])
    (tokens, top_k), world = ids.shape, rounds.world_size
    narrow = torch.int16 if num_experts < 2**15 else torch.int32
    while True:
        room = rooms.get(top_k, 0)
        fits = min(tokens, room) * top_k
        # The number of tokens, then choices; bytes of 255 are choices of -1.
        mine = ids.new_full((4 + room * top_k * narrow.itemsize,), 255, dtype=torch.uint8)
        mine[:4].view(torch.int32).fill_(tokens)
        mine[4:].view(narrow)[:fits].copy_(ids.reshape(-1)[:fits])
        every = mine.new_empty((world, mine.numel()))

        def start(every: Tensor = every, mine: Tensor = mine) -> dist.Work | None:
            return dist.all_gather_into_tensor(
                every.view(-1), mine, group=rounds.group, async_op=True
            )

        rounds.collective(operation, start)
        counts: list[int] = every[:, :4].contiguous().view(torch.int32).view(-1).tolist()
        if max(counts) <= room:
            choices = every[:, 4:].contiguous().view(narrow).view(world, room, top_k)
            return choices[:, : max(counts)].long(), counts
        rooms[top_k] = -(-max(counts) // 64) * 64


def chunks_for(crossing_bytes: float, device_type: str) -> int:
    """The number of pieces for so many crossing bytes of a rank: a power of two."""
    pieces = crossing_bytes / _LEAST_PIECE_BYTES[device_type]
    return min(MOST_CHUNKS, 2 ** int(math.log2(pieces))) if pieces >= 2 else 1


def plan_hierarchical(
    ids: Tensor, num_experts: int, rounds: P2PRounds, row_bytes: int, name: str = "moe",
    chunks: int | None = None,
) -> HierarchicalPlan:  # fmt: skip
    """The routing of one call. Collective over the group; the host waits for the device.

    Args:
        ids: expert of each choice, -1 where it is dropped. [T, K] integers
        num_experts: E, a multiple of the number of ranks.
        row_bytes: of one token, the same on all ranks.
        name: of the layer, for errors.
        chunks: pieces in which tokens cross, the same on all ranks; None: as their bytes say.

    Raises:
        ConfigError: ids is not [T, K], or E is not a multiple of the ranks.
        PeerTimeoutError: a rank does not take part.
    """
    choices, counts = gather_ids(ids, num_experts, rounds, f"{name} routing")
    layout = HostLayout(tuple(rounds.domains))
    if chunks is None:
        # The rank with most tokens, as if each went to as many other hosts as it can.
        most = max(counts) * min(ids.shape[1], layout.num_hosts - 1)
        chunks = chunks_for(most * row_bytes, ids.device.type)
    return make_plan(choices, counts, num_experts, layout, rounds.rank, chunks)


def _hosts_of_choices(ids: Tensor, num_experts: int, layout: HostLayout) -> Tensor:
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


def _reached_hosts(hosts: Tensor, layout: HostLayout) -> Tensor:
    """Which hosts have an expert for each token: of _hosts_of_choices [..., K] -> bool [..., M]"""
    shape = (*hosts.shape[:-1], 1 + layout.num_hosts)
    found = torch.zeros(shape, dtype=torch.bool, device=hosts.device)
    return found.scatter_(-1, hosts + 1, True)[..., 1:]


def make_plan(
    ids: Tensor, counts: Sequence[int], num_experts: int, layout: HostLayout, rank: int, chunks: int
) -> HierarchicalPlan:
    """The plan of one rank. No communication.

    Args:
        ids, counts: as gather_ids gives them.
        chunks: pieces in which tokens cross, the same on all ranks.
    """
    (world, most, top_k), device = ids.shape, ids.device
    per_rank, steps = local_experts(num_experts, world), chunks + 1
    here, members = layout.hosts[rank], layout.members[layout.hosts[rank]]
    reached = _reached_hosts(_hosts_of_choices(ids, num_experts, layout), layout)
    crosses = torch.tensor([[host != here] for host in layout.hosts], device=device)
    to_here = reached[..., here]
    crossed = crosses.long()  # the piece of each token that comes here. [W, 1] or [W, C]
    if chunks > 1:
        crossed = crossed * (_chunk_of(to_here, chunks) + 1)
    piece = torch.where(to_here, crossed, steps).view(-1)
    ranks_of = _ranks_of_choices(ids, per_rank)

    # From here on tokens of all ranks are numbers rank * C + token, and `steps` is the piece of
    # those that this host has no part in. First the tokens that this rank hands on:
    sources = torch.arange(world, device=device).repeat_interleave(most, output_size=world * most)
    gateways = torch.tensor([layout.gateway(s, here) for s in range(world)], device=device)[sources]
    held_piece = torch.where(gateways == rank, piece, steps)
    held_order, held_counts = _sorted(held_piece * world + sources, steps * world)
    held_piece = held_piece[held_order]
    begins = held_counts.view(steps, world).sum(1).cumsum(0)
    begins = torch.cat([begins.new_zeros(1), begins])[held_piece]
    hand_orders, hand_counts = [], []
    for member in members:
        goes = (ranks_of == member).any(-1).view(-1)[held_order]
        order, count = _sorted(torch.where(goes, held_piece, steps), steps)
        hand_orders.append(order - begins[order])
        hand_counts.append(count)
    # Then those that this rank computes, and their choices of its experts.
    to_me = (ranks_of == rank).any(-1).view(-1)
    arrival = torch.where(to_me, piece * world + gateways, steps * world)
    arrived, arrival_counts = _sorted(arrival, steps * world)
    keys = torch.where(ranks_of == rank, ids - rank * per_rank, per_rank).view(-1, top_k)[arrived]
    arrived_piece = piece[arrived].view(-1, 1)
    by_expert = _counted(arrived_piece * (per_rank + 1) + keys, steps * (per_rank + 1))
    # And this rank's own tokens, by the host that they go to.
    to_hosts = reached[rank, : counts[rank]].t()
    send_orders = (~to_hosts).to(torch.uint8).argsort(dim=1, stable=True)

    held, hand, arrivals, experts, to_host = _read(
        [
            held_counts.view(steps, world),
            torch.stack(hand_counts),
            arrival_counts.view(steps, world),
            by_expert.view(steps, per_rank + 1),
            to_hosts.sum(1, keepdim=True),
        ]
    )
    to_host_counts = [count for (count,) in to_host]
    pieces = []
    at_held, at_hand = 0, [0] * len(members)
    for step, by_source in enumerate(held):
        num_held, own = sum(by_source), step == 0
        hands = []
        for index, (member, order) in enumerate(zip(members, hand_orders, strict=True)):
            size = hand[index][step]
            hands.append((member, order[at_hand[index] : at_hand[index] + size]))
            at_hand[index] += size
        pieces.append(
            Piece(
                held_order[at_held : at_held + num_held] - rank * most if own else None,
                [] if own else _sends(layout, rank, send_orders, to_host_counts, step - 1, chunks),
                [] if own else [(s, n) for s, n in enumerate(by_source) if n],
                num_held,
                hands,
                [(member, arrivals[step][member]) for member in members],
            )
        )
        at_held += num_held
    # Once: the plan lives until the backward, the keys of all choices need not.
    once = [(pieces, keys, [of_piece[:per_rank] for of_piece in experts], device)]
    return HierarchicalPlan(
        rank, counts[rank], top_k, per_rank, pieces, lambda: _batches(*once.pop())
    )


def _read(tables: Sequence[Tensor]) -> list[list[list[int]]]:
    """Tables of counts [rows, columns] on the host, in one read of the device."""
    flat = torch.cat([table.reshape(-1) for table in tables]).cpu()
    parts = flat.split([table.numel() for table in tables])
    return [part.view(table.shape).tolist() for part, table in zip(parts, tables, strict=True)]


def _batches(
    pieces: Sequence[Piece], keys: Tensor, by_piece: list[list[int]], device: torch.device
) -> list[Batch]:
    """What this rank computes, in its order.

    Args:
        keys: local expert of each choice of the tokens that arrive, El for those of other ranks;
            tokens in the order of the pieces. [n, K]
        by_piece: rows of each piece for each expert. [S][El]
    """
    found, begin = list[Batch](), 0
    for index, (piece, counts) in enumerate(zip(pieces, by_piece, strict=True)):
        choices = keys[begin : begin + piece.num_arrived]
        begin += piece.num_arrived
        rows = sum(counts)
        permutation = Permutation.of(choices.reshape(-1), choices.shape).first(rows)
        found.append(Batch(index, permutation, slice(rows), _groups(counts, device)))
    own, counts = found[0], by_piece[0]
    first = (len(counts) + 1) // 2
    if first == len(counts):
        return found
    split, none = sum(counts[:first]), [0] * len(counts)
    before, after = counts[:first] + none[first:], none[:first] + counts[first:]
    rows = own.rows.stop
    found[0] = Batch(0, own.permutation, slice(split), _groups(before, device), last=False)
    found.append(Batch(0, own.permutation, slice(split, rows), _groups(after, device)))
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


def _sorted(keys: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The positions of keys in ascending order, and how often each of 0 .. size - 1 occurs."""
    return keys.argsort(stable=True), _counted(keys, size)


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
