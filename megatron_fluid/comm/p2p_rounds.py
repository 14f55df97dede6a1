"""Peer rounds: an all-to-all as a tournament, one partner at a time, over NCCL or gloo.

Each round is started without waiting and finished by its own `wait`, so that a rank computes with
what one peer sent while the next round moves. See topology.py for the order of the partners.

    rounds = P2PRounds(group)
    for r, peer in enumerate(rounds.partners):
        pending = rounds.start("moe dispatch", r, [rows_for(peer)], [rows_from(peer)])
        ...                     # computation that does not need this round
        pending.wait()

All ranks of the group start the same rounds in the same order (a bye included).
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.group_resources import group_resource
from megatron_fluid.comm.watchdog import FailureLog, get_monitor
from megatron_fluid.config import current_config
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.topology import detect_domains, tournament

__all__ = [
    "MultiCardOverlapContext",
    "P2PRounds",
    "PendingRound",
    "bounded_collective",
    "bounded_wait",
    "shared_rounds",
]

_SLOW_START = 2.0
"""The first round on a device may take this many times the timeout: connections are made, kernels
are loaded."""


class PendingRound:
    """A round that was started. It keeps its tensors alive until it is waited for.

    Attributes:
        operation: what is moved.
        round_index: which round of it.
        peer: the partner, as rank of the group; None in a bye.
    """

    def __init__(self, operation: str, round_index: int, peer: int | None) -> None:
        self.operation, self.round_index, self.peer = operation, round_index, peer

    def wait(self) -> None:
        """Make the received tensors ready for what follows: on a GPU the current stream waits, on a
        CPU the caller.

        Raises:
            PeerTimeoutError: on a CPU, when the peer did not answer in time. On a GPU the monitor
                reports it.
        """

    def done(self) -> bool:
        """Whether the round is known to have finished; never blocks. (gloo tells only those who
        wait.)"""
        return True


class _GlooRound(PendingRound):
    def __init__(
        self,
        rounds: P2PRounds,
        operation: str,
        round_index: int,
        peer: int,
        works: list[dist.Work],
        kept: list[Tensor],
    ) -> None:
        super().__init__(operation, round_index, peer)
        self._rounds, self._works, self._kept = rounds, works, kept

    def wait(self) -> None:
        while self._works:  # a work that failed stays, so that the round is not taken for done
            bounded_wait(self._works[0], self._rounds, self.operation, self.round_index, self.peer)
            del self._works[0]
        self._kept = []

    def done(self) -> bool:
        return not self._works


class _CudaRound(PendingRound):
    def __init__(
        self,
        operation: str,
        round_index: int,
        peer: int,
        finished: torch.cuda.Event,
        kept: list[Tensor],
    ) -> None:
        super().__init__(operation, round_index, peer)
        self._finished, self._kept = finished, kept

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._finished)
        self._kept = []

    def done(self) -> bool:
        return self._finished.query()


def bounded_wait(
    work: dist.Work,
    rounds: P2PRounds,
    operation: str,
    round_index: int | None = None,
    peer: int | None = None,
) -> None:
    """Wait for a gloo work, at most `rounds.timeout_s` seconds.

    Raises:
        PeerTimeoutError: it did not finish in time, or the connection broke.
    """
    # gloo's thread lets go of a work after it has told us that it is done. Were it the last to hold
    # it, it would need Python's lock for the tensors inside, which a process that is already ending
    # never gives: abort.
    rounds.last_work = work
    started = time.monotonic()
    try:
        finished = work.wait(timedelta(seconds=rounds.timeout_s))
        reason = "the wait ended without a result"
    except RuntimeError as error:
        finished, reason = False, str(error).strip().splitlines()[0]
    if not finished:
        waited = round(time.monotonic() - started, 2)
        raise rounds.failure(peer, operation, round_index, waited, reason)


def bounded_collective(
    rounds: P2PRounds, operation: str, launch: Callable[[], dist.Work | None]
) -> None:
    """Run one collective of the group as bounded as a round: on a CPU it raises, on a GPU the
    monitor watches it.

    Args:
        rounds: the group's rounds.
        operation: names the collective in errors.
        launch: starts it with async_op=True.

    Raises:
        PeerTimeoutError: on a CPU, when it did not finish within the timeout.
    """
    if rounds.device.type != "cuda":
        bounded_wait(_required(launch()), rounds, operation)
        return
    stream = torch.cuda.current_stream()
    watched = not torch.cuda.is_current_stream_capturing()
    started = _event(stream) if watched else None
    with rounds.launching(operation, None, None, rounds.timeout_s):
        _required(launch()).wait()
    if started is not None:
        rounds.watch(operation, None, None, started, _event(stream), rounds.timeout_s, stream)


class P2PRounds:
    """Exchanges with one peer a round. Making one is collective over the group.

    Args:
        group: process group with NCCL (CUDA tensors) or gloo (CPU tensors), or both.
        timeout_s: bound in seconds on every wait for a peer; None takes the configuration's.
        first_timeout_s: the bound for the first round on a GPU; None takes twice timeout_s.

    Attributes:
        group, rank, world_size: the group, this rank in it, and its size W.
        domains: NVLink domain of every rank of the group (see topology.detect_domains).
        partners: this rank's peer in every round, None where it has a bye.
        device: where its tensors live: the current CUDA device if the group has NCCL, else the CPU.
        stream: the communication stream on a GPU, else None.

    Raises:
        ConfigError: no group, or a timeout that is not positive.
        PeerTimeoutError: a rank of the group does not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        timeout_s: float | None = None,
        first_timeout_s: float | None = None,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError.of("group", group, "an initialised torch.distributed process group")
        self.timeout_s = current_config().timeout_s if timeout_s is None else timeout_s
        if not self.timeout_s > 0:
            raise ConfigError.of("timeout_s", self.timeout_s, "seconds above 0")
        self.first_timeout_s = (
            _SLOW_START * self.timeout_s if first_timeout_s is None else first_timeout_s
        )
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.domains = detect_domains(group, self.timeout_s)
        self.schedule = tournament(self.world_size, self.domains)
        self.partners: list[int | None] = [
            next((b if a == self.rank else a for a, b in pairs if self.rank in (a, b)), None)
            for pairs in self.schedule
        ]
        # Its own connection: the monitor's thread must not queue behind another thread's wait on
        # the store.
        self.log = FailureLog(dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
        self._connected: set[int] = set()
        self.last_work: dist.Work | None = None
        self.device = _device_of(group)
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            self._connect()

    def _connect(self) -> None:
        """Form the NCCL communicator. A batch of sends and receives cannot: there, ranks with a bye
        stay away."""
        if self.world_size == 1:
            return
        assert self.stream is not None
        with torch.cuda.stream(self.stream):
            started, operation = _event(self.stream), "communicator set-up"
            one = torch.zeros(1, device=self.device)
            with self.launching(operation, None, None, self.first_timeout_s):
                dist.all_reduce(one, group=self.group)
            finished = _event(self.stream)
        self.watch(operation, None, None, started, finished, self.first_timeout_s, self.stream)

    @contextlib.contextmanager
    def launching(
        self, operation: str, round_index: int | None, peer: int | None, timeout_s: float
    ) -> Iterator[None]:
        """Watch the host while it launches: with a peer's first message NCCL connects, and that
        waits for the peer."""
        launched = _Flag()

        def error() -> PeerTimeoutError:
            return self.failure(
                peer, operation, round_index, timeout_s, "the connection was not made"
            )

        get_monitor().watch(
            ("launch", threading.get_ident()),
            _Flag(True),
            launched,
            timeout_s,
            error,
            self._failed_already,
        )
        try:
            yield
        finally:
            launched.happened = True

    def watch(
        self,
        operation: str,
        round_index: int | None,
        peer: int | None,
        started: torch.cuda.Event,
        finished: torch.cuda.Event,
        timeout_s: float,
        lane: torch.cuda.Stream,
    ) -> None:
        """Have the monitor end the process if `finished` does not follow `started` within
        `timeout_s` seconds."""

        def error() -> PeerTimeoutError:
            return self.failure(peer, operation, round_index, timeout_s)

        get_monitor().watch(lane, started, finished, timeout_s, error, self._failed_already)

    def failure(
        self,
        peer: int | None,
        operation: str,
        round_index: int | None,
        waited_s: float,
        reason: str = "",
    ) -> PeerTimeoutError:
        """Record that a peer did not answer, and give the error for it, with the root cause if that
        lies elsewhere.

        Ranks are the group's; the global ones are added if they differ.
        """
        own = dist.get_global_rank(self.group, self.rank)
        theirs = None if peer is None else dist.get_global_rank(self.group, peer)
        if (own, theirs) != (self.rank, peer):
            reason = f"global ranks {own} and {theirs}" + (f"; {reason}" if reason else "")
        error = PeerTimeoutError(self.rank, peer, operation, round_index, waited_s, reason)
        return self.log.explain(error, own, theirs)

    def _failed_already(self) -> bool:
        return bool(self.log.first())

    def start(
        self, operation: str, round_index: int, send: Sequence[Tensor], recv: Sequence[Tensor]
    ) -> PendingRound:
        """Start moving `send` to this round's partner and `recv` from it. Does not block.

        Tensors without elements are skipped, so both sides must agree on which are empty. On a GPU
        the exchange runs on the communication stream, ordered after what the current stream has
        been given so far.

        Args:
            operation: names the exchange in errors; exchanges in flight at the same time need
                different names.
            round_index: 0 .. len(partners) - 1.
            send, recv: contiguous tensors on the group's device; sizes match the partner's.

        Raises:
            ConfigError: a tensor that is not contiguous or on the wrong device, or tensors in a
                bye.
        """
        if not 0 <= round_index < len(self.partners):
            raise ConfigError.of("round_index", round_index, f"0 to {len(self.partners) - 1}")
        peer = self.partners[round_index]
        outgoing, incoming = _filled(send), _filled(recv)
        if peer is None and (outgoing or incoming):
            raise ConfigError(
                f"{operation}, round {round_index}: rank {self.rank} has a bye, but tensors to "
                "exchange"
            )
        if peer is None or not (outgoing or incoming):
            return PendingRound(operation, round_index, peer)
        for tensor in (*outgoing, *incoming):
            if not tensor.is_contiguous():
                raise ConfigError(
                    f"{operation}, round {round_index}: tensors must be contiguous, found "
                    f"{tensor.shape}"
                )
        if (outgoing or incoming)[0].is_cuda:
            return self._start_cuda(operation, round_index, peer, outgoing, incoming)
        return self._start_gloo(operation, round_index, peer, outgoing, incoming)

    def _start_gloo(
        self,
        operation: str,
        round_index: int,
        peer: int,
        outgoing: list[Tensor],
        incoming: list[Tensor],
    ) -> PendingRound:
        # Messages of one tag arrive in the order in which they were sent; tags keep operations in
        # flight apart.
        works: list[dist.Work] = []
        try:
            for i, tensor in enumerate(incoming):
                tag = _tag(operation, round_index, i)
                works.append(
                    _required(dist.irecv(tensor, group=self.group, group_src=peer, tag=tag))
                )
            for i, tensor in enumerate(outgoing):
                tag = _tag(operation, round_index, i)
                works.append(
                    _required(dist.isend(tensor, group=self.group, group_dst=peer, tag=tag))
                )
        except RuntimeError as error:  # the connection is known to be broken
            reason = str(error).strip().splitlines()[0]
            raise self.failure(peer, operation, round_index, 0.0, reason) from error
        return _GlooRound(self, operation, round_index, peer, works, [*outgoing, *incoming])

    def _start_cuda(
        self,
        operation: str,
        round_index: int,
        peer: int,
        outgoing: list[Tensor],
        incoming: list[Tensor],
    ) -> PendingRound:
        if self.stream is None:
            raise ConfigError(
                f"{operation}: CUDA tensors need a group with NCCL; this group is for {self.device}"
            )
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            watched = not torch.cuda.is_current_stream_capturing()
            started = _event(stream) if watched else None
            operations = [
                dist.P2POp(dist.isend, t, group=self.group, group_peer=peer) for t in outgoing
            ]
            operations += [
                dist.P2POp(dist.irecv, t, group=self.group, group_peer=peer) for t in incoming
            ]
            timeout_s = self.timeout_s if peer in self._connected else self.first_timeout_s
            self._connected.add(peer)
            with self.launching(operation, round_index, peer, timeout_s):
                works = dist.batch_isend_irecv(operations)
            for work in works:
                work.wait()  # the communication stream waits for NCCL's own; the host does not
            finished = _event(stream)
        for tensor in (*outgoing, *incoming):
            tensor.record_stream(stream)
        if started is not None:
            self.watch(operation, round_index, peer, started, finished, timeout_s, stream)
        return _CudaRound(operation, round_index, peer, finished, [*outgoing, *incoming])


@dataclass
class _Flag:
    """An event that the host sets."""

    happened: bool = False

    def query(self) -> bool:
        return self.happened


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def _filled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]


