"""What rank 0 prints once, when the model has been built, or where another loop than Megatron's
builds it, in the first forward of a layer: three lines (versions; what is on; what is off, and
which flag changes that), or with --fluid-verbose Megatron's patches and every feature with its
reasons and ranks."""

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.groups import wait_timeout_s
from megatron_fluid.config import ENVIRONMENT_PREFIX, FluidConfig, current_config
from megatron_fluid.errors import ranks_text
from megatron_fluid.patches.cpu.mode import cpu_mode_active
from megatron_fluid.patches.engine.patch import MEGATRON, OFF, Row
from megatron_fluid.patches.engine.switches import asked
from megatron_fluid.patches.features import features
from megatron_fluid.patches.limits import remedy
from megatron_fluid.patches.overlap_decision import is_choice

__all__ = [
    "features",
    "merged_features",
    "report",
    "setup_model_and_optimizer",
    "startup_lines",
    "startup_table",
    "text_table",
    "unused_settings",
]


Feature = tuple[str, bool | None, str, int | str]  # its name, on, reason, for how many objects

_GATHER_S = 60.0  # bound on rank 0's wait for what the other ranks have to report
_MOE = "overlapped MoE layer"
_ATTENTION = ("overlapped attention", "overlapped latent attention")
_WIDTH = 100  # columns
_calls = itertools.count()


def setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Print the report after Megatron has built its model."""

    @functools.wraps(original)
    def fluid_setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        built = original(*args, **kwargs)
        report()
        return built

    return fluid_setup_model_and_optimizer


def report(own_loop: bool = True) -> None:
    """Print the report, at the first call.

    Args:
        own_loop: whether it is Megatron's set-up that calls, on all ranks; rank 0 then waits for
            the other ranks' reports, bounded. Else a layer's first forward does, and rank 0, for
            which others may wait, prints its own report.
    """
    if next(_calls):
        return
    mine = features()
    reports, missing = {0: mine}, ""
    several = dist.is_initialized() and dist.get_world_size() > 1
    if several and not own_loop:
        missing = "megatron_fluid: of rank 0 alone, in its first forward of such a layer"
        if dist.get_rank():
            return
    elif several and dist.get_backend() != "fake":
        # Less than peers wait for rank 0 in their first exchange.
        world, bound = dist.get_world_size(), min(_GATHER_S, wait_timeout_s(None) / 4)
        channel = agreement(dist.group.WORLD)  # type: ignore[arg-type]
        if dist.get_rank():
            channel.publish("start-up report", mine, bound)
            return
        reports |= channel.read("start-up report", range(1, world), bound)
        if absent := [rank for rank in range(world) if rank not in reports]:
            missing = f"megatron_fluid: no report from {ranks_text(absent)} within {bound:g} s"
    rows = merged_features(reports)
    without_effect = unused_settings(rows) if own_loop else _unused_in_other_loops()
    unused: list[Feature] = [(flag, None, why, "") for flag, why in without_effect.items()]
    show = startup_table if asked("verbose") else startup_lines
    print(show(patches.report(), rows + unused), flush=True)
    if missing:
        print(missing, flush=True)
    if warning := _nothing_overlapped(rows):
        print(warning, flush=True)


def merged_features(reports: Mapping[int, Sequence[tuple[str, bool, str, int]]]) -> list[Feature]:
    """The features of all ranks in one list: what is not true of every rank names its ranks, and
    objects are counted by rank."""
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
    found = [(on, reason) for name, on, reason, _ in rows if name == _MOE]
    reasons = [reason for _, reason in found if not is_choice(reason)]
    if not reasons or any(on for on, _ in found):
        return ""
    settings = [setting for reason in reasons if (setting := _setting_of(reason))]
    flags = ", ".join(map(remedy, dict.fromkeys(settings)))
    advice = f"To overlap them: {flags}." if flags else f"Why: {'; '.join(reasons)}."
    return f"megatron_fluid: WARNING: NO MoE layer is overlapped on any rank. {advice}"


def _setting_of(reason: str) -> str | None:
    """The setting that a reason begins with (`setting=value: why`), or None."""
    setting, found, _ = reason.partition("=")
    return setting if found and setting.isidentifier() else None


def startup_lines(rows: Sequence[Row], features: Sequence[Feature]) -> str:
    """What a run's log shows unless more is asked for: three lines of at most 100 columns."""
    from megatron_fluid import __version__

    states = Counter(row.state for row in rows)
    left_out = [row.patch for row in rows if row.state == OFF]
    versions = f"megatron_fluid {__version__}"
    if patches.megatron_installed():
        versions += f", Megatron-Core {patches.megatron_version()}"
    on: list[tuple[str, str]] = []  # each item as a long and as a short text
    off: list[tuple[str, str]] = []
    for name, state, why, count in features:
        if state:
            on.append((f"{_short(name)} ({count}): {why}", _short(name)))
        elif state is None:
            off.append((f"no effect: {name} ({why})", f"no effect: {name}"))
        else:
            off.append((_off_text(name, why, count), _short(name)))
    if left_out:
        off.append((f"patches left out: {', '.join(left_out)}", "patches left out"))
    return "\n".join(
        (
            f"{versions}: {states['applied']} patches applied (--fluid-verbose lists all)",
            _fitted("  on:  ", on),
            _fitted("  off: ", off),
        )
    )


