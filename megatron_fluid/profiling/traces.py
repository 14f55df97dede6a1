"""How much of the communication in a profiler's trace was hidden behind computation.

Reads Chrome traces as torch.profiler writes them. Communication counts as hidden while a kernel
that computes runs on the same device. What a GEMM sends itself while it computes is not visible in
a trace. Without a GPU, operators of the CPU threads are counted; of nested operators only the
innermost, since an outer one may wait for a peer.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fluid.errors import ConfigError

__all__ = [
    "Span",
    "Summary",
    "chosen_events",
    "gaps",
    "kind_of",
    "merged",
    "moves",
    "read_document",
    "read_trace",
    "summarise",
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
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU_COMMUNICATION = ("gloo:", "c10d::", "nccl:")


@dataclass(frozen=True)
class Summary:
    """The time of one device, in milliseconds.

    Attributes:
        window: from the first to the last event.
        compute, communication: with computation, with communication.
        exposed: with communication and without computation.
        idle: with neither.
        exposed_by_name: exposed time by name of the communication, longest first.
    """

    device: str
    window: float
    compute: float
    communication: float
    exposed: float
    idle: float
    exposed_by_name: tuple[tuple[str, float], ...]

    @property
    def hidden(self) -> float | None:
        """Share of the communication that was hidden; None without communication."""
        return 1 - self.exposed / self.communication if self.communication else None

    def lines(self) -> Iterator[str]:
        """Yield the lines to print."""
        share = "no communication" if self.hidden is None else f"{self.hidden:.1%} of it hidden"
        yield f"{self.device}: {self.window:.2f} ms"
        yield f"  computation    {self.compute:10.2f} ms"
        exposed = f"{self.exposed:.2f} ms exposed"
        yield f"  communication  {self.communication:10.2f} ms, {share}, {exposed}"
        yield f"  neither        {self.idle:10.2f} ms"
        for name, milliseconds in self.exposed_by_name:
            yield f"    exposed {milliseconds:10.2f} ms  {name}"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, plain or gzipped.

    Raises:
        ConfigError: the file is not a trace.
    """
    events: list[dict[str, Any]] = read_document(path)["traceEvents"]
    return events


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
        document["traceEvents"] = list(document["traceEvents"])
        return document
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"trace {path}: cannot be read ({reason})") from None


def summarise(events: Iterable[dict[str, Any]], names: int = 5) -> list[Summary]:
    """Summarise each device in the trace, with the `names` longest exposed communications."""
    chosen = chosen_events(events)
    by_device: dict[str, list[dict[str, Any]]] = {}
    for event in chosen:
        known = event["cat"] in _ON_DEVICE and "device" in event.get("args", {})
        device = f"GPU {event['args']['device']}" if known else "CPU"
        by_device.setdefault(device, []).append(event)
    return [_summarise(device, found, names) for device, found in sorted(by_device.items())]


def chosen_events(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the complete events that a summary counts: those of GPUs, or without a GPU the
    innermost operators and the communication of the CPU threads."""
    complete = [e for e in events if e.get("ph") == "X"]
    on_device = [e for e in complete if e.get("cat") in _ON_DEVICE]
    if on_device:
        return on_device
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in complete:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault(event.get("tid"), []).append(event)
    chosen: list[dict[str, Any]] = []
    for found in threads.values():
        found.sort(key=lambda e: (e["ts"], -e["dur"]))
        following = [*found[1:], None]
        for event, inner in zip(found, following, strict=True):
            is_outer = inner is not None and inner["ts"] < event["ts"] + event["dur"]
            if kind_of(event) == "communication" or not is_outer:
                chosen.append(event)
    return chosen


def _summarise(device: str, events: Sequence[dict[str, Any]], names: int) -> Summary:
    computing: list[Span] = []
    moving: dict[str, list[Span]] = {}
    for event in events:
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        kind = kind_of(event)
        if kind == "compute":
            computing.append(span)
        elif kind == "communication":
            moving.setdefault(event["name"], []).append(span)
    compute = merged(computing)
    communication = merged(span for spans in moving.values() for span in spans)
    busy = merged([*compute, *communication])
    unions = {name: merged(spans) for name, spans in moving.items()}
    exposed = {n: _length(spans) - _overlap(spans, compute) for n, spans in unions.items()}
    worst = [(n[:100], t / 1e3) for n, t in exposed.items() if t > 0]
    worst = sorted(worst, key=lambda item: -item[1])[:names]
    window = busy[-1][1] - busy[0][0] if busy else 0.0
    total = _length(communication)
    return Summary(
        device,
        window / 1e3,
        _length(compute) / 1e3,
        total / 1e3,
        (total - _overlap(communication, compute)) / 1e3,
        (window - _length(busy)) / 1e3,
        tuple(worst),
    )


def moves(kernel: str) -> bool:
    """Return whether a kernel of this name moves bytes between ranks or waits for a peer."""
    return kernel.startswith(_OURS) or any(part in kernel.lower() for part in _OTHERS)


def kind_of(event: dict[str, Any]) -> str:
    """Return "communication", "compute" or "other"."""
    name, category = str(event["name"]), event.get("cat")
    moving = {
        "gpu_memcpy": name.startswith(_COPIES),
        "user_annotation": name.startswith(_CPU_COMMUNICATION),
        "cpu_op": name.startswith(_CPU_COMMUNICATION),
        "kernel": moves(name),
    }
    if moving.get(str(category), False):
        return "communication"
    return "compute" if category in ("cpu_op", "kernel") else "other"


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans in order that cover the same time."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def gaps(spans: Sequence[Span], window: Span) -> list[Span]:
    """Return the parts of a window that disjoint, ordered spans do not cover."""
    found, at = [], window[0]
    for begin, end in [*spans, (window[1], window[1])]:
        if begin > at:
            found.append((at, min(begin, window[1])))
        at = max(at, end)
    return found


def without(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """Return the parts of `left` outside `right`. Both are disjoint and ordered."""
    if not left:
        return []
    free = gaps(right, (left[0][0], left[-1][1]))
    found, i, j = [], 0, 0
    while i < len(left) and j < len(free):
        begin, end = max(left[i][0], free[j][0]), min(left[i][1], free[j][1])
        if begin < end:
            found.append((begin, end))
        if left[i][1] < free[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _overlap(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Return the time that two lists of disjoint, ordered spans share."""
    shared, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        shared += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared
