"""The `megatron-fluid` program: reports, exit statuses, reasons."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fluid import patches
from megatron_fluid.cli import bench, doctor, main
from megatron_fluid.errors import ConfigError

NEEDS_MEGATRON = pytest.mark.skipif(not patches.megatron_installed(), reason="megatron-core is not installed")


def run_program(setup: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The program in a fresh process, after some lines of set-up."""
    code = f"import sys\n{setup}\nfrom megatron_fluid.cli import main\nsys.exit(main({list(argv)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)


WITHOUT_MEGATRON = "sys.modules['megatron'] = None"


def test_patches_without_megatron() -> None:
    done = run_program(WITHOUT_MEGATRON, "patches")
    assert done.returncode == 0, done.stderr
    assert "megatron-core is not installed" in done.stdout
    assert "megatron.training.arguments:parse_args" in done.stdout


@NEEDS_MEGATRON
def test_patches_with_megatron() -> None:
    done = run_program("", "patches", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["patch"]: row for row in json.loads(done.stdout)}
    assert set(rows) == {patch.name for patch in patches.PATCHES}
    assert rows["arguments"]["state"] == "applied"


@NEEDS_MEGATRON
def test_patches_that_do_not_fit_fail() -> None:
    changed = "import megatron.core.datasets.utils as u\nu.compile_helpers = lambda force: None"
    done = run_program(changed, "patches")
    assert done.returncode == 1
    assert "'dataset-helpers' does not fit" in done.stderr
    assert "expected (), found (force)" in done.stderr
    assert " applied " not in done.stdout


def test_the_markdown_table_lists_every_patch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert all(f"`{patch.target}`" in text for patch in patches.PATCHES)


def test_doctor_passes_here_and_says_why_something_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert torch.__version__ in capsys.readouterr().out
    gpu_status = main(["doctor", "--require", "gpu", "nvlink"])
    text = capsys.readouterr()
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in text.out
    else:
        assert gpu_status == 1
        assert "required, but missing: gpu: cuda: " in text.err


def test_doctor_fails_where_something_required_is_too_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    assert main(["doctor"]) == 1
    assert "missing: core: torch: 2.9.1 found, 2.11 or newer needed" in capsys.readouterr().err


def test_doctor_survives_a_broken_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[bool, str]:
        raise OSError("libnvshmem.so: cannot open shared object file")

    monkeypatch.setitem(doctor._LOOKS, "nvshmem", broken)
    finding = {f.name: f for f in doctor.examine()}["nvshmem"]
    assert not finding.ok
    assert finding.detail == "OSError: libnvshmem.so: cannot open shared object file"


def test_doctor_without_megatron_says_how_to_get_it() -> None:
    done = run_program(WITHOUT_MEGATRON, "doctor", "--require", "megatron")
    assert done.returncode == 1
    assert "megatron-fluid[megatron]" in done.stderr


def test_every_ability_stands_on_findings() -> None:
    assert {name for needs in doctor.ABILITIES.values() for name in needs} <= set(doctor._LOOKS)


@pytest.fixture
def source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with one suite and one helper, as the working directory."""
    (tmp_path / "megatron_fluid").mkdir()
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    shutil.copy(Path(bench.__file__).resolve().parents[2] / "benchmarks" / "launch.sh", folder)
    (folder / "__init__.py").write_text('"""A helper."""\n')
    (folder / "echo.py").write_text(
        '"""Says what it was given.\n\nMore."""\n'
        "import os, pathlib, sys\n"
        'if __name__ == "__main__":\n'
        '    pathlib.Path(f"rank{os.environ["RANK"]}").write_text(" ".join(sys.argv[1:]))\n'
        '    sys.exit("--fail" in sys.argv)\n'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bench_lists_suites(source_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.find_suites(source_tree / "benchmarks") == {"echo": "Says what it was given."}
    assert main(["bench"]) == 0
    assert capsys.readouterr().out.split(maxsplit=1) == ["echo", "Says what it was given.\n"]


def test_bench_runs_a_suite_on_every_rank_and_hands_on_its_status(source_tree: Path) -> None:
    assert main(["bench", "--ranks", "2", "echo", "--tokens", "8"]) == 0
    assert [(source_tree / f"rank{rank}").read_text() for rank in (0, 1)] == ["--tokens 8"] * 2
    assert main(["bench", "--ranks", "1", "echo", "--fail"]) != 0


def test_bench_refuses_an_unknown_suite_by_name(source_tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "nonsense"]) == 2
    assert capsys.readouterr().err == "suite: found 'nonsense', allowed: echo\n"


def test_bench_needs_the_source_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "site-packages" / "megatron_fluid" / "cli" / "bench.py"))
    with pytest.raises(ConfigError, match="come with the source tree"):
        bench.find_suites()


def test_a_subcommand_is_needed_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == "0.1.0"