def _required(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


def _tag(operation: str, round_index: int, index: int) -> int:
    return zlib.crc32(f"{operation}\0{round_index}\0{index}".encode()) & 0x7FFFFFFF


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if torch.cuda.is_available() and torch.device("cuda") in group._device_types:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def shared_rounds(group: dist.ProcessGroup | None, timeout_s: float | None = None) -> P2PRounds:
    """The rounds of a group, made once for all layers that use it. Collective over the group at its
    first call.

    Args:
        group: the process group.
        timeout_s: as for P2PRounds; None keeps what the shared rounds have.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError.of("group", group, "an initialised torch.distributed process group")
    process_group = group
    found = group_resource(process_group, "p2p rounds", lambda: P2PRounds(process_group, timeout_s))
    if timeout_s is not None:
        found.timeout_s, found.first_timeout_s = timeout_s, _SLOW_START * timeout_s
    return found


class MultiCardOverlapContext:
    """What the overlapped layers of one group share: the schedule, the communication stream, the
    rounds.

    It holds nothing about any call: a forward keeps its state in its own object.

    Args:
        device: where the tensors live.
        ep_size: number of ranks W; may be left out with `group`.
        group: the process group; without it the context is bound to the group of the first call
            that uses it.
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
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        if ep_size is None:
            if group is None:
                raise ConfigError(
                    "MultiCardOverlapContext: found neither ep_size nor group, allowed: one of them"
                )
            ep_size = group.size()
        self.ep_size = ep_size
        self._schedule = tournament(ep_size)
        self._rounds: P2PRounds | None = None
        if group is not None:
            self.rounds(group)

    def rounds(self, group: dist.ProcessGroup | None = None) -> P2PRounds:
        """The rounds of `group`, to which the context is bound from now on. Collective at the first
        call.

        Raises:
            ConfigError: a group of another size than ep_size, or no group yet.
        """
        if group is None:
            if self._rounds is None:
                raise ConfigError(
                    "MultiCardOverlapContext: no process group yet; give one to the constructor"
                )
            return self._rounds
        if self._rounds is None or self._rounds.group is not group:
            if group.size() != self.ep_size:
                raise ConfigError.of(
                    "ep_size", self.ep_size, f"{group.size()}, the size of the group"
                )
            self._rounds = shared_rounds(group, self.timeout_s)
            self._schedule = self._rounds.schedule
        return self._rounds

    @property
    def num_rounds(self) -> int:
        """Rounds of one exchange: W - 1 for an even number of ranks in one domain."""
        return len(self._schedule)

    def get_partner(self, rank: int, round_index: int) -> int:
        """The partner of `rank` in a round, or -1 if it has a bye."""
        if not 0 <= rank < self.ep_size:
            raise ConfigError.of("rank", rank, f"0 to {self.ep_size - 1}")
        for a, b in self._schedule[round_index]:
            if rank in (a, b):
                return b if rank == a else a
        return -1

    def get_stream(self) -> torch.cuda.Stream | None:
        """The communication stream: None on a CPU, or while the context is not bound to a group."""
        return self._rounds.stream if self._rounds is not None else None
