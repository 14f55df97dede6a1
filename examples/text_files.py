"""Which files are the text, and how a file is cut into documents."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cut_text", "find_text_files", "standard_library_files"]

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


def find_text_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files named by ``paths``: a file stands for itself, a folder for every file below it that
    is not hidden.

    Sorted, resolved, without duplicates.

    Raises:
        ValueError: a path does not exist, cannot be read, or nothing was found.
    """
    found: set[Path] = set()
    for given in paths:
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
    """``data`` in pieces of at most ``limit`` bytes, cut after a line's end, else between UTF-8
    characters."""
    pieces = []
    start = 0
    while len(data) - start > limit:
        end = data.rfind(b"\n", start, start + limit) + 1
        if not end:
            end = start + limit
            for back in range(min(_LONGEST_CHARACTER, limit)):
                if data[end - back] & 0xC0 != 0x80:  # 0b10xxxxxx continues a character
                    end -= back
                    break
        pieces.append(data[start:end])
        start = end
    if start < len(data):
        pieces.append(data[start:])
    return pieces
