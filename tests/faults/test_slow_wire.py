"""Faults of the wire between two emulated hosts: a slow link only slows; a host that is lost or
comes too late ends in an error within the timeout, which names rank, hosts and operation."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.emulated_hosts import EmulatedHosts, launch_environment, missing

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.process]


@pytest.fixture
def hosts() -> Iterator[EmulatedHosts]:
    if (why := missing()) is not None:
        pytest.skip(f"this machine cannot play hosts: {why}")
    with EmulatedHosts(2) as made:
        yield made


class Job:
    """A rank on each host, with their output."""

    def __init__(self, hosts: EmulatedHosts, folder: Path, *words: str) -> None:
        self.logs = [folder / f"{rank}.txt" for rank in range(2)]
        program = [sys.executable, "-m", "tests.support.wire_rank", *words]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self.logs):
            environment = launch_environment(hosts, 1, rank) | {"PYTHONPATH": str(ROOT)}
            self.processes.append(hosts.start(rank, program, environment, log=str(log)))

    def said(self, rank: int) -> str:
        log = self.logs[rank]
        return log.read_text() if log.exists() else ""

    def wait_for(self, text: str) -> None:
        """Until both ranks have said it."""
        deadline = time.monotonic() + 120
        while not all(text in self.said(rank) for rank in range(2)):
            assert time.monotonic() < deadline, [self.said(0), self.said(1)]
            assert all(p.poll() in (None, 0) for p in self.processes), [self.said(0), self.said(1)]
            time.sleep(0.05)

    def end(self) -> list[int]:
        return [process.wait(120) for process in self.processes]

    def steps(self, rank: int) -> list[tuple[float, str]]:
        """Seconds, and the sum of the gradients."""
        found = re.findall(r"^step \d+ ([\d.]+) ([\d.]+)$", self.said(rank), re.MULTILINE)
        return [(float(seconds), total) for seconds, total in found]


def test_a_slow_link_only_slows(hosts: EmulatedHosts, tmp_path: Path) -> None:
    hosts.set_rate(100e6)
    job = Job(hosts, tmp_path, "60", "60", "0")
    job.wait_for("step 1 ")
    hosts.set_rate(1e6)  # 1%, while steps run
    time.sleep(4)
    hosts.set_rate(100e6)
    assert job.end() == [0, 0], job.said(0)
    for rank in range(2):
        steps = job.steps(rank)
        assert len(steps) == 60
        assert len({total for _, total in steps}) == 1, "a step has other gradients"
        # 256 tokens of 256 bytes cross four times a step: half a Mbit at least, and so 0.5 s
        assert max(seconds for seconds, _ in steps) > 0.4


def test_a_lost_host_is_named_within_the_timeout(hosts: EmulatedHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "100000", "3", "0")
    job.wait_for("step 2 ")
    hosts.cut(1)
    begun = time.monotonic()
    assert job.end() == [3, 3], [job.said(0), job.said(1)]
    assert time.monotonic() - begun < 60
    for rank in range(2):
        said = job.said(rank)
        assert re.search(rf"rank {rank}: no answer from (peer {1 - rank}|its group) in ", said)
        assert re.search(r"layer 0 moe (routing|grad |dispatch|combine)", said), said
        assert re.search(
            rf"from host \S+ \({hosts.names[rank]}\) to \S+ \({hosts.names[1 - rank]}\)", said
        )


def test_a_host_that_comes_late_is_waited_for(hosts: EmulatedHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "3", "60", "3")
    assert job.end() == [0, 0], [job.said(0), job.said(1)]
    assert job.steps(0)[1][0] > 2.5


def test_a_host_that_comes_too_late_is_an_error(hosts: EmulatedHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "3", "2", "15")
    job.processes[0].wait(120)
    said = job.said(0)
    assert job.processes[0].returncode == 3, said
    assert "rank 0: no answer from its group in layer 0 moe routing" in said
    seconds = float(said.split("failed ")[1].split()[0])
    assert 2.0 <= seconds < 4.0, said  # the reports of others are waited for, too
