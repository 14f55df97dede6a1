"""The benchmark of slow links: rates follow from the computation, the share hidden is the right way
round, hosts leave nothing behind, a tiny case runs whole (rates: tests/faults/test_slow_wire.py).
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import slow_wire as cases
from benchmarks.harness.emulated_hosts import missing
from benchmarks.harness.loopback_hosts import join_host
from benchmarks.harness.results import Row

ROOT = Path(__file__).resolve().parents[3]


def test_a_rate_gives_the_wire_so_many_times_the_computation() -> None:
    # 1 MB in half of 100 ms is 160 Mbit/s
    assert cases.rate_for(0.5, 100.0, 1e6) == pytest.approx(160e6)
    assert cases.rate_for(0.0, 100.0, 1e6) is None


def test_the_share_hidden_is_that_of_the_link_s_cost() -> None:
    case, row = cases.CASES["moe-2x1"], Row("moe-2x1-wire-1", "train", "fluid", 130, 130, 130, 3)
    found = {"plain": 200.0, "fluid": 130.0}
    config = cases.link_row(case, row, 1.0, found, {"plain": 100.0}, wire_bytes=7).config
    assert config["hidden_share"] == pytest.approx(0.7)
    assert (config["hosts"], config["wire_over_compute"], config["wire_bytes"]) == (2, 1.0, 7)
    assert "hidden_share" not in cases.link_row(case, row, 0.0, found, {"plain": 100.0}).config


def test_ranks_of_a_host_on_loopback_share_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "2", "WORLD_SIZE": "4"})
    join_host(2)
    assert os.environ["NCCL_HOSTID"] == os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] == "host-1"
    for hosts in (1, 3, 8):
        with pytest.raises(ValueError, match=f"found {hosts}, allowed: 2 or more that divide 4"):
            join_host(hosts)


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_leaves_no_namespace(how: signal.Signals, tmp_path: Path) -> None:
    if (why := missing()) is not None:
        pytest.skip(f"slow_wire: this machine cannot play hosts: {why}")
    program = (
        "import signal, time; from benchmarks.harness.emulated_hosts import EmulatedHosts\n"
        # A job in the background ignores it from its start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with EmulatedHosts(2) as hosts:\n"
        "    hosts.start(0, ['sleep', '600'], {})\n"
        "    print('ready', flush=True); time.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    assert f"fluid-hosts-{run.pid}-h0" in namespaces()
    run.send_signal(how)
    assert run.wait() != 0
    run.stdout.close()
    assert f"fluid-hosts-{run.pid}-" not in namespaces()


@pytest.mark.slow
@pytest.mark.process
def test_a_tiny_case_is_measured_over_two_hosts(tmp_path: Path) -> None:
    if (why := missing()) is not None:
        pytest.skip(f"slow_wire: this machine cannot play hosts: {why}")
    output = tmp_path / "slow_wire.json"
    command = [sys.executable, "-m", "benchmarks.suites.slow_wire", "--cases", "moe-2x1-tiny"]
    command += ["--ratios", "1", "--seconds", "0.1", "--modes", "train", "--output", str(output)]
    command += ["--variants", "fluid,fluid_no_overlap,plain"]
    given = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert {row["case"] for row in rows} == {"moe-2x1-tiny-wire-0", "moe-2x1-tiny-wire-1"}
    assert {row["variant"] for row in rows} == {"fluid", "fluid_no_overlap", "plain"}
    # 32 tokens, top-2 of 4 experts over 2 hosts: half the rows cross, there and back
    least = 2 * 2 * 16 * 32 * 4
    assert all(row["config"]["wire_bytes"] > least for row in rows), rows
