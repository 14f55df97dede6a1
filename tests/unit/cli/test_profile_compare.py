"""`megatron-fluid profile --compare`: both variants on one page, of traces that lie there."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fluid.cli import main, profile
from megatron_fluid.profiling.timeline import read_timeline
from tests.unit.profiling.test_timeline import a_trace


@pytest.mark.parametrize(
    ("milliseconds", "hidden", "said"),
    [
        ((350, 206), "77.0%", "1.7 times as fast: 350 -> 206 ms a step, 77.0% of the commun"),
        ((237, 224), "0.0%", "1.1 times as fast: 237 -> 224 ms"),
        ((330, 419), "no communication", "no gain: 330 -> 419 ms a step, no communication"),
    ],
)
def test_a_verdict_comes_first(milliseconds: tuple[int, int], hidden: str, said: str) -> None:
    whole = read_timeline(a_trace(), "")
    plain, fluid = (
        dataclasses.replace(whole, length=1e3 * ms, figures=(("hidden share", hidden),))
        for ms in milliseconds
    )
    assert profile._verdict(plain, fluid).startswith(said)


@pytest.mark.process
def test_ranks_talk_over_a_slow_wire_where_there_may_be_a_network_of_its_own() -> None:
    if not (words := profile._slow_wire()):
        pytest.skip("no network namespaces here")
    code = """
import socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
def drain():
    connection = server.accept()[0]
    while connection.recv(1 << 20): pass
    connection.close()
thread = threading.Thread(target=drain)
thread.start()
client = socket.create_connection(server.getsockname())
begin = time.monotonic()
client.sendall(bytes(5_000_000))
client.shutdown(socket.SHUT_WR)
thread.join()
print(time.monotonic() - begin)
"""
    done = subprocess.run([*words, sys.executable, "-c", code], capture_output=True, text=True)
    assert float(done.stdout) > 0.9 * 5e6 * 8 / (profile._WIRE_MBIT * 1e6), done.stderr


def test_a_machine_without_namespaces_has_no_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert profile._slow_wire() == []


def test_a_variant_that_fails_leaves_its_status_and_no_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profile, "_trace_layer", lambda *_: 3)
    assert main(["profile", "--compare", "--output", str(tmp_path)]) == 3
    assert not (tmp_path / "timeline.html").exists()
