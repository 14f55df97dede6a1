"""Refuse figures that are not those of this version: `make release-check`.

    python -m tools.release_check [--archive]

Every file of benchmarks/results/ is shown on a page. Each must have been measured at one commit
without uncommitted changes, and the files that its suite imports must be today's. `--archive` moves
those of older code to benchmarks/results/archive/, which no table reads; run tools.readme then.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.measured_code import fingerprint
from benchmarks.harness.results import NO_SUITES, RESULTS, read_results

__all__ = ["main", "problem"]


def problem(path: Path) -> str | None:
    """Why the figures of a result file are not those of this version, or None."""
    if path.name in NO_SUITES:
        found = json.loads(path.read_text())
        commit = found.get("commit", "") if isinstance(found, dict) else ""
        return "its tree had uncommitted changes" if commit.endswith("-dirty") else None
    document = read_results(path)
    if document.get("code") != fingerprint(document["suite"], document["rows"]):
        return f"of older code: measured at {document['commit']}"
    if not re.fullmatch(r"[0-9a-f]{40}", str(document["commit"])):
        return f"found commit {document['commit']}, allowed: the hash of one, unchanged"
    return None


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS) -> int:
    """Check, or archive; 1 if a file is not of this version."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archive", action="store_true", help="move files of older code away")
    options = parser.parse_args(arguments)
    wrong = {path: why for path in sorted(results.glob("*.json")) if (why := problem(path))}
    if options.archive:
        archive = results / "archive"
        archive.mkdir(exist_ok=True)
        for path in [path for path in wrong if path.name not in NO_SUITES]:
            for file in results.glob(f"{path.stem}.*"):
                file.replace(archive / file.name)
            print(f"archived: {path.name}")
            del wrong[path]
    for path, why in wrong.items():
        print(f"{path.name}: {why}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
