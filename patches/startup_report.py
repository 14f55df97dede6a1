"""What rank 0 prints once, when the model has been built, or where another loop than Megatron's
builds it, in the first forward of a layer: three lines (versions; what is on; what is off, and
which flag changes that), or with --fluid-verbose every patch, and every feature with its reasons
and ranks. And the text of the reports."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron_fluid import patches
from megatron_fluid.patches.engine.patch import MEGATRON, OFF, Row
from megatron_fluid.patches.engine.switches import verbose

__all__ = [
    "features",
    "merged_features",
    "report",
    "setup_model_and_optimizer",
    "startup_lines",
    "startup_table",
    "text_table",
]


def features() -> list[tuple[str, bool, str, int]]:
    """What was recorded of each feature: its name, on or off, reason, and for how many objects."""
    from megatron_fluid.patches import overlap_decision  # imports torch, the tables do not

    return overlap_decision.features()


Feature = tuple[str, bool | None, str, int | str]  # its name, on, reason, for how many objects

_GATHER_S = 60.0  # bound on rank 0's wait for what the other ranks have to report
_MOE = "overlapped MoE layer"
_EXCHANGING = (_MOE, "overlapped attention", "overlapped latent attention")
_WIDTH = 100  # columns
_calls = itertools.count()
# Settings of the table of limits that another flag than their own changes.
_WAYS_OUT = {
    "moe_backend": "--fluid-moe-backend auto",
    "cp_backend": "--fluid-cp-backend auto",
    "fp8": "--fp8-format e4m3",
    "fp8_recipe": "--fp8-recipe blockwise",
    "moe_token_dispatcher_type": "--moe-token-dispatcher-type alltoall",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size 1",
    "cuda_graph_impl": "--cuda-graph-impl none",
    "transformer_impl": "--transformer-impl transformer_engine",
}


def setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Print the report after Megatron has built its model."""

    @functools.wraps(original)
    def fluid_setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        _announce_left_out(built)
        report()
        return built

    return fluid_setup_model_and_optimizer


def _announce_left_out(built: Any) -> None:
    """Layers whose __init__ is not patched could not announce themselves. Their forwards may be
    patched all the same: they are announced now."""
    names = ("moe-layer-init", "self-attention-init", "latent-attention-init")
    if not any(patches.off_reason(name) for name in names):
        return
    from megatron_fluid.patches.attention import latent, self_attention
    from megatron_fluid.patches.moe import layer as moe_layer

    decisions: tuple[Any, ...] = (moe_layer.DECISIONS, self_attention.DECISIONS, latent.DECISIONS)
    for name, of_layers in zip(names, decisions, strict=True):
        if patches.off_reason(name) is not None:
            for module in [module for chunk in built[0] for module in chunk.modules()]:
                of_layers.announce_built(module)


def report(own_loop: bool = True) -> None:
    """Print the report, at the first call.

    Args:
        own_loop: whether it is Megatron's set-up that calls, on all ranks; rank 0 then waits for
            the other ranks' reports, bounded. Else a layer's first forward does, and rank 0, for
            which others may wait, prints its own report.
    """
    if next(_calls):
        return
    import torch.distributed as dist

    from megatron_fluid.patches import overlap_decision
    from megatron_fluid.patches.unused_settings import unused_in_other_loops, unused_settings

    mine = features(), overlap_decision.settings_read()
    reports, missing = {0: mine}, ""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and not own_loop:
        missing = "megatron_fluid: of rank 0 alone, in its first forward of such a layer"
        if dist.get_rank():
            return
    elif several and dist.get_backend() != "fake":
        from megatron_fluid.comm.agreement import agreement
        from megatron_fluid.comm.timeouts import wait_timeout_s
        from megatron_fluid.errors import ranks_text

        # Less than peers wait for rank 0 in their first exchange.
        world, bound = dist.get_world_size(), min(_GATHER_S, wait_timeout_s(None) / 4)
        words = agreement(dist.group.WORLD)  # type: ignore[arg-type]
        if dist.get_rank():
            words.publish("start-up table", mine, bound)
            return
        reports |= words.read("start-up table", range(1, world), bound)
        if absent := [rank for rank in range(world) if rank not in reports]:
            missing = f"megatron_fluid: no report from {ranks_text(absent)} within {bound:g} s"
    rows = merged_features({rank: found for rank, (found, _) in reports.items()})
    known = any(name in _EXCHANGING for name, *_ in rows)
    read = {name for _, names in reports.values() for name in names} if known else None
    found_unused = unused_settings(read) if own_loop else unused_in_other_loops()
    unused: list[Feature] = [(flag, None, why, "") for flag, why in found_unused.items()]
    show = startup_table if verbose() else startup_lines
    print(show(patches.report(), rows + unused), flush=True)
    if missing:
        print(missing, flush=True)
    if warning := _nothing_overlapped(rows):
        print(warning, flush=True)


