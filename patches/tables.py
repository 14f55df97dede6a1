"""Text of the reports."""

from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_fluid.patches.attention.core import TELimit
from megatron_fluid.patches.engine.engine import MEGATRON, OFF, Patch, Row
from megatron_fluid.patches.moe.limits import Limit

__all__ = ["limits_table", "markdown_table", "patch_table", "startup_table", "text_table"]


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks between them, a line under the head."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def patch_table(rows: Sequence[Row]) -> str:
    """Every patch and its state."""
    cells = ((r.patch, r.target, r.state, _objects(r.instances), r.reason) for r in rows)
    return "megatron_fluid patches\n" + text_table(
        ("patch", "target", "state", "objects", "reason"), cells
    )


def startup_table(rows: Sequence[Row], features: Sequence[tuple[str, bool, str, int]]) -> str:
    """What a run's log shows: the patches of Megatron, one line for any other group in which
    nothing was turned off, and the features."""
    cells = []
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        states = Counter(row.state for row in members)
        if group != MEGATRON and OFF not in states:
            counts = ", ".join(f"{count} {state}" for state, count in states.items())
            cells.append((group, counts, "", "`megatron-fluid patches` lists them"))
        else:
            cells += [
                (row.patch, row.state, _objects(row.instances), row.reason) for row in members
            ]
    text = "megatron_fluid\n" + text_table(("patch", "state", "objects", "reason"), cells)
    if features:
        lines = (
            (name, "on" if on else "off", str(count), reason)
            for name, on, reason, count in features
        )
        text += "\n\n" + text_table(("feature", "state", "objects", "reason"), lines)
    return text


def markdown_table(patches: Sequence[Patch]) -> str:
    """The README's tables of what is patched and why; groups other than Megatron's are folded
    away."""
    parts = []
    for group in dict.fromkeys(patch.group for patch in patches):
        lines = ["| patch | target | why it is a patch |", "|---|---|---|"]
        members = [patch for patch in patches if patch.group == group]
        lines += [f"| {p.name} | `{p.target}` | {p.reason} |" for p in members]
        table = "\n".join(lines)
        if group != MEGATRON:
            summary = ", ".join(
                filter(None, [f"{group}: {len(members)} patches", members[0].condition])
            )
            table = f"<details><summary>{summary}</summary>\n\n{table}\n\n</details>"
        parts.append(table)
    return "\n\n".join(parts)


def limits_table(limits: Sequence[Limit] | Sequence[TELimit]) -> str:
    """The README's tables of settings under which a layer keeps Megatron's own path."""
    return "\n".join(
        [
            "| setting | why |",
            "|---|---|",
            *(f"| `{limit.setting}` | {limit.reason} |" for limit in limits),
        ]
    )


def _objects(count: int | None) -> str:
    return "" if count is None else str(count)
