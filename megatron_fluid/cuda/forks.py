"""Work of background threads that a fork must not meet half done.

A child that is forked has every file that its parent has open. A thread that starts a process (as
Triton starts the C compiler) waits until every copy of a pipe's end is closed: a worker of torch's
DataLoader that was forked between the pipe and the process keeps one for as long as it lives, and
the thread waits as long. In the same way a child waits for an import that another thread of its
parent had begun.

    with apart_from_forks():          # in the background thread
        compile()

A fork waits until such work has ended, at most _LONGEST_FORK_S, and work that has not begun waits
for the fork. Other threads, locks and files are left to those that own them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["apart_from_forks", "say"]

# Forks come in groups, one for each worker: work begun between two of them would delay the next.
_BETWEEN_FORKS_S = 0.2
_LONGEST_FORK_S = 60.0


def say(text: str) -> None:
    """Tell the user in one line of stderr."""
    print(f"megatron_fluid: {text}", file=sys.stderr, flush=True)


class _Gate:
    """The state of one process, guarded by `changed`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.workers: set[int] = set()  # threads inside apart_from_forks
        self.stuck: set[int] = set()  # those that held up a fork for too long
        self.forking = 0  # threads that fork, or wait to
        self.last_fork = -_BETWEEN_FORKS_S

    def enter(self) -> None:
        with self.changed:
            while True:
                left = self.last_fork + _BETWEEN_FORKS_S - time.monotonic()
                if not self.forking and left <= 0:
                    break
                self.changed.wait(None if self.forking else left)
            self.workers.add(threading.get_ident())

    def leave(self) -> None:
        with self.changed:
            self.workers.discard(threading.get_ident())
            self.stuck.discard(threading.get_ident())
            self.changed.notify_all()

    def before_fork(self) -> None:
        """Wait for the workers, and keep the lock until `after_fork`."""
        self.changed.acquire()
        self.forking += 1
        me = {threading.get_ident()}  # a thread that forks inside its work does not wait for itself
        if not self.changed.wait_for(lambda: self.workers <= self.stuck | me, _LONGEST_FORK_S):
            self.stuck |= self.workers
            say(f"forked beside work in the background that took longer than {_LONGEST_FORK_S:g} s")

    def after_fork(self) -> None:
        self.forking -= 1
        self.last_fork = time.monotonic()
        self.changed.notify_all()
        self.changed.release()


_gate = _Gate()


def _in_child() -> None:
    global _gate
    _gate = _Gate()  # the other threads are not here


@contextlib.contextmanager
def apart_from_forks() -> Iterator[None]:
    """No fork of this process falls into this context, which does not nest; a thread may fork
    inside its own."""
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
