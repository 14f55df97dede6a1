"""Machine code on disk: files named by the hash of their sources, shared by one user's processes.

Files that another user owns or may write are not read, but for root's (container images). Where the
folder cannot be used, a private temporary one takes its place, which one line reports.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["KernelCache", "default_folder", "say"]

_POLL_S = 0.05
_FOLLOWER_S = 1.0
_CHECKSUM = 32  # bytes before the code


def say(text: str) -> None:
    """Tell the user in one line."""
    print(f"megatron_fluid: {text}", file=sys.stderr, flush=True)


def default_folder() -> Path | None:
    """The user's cache folder for this package; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "megatron_fluid"
    except RuntimeError:
        return None


class KernelCache:
    """The files of one folder and, where it cannot be written, of a temporary one.

    Args:
        folder: None takes `default_folder()`.
        wait_s: bound on the wait for another process that makes the same file.
    """

    def __init__(self, folder: Path | None = None, wait_s: float = 120.0) -> None:
        self.folder = default_folder() if folder is None else folder
        self.wait_s = wait_s
        self._temporary: Path | None = None
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def obtain(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the code under `key`: from disk, or from `make`, which one process of the host
        calls while the others wait for its file. Where the file system cannot lock, each process
        calls `make`.
        """
        code = self.read(key)
        if code is not None:
            return code
        folder = self.writable()
        begin = time.monotonic()
        # The first rank of a host makes what is missing, unless it is late.
        patience = 0.0 if os.environ.get("LOCAL_RANK", "0") == "0" else _FOLLOWER_S
        while (waited := time.monotonic() - begin) < self.wait_s:
            if waited >= patience:
                try:
                    lock = _try_lock(folder / f"{key}.lock")
                except OSError as error:  # no wait could end: nobody else holds a lock either
                    reason = (error.strerror or str(error)).lower()
                    self._tell(f"no locks in {folder} ({reason}): kernels are compiled per process")
                    break
                if lock is not None:
                    try:
                        code = self.read(key)  # of the process that had the lock before
                        return self._make(key, make) if code is None else code
                    finally:
                        _unlock(lock, folder / f"{key}.lock")
            time.sleep(_POLL_S)
            code = self.read(key)
            if code is not None:
                return code
        else:
            self._tell(f"waited {self.wait_s:g} s for another process that compiles {key[:12]}")
        return self._make(key, make)

    def _make(self, key: str, make: Callable[[], bytes]) -> bytes:
        code = make()
        self.write(key, code)  # atomic, so that several processes may write the same key
        return code

    def read(self, key: str) -> bytes | None:
        """Return what is kept under `key` if it is whole and this user's or root's."""
        for folder in (self.folder, self._temporary):
            if folder is not None:
                code = self._read(folder, key)
                if code is not None:
                    return code
        return None

    def write(self, key: str, code: bytes) -> None:
        """Keep `code`. A file appears whole or not at all."""
        folder, written = self.writable(), None
        try:
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                written = file.name
                file.write(_checksum(key, code) + code)
                os.fchmod(file.fileno(), 0o644)
            os.replace(written, folder / f"{key}.cubin")
        except OSError as error:
            self._tell(f"compiled kernels could not be kept in {folder}: {error.strerror}")
            if written is not None:
                Path(written).unlink(missing_ok=True)

    def writable(self) -> Path:
        """Return the folder that is written to: the cache's, or a temporary one in its place."""
        with self._lock:
            if self._temporary is not None:
                return self._temporary
            reason = "there is no home folder"
            if self.folder is not None:
                reason = _unusable(self.folder)
                if not reason:
                    return self.folder
            shared = Path(tempfile.gettempdir()) / f"megatron_fluid-{os.geteuid()}"
            if _unusable(shared, private=True):
                shared = Path(tempfile.mkdtemp(prefix="megatron_fluid-"))
            self._temporary = shared
        place = "the cache folder" if self.folder is None else str(self.folder)
        self._tell(f"{place}: {reason}; compiled kernels are kept in {shared} instead")
        return shared

    def _read(self, folder: Path, key: str) -> bytes | None:
        path = folder / f"{key}.cubin"
        try:
            if not _trusted(os.stat(folder)):
                return None
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(number, "rb") as file:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode) or not _trusted(found):
                self._tell(f"{path} is another user's, or writable by others: it is not used")
                return None
            content = file.read()
        code = content[_CHECKSUM:]
        return code if content[:_CHECKSUM] == _checksum(key, code) else None

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            say(text)


def _checksum(key: str, code: bytes) -> bytes:
    """Of the code under this key: a file that was renamed does not pass."""
    return hashlib.sha256(key.encode() + code).digest()


def _trusted(found: os.stat_result) -> bool:
    """Whether only this user and root could have written it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _unusable(folder: Path, private: bool = False) -> str:
    """Return why `folder` cannot be written by this user alone, "" if it can; it is made if it is
    not there. private: a folder among other users', which must be this user's own."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if private else 0))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    try:
        found = os.fstat(number)
        if found.st_uid == os.geteuid() and not _trusted(found):
            os.fchmod(number, 0o755)  # made under a umask that lets the group write
            found = os.fstat(number)
        if not _trusted(found) or (private and found.st_uid != os.geteuid()):
            return "it is another user's, or writable by others"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    finally:
        os.close(number)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"


def _try_lock(path: Path) -> int | None:
    """Return the descriptor of the locked file, None while another process holds the lock.

    Raises:
        OSError: the file cannot be locked at all.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(path, flags, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(number).st_nlink:
            return number
    except BlockingIOError:
        pass
    except OSError:
        os.close(number)
        raise
    os.close(number)  # held by another process, or removed by the one that held it
    return None


def _unlock(number: int, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    # Not by closing alone: a process forked meanwhile has the file open, too.
    with contextlib.suppress(OSError):
        fcntl.flock(number, fcntl.LOCK_UN)
    os.close(number)
