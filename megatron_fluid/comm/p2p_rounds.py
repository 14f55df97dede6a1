"""Round-robin P2P exchange: an all-to-all with one partner a round, over NCCL or gloo.

Each round is started without waiting and finished by its own `wait`, so that a rank computes with
what one peer sent while the next round is in flight. topology.py gives the order of the partners.

    rounds = P2PRounds(group)
    for r, peer in enumerate(rounds.partners):
        pending = rounds.start("moe dispatch", r, [rows_for(peer)], [rows_from(peer)])
        ...                     # computation that does not need this round
        pending.wait()

All ranks of the group start the same rounds in the same order (a bye included).
"""

from __future__ import annotations

import itertools
import os
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.groups import group_or_lone_rank, group_resource
from megatron_fluid.comm.waits import SLOW_START, GroupWaits, WaitName, record_event, required
from megatron_fluid.config import check_setting
from megatron_fluid.errors import ConfigError, first_line
from megatron_fluid.topology import check_group, domain_name, partners

__all__ = [
    "MultiCardOverlapContext",
    "P2PRounds",
    "PendingRound",
    "SeveralRounds",
    "detect_hosts",
    "shared_rounds",
]

type Transfer = tuple[int, Sequence[Tensor], Sequence[Tensor]]  # peer, sent, received


class PendingRound:
    """A round in flight. It keeps its tensors alive until `wait`."""

    def wait(self) -> None:
        """Make the received tensors ready: on a GPU the current stream waits, on a CPU the caller.

        Raises:
            PeerTimeoutError: on a CPU, the peer did not answer in time. On a GPU the watcher
                reports it.
        """

    def done(self) -> bool:
        """Return whether the round is known to have finished; never blocks.

        A gloo round is known to have finished only after `wait`.
        """
        return True


@dataclass
class _GlooRound(PendingRound):
    name: WaitName
    rounds: P2PRounds
    works: list[dist.Work]
    kept: list[Tensor]

    def wait(self) -> None:
        while self.works:  # a work that failed stays, so that the round does not count as done
            self.rounds.waits.wait(self.works[0], self.name, self.rounds.timeout_s)
            del self.works[0]
        self.kept = []

    def done(self) -> bool:
        return not self.works

    def __del__(self) -> None:
        if self.works:  # left by an error: gloo's connection hangs once a receive is freed
            self.rounds.left.append((self.works, self.kept))


@dataclass
class SeveralRounds(PendingRound):
    parts: Sequence[PendingRound]

    def wait(self) -> None:
        for part in self.parts:
            part.wait()

    def done(self) -> bool:
        return all(part.done() for part in self.parts)


@dataclass
class _CudaRound(PendingRound):
    finished: torch.cuda.Event
    kept: list[Tensor]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.finished)
        self.kept = []

    def done(self) -> bool:
        return self.finished.query()


def detect_hosts(
    group: dist.ProcessGroup | None, timeout_s: float | None = None
) -> tuple[list[int], list[str]]:
    """Return the NVLink domain and the host of every rank of a group, alike on all. Collective.

    Ranks of one host form a domain (MEGATRON_FLUID_NVLINK_DOMAIN overrides it). Names go through
    the job's store and not through a collective of torch, so this works before the first use of
    the group's devices.

    Args:
        timeout_s: bound on the wait in seconds; None: that of the group's waits.

    Returns:
        Domains, numbered by their first rank from 0 [W], and for errors the host names, with the
        domain's name where it has one. [W]

    Raises:
        ConfigError: no group.
        PeerTimeoutError: a rank did not come within timeout_s.
    """
    channel = agreement(check_group(group))
    named = os.environ.get("MEGATRON_FLUID_NVLINK_DOMAIN")
    host = f"{socket.gethostname()} ({named})" if named else socket.gethostname()
    names = channel.gather("hosts of the group", (domain_name(), host), timeout_s)
    ids: dict[str, int] = {}
    return [ids.setdefault(domain, len(ids)) for domain, _ in names], [host for _, host in names]


