"""Kernels are compiled side by side, once a host, and kept where nobody else can write."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fluid.cuda import kernel_build, kernel_cache
from megatron_fluid.cuda.kernel_cache import KernelCache
from megatron_fluid.cuda.nvrtc import Unit

KEY = "a" * 64


class FakeUnit:
    """Compiles without a compiler."""

    def __init__(self, name: str, makes: Any) -> None:
        self.name, self.key, self._makes = name, name * 8, makes

    def compile(self) -> bytes:
        return bytes(self._makes())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    found = KernelCache(tmp_path / "cache")
    monkeypatch.setattr(kernel_build, "_cache", lambda: found)
    monkeypatch.setattr(kernel_build, "_started", {})
    return found


def _make_once(folder: Path, made: Any, codes: Any) -> None:
    def make() -> bytes:
        time.sleep(0.3)
        with made.get_lock():
            made.value += 1
        return b"code"

    codes.put(KernelCache(folder).obtain(KEY, make))


def test_one_process_compiles_what_several_want(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    made, codes = context.Value("i", 0), context.Queue()
    ranks = [
        context.Process(target=_make_once, args=(tmp_path / "cache", made, codes)) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    assert [codes.get(timeout=300) for _ in ranks] == [b"code"] * 4
    for rank in ranks:
        rank.join(300)
    assert made.value == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".cubin"]


def _die_with_the_lock(folder: Path) -> None:
    KernelCache(folder).obtain(KEY, lambda: os._exit(1))  # type: ignore[arg-type, return-value]


def test_a_compiler_that_was_killed_is_followed_by_another(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=_die_with_the_lock, args=(tmp_path / "cache",))
    killed.start()
    killed.join(300)
    assert (tmp_path / "cache" / f"{KEY}.lock").exists()
    assert KernelCache(tmp_path / "cache").obtain(KEY, lambda: b"code") == b"code"


def test_a_wait_for_another_compiler_is_bounded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> bytes:
        held.set()
        done.wait(300)
        return b"late"

    holder = threading.Thread(target=lambda: KernelCache(tmp_path).obtain(KEY, hold))
    holder.start()
    held.wait(300)
    assert KernelCache(tmp_path, wait_s=0.2).obtain(KEY, lambda: b"own") == b"own"
    assert "waited 0.2 s for another process that compiles aaaaaaaaaaaa" in capfd.readouterr().err
    done.set()
    holder.join(300)


def _no_flock(error: int) -> Any:
    def flock(number: int, operation: int) -> None:
        raise OSError(error, os.strerror(error))

    return flock


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("error", ["ENOSYS", "ENOLCK", "EACCES", "EOPNOTSUPP", "unopenable"])
def test_without_locks_code_is_made_and_kept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    error: str, rank: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(kernel_cache, "_FOLLOWER_S", 0.0)
    keys = [KEY, "b" * 64]
    if error == "unopenable":  # as a lock file of root with mode 0600 is to everybody else
        for key in keys:
            (tmp_path / f"{key}.lock").mkdir()
    else:
        monkeypatch.setattr(kernel_cache.fcntl, "flock", _no_flock(getattr(errno, error)))
    sleeps: list[float] = []
    monkeypatch.setattr(kernel_cache.time, "sleep", sleeps.append)
    cache = KernelCache(tmp_path)
    for key in keys:
        assert cache.obtain(key, key[:4].encode) == key[:4].encode()
        assert KernelCache(tmp_path).obtain(key, lambda: b"made again") == key[:4].encode()
    assert not sleeps
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"megatron_fluid: no locks in {tmp_path} (")


def test_code_made_after_a_bounded_wait_is_kept(tmp_path: Path) -> None:
    number = os.open(tmp_path / f"{KEY}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(number, fcntl.LOCK_EX)  # of a process that is stuck
    assert KernelCache(tmp_path, wait_s=0.1).obtain(KEY, lambda: b"code") == b"code"
    assert KernelCache(tmp_path).read(KEY) == b"code"
    os.close(number)


@pytest.mark.parametrize("harm", ["cut", "changed", "of another key"])
def test_a_harmed_file_is_compiled_anew(tmp_path: Path, harm: str) -> None:
    cache = KernelCache(tmp_path)
    cache.write(KEY, b"code" * 99)
    kept = tmp_path / f"{KEY}.cubin"
    content = kept.read_bytes()
    if harm == "cut":  # a machine that went down while it was written
        kept.write_bytes(content[:100])
    elif harm == "changed":
        kept.write_bytes(content[:-1] + b"!")
    else:
        cache.write("b" * 64, b"other")
        os.replace(tmp_path / f"{'b' * 64}.cubin", kept)
    assert cache.obtain(KEY, lambda: b"new") == b"new"
    assert cache.read(KEY) == b"new"


def test_what_others_could_have_written_is_not_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = KernelCache(tmp_path)
    cache.write(KEY, b"code")
    assert cache.read(KEY) == b"code"
    (tmp_path / f"{KEY}.cubin").chmod(0o666)
    assert cache.read(KEY) is None
    assert "writable by others: it is not used" in capfd.readouterr().err


def test_links_are_not_followed(tmp_path: Path) -> None:
    KernelCache(tmp_path / "elsewhere").write(KEY, b"code")
    cache = KernelCache(tmp_path / "cache")
    cache.write("b" * 64, b"")
    (tmp_path / "cache" / f"{KEY}.cubin").symlink_to(tmp_path / "elsewhere" / f"{KEY}.cubin")
    assert cache.read(KEY) is None


def test_a_folder_that_cannot_be_used_is_replaced_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    blocked = tmp_path / "megatron_fluid"
    blocked.write_text("a file where the folder should be")
    monkeypatch.setattr(kernel_cache.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    cache = KernelCache(blocked)
    assert cache.obtain(KEY, lambda: b"code") == b"code"
    assert KernelCache(blocked).obtain(KEY, lambda: b"again") == b"code", (
        "kept for the next process"
    )
    told = capfd.readouterr().err
    assert f"{blocked}: file exists; compiled kernels are kept in {tmp_path}/temporary" in told


def test_units_are_compiled_side_by_side_and_told_in_one_line(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
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
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("megatron_fluid: compiled ") and line.endswith(f"kept in {cache.folder}")
    assert "forward" in line and "backward" in line


def test_what_is_kept_is_not_compiled_and_nothing_is_told(
    cache: KernelCache, capfd: pytest.CaptureFixture[str]
) -> None:
    unit: Any = FakeUnit("kept", None)
    cache.write(unit.key, b"code")
    assert kernel_build.machine_code(unit) == b"code"
    assert capfd.readouterr().err == ""


def test_a_failed_compilation_is_raised_and_tried_again(cache: KernelCache) -> None:
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
    monkeypatch.setattr("megatron_fluid.cuda.nvrtc.version", lambda: (13, 0))
    units = [
        Unit("name", b"text", (("a.h", b"1"),), ("-x",)),
        Unit("name", b"texts", (("a.h", b"1"),), ("-x",)),
        Unit("name", b"text", (("a.h", b"2"),), ("-x",)),
        Unit("name", b"text", (("b.h", b"1"),), ("-x",)),
        Unit("name", b"text", (("a.h", b"1"),), ("-y",)),
    ]
    keys = {unit.key for unit in units}
    monkeypatch.setattr("megatron_fluid.cuda.nvrtc.version", lambda: (13, 1))
    keys.add(Unit(*[getattr(units[0], n) for n in ("name", "text", "headers", "options")]).key)
    assert len(keys) == 6
