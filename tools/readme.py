"""The generated parts of README.md and docs/, and a page of results for each suite: `python -m
tools.readme` writes them, test_readme.py checks that they are up to date.
"""

import argparse
import re
from pathlib import Path

from benchmarks.report import iterations
from benchmarks.report.descriptions import SUITES
from benchmarks.report.headline import between_hosts, headline, wire_shares
from benchmarks.report.tables import suite_page, summary
from benchmarks.report.wire_plan import wire_plan
from benchmarks.tune import megatron_best
from megatron_fluid.patches import PATCHES
from megatron_fluid.patches.attention.limits import LATENT_LIMITS, OVERLAP_LIMITS, TE_LIMITS
from megatron_fluid.patches.moe.limits import PARTS as MOE_PARTS
from tools import versions
from tools.megatron_test_table import table as megatron_tests
from tools.settings_table import compatibility_table, limits_table, parts_table, patches_table

__all__ = ["PAGES", "README", "RESULT_PAGES", "generated"]

README = Path(__file__).resolve().parent.parent / "README.md"
PAGES = (README, *sorted((README.parent / "docs").glob("*.md")))
RESULT_PAGES = {README.parent / "docs" / "results" / f"{name}.md": name for name in SUITES}
"""By path, the suite whose page it is."""
PARTS = {
    "headline": headline,
    "between_hosts": between_hosts,
    "patches": lambda: patches_table(PATCHES),
    "limits": lambda: parts_table(MOE_PARTS),
    "attention_limits": lambda: limits_table(TE_LIMITS),
    "overlap_limits": lambda: limits_table(OVERLAP_LIMITS),
    "latent_limits": lambda: limits_table(LATENT_LIMITS),
    "settings": compatibility_table,
    "results": summary,
    "versions": versions.table,
    "wire_plan": wire_plan,
    "wire_shares": wire_shares,
    "megatron_tests": megatron_tests,
    "megatron_best": megatron_best.table,
}


def generated(text: str) -> str:
    """The page with every generated part as it should be.

    Raises:
        KeyError: the page asks for a part that nobody makes.
    """

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n<!-- end -->"

    return re.sub(r"(<!-- generated: (\w+) -->)\n.*?<!-- end -->", part, text, flags=re.DOTALL)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tools.readme", description=__doc__).parse_args()
    for page in PAGES:
        page.write_text(generated(page.read_text()))
    iterations.FILE.write_text(iterations.iterations())
    for page, suite in RESULT_PAGES.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(suite_page(suite))
