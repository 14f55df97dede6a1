"""Commands that documents and docstrings print: each names a program, a target and flags that are
here."""

import argparse
import contextlib
import functools
import importlib.util
import io
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from megatron_fluid.patches.arguments import add_fluid_arguments

pytest.importorskip("megatron.core")

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    + list(ROOT.glob("benchmarks/*.md"))
)
PACKAGES = ("megatron_fluid", "patches", "benchmarks", "examples", "tests", "tools")
PROGRAMS = ("torchrun", "python", "python3", "pytest", "mpirun", "make", "megatron-fluid")
PROGRAMS += ("benchmarks/launch.sh",)
EXAMPLE = "examples/pretrain_gpt_moe.py"
EXAMPLE_PARSERS = ("pretrain_gpt_moe.py", "run_output.py")
HERE = "python3 -m tests.bench_all_to_all"  # a docstring line that starts so is a command
MEGATRONS_TESTS = "tests/unit_tests/"  # of a checkout of Megatron-LM
SCRIPTS_OF_A_READER = ("my_moe.py", "train.py", "pretrain_gpt.py")


def commands_of_a_document(text: str) -> list[str]:
    fences = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in fences for line in block.replace("\\\n", " ").splitlines()]
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return lines + re.findall(r"`([^`\n]+)`", rest)


def commands_of_a_module(text: str) -> list[str]:
    """Indented lines of its docstring: commands where they begin with a program."""
    docstring = re.match(r'(?:#.*\n|\s)*"""(.*?)"""', text, flags=re.DOTALL)
    words = docstring[1] if docstring else ""
    # A command goes on in a line that is indented further, or that begins with its script.
    lines = re.sub(r"\n(?: {6,}(?=--)| {4,}(?=[a-z_/]+\.py\b))", " ", words).splitlines()
    return [line.strip() for line in lines if line.startswith("    ")]


def words_of(line: str) -> list[str]:
    """A command's words without its comment and its environment; empty if it is no command, or one
    with a word of the reader's in a place that is checked."""
    line = re.sub(r" {3,}.*", "", line)  # what it does, in a column of its own
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and re.fullmatch(r"[A-Z][A-Z_0-9]*=\S*", words[0]):
        words = words[1:]
    if len(words) < 2 or words[0] not in PROGRAMS or "..." in line or words[1].isupper():
        return []
    return words


@functools.cache
def printed() -> dict[str, str]:
    """Every printed command, and a place where it stands."""
    lines = {path: commands_of_a_document(path.read_text()) for path in DOCUMENTS}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            lines[path] = commands_of_a_module(path.read_text())
    found: dict[str, str] = {}
    for path, whole in lines.items():
        for line in (part.strip() for each in whole for part in each.split("&&")):
            if words_of(line):
                found.setdefault(line, str(path.relative_to(ROOT)))
    return found


@functools.cache
def texts() -> dict[str, str]:
    """Every document, and the source of every module outside the tests."""
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    paths = [*DOCUMENTS, *modules]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def started(words: list[str]) -> tuple[str, list[str]]:
    """(module or script, its words) of what a launcher or python starts."""
    if words[0] == "benchmarks/launch.sh":
        name = words[1].removesuffix(".py")
        paths = [p for p in (ROOT / "benchmarks").rglob("*.py") if p.stem == name]
        programs = [p for p in paths if '__name__ == "__main__"' in p.read_text()]
        assert len(programs) == 1, f"benchmarks/ has no program {name}"
        return ".".join(programs[0].relative_to(ROOT).with_suffix("").parts), words[2:]
    at = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
    at += words[at] == "-m"
    return words[at], words[at + 1 :]


