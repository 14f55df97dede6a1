"""The events of a profiler's trace that count, their kinds, and arithmetic of time spans.

Reads Chrome traces as torch.profiler writes them. Communication counts as hidden while a kernel
that computes runs on the same device. What a GEMM sends itself while it computes is not visible in
a trace. Without a GPU, operators of the CPU threads are counted: torch's own ("aten::"), and of
others that are nested only the innermost, since an outer one may wait for a peer.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_fluid.errors import ConfigError

__all__ = [
    "ON_DEVICE",
    "Span",
    "chosen_events",
    "gaps",
    "kind_of",
    "merged",
    "read_document",
    "without",
]

Span = tuple[float, float]

# Kernels that move bytes or wait for a peer: prefixes of this package's kernels, and parts of the
# names of others'.
_OURS = tuple(
    "publish_kernel plan_kernel push_ scatter_kernel begin_combine_kernel send_rows_kernel "
    "reduce_push_kernel reduce_kernel arrive_ dispatch_ combine_ barrier_kernel "
    "wait_for_peers_kernel".split()
)
_OTHERS = tuple(
    "nccl nvshmem userbuffers deep_ep hybrid_ep multimem all_gather allgather all_reduce allreduce "
    "reduce_scatter barrier signal".split()
)
# Copies count as communication: copy engines carry exchanges.
_COPIES = ("Memcpy PtoP", "Memcpy DtoD")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU_COMMUNICATION = ("gloo:", "c10d::", "nccl:")


def read_document(path: Path) -> dict[str, Any]:
    """Return a trace, plain or gzipped, with its events under "traceEvents".

    Raises:
        ConfigError: the file is not a trace.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt") as file:
            document = json.load(file)
        if not isinstance(document, dict):
            document = {"traceEvents": document}
        events = document["traceEvents"] = list(document["traceEvents"])
        for event in events:
            if event.get("ph") == "X":
                # What every reader takes for granted.
                _ = event["name"], event["ts"] + event["dur"] + 0.0
        return document
    except (
        OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError
    ) as error:  # fmt: skip
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"trace {path}: cannot be read ({reason})") from None


def chosen_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the complete events that a summary counts: those of GPUs, or without a GPU torch's
    operators, the innermost of others, and the communication of the CPU threads."""
    complete = [e for e in events if e.get("ph") == "X"]
    on_device = [e for e in complete if e.get("cat") in ON_DEVICE]
    if on_device:
        return on_device
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in complete:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event.get("tid"), []).append(event)
    chosen: list[dict[str, Any]] = []
    for thread_events in threads.values():
        thread_events.sort(key=lambda e: (e["ts"], -e["dur"]))
        following = [*thread_events[1:], None]
        for event, inner in zip(thread_events, following, strict=True):
            is_outer = inner is not None and inner["ts"] < event["ts"] + event["dur"]
            # A GEMM has inner operators that only look at its operands.
            computes = not is_outer or str(event["name"]).startswith("aten::")
            if computes or kind_of(event) == "communication":
                chosen.append(event)
    return chosen


def kind_of(event: dict[str, Any]) -> str:
    """Return "communication" (bytes move between ranks, or a peer is waited for), "compute" or
    "other"."""
    name, category = str(event["name"]), event.get("cat")
    if category == "kernel":
        moves = name.startswith(_OURS) or any(part in name.lower() for part in _OTHERS)
    else:
        moves = name.startswith(_COPIES if category == "gpu_memcpy" else _CPU_COMMUNICATION)
    if moves and category != "gpu_memset":
        return "communication"
    return "compute" if category in ("cpu_op", "kernel") else "other"


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans in order that cover the same time."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def gaps(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of a window that ordered spans do not cover."""
    free, at = [], window[0]
    for begin, end in [*spans, (window[1], window[1])]:
        if at < min(begin, window[1]):
            free.append((at, min(begin, window[1])))
        at = max(at, end)
    return free


def without(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the parts of `left` outside `right`. Both are disjoint and ordered."""
    if not left:
        return []
    window = left[0][0], left[-1][1]
    return gaps(sorted([*right, *gaps(left, window)]), window)
