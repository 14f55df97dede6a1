"""Small values that the ranks of a process group exchange through the job's store: host names, the
settings of a new layer, sizes of symmetric memory, failures. Only this module uses the store.

When: while something is built or grows, and after a wait has failed; never in a steady step.

`gather`, which `first` and `barrier` call, is collective. Call number N of a session:

    rank r                                    first rank
    N/r = (operation, value)              --> polls until all ranks have stored theirs
    polls N/answer                        <-- N/answer = (values, absent ranks, failure)

If a rank does not come within the timeout, all others raise PeerTimeoutError, which names it. If it
is the first rank that stays away, they read from the store who has come. Ranks that are in
different operations, or one that reports a failure, end the call of all with FluidError at once.

`publish`, `read` and the reports of failures are calls of one rank alone. No call waits longer than
its bound, also where the host of the store is frozen.

A store outlives process groups: after `close_group`, after `destroy_process_group` and
`init_process_group` on torchrun's store, and after an elastic restart it still holds what was
stored for earlier groups of the same name. So all keys of a group begin with the id of a session,
which lasts until the group is closed or destroyed. Its first rank draws the id at random. The
others ask for it by a request with an id of its own, so that no old answer is taken for a new one:

    rank r                                     first rank
    join/r = request id (new each session) --> sees a request that it has not answered
    reads accept/<request id>              <-- accept/<request id> = session id

The answer to an old request is read by nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from megatron_fluid.comm.groups import group_resource, held_everywhere, is_lone, wait_timeout_s
from megatron_fluid.errors import FluidError, PeerTimeoutError, ranks_text
from megatron_fluid.topology import real_group

__all__ = ["STORE_S", "Agreement", "agreement", "live_agreements"]

STORE_S = 5.0  # a store that is alive has answered by then
_PREFIX = "megatron_fluid"
_POLL_S = (0.001, 0.02)  # first and longest pause between two looks
_RESOURCE = "agreement"
_FAILED = "failed"
_JOIN_S = 1.0  # for a refusal before the first agreement
_FAILED_EVERY_S = 1.0  # between looks for a failure of another rank

type _Answer = tuple[list[Any], list[int], str]  # values by rank, absent ranks, failure or ""


class Agreement:
    """The exchange of values between the ranks of a process group, in one session.
    `agreement(group)` makes it.

    Ranks are the group's, but for `ranks`. All ranks call `gather`, `first` and `barrier` in
    the same order. Values are pickled. Construction sends nothing.

    Args:
        store: shared by the ranks; None where one process stands for the whole group.
        group: the same text on all ranks, which no other group has at the same time.
        rank: of this process in the group.
        ranks: global rank of every rank. [size]
        timeout_s: bound on a wait in seconds, unless a call gives its own.
    """

    def __init__(
        self,
        store: dist.Store | None,
        group: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: Callable[[], float],
    ) -> None:
        self.rank, self.ranks, self.size = rank, ranks, len(ranks)
        self.alone = store is None
        self._store, self._timeout_s = store, timeout_s
        self._group_key = f"{_PREFIX}/{hashlib.sha1(group.encode()).hexdigest()}"
        self._request_id = uuid.uuid4().hex
        self._session = self._request_id if rank == 0 else None
        self._requested = False
        # On the first rank: the request of each rank that was answered last, and which ranks have
        # stored something in this session.
        self._accepted: dict[int, str] = {}
        self._joined = {0}
        self._calls = self._refusals = 0
        self._refused = False  # whether the last report_refusal still stands
        self._looked = 0  # how many reports there were when none that stood was unknown here
        self._stuck: list[threading.Thread] = []  # calls on the store that have not come back

    # ---- what all ranks do together

    def gather(self, operation: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's value, by rank. Collective.

        Args:
            operation: names the call in errors; the same on all ranks.
            timeout_s: bound on the wait in seconds; None: that of the group's waits.

        Raises:
            PeerTimeoutError: a rank has not come within the timeout. It names all such ranks.
            FluidError: the ranks are in different operations, or one of them has failed.
        """
        number = self.ticket()
        if self.alone:
            return [value] * self.size
        if self._refused:
            self.withdraw_refusal()
        limit_s = self._timeout_s() if timeout_s is None else timeout_s
        gather = self._collect_for_all if self.rank == 0 else self._ask_first_rank
        answer = self._bounded(
            lambda: gather(number, operation, value, limit_s), limit_s + 3 * STORE_S
        )
        if answer is None:
            detail = "the store of the job does not answer: the process that holds it is lost"
            raise PeerTimeoutError(self.rank, None, operation, timeout_s=limit_s, detail=detail)
        values, absent, failure = answer
        if failure:
            raise FluidError(f"{operation}: {failure}")
        if absent:
            detail = f"{ranks_text(self.ranks[rank] for rank in absent)} did not come"
            raise PeerTimeoutError(
                self.rank, absent[0], operation, timeout_s=limit_s, detail=detail
            )
        self._refusals = 0  # all ranks have come here: what was refused before is over
        return values

    def first(self, operation: str, value: Any) -> Any:
        """Return the first rank's value. Collective; raises as `gather` does."""
        return self.gather(operation, value if self.rank == 0 else None)[0]

    def barrier(self, operation: str, timeout_s: float | None = None) -> None:
        """Return when every rank has come. Collective; raises as `gather` does."""
        self.gather(operation, None, timeout_s)

    def ticket(self) -> int:
        """Return a number that no other ticket of this session has. Sends nothing: ranks that call
        in the same order get the same."""
        number, self._calls = self._calls, self._calls + 1
        return number

    # ---- what a rank does alone

    def publish(self, key: str, value: Any, limit_s: float = STORE_S) -> None:
        """Store a value of this rank under `key`, in place of an earlier one.

        Bounded: nothing is stored where the store does not answer, or where the first rank has not
        begun this session within limit_s seconds.
        """
        if self.alone:
            return

        def put() -> None:
            session = self._poll(self._join, limit_s)
            if session is not None:
                self._set(f"{session}/{key}/{self.rank}", value)

        self._bounded(put, limit_s + STORE_S)

    def read(
        self,
        key: str,
        ranks: Iterable[int],
        limit_s: float = 0.0,
        enough: Callable[[dict[int, Any]], bool] = lambda values: False,
    ) -> dict[int, Any]:
        """Return what ranks have published under `key`, by rank; after limit_s seconds, or once
        `enough` is true of them, of those that have. Bounded.

        The first look reads the newest value of each; a value that was read is not read again.
        """
        values: dict[int, Any] = {}
        wanted = sorted(set(ranks))

        def look() -> bool | None:
            if (session := self._join()) is not None:
                self._read_missing(f"{session}/{key}", wanted, values)
            return True if len(values) == len(wanted) or enough(values) else None

        if not self.alone:
            self._bounded(lambda: self._poll(look, limit_s), limit_s + STORE_S)
        return dict(values)

    # ---- failures: a key for each rank, since in one for all a rank would overwrite, or take back,
    # the report of another; and the number of all reports

    def report_failure(self, peer: int | None, text: str) -> None:
        """Tell the other ranks that a wait of this rank for `peer` (global; None: the group) has
        failed."""
        self._report((peer, 0, text))

    def report_refusal(self, text: str) -> None:
        """Tell the other ranks that a call has raised on this rank, which they may be waiting in.

        Ranks that have raised as often themselves take no notice of it: they were in the same call.
        """
        self._refusals, self._refused = self._refusals + 1, True
        self._report((None, self._refusals, text), _JOIN_S)
        if self.rank == 0:  # it alone lets ranks into the session; one that finds this reports, too
            self.read(_FAILED, range(self.size), _JOIN_S, lambda _: len(self._joined) == self.size)

    def withdraw_refusal(self) -> None:
        """Take the last report_refusal back: this rank goes on with another call. `gather` does so
        by itself."""
        self._refused = False
        self._report(None)

    def _report(self, report: tuple[int | None, int, str] | None, join_s: float = 0.0) -> None:
        self.publish(_FAILED, report, join_s)  # a wait that has failed leaves no time to join
        store, session = self._store, self._session
        if not (report is None or session is None or store is None):
            self._bounded(lambda: store.add(f"{session}/{_FAILED}", 1), STORE_S)

    def failures(self) -> dict[int, tuple[int | None, str]]:
        """Return the failures that ranks have reported, by rank of the group."""
        reports = self.read(_FAILED, range(self.size))
        return {rank: report[::2] for rank, report in reports.items() if report is not None}

    def failed(self) -> str:
        """Return a failure that another rank has reported and not taken back, "" if there is none
        or the store does not answer."""
        return "" if self.alone else self._bounded(self._standing_failure, STORE_S) or ""

    def _standing_failure(self) -> str:
        key = f"{self._session}/{_FAILED}"
        if self._store is None or self._session is None or not self._store.check([key]):
            return ""
        reports = int(self._store.get(key))  # before the reports: a later one counts again
        for rank in range(self.size) if reports != self._looked else ():
            stored = self._get(f"{key}/{rank}")
            if rank != self.rank and stored is not None and stored[0] is not None:
                _, number, text = stored[0]
                if not 0 < number <= self._refusals:
                    return text
        self._looked = reports
        return ""

    # ---- gather

    def _collect_for_all(self, number: int, operation: str, value: Any, limit_s: float) -> _Answer:
        """The first rank's part of a gather: wait for all values, and store the answer that every
        rank returns."""
        key = f"{self._session}/{number}"
        self._set(f"{key}/0", (operation, None))  # for ranks that look who has come
        arrived: dict[int, tuple[str, Any]] = {0: (operation, value)}

        def look() -> bool | None:
            self._accept_requests()
            self._read_missing(key, range(self.size), arrived)
            return True if len(arrived) == self.size or self._mismatch(arrived) else None

        failure = ""
        try:
            self._poll(look, limit_s, self._raise_failure)
            failure = self._mismatch(arrived)
        except FluidError as error:
            failure = str(error)
        absent = [rank for rank in range(self.size) if rank not in arrived]
        values = [] if absent or failure else [arrived[rank][1] for rank in range(self.size)]
        self._set(f"{key}/answer", (values, absent, failure))
        return values, absent, failure

    def _ask_first_rank(self, number: int, operation: str, value: Any, limit_s: float) -> _Answer:
        """Every other rank's part of a gather: store the value, and wait for the answer."""
        stored = False

        def look() -> _Answer | None:
            nonlocal stored
            if (session := self._join()) is None:
                return None
            if not stored:
                self._set(f"{session}/{number}/{self.rank}", (operation, value))
                stored = True
            answer = self._get(f"{session}/{number}/answer")
            return None if answer is None else answer[0]

        try:
            # The first rank may have come late: it answers for the ranks that it waits for.
            late_s = min(limit_s, STORE_S)
            answer = self._poll(look, limit_s + late_s, self._raise_failure)
        except FluidError as error:
            return [], [], str(error)
        if answer is not None:
            return answer
        if (session := self._session) is None:
            return [], [0], ""
        # The first rank is lost, or lost in this call: tell from the store who has come.
        arrived: dict[int, tuple[str, Any]] = {}
        self._read_missing(f"{session}/{number}", range(self.size), arrived)
        missing = [rank for rank in range(self.size) if rank not in arrived]
        absent = [rank for rank in missing if not self._waits_to_join(rank)]
        return [], absent or [0], self._mismatch(arrived)

    def _mismatch(self, arrived: dict[int, tuple[str, Any]]) -> str:
        """Return which ranks are in which operations, "" if all are in the same."""
        ranks_in: dict[str, list[int]] = {}
        for rank in sorted(arrived):
            ranks_in.setdefault(arrived[rank][0], []).append(self.ranks[rank])
        if len(ranks_in) < 2:
            return ""
        where = "; ".join(f"{ranks_text(ranks)}: {name}" for name, ranks in ranks_in.items())
        return f"the ranks of a group are in different operations: {where}"

    def _raise_failure(self) -> None:
        if text := self._standing_failure():
            raise FluidError(f"another rank has failed: {text}")

    # ---- the session

    def _join(self) -> str | None:
        """Return the session's id, None if the first rank has not answered yet. On the first rank:
        answer the others."""
        if self.rank == 0:
            self._accept_requests()
        elif self._session is None:
            if not self._requested:
                self._set(f"{self._group_key}/join/{self.rank}", self._request_id)
                self._requested = True
            answer = self._get(f"{self._group_key}/accept/{self._request_id}")
            self._session = None if answer is None else answer[0]
        return self._session

    def _accept_requests(self) -> None:
        """Send the session's id to ranks that have asked for it."""
        for rank in range(self.size):
            request = None if rank in self._joined else self._request_of(rank)
            if request is not None and self._accepted.get(rank) != request:
                self._set(f"{self._group_key}/accept/{request}", self._session)
                self._accepted[rank] = request

    def _waits_to_join(self, rank: int) -> bool:
        """Return whether a rank has asked for the session and got no answer: then the first rank is
        missing, and not this one."""
        request = self._request_of(rank)
        return request is not None and self._get(f"{self._group_key}/accept/{request}") is None

    def _request_of(self, rank: int) -> str | None:
        request = self._get(f"{self._group_key}/join/{rank}")
        return None if request is None else request[0]

    # ---- the store

    def _read_missing(self, key: str, ranks: Iterable[int], values: dict[int, Any]) -> None:
        """Add to `values` what ranks that are not in it have stored under `key` in this session."""
        for rank in ranks:
            if rank not in values and (stored := self._get(f"{key}/{rank}")) is not None:
                values[rank] = stored[0]
                self._joined.add(rank)

    def _bounded[T](self, work: Callable[[], T], seconds: float) -> T | None:
        """Return work(), or None if it takes longer than `seconds` or raises RuntimeError; None at
        once while an earlier call is still stuck.

        Neither a store's own timeout nor a signal ends a call whose host is frozen. The thread that
        is still in it ends with the process.
        """
        self._stuck = [call for call in self._stuck if call.is_alive()]
        if self._stuck:
            return None
        result: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):
                result.append(work())

        call = threading.Thread(target=run, name="megatron_fluid store", daemon=True)
        call.start()
        call.join(seconds)
        if call.is_alive():
            self._stuck.append(call)
        return result[0] if result else None

    def _poll[T](
        self, look: Callable[[], T | None], limit_s: float, check: Callable[[], None] | None = None
    ) -> T | None:
        """Call `look` until it returns something, at most limit_s seconds and at least once; and
        `check` now and then."""
        now = checked_at = time.monotonic()
        deadline = now + limit_s
        pause = _POLL_S[0]
        while (result := look()) is None:
            now = time.monotonic()
            if now >= deadline:
                return None
            if check is not None and now - checked_at >= _FAILED_EVERY_S:
                checked_at = now
                check()
            time.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(2 * pause, _POLL_S[1])
        return result

    def _set(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def _get(self, key: str) -> tuple[Any] | None:
        """Return what is stored under a key, in a tuple; None if nothing is. Never waits."""
        assert self._store is not None
        if not self._store.check([key]):
            return None
        return (pickle.loads(self._store.get(key)),)


_connection: tuple[weakref.ref[Any], dist.Store] | None = None
_MAKING = threading.Lock()


def _own_connection() -> dist.Store:
    """Return a connection of this package to the default group's store: its threads must not queue
    behind a wait of torch's on the same connection."""
    global _connection
    default: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    if _connection is None or _connection[0]() is not default:
        _connection = weakref.ref(default), default.clone()
    return _connection[1]


def agreement(group: dist.ProcessGroup) -> Agreement:
    """Return the agreement of a group, the same one until `close_group`, or until the group is
    destroyed. Sends nothing."""
    group = real_group(group)
    with _MAKING:  # the watcher asks, too: two objects would be in two sessions
        return group_resource(group, _RESOURCE, lambda: _of(group))


def _of(group: dist.ProcessGroup) -> Agreement:
    rank, size = group.rank(), group.size()
    if size == 1 or is_lone(group) or dist.get_backend(group) == "fake":
        return Agreement(None, "", rank, range(size), lambda: 0.0)
    ranks = dist.get_process_group_ranks(group)
    name = f"{group.group_name} {ranks}"
    return Agreement(_own_connection(), name, rank, ranks, lambda: wait_timeout_s(group))


def live_agreements() -> list[Agreement]:
    """Return the agreements of this process with other ranks, of groups that are not destroyed."""
    return [kept for kept in held_everywhere(_RESOURCE) if not kept.alone]