@functools.cache
def flags_of_training() -> set[str]:
    """The flags of examples/pretrain_gpt_moe.py: Megatron's, this package's and its own."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_fluid_arguments(argparse.ArgumentParser(allow_abbrev=False))
    add_megatron_arguments(parser)
    example = "".join((ROOT / "examples").joinpath(name).read_text() for name in EXAMPLE_PARSERS)
    return {*parser._option_string_actions, *re.findall(r'"(--[a-z-]+)"', example)}


@functools.cache
def flags_of(*program: str) -> set[str]:
    """The flags that `python -m PROGRAM --help` shows."""
    said, before = io.StringIO(), sys.argv
    sys.argv = [*program, "--help"]
    try:
        with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
            runpy.run_path(f"{ROOT / program[0].replace('.', '/')}.py", run_name="__main__")
    finally:
        sys.argv = before
    assert not ended.value.code, f"there is no {' '.join(program)}"
    return set(re.findall(r"--[a-z][a-z-]*", said.getvalue()))


def check_flags(name: str, words: list[str], known: set[str]) -> None:
    unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
    assert not unknown, f"{name} has no {', '.join(sorted(unknown))}"


def check_program(name: str, words: list[str]) -> None:
    if name.endswith(".py"):
        known = name in SCRIPTS_OF_A_READER or (ROOT / name).is_file()
        assert known, f"there is no {name}"
        if name == EXAMPLE:
            check_flags(name, words, flags_of_training())
    elif name == "megatron_fluid.cli":
        check_cli(words)
    elif name.split(".")[0] in PACKAGES:
        assert importlib.util.find_spec(name) is not None, f"there is no module {name}"
        if name.startswith(("benchmarks", "tests.bench")) and "--" in " ".join(words):
            check_flags(name, words, flags_of(name))


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = {word for word in words if "=" not in word} - targets
    assert not unknown, f"make has no target {', '.join(unknown)}"
    settings = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = settings.keys() - {"ARGS", "RANKS", "PYTHON"}
    assert not unknown, f"make has no variable {', '.join(unknown)}"
    if words[0] == "pretrain":
        check_program(EXAMPLE, shlex.split(settings.get("ARGS", "")))


def check_cli(words: list[str]) -> None:
    command, rest = words[0], words[1:]
    if command.startswith("-"):
        return
    known = flags_of("megatron_fluid.cli.__main__", command)
    starts = [i for i, word in enumerate(rest) if word == "-m" or word.endswith(".py")]
    if starts and command in ("run", "profile", "compare"):
        check_program(*started(rest[starts[0] :]))
        rest = rest[: starts[0]]
    if command != "run":  # it has torchrun's flags
        check_flags(f"megatron-fluid {command}", rest, known)


def check(words: list[str]) -> None:
    if words[0] == "make":
        check_make(words[1:])
    elif words[0] == "megatron-fluid":
        check_cli(words[1:])
    elif "pytest" in words:
        for word in words:
            if "/" in word and not word.startswith(("-", MEGATRONS_TESTS)):
                assert (ROOT / word.partition("::")[0]).exists(), f"there is no {word}"
    else:
        check_program(*started(words))


def test_every_printed_command_names_what_is_here() -> None:
    assert HERE in {line.split(" --")[0] for line in printed()}, "docstrings are searched"
    wrong = []
    for line, place in printed().items():
        try:
            check(words_of(line))
        except AssertionError as error:
            wrong.append(f"{place}: {line}: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_flag_of_this_package_in_a_text_is_one_it_has() -> None:
    known = flags_of_training()
    for place, text in texts().items():
        if not place.startswith("tests/"):
            named = set(re.findall(r"--fluid-[a-z0-9]+(?:-[a-z0-9]+)*", text))
            assert not named - known, f"{place} names {', '.join(sorted(named - known))}"


@pytest.mark.parametrize(("line", "why"), [
    ("torchrun --nproc_per_node 2 benchmarks/moe_layer.py", "there is no"),
    ("benchmarks/launch.sh tp_overlap --sweeps all", "--sweeps"),
    ("make pretrains", "pretrains"),
    ('make pretrain ARGS="--train-itters 5"', "--train-itters"),
    ("megatron-fluid doctor --bandwith", "--bandwith"),
    ("megatron-fluid run -m megatron_fluid.cli doctor --bandwith", "--bandwith"),
    ("pytest tests/gpus", "there is no"),
])  # fmt: skip
def test_a_command_that_does_not_work_is_told(line: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check(words_of(line))
