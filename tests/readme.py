"""The generated parts of README.md: `python tests/readme.py` writes them anew, test_readme.py checks that they are up to date."""

import re
from pathlib import Path

from megatron_fluid.patches import PATCHES
from megatron_fluid.patches.limits import LIMITS
from megatron_fluid.patches.tables import limits_table, markdown_table

__all__ = ["README", "generated"]

README = Path(__file__).resolve().parent.parent / "README.md"
PARTS = {"patches": lambda: markdown_table(PATCHES), "limits": lambda: limits_table(LIMITS)}


def generated(text: str) -> str:
    """The page with every generated part as it should be.

    Raises:
        KeyError: the page asks for a part that nobody makes.
    """

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}\n{PARTS[match[2]]()}\n<!-- end -->"

    return re.sub(r"(<!-- generated: (\w+) -->)\n.*?<!-- end -->", part, text, flags=re.DOTALL)


if __name__ == "__main__":
    README.write_text(generated(README.read_text()))
