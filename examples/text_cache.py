"""The folder of one tokenised corpus: its record ``dataset.json``, the check that nothing in it was
damaged, and the lock that lets one process build it.

``dataset.json`` holds the counts of the corpus and, for each ``.bin`` and ``.idx``, its size in
bytes, its modification time and a checksum. Reading compares sizes; a file whose modification time
changed is read whole and its checksum compared.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["only_builder", "read_record", "write_record"]

_RECORD = "dataset.json"
_FIELDS = {"tokens", "bytes", "documents", "files", "skipped", "tokenizer"}
_POLL_S = 0.2
_BLOCK = 1 << 24


def write_record(folder: Path, summary: dict[str, Any]) -> None:
    """Write ``summary`` and the sizes and checksums of the data files in ``folder``."""
    contents = {}
    for path in sorted((*folder.glob("*.bin"), *folder.glob("*.idx"))):
        stat = path.stat()
        contents[path.name] = {
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "blake2b": _checksum(path),
        }
    record = {**summary, "contents": contents}
    (folder / _RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The summary of the finished corpus in ``folder``; None where there is none (a folder appears
    only when complete).

    Raises:
        ValueError: something in the folder is damaged or cannot be read; the message names the
            file.
    """
    path = folder / _RECORD
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if folder.is_dir():
            raise _damaged(path, "it is missing") from None
        return None
    except OSError as error:
        raise ValueError(f"--text-cache: {path} cannot be read ({error.strerror})") from None
    try:
        record = json.loads(text)
    except ValueError:
        raise _damaged(path, f"its {len(text)} bytes are no complete JSON") from None
    if not isinstance(record, dict) or not _FIELDS | {"contents"} <= set(record):
        raise _damaged(path, "it lacks fields that every record has")
    for name, expected in record.pop("contents").items():
        _check_file(folder / name, expected)
    return record


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    except OSError as error:
        raise ValueError(f"--text-cache: {path} cannot be read ({error.strerror})") from None
    if stat.st_size != expected["size"]:
        raise _damaged(path, f"found {stat.st_size} bytes, written were {expected['size']}")
    if stat.st_mtime_ns != expected["mtime_ns"] and _checksum(path) != expected["blake2b"]:
        raise _damaged(path, "its content is not what was written (the checksum differs)")


def _damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"--text-cache: {path} is damaged: {what}; remove the folder {path.parent}, and the next "
        "run tokenises the text anew"
    )


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        raise ValueError(f"--text-cache: {path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


@contextmanager
def only_builder(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel releases it when its holder ends, however it ends.

    Raises:
        ValueError: the file cannot be opened, is a symbolic link, or its file system gives no
            locks.
        TimeoutError: another process holds the lock for more than ``wait_s`` seconds.
    """
    began = time.monotonic()
    lock = _open_lock(path)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise ValueError(
                        f"--text-cache {path.parent}: its file system gives no file locks "
                        f"({error.strerror})"
                    ) from None
            if time.monotonic() - began > wait_s:
                raise TimeoutError(
                    f"another process has held {path} for more than {wait_s:.0f} s while it "
                    "tokenises this text; "
                    "raise --text-wait-minutes, or look whether it hangs"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file, which is neither truncated nor reached through a link."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(
                f"--text-cache: the lock file {path} is a symbolic link; remove it"
            ) from None
        raise ValueError(
            f"--text-cache {path.parent}: the lock file {path.name} cannot be opened for writing "
            f"({error.strerror}{_owner(path)}), and this text is not in the cache yet; name a "
            "folder of your own with --text-cache"
        ) from None


def _owner(path: Path) -> str:
    try:
        return f", it belongs to user {path.owner()}"
    except (OSError, KeyError):
        return ""
