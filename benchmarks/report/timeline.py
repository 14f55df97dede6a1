"""A trace of one call of every variant, and a picture of it: streams as lanes, a panel a variant.
Needs matplotlib.

python -m benchmarks.report.timeline profiles/ag-8192-28672-8192.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report.pictures import draw_later
from megatron_fluid.profiling.traces import moves

if TYPE_CHECKING:
    import torch

__all__ = ["draw_timeline", "write_trace"]


def write_trace(
    calls: Mapping[str, Callable[[], object]], device: torch.device, trace: Path
) -> None:
    """One call of each under torch's profiler, one after the other: rank 0 writes a trace for
    Perfetto and a timeline picture next to it.

    Collective over all ranks. Each is called once before the profiler starts.
    """
    import torch
    import torch.distributed as dist

    for call in calls.values():
        call()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for name, call in calls.items():
            dist.barrier()
            with torch.profiler.record_function(name):
                call()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    if dist.get_rank() == 0:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        print(f"trace for Perfetto: {trace}")
        command = f"python -m benchmarks.report.timeline {trace}"
        draw_later(lambda: draw_timeline(trace, list(calls)), command)
    dist.barrier()


def draw_timeline(trace: Path | str, regions: Sequence[str] | None = None) -> Path:
    """Kernels and copies by stream within each named region of a profiler trace (default: all that
    record_function marked); written next to the trace as PNG.

    Without a GPU in the trace, the operators of the CPU threads are drawn.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = [e for e in json.loads(Path(trace).read_text())["traceEvents"] if e.get("ph") == "X"]
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    drawn = on_device or [e for e in events if e.get("cat") == "cpu_op"]
    spans = {}
    for event in events:
        if (regions is None or event["name"] in regions) and event.get("cat") == "user_annotation":
            spans[event["name"]] = (event["ts"], event["ts"] + event["dur"])
    if not spans:
        raise ValueError(f"trace {trace}: found none of the regions {regions}")
    figure = Figure(figsize=(12, 1.6 * len(spans) + 0.6), layout="constrained")
    axes = figure.subplots(len(spans), 1, squeeze=False)[:, 0]
    looks: dict[str, dict[str, Any]] = {
        "communication": {"fc": "white", "ec": "0.1", "hatch": "////"},
        "gemm": {"fc": "#14532d", "ec": "0.1"},
        "other": {"fc": "0.75", "ec": "0.5"},
    }
    for axis, (region, (begin, end)) in zip(axes, spans.items(), strict=True):
        inside = [e for e in drawn if begin <= e["ts"] < end]
        streams = sorted({e["tid"] for e in inside}, key=str)
        for event in inside:
            axis.barh(
                streams.index(event["tid"]),
                event["dur"],
                left=event["ts"] - begin,
                height=0.7,
                linewidth=0.3,
                **looks[_kind(event)],
            )
        axis.set_yticks(range(len(streams)), [f"stream {s}" for s in streams], fontsize=7)
        axis.set_ylabel(region, fontsize=8)
    axes[-1].set_xlabel("microseconds from the call", fontsize=8)
    keys = [Patch(**look) for look in looks.values()]
    figure.legend(keys, looks, loc="outside lower center", ncols=3, fontsize=8)
    picture = Path(trace).with_suffix(".png")
    figure.savefig(picture, dpi=110)
    return picture


# In small letters: parts of kernels' names, and how our fused GEMMs begin.
_MULTIPLYING = (
    "gemm",
    "nvjet",
    "cutlass",
    "xmma",
    "aten::mm",
    "aten::addmm",
    "splitkreduce",
    "grouped_",
)
_OUR_MULTIPLYING = ("gather_forward", "gather_backward", "scatter_forward", "scatter_backward")


def _kind(event: dict) -> str:
    name = event["name"].lower()
    if event.get("cat") == "gpu_memcpy":
        return "communication"
    if name.startswith(_OUR_MULTIPLYING) or any(part in name for part in _MULTIPLYING):
        return "gemm"
    return "communication" if moves(event["name"]) else "other"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw one picture from a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    print(draw_timeline(parser.parse_args(arguments).trace))
    return 0


if __name__ == "__main__":
    sys.exit(main())
