"""Ranks as threads of one process over simulated symmetric memory. One runs until it waits for the
others in a barrier. A rank that has yet to read a receive buffer sees when it is written too early.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.attention.exchange.buffers import HeadBuffers
from megatron_fluid.comm.workspace import Workspace
from tests.support.simulated_driver import SimulatedDriver
from tests.support.simulated_workspace import SimulatedWorkspace


class _Turns:
    """One thread at a time; a barrier gives the turn to the others."""

    def __init__(self, world: int) -> None:
        self.lock, self.threads = threading.Lock(), threading.Barrier(world, timeout=600)

    def barrier(self) -> None:
        self.lock.release()
        try:
            self.threads.wait()
        finally:
            self.lock.acquire()


class ThreadBuffers(HeadBuffers):
    """Buffers whose barrier is one of threads."""

    def __init__(self, workspace: Workspace, transport: str, turns: _Turns) -> None:
        super().__init__(workspace, transport, SimulatedDriver())
        self.turns = turns

    def barrier(
        self, name: str, stream: torch.cuda.Stream | None = None, received: Tensor | None = None
    ) -> dict[str, int]:
        self.turns.barrier()
        return dict(self._unread)


def run_threads(world: int, transport: str, body: Callable[[ThreadBuffers], Any]) -> list[Any]:
    """body(buffers of rank r) for every rank at a time; the results by rank."""
    memory, turns = SimulatedWorkspace(world), _Turns(world)
    results: list[Any] = [None] * world
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        with turns.lock:
            try:
                results[rank] = body(ThreadBuffers(memory.rank(rank), transport, turns))
            except BaseException as error:
                failures.append(error)
                turns.threads.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    assert not failures
    return results
