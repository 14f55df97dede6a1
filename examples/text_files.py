"""Which files are the text, and how a file is cut into documents."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cut_text", "find_text_files", "standard_library_files"]


def find_text_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files named by ``paths``: a file stands for itself, a folder for every file below it that
    is not hidden.

    Sorted, resolved, without duplicates.

    Raises:
        ValueError: a path does not exist, cannot be read, or nothing was found.
    """
    found: set[Path] = set()
    for given in paths:
        if given == "":  # Path("") is the working folder
            raise ValueError("--text-path: found '', allowed: a file or a folder")
        path = Path(given).expanduser()
        if path.is_file():
            found.add(path.resolve())
        elif path.is_dir():
            inside = []
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                inside += [Path(folder, name) for name in names if not name.startswith(".")]
            inside = [entry.resolve() for entry in inside if entry.is_file()]
            if not inside:
                raise ValueError(f"--text-path {given}: this folder holds no files")
            found.update(inside)
        else:
            raise ValueError(
                f"--text-path {given}: no such file or folder (looked from {Path.cwd()})"
            )
    if not found:
        raise ValueError("--text-path: no text was named")
    for path in found:
        if not os.access(path, os.R_OK):
            raise ValueError(f"--text-path: {path} cannot be read (permissions)")
    return sorted(found)


def standard_library_files() -> list[Path]:
    """The sources of this Python's standard library, without its tests: real text that every
    machine has.

    Raises:
        ValueError: this Python carries no sources (an embedded or zipped build).
    """
    root = Path(sysconfig.get_path("stdlib"))
    leave = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in leave)
        found += [Path(folder, name).resolve() for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(
            f"this Python carries no library sources under {root}: name your own text with "
            "--text-path"
        )
    return sorted(set(found))


def cut_text(data: bytes, limit: int) -> list[bytes]:
    """``data`` in pieces of at most ``limit`` bytes, cut after a line's end where there is one."""
    pieces = []
    start = 0
    while start < len(data):
        end = start + limit
        if end < len(data):
            end = data.rfind(b"\n", start, end) + 1 or end
        pieces.append(data[start:end])
        start = end
    return pieces
