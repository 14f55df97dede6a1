"""A profiler's trace as lanes: what each stream or thread did during one step.

Times are microseconds from the beginning of the step. Lanes hold computation, communication or
both. Communication is exposed while nothing computes on the device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_fluid.profiling.traces import (
    ON_DEVICE,
    Span,
    chosen_events,
    gaps,
    kind_of,
    merged,
    without,
)

__all__ = ["PEAK_TFLOPS", "STEP", "Lane", "Timeline", "add_facts", "read_timeline"]

STEP = "megatron_fluid.step"
"""Name of the `record_function` around a step.

Of several steps, the one of median length is drawn; without any, the whole trace."""

_FACTS = "megatron_fluid"
_SHORTEST_GAP_US = 5.0

# Dense bfloat16 peak in TFLOP/s by a part of the device's name; the first match counts.
PEAK_TFLOPS = (
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
)
_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "Long", "Double"), 8),
    **dict.fromkeys(("float", "int", "Float", "Int"), 4),
    **dict.fromkeys(("c10::BFloat16", "c10::Half", "BFloat16", "Half", "short"), 2),
    **dict.fromkeys(("Byte", "Char", "Bool", "unsigned char", "signed char", "bool"), 1),
}
# Index of the argument of torch's collectives that holds what this rank sends.
_SENT_ARGUMENT = {
    "c10d::alltoall_base_": 1,
    "c10d::send": 0,
    "c10d::allreduce_": 0,
    "c10d::_allgather_base_": 1,
    "c10d::_reduce_scatter_base_": 1,
}
# Parts of calls that are counted above, or calls that send nothing.
_UNSENT = ("gloo:", "nccl:", "c10d::recv", "c10d::barrier")


class Lane(NamedTuple):
    """The events (begin, length, kind, name) of a stream or thread."""

    name: str
    events: list[tuple[float, float, str, str]]


@dataclass(frozen=True)
class Timeline:
    """One variant's step on one device.

    Attributes:
        title: name of the variant.
        device: name of the device.
        length: microseconds of the step.
        lanes: those of streams or threads, the longest computation first; then exposed
            communication, and host gaps: spans of 5 us or more in which nothing runs.
        figures: (label, value) to show, in order.
        notes: which kernels are exposed longest, and which figures are left out and why.
    """

    title: str
    device: str
    length: float
    lanes: tuple[Lane, ...]
    figures: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """Yield the figures and notes as text."""
        yield f"{self.title}, on {self.device}"
        for label, value in self.figures:
            yield f"  {label:<18} {value}"
        yield from (f"  {note}" for note in self.notes)


def add_facts(profiler: Any, **facts: object) -> None:
    """Add facts to a trace while the profiler runs.

    Args:
        profiler: torch's profiler.
        facts: `flops` of one rank in what is drawn, `dtype` of the GEMMs, `steps` in what is drawn
            (default 1).
    """
    profiler.add_metadata_json(_FACTS, json.dumps(facts))


def read_timeline(document: Mapping[str, Any], title: str) -> Timeline:
    """Return the lanes and figures of a trace (`read_document`), of its first GPU.

    A trace without events that count gives a timeline without lanes of streams or threads.
    """
    events = [e for e in document["traceEvents"] if e.get("ph") in ("X", "M")]
    chosen = chosen_events(events)
    on_gpu = any(e["cat"] in ON_DEVICE for e in chosen)
    if on_gpu:
        first = min(e.get("args", {}).get("device", 0) for e in chosen)
        chosen = [e for e in chosen if e.get("args", {}).get("device", 0) == first]
    step = _median_step(events)
    if step is not None:
        chosen = [e for e in chosen if step[0] <= e["ts"] < step[1]]
    begin = min((float(e["ts"]) for e in chosen), default=0.0)
    end = max((float(e["ts"]) + float(e["dur"]) for e in chosen), default=0.0)
    busy: dict[str, list[Span]] = {"compute": [], "communication": [], "other": []}
    by_name: dict[str, list[Span]] = {}
    for event in chosen:
        at, kind = float(event["ts"]) - begin, kind_of(event)
        busy[kind].append((at, at + float(event["dur"])))
        if kind == "communication":
            by_name.setdefault(str(event["name"])[:100], []).append(busy[kind][-1])
    compute, moving = merged(busy["compute"]), merged(busy["communication"])
    exposed = without(moving, compute)
    every = merged(span for spans in busy.values() for span in spans)
    idle = [(b, e) for b, e in gaps(every, (0.0, end - begin)) if e - b >= _SHORTEST_GAP_US]
    properties = document.get("deviceProperties") or [{}]
    device = str(properties[0].get("name", "GPU")) if on_gpu else "CPU"
    written = document.get(_FACTS) or {}
    facts: dict[str, Any] = json.loads(written) if isinstance(written, str) else written
    steps = int(facts.get("steps", 1))
    moved = _total(moving)
    share = f"{1 - _total(exposed) / moved:.1%}" if moved else "no communication"
    host_gaps = "none of 5 us or more"
    if idle:
        longest = max(e - b for b, e in idle)
        host_gaps = f"{len(idle)}, {_ms(_total(idle))} in all, longest {_ms(longest)}"
    figures = [
        ("trace" if step is None else "step" if steps == 1 else f"{steps} steps", _ms(end - begin)),
        ("computation", _ms(_total(compute))),
        ("communication", _ms(moved)),
        ("hidden share", share),
        ("exposed", _ms(_total(exposed))),
        ("host gaps", host_gaps),
    ]
    shares = [(_total(without(merged(s), compute)), name) for name, s in by_name.items()]
    shares.sort(key=lambda share: -share[0])
    notes = [f"Exposed for {_ms(length)}: {name}" for length, name in shares[:5] if length]
    for more, why in (_bytes(chosen), _mfu(facts, device, end - begin)):
        figures += more
        notes += why
    lanes = [
        *_lanes(chosen, events, begin, on_gpu),
        Lane("exposed communication", [(b, e - b, "exposed", "exposed") for b, e in exposed]),
        Lane("host gaps", [(b, e - b, "idle", "host gap") for b, e in idle]),
    ]
    return Timeline(title, device, end - begin, tuple(lanes), tuple(figures), tuple(notes))


def _median_step(events: Sequence[dict[str, Any]]) -> Span | None:
    marks = [e for e in events if e.get("name") == STEP and e.get("cat") == "user_annotation"]
    if not marks:
        return None
    chosen = sorted(marks, key=lambda e: float(e["dur"]))[len(marks) // 2]
    return float(chosen["ts"]), float(chosen["ts"]) + float(chosen["dur"])


def _total(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"


def _bytes(chosen: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the bytes that this rank sends, as far as the trace states them, and their rate."""
    total, unstated, own = 0, set(), False
    spans: list[Span] = []
    for event in chosen:
        if kind_of(event) != "communication":
            continue
        sent = _sent(event)
        if sent is not None:
            total += sent
            own |= event["name"] == "c10d::alltoall_base_"
        elif not event["name"].startswith(_UNSENT):
            unstated.add(str(event["name"])[:60])
            continue
        spans.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    notes = []
    if unstated:
        names = sorted(unstated)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        notes = [f"Bytes that the trace does not state: {', '.join(names[:4])}{more}."]
    if own:
        notes.append("Bytes of all-to-alls include the part that stays on this rank.")
    took = _total(merged(spans))
    if not total or not took:
        return [], notes
    rate = total / took / 1e3
    shown = f"{rate:,.2f}" if rate >= 1 else f"{rate:.2g}"
    return [("sent by this rank", f"{total / 1e6:,.2f} MB"), ("rate", f"{shown} GB/s")], notes


