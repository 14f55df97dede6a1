"""The tool that breaks the package on purpose; a small tree stands for the package."""

from pathlib import Path

import pytest

from tools.mutations import ROOT, Mutation, MutationError, mutated, mutations, try_one

SUM = Mutation("sum", "code_under_test.py", "a + b", "a - b", "sums", "test_code.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "code_under_test.py").write_text("def add(a, b):\n    return a + b\n")
    test = "from code_under_test import add\n\n\ndef test_it():\n    assert add(1, 2) == 3\n"
    (tmp_path / "test_code.py").write_text(test)
    (tmp_path / "test_blind.py").write_text("def test_it():\n    pass\n")
    return tmp_path


def test_every_mutation_of_the_list_has_its_text_once() -> None:
    found = mutations()
    assert len(found) >= 60
    for mutation in found:
        assert mutation.new in mutated(mutation)
        assert mutation.old != mutation.new
        files = [word for word in mutation.tests.split() if word.startswith("tests/")]
        assert files and all((ROOT / file).is_file() for file in files), mutation.name


@pytest.mark.process
def test_a_mutation_is_caught_or_not_and_its_file_is_restored(tree: Path) -> None:
    before = (tree / "code_under_test.py").read_text()
    assert try_one(SUM, tree)
    (tree / "test_crash.py").write_text("import os\n\ndef test_it():\n    os.abort()\n")
    assert not try_one(SUM, tree, "test_blind.py") and try_one(SUM, tree, "test_crash.py")
    with pytest.raises(MutationError, match="sum: pytest ended with status"):
        try_one(SUM, tree, "test_nowhere.py")
    assert (tree / "code_under_test.py").read_text() == before


@pytest.mark.parametrize(
    ("change", "said"), [({"old": "a * b"}, "0 times"), ({"file": "gone.py"}, "no file gone.py")]
)
def test_a_text_that_is_gone_is_an_error_by_name(
    change: dict[str, str], said: str, tree: Path
) -> None:
    with pytest.raises(MutationError, match=f"sum: .*{said}"):
        mutated(Mutation(**{**vars(SUM), **change}), tree)


def test_two_of_one_name_are_an_error(tmp_path: Path) -> None:
    entry = "\n".join(["[[mutation]]", *(f"{n} = {v!r}" for n, v in vars(SUM).items())])
    (tmp_path / "list.toml").write_text(f"{entry}\n{entry}\n")
    with pytest.raises(MutationError, match="sum: this name is in the list twice"):
        mutations(tmp_path / "list.toml")