class P2PRounds:
    """Exchanges with one peer a round. Construction is collective over the group.

    Args:
        group: process group with NCCL (CUDA tensors) or gloo (CPU tensors), or both.
        timeout_s: bound in seconds on every wait for a peer; None takes the configuration's.

    Attributes:
        group, rank, world_size: the group, this rank in it, and its size W.
        domains: NVLink domain of every rank of the group (see detect_hosts).
        hosts: name of every rank's host, for errors. [W]
        partners: this rank's peer in every round, None where it has a bye.
        device: where its tensors live: the current CUDA device if the group has NCCL, else the CPU.
        stream: the communication stream on a GPU, else None.
        calls: numbers for `exchange`.
        asks_ahead: whether a receive may be started alone, long before its peer sends: over gloo,
            not over NCCL, where it would hold up what is launched after it.

    Raises:
        ConfigError: no group, or a timeout out of range.
        PeerTimeoutError: a rank of the group does not come.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float | None = None) -> None:
        self.group = group = check_group(group)
        self.waits = GroupWaits(group, self._between_hosts)
        self.timeout_s = timeout_s
        self.rank, self.world_size = group.rank(), group.size()
        self.domains, self.hosts = detect_hosts(group, self.timeout_s)
        self.partners = partners(self.rank, self.world_size, self.domains)
        self._connected: set[int] = set()
        self.left: list[tuple[list[dist.Work], list[Tensor]]] = []  # of exchanges over gloo
        self.device = self.waits.device
        self.asks_ahead = self.device.type != "cuda"
        self.calls = itertools.count(1)
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            self._connect()

    @property
    def timeout_s(self) -> float:
        """Bound on a wait in seconds: what was given, else what the configuration has now."""
        return self.waits.timeout_s if self._given_s is None else self._given_s

    @timeout_s.setter
    def timeout_s(self, seconds: float | None) -> None:
        check_setting("timeout_s", seconds)
        self._given_s = seconds

    def _connect(self) -> None:
        """Form the NCCL communicator, for which every rank is needed: a batch of sends and receives
        cannot, since ranks with a bye start none."""
        if self.world_size == 1:
            return
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            one = torch.zeros(1, device=self.device)
            self.waits.collective(
                "communicator set-up",
                lambda: dist.all_reduce(one, group=self.group, async_op=True),
                SLOW_START * self.timeout_s,
            )

    def collective(self, operation: str, launch: Callable[[], dist.Work | None]) -> None:
        """Run one collective of the group with the bound of a round: GroupWaits.collective."""
        self.waits.collective(operation, launch, self.timeout_s)

    def _between_hosts(self, peer: int | None) -> str:
        """For errors: the hosts that a wait is between, "" where it is inside one."""
        others = range(self.world_size) if peer is None else [peer]
        own = self.domains[self.rank]
        far = dict.fromkeys(self.hosts[rank] for rank in others if self.domains[rank] != own)
        names = [*list(far)[:4], *(["..."] if len(far) > 4 else [])]
        return f"from host {self.hosts[self.rank]} to {', '.join(names)}" if far else ""

    def start(
        self, operation: str, round_index: int, send: Sequence[Tensor], recv: Sequence[Tensor]
    ) -> PendingRound:
        """Start sending `send` to this round's partner and receiving `recv`. Does not block.

        Tensors without elements are skipped, so both sides must agree on which are empty. On a GPU
        the exchange runs on the communication stream, after all work enqueued on the current one.

        Args:
            operation: names the exchange in errors; exchanges in flight at the same time need
                different names.
            round_index: 0 .. len(partners) - 1.
            send, recv: contiguous tensors on the group's device; sizes match the partner's.

        Raises:
            ConfigError: a tensor is not contiguous or on the wrong device, or this rank has a bye.
        """
        if not 0 <= round_index < len(self.partners):
            raise ConfigError.of("round_index", round_index, f"0 to {len(self.partners) - 1}")
        peer = self.partners[round_index]
        if peer is not None:
            return self.exchange(operation, round_index, [(peer, send, recv)])
        if any(tensor.numel() for tensor in (*send, *recv)):
            where = f"{operation}, round {round_index}"
            raise ConfigError(f"{where}: rank {self.rank} has a bye, but tensors to exchange")
        return PendingRound()

    def exchange(
        self, operation: str, index: int, transfers: Sequence[Transfer], call: int = 0
    ) -> PendingRound:
        """Start sending to and receiving from any ranks at once. Does not block.

        Args:
            operation: as for `start`.
            index: which of the operation's exchanges; errors call it the round.
            transfers: (peer, tensors to send, tensors to receive), each peer once. Tensors without
                elements are skipped, as in `start`.
            call: from `calls`, the same on all ranks, where receives are posted before their peer
                sends: over gloo, those that an error left take no message of a later call.

        Raises:
            ConfigError: as for `start`.
        """
        moves = [
            (peer, [t for t in send if t.numel()], [t for t in recv if t.numel()])
            for peer, send, recv in transfers
        ]
        moves = [transfer for transfer in moves if transfer[1] or transfer[2]]
        if not moves:
            return PendingRound()
        name = WaitName(operation, index, moves[0][0] if len(moves) == 1 else None)
        for tensor in (t for _, outgoing, incoming in moves for t in (*outgoing, *incoming)):
            if not tensor.is_contiguous():
                where = f"{operation}, round {index}"
                raise ConfigError(f"{where}: tensors must be contiguous, found {tensor.shape}")
        _, outgoing, incoming = moves[0]
        if (*outgoing, *incoming)[0].is_cuda:
            return self._start_cuda(name, moves)
        # gloo sends what has been asked for: no receive may queue behind another peer's data.
        receives = [(peer, dist.irecv, incoming) for peer, _, incoming in moves if incoming]
        sends = [(peer, dist.isend, outgoing) for peer, outgoing, _ in moves if outgoing]
        return SeveralRounds(
            [
                self._start_gloo(name._replace(peer=p), move, t, call)
                for p, move, t in receives + sends
            ]
        )

    def _start_gloo(
        self,
        name: WaitName,
        move: Callable[..., dist.Work | None],
        tensors: Sequence[Tensor],
        call: int,
    ) -> PendingRound:
        # Messages of one tag arrive in the order of sending; tags keep operations apart.
        works = []
        try:
            for i, tensor in enumerate(tensors):
                tag = _tag(name, i, call)
                works.append(required(move(tensor, None, self.group, tag, name.peer)))
        except RuntimeError as error:  # the connection is known to be broken
            raise self.waits.failure(name, 0.0, first_line(error)) from error
        return _GlooRound(name, self, works, list(tensors))

    def _start_cuda(self, name: WaitName, transfers: Sequence[Transfer]) -> PendingRound:
        stream = self.stream
        if stream is None:
            needs = f"CUDA tensors need a group with NCCL; this group is for {self.device}"
            raise ConfigError(f"{name.operation}: {needs}")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            watched = not torch.cuda.is_current_stream_capturing()
            started = record_event(stream) if watched else None
            moves = [
                (move, tensor, peer)
                for peer, outgoing, incoming in transfers
                for move, tensors in ((dist.isend, outgoing), (dist.irecv, incoming))
                for tensor in tensors
            ]
            batch = [dist.P2POp(m, t, group=self.group, group_peer=peer) for m, t, peer in moves]
            peers = {peer for peer, *_ in transfers}
            timeout_s = self.timeout_s * (1.0 if peers <= self._connected else SLOW_START)
            self._connected |= peers
            with self.waits.inside_library(name, timeout_s):
                works = dist.batch_isend_irecv(batch)
            for work in works:
                work.wait()  # the communication stream waits for NCCL's own; the host does not
            finished = record_event(stream)
        for _, tensor, _ in moves:
            tensor.record_stream(stream)
        if started is not None:
            self.waits.watch(name, started.query, finished.query, timeout_s, stream)
        return _CudaRound(finished, [tensor for _, tensor, _ in moves])


def _tag(name: WaitName, index: int, call: int) -> int:
    text = f"{name.operation}\0{name.round_index}\0{index}\0{call}"
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def shared_rounds(group: dist.ProcessGroup | None, timeout_s: float | None = None) -> P2PRounds:
    """Return the rounds of a group, made once for all its layers. Collective at the first call.

    Args:
        group: the process group; None where this process runs alone.
        timeout_s: as for P2PRounds; None keeps that of the shared rounds.
    """
    group = check_group(group_or_lone_rank(group))
    rounds = group_resource(group, "p2p rounds", lambda: P2PRounds(group, timeout_s))
    if timeout_s is not None:
        rounds.timeout_s = timeout_s
    return rounds


class MultiCardOverlapContext:
    """The P2PRounds that the overlapped layers of a group share. It holds nothing about any call.

    Args:
        device: where the tensors live.
        ep_size: number of ranks W; may be left out with `group`.
        group: the process group; None binds the context to the group of its first use.
        timeout_s: bound in seconds on every wait for a peer; None takes the configuration's.

    Raises:
        ConfigError: neither ep_size nor group, or the two disagree.
    """

    def __init__(
        self,
        device: torch.device | str,
        ep_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        check_setting("timeout_s", timeout_s)
        self.device, self.timeout_s = torch.device(device), timeout_s
        if ep_size is None:
            if group is None:
                missing = "found neither ep_size nor group, allowed: one of them"
                raise ConfigError(f"MultiCardOverlapContext: {missing}")
            ep_size = group.size()
        if ep_size < 1:
            raise ConfigError.of("ep_size", ep_size, "1 or more")
        self.ep_size = ep_size
        self._rounds: P2PRounds | None = None
        if group is not None:
            self.rounds(group)

    def rounds(self, group: dist.ProcessGroup | None = None) -> P2PRounds:
        """Return the rounds of `group` and bind the context to it. Collective at the first call.

        Raises:
            ConfigError: a group of another size than ep_size, or no group yet.
        """
        if group is None:
            if self._rounds is None:
                needed = "no process group yet; give one to the constructor"
                raise ConfigError(f"MultiCardOverlapContext: {needed}")
            return self._rounds
        if self._rounds is None or self._rounds.group is not group:
            if group.size() != self.ep_size:
                allowed = f"{group.size()}, the size of the group"
                raise ConfigError.of("ep_size", self.ep_size, allowed)
            self._rounds = shared_rounds(group, self.timeout_s)
        return self._rounds