def _sent(event: Mapping[str, Any]) -> int | None:
    """Return the bytes that an event says it sends, or None if it does not say."""
    args, name = event.get("args", {}), str(event["name"])
    if "bytes" in args:
        return int(args["bytes"])
    if "In msg nelems" in args and args.get("dtype") in _BYTES:
        return int(args["In msg nelems"]) * _BYTES[args["dtype"]]
    place = _SENT_ARGUMENT.get(name)
    if place is None or len(args.get("Input Dims", ())) <= place:
        return None
    dims, kind = args["Input Dims"][place], str(args["Input type"][place])
    many = dims if dims and isinstance(dims[0], list) else [dims]
    size = _BYTES.get(kind)
    if size is None:  # a list of tensors does not state its type
        size = 4 if kind in ("TensorList", "") else None
    return None if size is None else size * sum(math.prod(d) for d in many)


def _mfu(
    facts: Mapping[str, Any], device: str, length: float
) -> tuple[list[tuple[str, str]], list[str]]:
    peak = next((peak for part, peak in PEAK_TFLOPS if part in device), None)
    if "flops" not in facts:
        return [], ["MFU left out: the trace does not state the model's FLOPs."]
    rate = facts["flops"] / length / 1e6 if length else 0.0
    rates = [("model FLOPs", f"{rate:,.3g} TFLOP/s")]
    if peak is None:
        return rates, [f"MFU left out: the peak of {device} is not known."]
    if facts.get("dtype") != "bfloat16":
        dtype = facts.get("dtype")
        return rates, [f"MFU left out: the peak is known for bfloat16, the GEMMs are in {dtype}."]
    return [*rates, ("MFU", f"{rate / peak:.1%} of {peak:g} TFLOP/s")], []


def _lanes(
    chosen: Sequence[dict[str, Any]], events: Sequence[dict[str, Any]], begin: float, on_gpu: bool
) -> list[Lane]:
    """Return a lane per stream of a GPU, or per kind and thread of a CPU, the longest computation
    first.

    gloo's threads share one lane: each process group uses any of its threads.
    """
    gloo = {
        e.get("tid")
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name" and "gloo" in str(e.get("args"))
    }
    ordered = sorted(chosen, key=lambda e: float(e["ts"]))
    main = next((e.get("tid") for e in ordered if kind_of(e) == "compute"), None)
    lanes: dict[str, Lane] = {}
    threads: dict[Any, str] = {}
    for event in ordered:
        kind = kind_of(event)
        if on_gpu:
            name = f"stream {event.get('args', {}).get('stream', event.get('tid'))}"
        elif kind == "other":
            continue
        else:
            what = "communication" if kind == "communication" else "computation"
            thread = event["tid"]
            if thread not in gloo:
                word = "main" if thread == main else "thread"
                threads.setdefault(thread, f"{word} {len(threads)}")
            name = f"{threads.get(thread, 'gloo threads')}: {what}"
        lane = lanes.setdefault(name, Lane(name, []))
        span = float(event["ts"]) - begin, float(event["dur"])
        lane.events.append((*span, kind, str(event["name"])))

    def computed(lane: Lane) -> float:
        return sum(length for _, length, kind, _ in lane.events if kind == "compute")

    return sorted(lanes.values(), key=lambda lane: -computed(lane))
