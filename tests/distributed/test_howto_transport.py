"""docs/howto/add_a_transport.md: its code, put where the page says, passes the page's own test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "add_a_transport.md"


def _files() -> dict[str, str]:
    """The Python blocks of the page by the file that the heading above them names."""
    found: dict[str, str] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        name = re.search(r"`([\w/]+\.py)`", part.partition("\n")[0])
        block = re.search(r"```python\n(.*?)```", part, flags=re.DOTALL)
        if name is not None and block is not None:
            found[name.group(1)] = block.group(1)
    return found


def _insert(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for before, after in changes:
        assert before in text, (path.name, before)
        text = text.replace(before, after, 1)
    path.write_text(text)


def test_the_page_s_code_is_a_transport(tmp_path: Path) -> None:
    tree, files = tmp_path / "tree", _files()
    for folder in ("megatron_fluid", "patches", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    row = files.pop("megatron_fluid/moe/backends.py")
    for name, text in files.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    (tree / "megatron_fluid/moe/gathered/__init__.py").touch()
    moved = "from megatron_fluid.moe.gathered.transport import GatheredTransport\n"
    anchor = "from megatron_fluid.moe.hierarchical.choice"
    _insert(
        tree / "megatron_fluid/moe/backends.py",
        ("BACKENDS: dict", f"{row}\n\nBACKENDS: dict"),
        ("_Hierarchical, _Rounds)", "_Hierarchical, _Rounds, _Gathered)"),
        (anchor, moved + anchor),
    )
    rounds = '    "rounds": lambda case: None,\n'
    gathered = rounds.replace("rounds", "gathered")
    _insert(tree / "megatron_fluid/moe/choose.py", (rounds, rounds + gathered))
    names = '"rounds", "gathered", "local"'
    _insert(tree / "megatron_fluid/config.py", ('"rounds", "local"', names))
    (test,) = (name for name in files if name.startswith("tests/"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if ended.returncode:
        pytest.fail(ended.stdout[-3000:] + ended.stderr[-2000:])
