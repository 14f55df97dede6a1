"""`python -m megatron_fluid.run SCRIPT`: a script that is not changed, with the package imported
first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fluid.run import run

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """\
import sys
print(__name__, "megatron_fluid" in sys.modules, sys.argv[1:], sys.path[0], __file__)
import neighbour
"""


def test_the_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "neighbour.py").write_text("print('found')")
    command = [sys.executable, "-m", "megatron_fluid.run", "train.py", "--lr", "1e-3", "-x"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"__main__ True ['--lr', '1e-3', '-x'] {tmp_path} train.py"
    assert second == "found"


@pytest.mark.parametrize(
    ("words", "found"),
    [([], "no script is named"), (["absent.py", "--lr"], "there is no file absent.py")],
)
def test_a_script_that_is_not_there_is_named(words: list[str], found: str) -> None:
    with pytest.raises(SystemExit, match=f"megatron_fluid.run: {found}; usage: python -m"):
        run(words)


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m megatron_fluid.run SCRIPT")
