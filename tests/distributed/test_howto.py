"""docs/howto: the code of each page, put where the page says, passes the page's own tests.

A section whose heading ends in "(needs a GPU)" is not run; no other section may call for one.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
NEEDS_GPU = "(needs a GPU)"
CALLS_FOR_GPU = ("benchmarks/launch.sh", "benchmarks.tune", "torchrun", "measured into")

# What a page says in words of files that exist: (file, text, what stands there instead). {block} is
# the page's block for that file, {text} the text.
BACKENDS, CHOOSE = "megatron_fluid/moe/backends.py", "megatron_fluid/moe/choose.py"
TP_CHOICE = "megatron_fluid/tensor_parallel/choice.py"
EDITS = {
    "add_a_kernel": [],
    "add_a_patch": [
        ("patches/__init__.py", "PATCHES: tuple[Patch, ...] = (", "{text}\n    *{block},")
    ],
    "add_a_tp_backend": [
        (TP_CHOICE, "    backends, reason = None, None\n", "{block}{text}"),
        (TP_CHOICE, '"fused", "coll', '"pairwise", {text}'),
        (
            TP_CHOICE,
            "from megatron_fluid.tensor_parallel.gemm import Gemm\n",
            "{text}from megatron_fluid.tensor_parallel.pairwise import PairwiseBackend\n",
        ),
    ],
    "add_a_transport": [
        (BACKENDS, "BACKENDS: dict", "{block}\n\n{text}"),
        (BACKENDS, "_Hierarchical, _Rounds)", "_Hierarchical, _Rounds, _Gathered)"),
        (
            BACKENDS,
            "from megatron_fluid.moe.hierarchical.plan",
            "from megatron_fluid.moe.gathered.transport import GatheredTransport\n{text}",
        ),
        (
            CHOOSE,
            '    "rounds": lambda case: None,\n',
            '{text}    "gathered": lambda case: None,\n',
        ),
        ("megatron_fluid/config.py", '"rounds", "local"', '"rounds", "gathered", "local"'),
    ],
}


def sections(page: Path) -> dict[str, str]:
    """What stands under each heading of second rank."""
    parts = page.read_text().split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def files_of(page: Path) -> dict[str, str]:
    """The Python blocks of the page by the file that the heading above them names."""
    found: dict[str, str] = {}
    for heading, text in sections(page).items():
        name = re.search(r"`([\w/]+\.py)`", heading)
        block = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
        if block is not None:
            assert name is not None, f"the heading {heading!r} names no file for its code"
            found[name.group(1)] = block.group(1)
    return found


def commands_of(page: Path) -> list[list[str]]:
    block = re.search(r"```\w*\n(.*?)```", sections(page)["Run"], flags=re.DOTALL)
    assert block is not None
    return [shlex.split(line) for line in block.group(1).splitlines()]


def sources(folder: Path) -> Path:
    """A copy of the sources, and of their bytecode, by which they are imported sooner."""
    for part in ("megatron_fluid", "patches", "tests"):
        half_written = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ROOT / part, folder / part, ignore=half_written)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    return folder


def add(page: Path, tree: Path) -> list[str]:
    """Put the code of a page into the sources; returns the files that are new."""
    files, new = files_of(page), []
    for name, text in files.items():
        path = tree / name
        if path.exists():
            assert any(name == edited for edited, *_ in EDITS[page.stem]), name
            continue
        if not path.parent.exists():
            path.parent.mkdir()
            (path.parent / "__init__.py").touch()
        path.write_text(text)
        new.append(name)
    for name, before, after in EDITS[page.stem]:
        text = (tree / name).read_text()
        assert before in text, (name, before)
        block = files.get(name, "").rstrip().removesuffix(",") + "\n"
        after = after.replace("{text}", before).replace("{block}", block)
        (tree / name).write_text(text.replace(before, after, 1))
    return new


def chosen_of(page: Path, new: list[str]) -> tuple[list[str], str]:
    """The test files that a page's last section runs, and what of them it chooses ("": all)."""
    [command] = [command for command in commands_of(page) if command[0] == "pytest"]
    tests = [name for name in command[1:] if name in new]
    assert tests, f"the last section of {page.stem} runs none of {new}"
    if "-k" not in command:
        return tests, ""
    return [name for name in command[1:] if name.endswith(".py")], command[-1]


def test_the_code_of_all_pages_passes_their_tests(tmp_path: Path) -> None:
    """In one tree: no two pages edit the same file."""
    tree, new, tests, choices = sources(tmp_path), [], [], []
    for page in PAGES:
        new += (added := add(page, tree))
        files, choice = chosen_of(page, added)
        tests += files
        if choice:
            here = " or ".join(Path(name).stem for name in files)
            choices.append(f"({choice} or not ({here}))")
    choose = ["-k", " and ".join(choices)] if choices else []
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    for arguments in (
        ["-m", "ruff", "check", "--select", "F", *new],
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, *choose],
    ):
        command = [sys.executable, *arguments]
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if ended.returncode:
            pytest.fail(ended.stdout[-3000:] + ended.stderr[-2000:])


def test_what_needs_a_gpu_says_so() -> None:
    for page in PAGES:
        for heading, text in sections(page).items():
            asks = any(word in text for word in CALLS_FOR_GPU)
            assert asks == heading.endswith(NEEDS_GPU), (page.stem, heading)
