"""Tables and paragraphs that fit a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["WIDTH", "paragraph", "wrapped_table"]

WIDTH = 100


def wrapped_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose last column is wrapped so that no line is longer than WIDTH.

    Line breaks in the last column are kept.
    """
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head) - 1)]
    left = sum(widths) + 2 * len(widths)
    texts = []
    for number, (*cells, last) in enumerate(lines):
        start = "".join(cell.ljust(w) + "  " for cell, w in zip(cells, widths, strict=True))
        pieces = [piece for text in last.split("\n") for piece in _wrap(text, WIDTH - left)]
        texts += [(start if i == 0 else " " * left) + piece for i, piece in enumerate(pieces)]
        if number == 0:
            longest = max(min(len(line[-1]), WIDTH - left) for line in lines)
            texts.append("  ".join("-" * width for width in (*widths, longest)))
    return "\n".join(text.rstrip() for text in texts)


def paragraph(text: str, indent: str = "", first: str | None = None) -> str:
    """Wrap text to WIDTH; each line starts with `indent`, the first one with `first`."""
    begin = indent if first is None else first
    lines = _wrap(text, WIDTH - max(len(indent), len(begin)))
    return "\n".join((begin if i == 0 else indent) + line for i, line in enumerate(lines))


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
