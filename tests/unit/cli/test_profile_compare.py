"""`megatron-fluid profile --compare`: both variants on one page, of traces that lie there."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from megatron_fluid.cli import main, profile
from tests.unit.profiling.test_timeline import a_trace


def traces_lie_there(monkeypatch: pytest.MonkeyPatch, fluid_status: int = 0) -> list[Path]:
    """In place of a run: writes a trace in the folder that a variant is given. Returns the folders,
    in their order."""
    folders: list[Path] = []

    def trace(args: argparse.Namespace) -> tuple[int, list[Path]]:
        assert args.baseline is (args.output.name == "baseline")
        folders.append(args.output)
        args.output.mkdir(parents=True)
        (args.output / "moe_layer.json").write_text(json.dumps(a_trace()))
        return 0 if args.baseline else fluid_status, [args.output / "moe_layer.json"]

    monkeypatch.setattr(profile, "_trace", trace)
    return folders


def test_both_variants_are_on_one_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = traces_lie_there(monkeypatch)
    assert main(["profile", "--compare", "--output", str(tmp_path)]) == 0
    assert folders == [tmp_path / "baseline", tmp_path / "fluid"]
    page = (tmp_path / "timeline.html").read_text()
    assert 0 < page.index('"title":"plain all-to-all"') < page.index('"title":"megatron_fluid"')
    said = capsys.readouterr().out
    assert f"picture: {tmp_path / 'timeline.html'}" in said
    assert len(re.findall(r"hidden share +50\.0%", said)) == 2


def test_a_variant_that_fails_leaves_its_status_and_no_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    traces_lie_there(monkeypatch, fluid_status=3)
    assert main(["profile", "--compare", "--output", str(tmp_path)]) == 3
    assert not (tmp_path / "timeline.html").exists()


@pytest.mark.parametrize("more", [["--baseline"], ["--trace", "a.json"], ["python", "train.py"]])
def test_compare_is_refused_beside_what_it_would_ignore(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--compare", *more]) == 2
    assert "are mutually exclusive" in capsys.readouterr().err
