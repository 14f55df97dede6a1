"""The text of the reports, and what rank 0 prints once, when the model has been built: the patches,
and which features are on."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron_fluid import patches
from megatron_fluid.patches.engine.patch import MEGATRON, OFF, Patch, Row
from megatron_fluid.patches.limits import Limit

__all__ = [
    "features",
    "limits_table",
    "markdown_table",
    "patch_table",
    "setup_model_and_optimizer",
    "startup_table",
    "text_table",
]


def features() -> list[tuple[str, bool, str, int]]:
    """What was recorded of each feature: its name, on or off, reason, and for how many objects."""
    from megatron_fluid.patches import overlap_decision  # imports torch, the tables do not

    return overlap_decision.features()


def setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Print the table after Megatron has built its model."""

    @functools.wraps(original)
    def fluid_setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        _announce_left_out(built)
        _print_once()
        return built

    return fluid_setup_model_and_optimizer


def _announce_left_out(built: Any) -> None:
    """Layers whose __init__ is not patched could not announce themselves. Their forwards may be
    patched all the same: they are announced now."""
    names = ("moe-layer-init", "self-attention-init")
    if not any(patches.off_reason(name) for name in names):
        return
    from megatron_fluid.patches.attention import self_attention
    from megatron_fluid.patches.moe import layer as moe_layer

    announce = moe_layer.DECISIONS.announce_built, self_attention.DECISIONS.announce_built
    for name, announce_built in zip(names, announce, strict=True):
        if patches.off_reason(name) is not None:
            for module in [module for chunk in built[0] for module in chunk.modules()]:
                announce_built(module)


@functools.cache
def _print_once() -> None:
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(startup_table(patches.report(), features()), flush=True)


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
    head = ("patch", "target", "state", "objects", "reason")
    cells = ((r.patch, r.target, r.state, _objects(r.instances), r.reason) for r in rows)
    return "megatron_fluid patches\n" + text_table(head, cells)


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
            cells += [(r.patch, r.state, _objects(r.instances), r.reason) for r in members]
    text = "megatron_fluid\n" + text_table(("patch", "state", "objects", "reason"), cells)
    if features:
        head = ("feature", "state", "objects", "reason")
        lines = ((name, "on" if on else "off", str(n), why) for name, on, why, n in features)
        text += "\n\n" + text_table(head, lines)
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
            words = [f"{group}: {len(members)} patches", members[0].condition]
            summary = ", ".join(filter(None, words))
            table = f"<details><summary>{summary}</summary>\n\n{table}\n\n</details>"
        parts.append(table)
    return "\n\n".join(parts)


def limits_table(limits: Sequence[Limit[Any]]) -> str:
    """The README's tables of settings under which a layer keeps Megatron's own path."""
    rows = (f"| `{limit.setting}` | {limit.reason} |" for limit in limits)
    return "\n".join(["| setting | why |", "|---|---|", *rows])


def _objects(count: int | None) -> str:
    return "" if count is None else str(count)