def _fitted(head: str, items: Sequence[tuple[str, str]]) -> str:
    """A line of items, the first ones as their long texts, as far as there is room for all others
    as their short ones; where there is none, how many more there are."""
    texts = [short for _, short in items]

    def line(shown: Sequence[str]) -> str:
        left = len(items) - len(shown)
        more = f"; {left} more (--fluid-verbose)" if left else ""
        return head + ("; ".join(shown) or "nothing") + more

    for i, (long, _) in enumerate(items):
        longer = [*texts[:i], long, *texts[i + 1 :]]
        texts = longer if len(line(longer)) <= _WIDTH else texts
    while len(line(texts)) > _WIDTH:
        texts = texts[:-1]
    return line(texts)


def _short(feature: str) -> str:
    return feature.removeprefix("overlapped ")


def _off_text(name: str, reason: str, count: int | str) -> str:
    """A feature that is off, the setting that is the reason, and the flag that changes it."""
    if (setting := _setting_of(reason)) is None:
        return f"{_short(name)} ({count}): {reason}"
    return f"{_short(name)} ({count}): {reason.partition(':')[0]}, change: {remedy(setting)}"


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
    """What a run's log shows with --fluid-verbose: the patches of Megatron, others that were turned
    off, the features, and settings without effect."""
    cells = [
        (row.patch, row.state, "" if row.instances is None else str(row.instances), row.reason)
        for row in rows
        if row.group == MEGATRON or row.state == OFF
    ]
    text = "megatron_fluid\n" + text_table(("patch", "state", "objects", "reason"), cells)
    if features:
        words = {True: "on", False: "off", None: "no effect"}
        lines = ((name, words[on], str(count), why) for name, on, why, count in features)
        text += "\n\n" + text_table(("feature", "state", "objects", "reason"), lines)
    return text


def unused_settings(rows: Sequence[Feature] = ()) -> dict[str, str]:
    """Settings that were given and that nothing reads, as flags with their values, and why; of the
    job's own arguments as Megatron parsed them.

    Args:
        rows: the features of all ranks; empty where no layer is known.
    """
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None:
        return {}
    config, default = current_config(), FluidConfig()
    found: dict[str, str] = {}
    for name, reason in _unused_reasons(args, config, rows).items():
        value = getattr(config, name)
        if reason and value not in (getattr(default, name), "off", "megatron"):
            flag = f"--fluid-{name.removesuffix('_s').replace('_', '-')} {value}"
            found[flag.removesuffix(" True")] = reason
    if asked("cpu") and not cpu_mode_active():
        found["--fluid-cpu"] = "a GPU is found"
    if asked("fused_optimizer") and not args.use_distributed_optimizer:
        found["--fluid-fused-optimizer"] = "it needs --use-distributed-optimizer"
    return found


def _unused_in_other_loops() -> dict[str, str]:
    """Settings that only Megatron's own training loop reads, where another one trains."""
    config, default = current_config(), FluidConfig()
    names = ("profile_steps", "profile_dir", "end_on_timeout", "graph")
    return {
        f"{ENVIRONMENT_PREFIX}{name.upper()}": "only Megatron's training loop reads it"
        for name in names
        if getattr(config, name) != getattr(default, name)
    }


def _unused_reasons(args: Any, config: FluidConfig, rows: Sequence[Feature]) -> dict[str, str]:
    """Why each setting has no effect, "" where it may have."""
    linears = heads = ""
    if config.tp_overlap == "off":
        linears = "--fluid-tp-overlap is off"
    elif args.tensor_model_parallel_size == 1 or not args.sequence_parallel:
        linears = "it needs --tensor-model-parallel-size above 1 and --sequence-parallel"
    kinds = args.cp_comm_type or ["p2p"]
    if args.context_parallel_size == 1:
        heads = "--context-parallel-size is 1"
    elif "a2a" not in kinds:
        heads = f"it needs --cp-comm-type a2a, found {' '.join(kinds)}"
    experts = "" if args.num_experts else "the model has no MoE layer"
    fp8 = experts or ("" if args.fp8 else "it needs --fp8-format e4m3")
    precision = "" if config.moe_fp8 == "ours" else f"--fluid-moe-fp8 is {config.moe_fp8}"
    neither = f"{experts}, and {heads}" if experts and heads else ""
    # The text of a fused layer is its backend and its ranks.
    moe = [why for name, on, why, _ in rows if name == _MOE and on]
    fused = {why.replace(",", " ").split()[0] for why in moe if ";" not in why}
    attention = [on for name, on, *_ in rows if name in _ATTENTION]
    known = bool(attention) or any(name == _MOE for name, *_ in rows)
    pieces = idle = rows_kept = figures = ""
    if config.moe_recompute == "rows" and fused and fused <= {"rounds", "hierarchical"}:
        rows_kept = "over rounds and between hosts rows are not computed again"
    if known and not fused & {"nvlink", "hierarchical"}:
        figures = "no MoE layer is over symmetric memory or over hosts"
    if known and "rounds" not in fused and not any(attention):
        pieces = "fused layers over rounds and overlapped attention read it, and there are none"
    if known and not moe and not any(attention):
        idle = "nothing that reads it is overlapped"
    return {
        **dict.fromkeys(("tp_overlap", "deterministic"), linears),
        "cp_backend": heads,
        **dict.fromkeys(("moe_backend", "batch_invariant"), experts),
        "moe_recompute": experts or rows_kept,
        "machine": experts or figures,
        "profile_dir": "" if config.profile_steps else "it needs --fluid-profile-steps",
        **dict.fromkeys(("timeout_s", "end_on_timeout"), "" if args.world_size > 1 else "one rank"),
        "moe_fp8": fp8,
        "moe_fp8_weight_grads": fp8 or precision,
        "dx_chunks": neither or pieces,
        "defer_weight_grads": neither or idle,
    }