def merged_features(reports: Mapping[int, Sequence[tuple[str, bool, str, int]]]) -> list[Feature]:
    """The features of all ranks in one list: what is not true of every rank names its ranks, and
    objects are counted by rank."""
    from megatron_fluid.errors import ranks_text

    counts: dict[tuple[str, bool, str], dict[int, int]] = {}
    for rank, found in reports.items():
        for *key, count in found:
            counts.setdefault(tuple(key), {})[rank] = count  # type: ignore[arg-type]
    rows: list[Feature] = []
    for (name, on, reason), by_rank in counts.items():
        if len(by_rank) < len(reports):
            reason += f" ({ranks_text(by_rank)})"
        least, most = min(by_rank.values()), max(by_rank.values())
        rows.append((name, on, reason, most if least == most else f"{least}-{most}"))
    return rows


def _nothing_overlapped(rows: Iterable[Feature]) -> str:
    """A warning where there are MoE layers, and all of them keep Megatron's own path against the
    user's wish: which flags change that; else an empty text."""
    from megatron_fluid.patches.overlap_decision import is_choice

    found = [(on, reason) for name, on, reason, _ in rows if name == _MOE]
    reasons = [reason for _, reason in found if not is_choice(reason)]
    if not reasons or any(on for on, _ in found):
        return ""
    settings = [setting for reason in reasons if (setting := _setting_of(reason))]
    flags = ", ".join(map(_way_out, dict.fromkeys(settings)))
    advice = f"To overlap them: {flags}." if flags else f"Why: {'; '.join(reasons)}."
    return f"megatron_fluid: WARNING: NO MoE layer is overlapped on any rank. {advice}"


def _setting_of(reason: str) -> str | None:
    """The setting that a reason begins with (`setting=value: why`), or None."""
    setting, found, _ = reason.partition("=")
    return setting if found and setting.isidentifier() else None


def _way_out(setting: str) -> str:
    """The flag without which, or with which, a setting no longer keeps Megatron's own path."""
    return _WAYS_OUT.get(setting, "no --" + setting.replace("_", "-"))


def startup_lines(rows: Sequence[Row], features: Sequence[Feature]) -> str:
    """What a run's log shows unless more is asked for: three lines of at most 100 columns."""
    from megatron_fluid import __version__

    states = Counter(row.state for row in rows)
    left_out = [row.patch for row in rows if row.state == OFF]
    versions = f"megatron_fluid {__version__}"
    if patches.megatron_installed():
        versions += f", Megatron-Core {patches.megatron_version()}"
    on = [f"{_short(name)} ({count}): {why}" for name, on, why, count in features if on]
    off = [_off_text(name, why, count) for name, on, why, count in features if on is False]
    off += [f"no effect: {name} ({why})" for name, on, why, _ in features if on is None]
    off += [f"patches left out: {', '.join(left_out)}"] if left_out else []
    lines = (
        f"{versions}: {states['applied']} patches applied (--fluid-verbose lists all)",
        f"  on:  {'; '.join(on) or 'nothing'}",
        f"  off: {'; '.join(off) or 'nothing'}",
    )
    return "\n".join(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 4]} ..." for line in lines)


def _short(feature: str) -> str:
    return feature.removeprefix("overlapped ")


def _off_text(name: str, reason: str, count: int | str) -> str:
    """A feature that is off, the setting that is the reason, and the flag that changes it."""
    if (setting := _setting_of(reason)) is None:
        return f"{_short(name)} ({count}): {reason}"
    return f"{_short(name)} ({count}): {reason.partition(':')[0]}, change: {_way_out(setting)}"


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two blanks between them, a line under the head."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def startup_table(rows: Sequence[Row], features: Sequence[Feature]) -> str:
    """What a run's log shows: the patches of Megatron, one line for any other group in which
    nothing was turned off, the features, and settings without effect."""
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
        words = {True: "on", False: "off", None: "no effect"}
        lines = ((name, words[on], str(n), why) for name, on, why, n in features)
        text += "\n\n" + text_table(head, lines)
    return text


def _objects(count: int | None) -> str:
    return "" if count is None else str(count)
