"""`megatron-fluid profile --compare`: both variants on one page, of traces that lie there."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fluid.cli import main, profile
from megatron_fluid.cli.terminal import run_command
from megatron_fluid.profiling.timeline import read_timeline
from tests.unit.profiling.test_timeline import a_trace


@pytest.mark.parametrize(("milliseconds", "hidden", "said"), [
    ((350, 206), "77.0%", "1.7 times as fast: 350 -> 206 ms a step, 77.0% of the commun"),
    ((237, 224), "0.0%", "1.1 times as fast: 237 -> 224 ms"),
    ((330, 419), "no communication", "no gain: 330 -> 419 ms a step, no communication"),
])  # fmt: skip
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


def test_what_cannot_be_written_or_read_is_one_line_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "_trace_layer", lambda *_: pytest.fail("it runs"))
    file = tmp_path / "file"
    file.touch()
    event = {"ph": "X", "name": "gloo:send", "ts": 0, "dur": 1}
    (foreign := tmp_path / "foreign").write_text(json.dumps([event]))
    (damaged := tmp_path / "damaged").write_text(json.dumps([event | {"cat": "cpu_op"}]))
    for flag, path in ("--output", file), *(("--trace", each) for each in (file, foreign, damaged)):
        assert main(["profile", flag, str(path)]) == 2
        said = capsys.readouterr()
        assert str(path) in said.err and said.err.count("\n") == 1 and not said.out


@pytest.mark.process
def test_an_interrupt_lets_a_command_end_before_it_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go, saved, waits, wait = tmp_path / "go", tmp_path / "saved", [], subprocess.Popen.wait

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        waits.append(timeout)
        if len(waits) == 1:
            raise KeyboardInterrupt
        go.touch()
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    code = "import pathlib, sys\ngo, saved = map(pathlib.Path, sys.argv[1:])\n"
    code += "while not go.exists(): pass\nsaved.touch()"
    command = [sys.executable, "-c", code, str(go), str(saved)]
    monkeypatch.setattr(profile, "_trace_layer", lambda *_: run_command(command, os.environ))
    assert main(["profile", "--output", str(tmp_path)]) == 130
    assert saved.exists() and capsys.readouterr().err == "interrupted\n"


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_before_its_parent(number: int, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    child = "import pathlib, signal, sys, time\n"
    child += f"end = lambda *_: sys.exit(pathlib.Path({str(ended)!r}).touch())\n"
    child += f"signal.signal({int(number)}, end); print('ready', flush=True); time.sleep(30)"
    parent = "import os, signal, sys; from megatron_fluid.cli.terminal import run_command\n"
    parent += f"signal.signal({int(number)}, signal.SIG_DFL)\n"  # under nohup it is ignored
    parent += f"run_command([sys.executable, '-c', {child!r}], os.environ)"
    run = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    with run:
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
        run.send_signal(number)
    assert run.returncode == 128 + number and ended.exists()


@pytest.mark.process
def test_a_signal_ends_a_command_that_starts() -> None:
    parent = """
import os, signal, subprocess
from megatron_fluid.cli.terminal import run_command
start = subprocess.Popen
def killed(*args, **kwargs):
    process = start(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGTERM)
    return process
subprocess.Popen = killed
run_command(["sleep", "1000"], os.environ)
"""  # whoever outlives the parent holds its output open
    run = subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, timeout=600)
    assert run.returncode == 128 + signal.SIGTERM
