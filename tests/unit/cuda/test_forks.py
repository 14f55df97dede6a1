"""Background work and forks keep apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_fluid.cuda import forks
from megatron_fluid.cuda.forks import apart_from_forks

# Threads that start processes, and workers that outlive them, as a DataLoader's do: without the
# gate a worker keeps the pipe on which subprocess.Popen waits.
_LEAK = """
import multiprocessing, os, subprocess, sys, threading, time
from megatron_fluid.cuda.forks import apart_from_forks
ended = False
sys.setswitchinterval(1e-6)
def start_processes():
    while not ended:
        with apart_from_forks():
            subprocess.check_call(["/bin/true"])
def compute():
    while not ended:
        sum(range(50))
threads = [threading.Thread(target=start_processes, daemon=True) for _ in range(3)]
others = [threading.Thread(target=compute, daemon=True) for _ in range(3)]
for thread in (*threads, *others):
    thread.start()
workers = []
for number in range(20):
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    worker.start()
    workers.append(worker)
    time.sleep(0.3 if number % 4 == 3 else 0.02)  # or no process starts between them
ended = True
for thread in threads:
    thread.join(20)
stuck = sum(thread.is_alive() for thread in threads)
for worker in workers:
    worker.kill()
print("stuck", stuck, flush=True)
os._exit(0)
"""


def test_processes_that_threads_start_are_not_held_by_workers_that_are_forked_meanwhile() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _LEAK]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    assert said.split() == ["stuck", "0"]


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[forks._Gate]:
    """A gate that no fork of another test has closed."""
    found = forks._Gate()
    monkeypatch.setattr(forks, "_gate", found)
    yield found
    assert not found.workers and not found.forking and not found.stuck


def _fork(child: int = 0) -> int:
    """Fork a child that ends with this code; the code that it ended with."""
    number = os.fork()
    if not number:
        os._exit(child)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_fork_waits_for_work_that_has_begun(gate: forks._Gate) -> None:
    begun, order = threading.Event(), []

    def work() -> None:
        with apart_from_forks():
            begun.set()
            _until(lambda: gate.forking > 0)
            time.sleep(0.1)  # in which a fork that does not wait would be over
            order.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    assert _fork() == 0
    order.append("forked")
    thread.join()
    assert order == ["worked", "forked"]


def test_work_waits_until_a_group_of_forks_is_over(gate: forks._Gate) -> None:
    assert _fork() == 0
    with apart_from_forks():
        assert time.monotonic() - gate.last_fork >= forks._BETWEEN_FORKS_S


def test_a_thread_forks_inside_its_own_work() -> None:
    with apart_from_forks():
        assert _fork() == 0


class _Working:
    """A thread that works until it is told to stop."""

    def __init__(self) -> None:
        self._begun, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._begun.wait(60)

    def _run(self) -> None:
        with apart_from_forks():
            self._begun.set()
            assert self._ends.wait(60)

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()


def test_a_child_does_not_wait_for_work_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_LONGEST_FORK_S", 0.1)
    working = _Working()
    number = os.fork()
    if not number:
        signal.alarm(20)  # where it waits for a thread that it does not have
        with apart_from_forks():
            os._exit(len(forks._gate.workers))
    working.stop()
    assert os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) == 1


def test_work_that_is_stuck_holds_up_one_fork_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gate: forks._Gate
) -> None:
    monkeypatch.setattr(forks, "_LONGEST_FORK_S", 0.1)
    working = _Working()
    assert _fork() == 0
    monkeypatch.setattr(forks, "_LONGEST_FORK_S", 300.0)
    assert _fork() == 0
    assert gate.workers, "it did not wait until the work was over"
    assert capsys.readouterr().err.count("longer than 0.1 s") == 1
    working.stop()
