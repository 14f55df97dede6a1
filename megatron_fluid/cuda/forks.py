"""Work of background threads that a fork must not meet half done.

A child that is forked has every file that its parent has open. A thread that starts a process (as
Triton starts the C compiler) waits until every copy of a pipe's end is closed: a worker of torch's
DataLoader that was forked between the pipe and the process keeps one for as long as it lives, and
the thread waits as long. In the same way a child waits for an import that another thread of its
parent had begun.

    with apart_from_forks():          # in the background thread
        compile()

A fork waits until such work has ended, and work that has not begun waits for the fork. Other
threads, locks and files are left to those that own them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from megatron_fluid.cuda.kernel_cache import say

__all__ = ["apart_from_forks"]

# Forks come in groups, one for each worker: work begun between two of them would delay the next.
_BETWEEN_FORKS_S = 0.2
_LONGEST_PAUSE_S = 5.0  # Longest time that forks in a row keep background work from starting.
_LONGEST_FORK_S = 60.0  # Longest time that fork() waits for background work.


class _Gate:
    """Of one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.workers: dict[int, int] = {}  # by thread: how many of its contexts are open
        self.forking: set[int] = set()  # threads that fork, or wait to
        self.stuck: set[int] = set()  # threads that held up a fork for too long
        self.forked = -_BETWEEN_FORKS_S
        self.late = False

    def enter(self) -> None:
        me, end = threading.get_ident(), time.monotonic() + _LONGEST_PAUSE_S
        with self.changed:
            while me not in self.workers:
                now = time.monotonic()
                left = min(self.forked + _BETWEEN_FORKS_S, end) - now
                if not self.forking and left <= 0:
                    break
                self.changed.wait(None if self.forking else left)
            self.workers[me] = self.workers.get(me, 0) + 1

    def leave(self) -> None:
        me = threading.get_ident()
        with self.changed:
            self.workers[me] -= 1
            if not self.workers[me]:
                del self.workers[me]
                self.stuck.discard(me)
                self.changed.notify_all()

    def before_fork(self) -> None:
        """Wait, and keep the lock until `after_fork`."""
        self.changed.acquire()
        self.forking.add(threading.get_ident())
        end = time.monotonic() + _LONGEST_FORK_S
        # Threads that fork inside their own work would wait for each other.
        while under_way := self.workers.keys() - self.stuck - self.forking:
            left = end - time.monotonic()
            if left <= 0:
                self.stuck |= under_way
                self.late = True
                break
            self.changed.wait(left)

    def after_fork(self) -> None:
        self.forking.discard(threading.get_ident())
        self.forked = time.monotonic()
        late, self.late = self.late, False
        self.changed.notify_all()
        self.changed.release()
        if late:
            say(f"forked beside work in the background that took longer than {_LONGEST_FORK_S:g} s")


_gate = _Gate()


def _in_child() -> None:
    global _gate
    _gate = _Gate()  # the other threads are not here


@contextlib.contextmanager
def apart_from_forks() -> Iterator[None]:
    """No fork of this process falls into this context; a thread may fork inside its own."""
    gate = _gate
    gate.enter()
    try:
        yield
    finally:
        gate.leave()


os.register_at_fork(
    before=lambda: _gate.before_fork(),
    after_in_parent=lambda: _gate.after_fork(),
    after_in_child=_in_child,
)
