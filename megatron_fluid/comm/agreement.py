"""Words that the ranks of a group leave for each other, the only user of torch.distributed stores.

A store outlives process groups: after `close_group`, after `destroy_process_group` and
`init_process_group` on torchrun's store, and after an elastic restart it still holds what earlier
lives of a group have left. So every key begins with a token that the group's first rank draws for
this life. The others learn it by a handshake in which no stale key can be taken for a new one:

    rank r                                     first rank
    hello/r = nonce of r (new each life)  -->  sees a nonce that it has not answered
    reads welcome/<its nonce>             <--  welcome/<nonce> = token (new each life)

An old hello is answered, too, under a nonce that nobody reads any more.

The store is polled: its own wait would hold the connection, which other threads need. Every call is
bounded, also where the host of the store is frozen.
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

from megatron_fluid.comm.group_resources import group_resource, held_everywhere
from megatron_fluid.comm.lone_rank import is_lone
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.errors import FluidError, PeerTimeoutError, ranks_text
from megatron_fluid.topology import real_group

__all__ = ["STORE_S", "Agreement", "agreement", "live_agreements"]

STORE_S = 5.0  # a store that is alive has answered by then
_PREFIX = "megatron_fluid"
_POLL_S = (0.001, 0.02)  # first and longest pause between two looks
_RESOURCE = "agreement"
_FAILED = "failed"
_HANDSHAKE_S = 1.0  # for a refusal before the first agreement
_FAILED_EVERY_S = 1.0  # between looks for a failure of another rank


class Agreement:
    """The words of one life of a process group, between its ranks. `agreement(group)` makes it.

    Ranks are the group's, but for `ranks`. All ranks call `gather`, `first`, `barrier` and `name`
    in the same order. Values are pickled. Construction sends nothing.

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
        self._door = f"{_PREFIX}/{hashlib.sha1(group.encode()).hexdigest()}"
        self._nonce = uuid.uuid4().hex
        self._token = self._nonce if rank == 0 else None
        self._calls = self._refusals = 0
        self._greeted: dict[int, str] = {}  # on the first rank: the nonce that was answered last
        self._joined = {0}  # on the first rank: who knows the token
        self._said_hello = False
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
        limit_s = self._timeout_s() if timeout_s is None else timeout_s
        act = self._lead if self.rank == 0 else self._follow
        answer = self._ask(lambda: act(number, operation, value, limit_s), limit_s + 3 * STORE_S)
        if answer is None:
            detail = "the store of the job does not answer: the process that holds it is lost"
            raise PeerTimeoutError(self.rank, None, operation, timeout_s=limit_s, detail=detail)
        values, absent, failure = answer
        if failure:
            raise FluidError(f"{operation}: {failure}")
        if absent:
            who = ranks_text(self.ranks[rank] for rank in absent)
            detail = f"{who} did not come"
            raise PeerTimeoutError(
                self.rank, absent[0], operation, timeout_s=limit_s, detail=detail
            )
        found: list[Any] = values
        return found

    def first(self, operation: str, value: Any) -> Any:
        """Return the first rank's value. Collective; raises as `gather` does."""
        return self.gather(operation, value if self.rank == 0 else None)[0]

    def barrier(self, operation: str, timeout_s: float | None = None) -> None:
        """Return when every rank has come. Collective; raises as `gather` does."""
        self.gather(operation, None, timeout_s)

    def name(self, operation: str) -> str:
        """Return a name that is unique in the job, the same on all ranks. Collective."""
        unique: str = self.first(f"name of {operation}", uuid.uuid4().hex)
        return unique

    def ticket(self) -> int:
        """Return a number that no other ticket of this life has. Sends nothing: ranks that call in
        the same order get the same."""
        number, self._calls = self._calls, self._calls + 1
        return number

    # ---- what a rank does alone

    def publish(self, word: str, value: Any, limit_s: float = STORE_S) -> None:
        """Leave a value of this rank under `word`, in place of an earlier one.

        Bounded: nothing is left where the store does not answer, or where the first rank has not
        begun this life of the group within limit_s seconds.
        """
        if self.alone:
            return

        def put() -> None:
            token = self._poll(self._known_token, limit_s)
            if token is not None:
                self._set(f"{token}/{word}/{self.rank}", value)

        self._ask(put, limit_s + STORE_S)

    def read(
        self,
        word: str,
        ranks: Iterable[int],
        limit_s: float = 0.0,
        enough: Callable[[dict[int, Any]], bool] = lambda found: False,
    ) -> dict[int, Any]:
        """Return what ranks have published under `word`, by rank; after limit_s seconds, or once
        `enough` holds, of those that have. Bounded.

        A first look finds the newest value of each; a value that is found is not read again.
        """
        found: dict[int, Any] = {}
        wanted = sorted(set(ranks))
        if self.alone:
            return found

        def look() -> bool | None:
            if (token := self._known_token()) is None:
                return None
            for rank in wanted:
                if rank not in found and (got := self._get(f"{token}/{word}/{rank}")) is not None:
                    found[rank] = got[0]
            return True if len(found) == len(wanted) or enough(found) else None

        self._ask(lambda: self._poll(look, limit_s), limit_s + STORE_S)
        return dict(found)

    # ---- failures: by rank, and one word by which each rank sees that there is any

    def report_failure(self, peer: int | None, text: str) -> None:
        """Leave word that a wait of this rank for `peer` (global; None: the group) has failed."""
        self._report((peer, text), (self.rank, 0, text))

    def report_refusal(self, text: str) -> None:
        """Leave word that a call has raised on this rank, which others may be waiting in.

        Ranks that have raised as often themselves take no notice of it: they were in the same call.
        """
        self._refusals += 1
        self._report((None, text), (self.rank, self._refusals, text), _HANDSHAKE_S)

    def withdraw_refusal(self) -> None:
        """Take the last report_refusal back: this rank goes on with another call."""
        self._report(None, None)

    def _report(self, mine: Any, newest: Any, handshake_s: float = 0.0) -> None:
        self.publish(_FAILED, mine, handshake_s)  # in a wait there is no time for one
        token = self._token
        if token is not None and not self.alone:
            self._ask(lambda: self._set(f"{token}/{_FAILED}", newest), STORE_S)

    def failures(self) -> dict[int, tuple[int | None, str]]:
        """Return the failures that ranks have reported, by rank of the group."""
        reports = self.read(_FAILED, range(self.size))
        return {rank: report for rank, report in reports.items() if report is not None}

    def failed(self) -> str:
        """Return the newest failure of another rank, "" if there is none or the store is mute."""
        return "" if self.alone else self._ask(self._newest_failure, STORE_S) or ""

    def _newest_failure(self) -> str:
        got = None if self._token is None else self._get(f"{self._token}/{_FAILED}")
        if got is None or got[0] is None:
            return ""
        rank, number, text = got[0]
        known = rank == self.rank or 0 < number <= self._refusals
        return "" if known else text

    # ---- inside

    def _ask[T](self, work: Callable[[], T], seconds: float) -> T | None:
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

    def _lead(
        self, number: int, operation: str, value: Any, limit_s: float
    ) -> tuple[list[Any], list[int], str]:
        key = f"{self._token}/{number}"
        self._set(f"{key}/0", (operation, None))  # for those that ask who has come
        found: dict[int, tuple[str, Any]] = {0: (operation, value)}

        def look() -> bool | None:
            self._greet()
            for rank in range(self.size):
                if rank not in found and (got := self._get(f"{key}/{rank}")) is not None:
                    found[rank] = got[0]
            return True if len(found) == self.size or self._elsewhere(found) else None

        failure = ""
        try:
            self._poll(look, limit_s, self._watch_failures)
            failure = self._elsewhere(found)
        except FluidError as error:
            failure = str(error)
        absent = [rank for rank in range(self.size) if rank not in found]
        values = [] if absent or failure else [found[rank][1] for rank in range(self.size)]
        answer = values, absent, failure
        self._set(f"{key}/answer", answer)
        return answer

    def _follow(
        self, number: int, operation: str, value: Any, limit_s: float
    ) -> tuple[list[Any], list[int], str]:
        published = False

        def look() -> tuple[list[Any], list[int], str] | None:
            nonlocal published
            if (token := self._known_token()) is None:
                return None
            if not published:
                self._set(f"{token}/{number}/{self.rank}", (operation, value))
                published = True
            got = self._get(f"{token}/{number}/answer")
            return None if got is None else got[0]

        try:
            # The first rank may have come late: it answers for the ranks that it waits for.
            late = min(limit_s, STORE_S)
            answer = self._poll(look, limit_s + late, self._watch_failures)
        except FluidError as error:
            return [], [], str(error)
        if answer is not None:
            return answer
        if (token := self._token) is None:
            return [], [0], ""
        found = {
            rank: got[0]
            for rank in range(self.size)
            if (got := self._get(f"{token}/{number}/{rank}")) is not None
        }
        absent = [
            rank
            for rank in range(self.size)
            if rank not in found and not self._stands_at_the_door(rank)
        ]
        return [], absent or [0], self._elsewhere(found)

    def _stands_at_the_door(self, rank: int) -> bool:
        """Return whether a rank has said hello and got no answer: the first rank is missing, and
        not this one."""
        hello = self._get(f"{self._door}/hello/{rank}")
        return hello is not None and self._get(f"{self._door}/welcome/{hello[0]}") is None

    def _elsewhere(self, found: dict[int, tuple[str, Any]]) -> str:
        """Say which ranks are in which operations; "" where it is one."""
        places: dict[str, list[int]] = {}
        for rank in sorted(found):
            places.setdefault(found[rank][0], []).append(self.ranks[rank])
        if len(places) < 2:
            return ""
        where = "; ".join(f"{ranks_text(ranks)}: {place}" for place, ranks in places.items())
        return f"the ranks of a group are in different operations: {where}"

    def _watch_failures(self) -> None:
        if text := self._newest_failure():
            raise FluidError(f"another rank has failed: {text}")

    def _poll[T](
        self, look: Callable[[], T | None], limit_s: float, watch: Callable[[], None] = lambda: None
    ) -> T | None:
        """Look until there is something, at most limit_s seconds; at least once."""
        deadline = time.monotonic() + limit_s
        watched_at = time.monotonic()
        pause = _POLL_S[0]
        while True:
            if (found := look()) is not None:
                return found
            now = time.monotonic()
            if now >= deadline:
                return None
            if now - watched_at >= _FAILED_EVERY_S:
                watched_at = now
                watch()
            time.sleep(min(pause, max(0.0, deadline - now)))
            pause = min(2 * pause, _POLL_S[1])

    def _known_token(self) -> str | None:
        """Return the token if this rank knows it by now. The first rank lets others know it."""
        if self.rank == 0:
            self._greet()
        elif self._token is None:
            if not self._said_hello:
                self._set(f"{self._door}/hello/{self.rank}", self._nonce)
                self._said_hello = True
            got = self._get(f"{self._door}/welcome/{self._nonce}")
            if got is not None:
                self._token = got[0]
                self._set(f"{self._token}/here/{self.rank}", None)
        return self._token

    def _greet(self) -> None:
        """Answer the hellos of ranks that do not know the token yet."""
        for rank in range(self.size):
            if rank in self._joined:
                continue
            if rank in self._greeted and self._get(f"{self._token}/here/{rank}") is not None:
                self._joined.add(rank)
                continue
            hello = self._get(f"{self._door}/hello/{rank}")
            if hello is not None and self._greeted.get(rank) != hello[0]:
                self._set(f"{self._door}/welcome/{hello[0]}", self._token)
                self._greeted[rank] = hello[0]

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


def _own_connection() -> dist.Store:
    """Return a connection of this package to the default group's store: its threads must not queue
    behind a wait of torch's on the same connection."""
    global _connection
    default: Any = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    if _connection is None or _connection[0]() is not default:
        _connection = weakref.ref(default), default.clone()
    return _connection[1]


def agreement(group: dist.ProcessGroup) -> Agreement:
    """Return the agreement of a group, one for each life: until `close_group`, or until the group
    is destroyed. Sends nothing."""
    group = real_group(group)
    return group_resource(group, _RESOURCE, lambda: _of(group))


def _of(group: dist.ProcessGroup) -> Agreement:
    rank, size = group.rank(), group.size()
    if size == 1 or is_lone(group) or dist.get_backend(group) == "fake":
        return Agreement(None, "", rank, range(size), lambda: 0.0)
    ranks = dist.get_process_group_ranks(group)
    name = f"{group.group_name} {ranks}"
    return Agreement(_own_connection(), name, rank, ranks, lambda: wait_timeout_s(group))


def live_agreements() -> list[Agreement]:
    """Return the agreements of this process with other ranks, of groups that still live."""
    found: list[Agreement] = [kept for kept in held_everywhere(_RESOURCE) if not kept.alone]
    return found
