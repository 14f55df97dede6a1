"""Kernels are compiled side by side, once a host, and kept in Triton's cache folder."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import triton

from megatron_fluid.cuda import kernel_build
from megatron_fluid.cuda.kernel_build import Unit


class FakeUnit:
    """Compiles without a compiler."""

    def __init__(self, name: str, makes: Any) -> None:
        self.name, self.key, self._makes = name, name * 8, makes

    def compile(self) -> bytes:
        return bytes(self._makes())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(kernel_build, "_started", {})
    return tmp_path / "megatron_fluid"


def _machine_code(makes: Any) -> bytes:
    """As a process that begins now."""
    kernel_build._started.clear()
    unit: Any = FakeUnit("unit", makes)
    return kernel_build.machine_code(unit)


def test_a_wait_for_another_compiler_is_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    number = os.open(folder / f"{'unit' * 8}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(number, fcntl.LOCK_EX)  # of a process that is stuck
    monkeypatch.setattr(kernel_build, "_LONGEST_WAIT_S", 0.2)
    assert _machine_code(lambda: b"code") == b"code"
    assert "waited 0.2 s for another process that compiles unitunitunit" in capfd.readouterr().err
    os.close(number)
    assert _machine_code(None) == b"code", "kept"


@pytest.mark.parametrize("way", ["no flock", "unopenable"])
def test_without_locks_code_is_made_and_kept_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def flock(number: int, operation: int) -> None:
        raise OSError("no locks")

    if way == "unopenable":
        (folder / f"{'unit' * 8}.lock").mkdir(parents=True)
    else:
        monkeypatch.setattr(kernel_build.fcntl, "flock", flock)
    monkeypatch.setattr(kernel_build, "_POLL_S", 300.0)
    assert _machine_code(lambda: b"code") == b"code"
    assert _machine_code(None) == b"code", "kept"


def test_a_folder_that_cannot_be_written_is_named(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("a file where the folder should be")
    assert _machine_code(lambda: b"code") == b"code"
    assert f"cannot be kept in {folder} (Not a directory)" in capfd.readouterr().err


def test_units_are_compiled_side_by_side_and_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_build, "_slots", lambda: threading.Semaphore(2))
    both = threading.Barrier(2, timeout=300)  # passed only by two compilations at a time

    def make() -> bytes:
        both.wait()
        return b"code"

    units: list[Any] = [FakeUnit("forward", make), FakeUnit("backward", make)]
    futures = kernel_build.start(units)
    assert [future.result(300) for future in futures] == [b"code"] * 2
    assert kernel_build.machine_code(units[0]) == b"code"
    told = sorted(capfd.readouterr().err.splitlines())
    assert [line.split()[2] for line in told] == ["backward", "forward"]
    assert all(line.endswith(f"kept in {folder}") for line in told)
    kernel_build._started.clear()
    assert [future.result(300) for future in kernel_build.start(units)] == [b"code"] * 2
    assert capfd.readouterr().err == "", "what is kept is not compiled"


def test_a_failed_compilation_is_raised_and_tried_again() -> None:
    answers = [ValueError("refused"), b"code"]

    def make() -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, bytes):
            return answer
        raise answer

    unit: Any = FakeUnit("unit", make)
    with pytest.raises(ValueError, match="refused"):
        kernel_build.machine_code(unit)
    assert kernel_build.machine_code(unit) == b"code"


def test_the_key_holds_all_that_the_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fluid.cuda.kernel_build.version", lambda: (13, 0))
    units = [
        Unit("name", b"text", (("a.h", b"1"),), ("-x",)),
        Unit("name", b"texts", (("a.h", b"1"),), ("-x",)),
        Unit("name", b"text", (("a.h", b"2"),), ("-x",)),
        Unit("name", b"text", (("b.h", b"1"),), ("-x",)),
        Unit("name", b"text", (("a.h", b"1"),), ("-y",)),
    ]
    keys = {unit.key for unit in units}
    monkeypatch.setattr("megatron_fluid.cuda.kernel_build.version", lambda: (13, 1))
    keys.add(Unit(*[getattr(units[0], n) for n in ("name", "text", "headers", "options")]).key)
    assert len(keys) == 6


_IMPORTS_MEANWHILE = """
from megatron_fluid.cuda import kernel_build

units = [kernel_build.Unit(name, b"", (), ()) for name in "abc"]
kernel_build.Unit.key = property(lambda unit: unit.name)
kernel_build.Unit.compile = lambda unit: b"code"
futures = kernel_build.start(units)
import triton.language
assert [future.result() for future in futures] == [b"code"] * 3
"""


def test_triton_may_be_imported_while_kernels_compile(tmp_path: Path) -> None:
    """In a process in which nothing has imported it before a layer is built."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", _IMPORTS_MEANWHILE], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
