"""Faults of the wire between two emulated hosts: a slow link only slows; a host that is lost or
comes too late ends in an error within the timeout, which names rank, hosts and operation."""

import datetime
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness.emulated_hosts import EmulatedHosts, launch_environment, missing
from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.moe.sharding import local_part
from tests.support.launch import HANG_S, run_ranks_outcomes

LOST = 3  # exit status of a rank whose peer did not answer


@pytest.fixture
def hosts() -> Iterator[EmulatedHosts]:
    if (why := missing()) is not None:
        pytest.skip(f"this machine cannot play hosts: {why}")
    with EmulatedHosts(2) as made:
        yield made


def train(
    rank: int, world: int, hosts: Sequence[str], environments: Sequence[Mapping[str, str]],
    folder: str, steps: int, timeout_s: float, late_s: float,
) -> None:  # fmt: skip
    """Train in the network namespace ``hosts[rank]``. Each step is a line of folder/RANK.txt:
    number, seconds, sum of the gradients. Rank 1 comes `late_s` seconds late to the second step."""
    output = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.setns(os.open(f"/run/netns/{hosts[rank]}", os.O_RDONLY), os.CLONE_NEWNET)
    os.environ.update(environments[rank])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    shared_rounds(dist.group.WORLD, timeout_s)
    layer = MoELayer(MoEConfig(64, 48, 4, 2), dist.group.WORLD)
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(rank))
    for step in range(steps):
        if step == 1 and rank == 1:
            time.sleep(late_s)
        begun = time.perf_counter()
        try:
            layer(x).square().sum().backward()
        except PeerTimeoutError as error:
            print(f"failed {time.perf_counter() - begun:.2f} {error}", flush=True)
            os._exit(LOST)
        found = sum(
            float(local_part(p.grad).abs().sum()) for p in layer.parameters() if p.grad is not None
        )
        layer.zero_grad()
        print(f"step {step} {time.perf_counter() - begun:.3f} {found:.4f}", flush=True)
    assert layer.backend == "hierarchical"
    os._exit(0)  # how a peer ends is not tested here


class Job:
    """A rank on each host, with their output. `awaited`: ranks whose end is waited for."""

    def __init__(
        self, hosts: EmulatedHosts, folder: Path, *, steps: int, timeout_s: float,
        late_s: float = 0, awaited: Sequence[int] = (0, 1),
    ) -> None:  # fmt: skip
        self.logs = [folder / f"{rank}.txt" for rank in range(2)]
        environments = [launch_environment(hosts, 1, rank) for rank in range(2)]
        self._outcomes = ThreadPoolExecutor(1).submit(
            run_ranks_outcomes,
            *(train, 2, hosts.names, environments, str(folder), steps, timeout_s, late_s),
            backend="", grace_s=60, awaited=awaited,
            env={"TORCHELASTIC_USE_AGENT_STORE": "False"},
        )  # fmt: skip

    def said(self, rank: int) -> str:
        log = self.logs[rank]
        return log.read_text() if log.exists() else ""

    def wait_for(self, text: str) -> None:
        """Until both ranks have said it."""
        deadline = time.monotonic() + HANG_S
        while not all(text in self.said(rank) for rank in range(2)):
            assert time.monotonic() < deadline, [self.said(0), self.said(1)]
            assert not self._outcomes.done(), [self.said(0), self.said(1)]
            time.sleep(0.05)

    def end(self) -> list[int | None]:
        """Exit statuses."""
        return [outcome.exitcode for outcome in self._outcomes.result()]

    def steps(self, rank: int) -> list[tuple[float, str]]:
        """Seconds, and the sum of the gradients."""
        found = re.findall(r"^step \d+ ([\d.]+) ([\d.]+)$", self.said(rank), re.MULTILINE)
        return [(float(seconds), total) for seconds, total in found]


def test_a_slow_link_only_slows(hosts: EmulatedHosts, tmp_path: Path) -> None:
    hosts.set_rate(100e6)
    job = Job(hosts, tmp_path, steps=60, timeout_s=60)
    job.wait_for("step 1 ")
    hosts.set_rate(1e6)  # 1%, while steps run
    time.sleep(1.5)
    hosts.set_rate(100e6)
    assert job.end() == [0, 0], job.said(0)
    for rank in range(2):
        steps = job.steps(rank)
        assert len(steps) == 60
        assert len({total for _, total in steps}) == 1, "a step has other gradients"
        # 256 tokens of 256 bytes cross four times a step: half a Mbit at least, and so 0.5 s
        assert max(seconds for seconds, _ in steps) > 0.4


def test_a_lost_host_is_named_within_the_timeout(hosts: EmulatedHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, steps=100_000, timeout_s=3)
    job.wait_for("step 2 ")
    hosts.cut(1)
    assert job.end() == [LOST, LOST], [job.said(0), job.said(1)]
    for rank in range(2):
        said = job.said(rank)
        assert re.search(rf"rank {rank}: no answer from (peer {1 - rank}|its group) in ", said)
        assert re.search(r"layer 0 moe (routing|grad |dispatch|combine)", said), said
        assert re.search(
            rf"from host \S+ \({hosts.names[rank]}\) to \S+ \({hosts.names[1 - rank]}\)", said
        )


def test_a_host_that_comes_late_is_waited_for(hosts: EmulatedHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, steps=3, timeout_s=60, late_s=4)
    assert job.end() == [0, 0], [job.said(0), job.said(1)]
    assert job.steps(0)[1][0] > 1.2


def test_a_host_that_comes_too_late_is_an_error(hosts: EmulatedHosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, steps=3, timeout_s=2, late_s=120, awaited=[0])
    ended, said = job.end(), job.said(0)
    assert ended[0] == LOST, said
    assert "rank 0: no answer from its group in layer 0 moe routing" in said
    seconds = float(said.split("failed ")[1].split()[0])
    assert 2.0 <= seconds < 110.0, said  # before the late rank comes, on a busy machine, too
