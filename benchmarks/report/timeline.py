"""Pictures of tensor-parallel overlap: exposed communication by M, and a timeline of one call of
every variant. They need matplotlib.

python -m benchmarks.report.timeline exposed benchmarks/results/tp_overlap.json
python -m benchmarks.report.timeline timeline profiles/ag-8192-28672-8192.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.results import read_results
from megatron_fluid.profiling.traces import moves

if TYPE_CHECKING:
    import torch

__all__ = ["draw_exposed", "draw_later", "draw_timeline", "write_trace"]


def write_trace(
    calls: Mapping[str, Callable[[], object]], device: torch.device, trace: Path
) -> None:
    """One call of each under torch's profiler, one after the other: rank 0 writes a trace for
    Perfetto and a timeline picture beside it.

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
        draw_later(lambda: draw_timeline(trace, list(calls)), f"timeline {trace}")
    dist.barrier()


def draw_later(draw: Callable[[], Path], later: str) -> None:
    """Draw, or where matplotlib is missing say how to do it elsewhere: by `python -m
    benchmarks.report.timeline` and `later`."""
    try:
        print(f"picture: {draw()}", flush=True)
    except ImportError as error:
        print(
            f"no picture ({error}); where matplotlib is, draw it with: python -m "
            f"benchmarks.report.timeline {later}"
        )


def draw_exposed(results: Path | str) -> Path:
    """M against exposed communication, one panel a layer, one line a backend; written beside the
    results as PNG."""
    from matplotlib.figure import Figure

    document = read_results(results)
    panels: dict[tuple[str, str], dict[str, list[tuple[int, float]]]] = {}
    for row in document["rows"]:
        if row["variant"] == "gemm_only":
            continue
        operation, m, n, k = row["case"].split("-")
        lines = panels.setdefault((operation, f"N {n}, K {k}"), {})
        lines.setdefault(row["variant"], []).append((int(m), row["config"]["exposed_ms"]))
    columns = min(4, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    colours = {
        name: f"C{i}"
        for i, name in enumerate(sorted({name for lines in panels.values() for name in lines}))
    }
    for axis, ((operation, shape), lines) in zip(axes.flat, sorted(panels.items()), strict=False):
        for backend, points in sorted(lines.items()):
            points.sort()
            axis.plot(
                [m for m, _ in points],
                [exposed for _, exposed in points],
                color=colours[backend],
                marker="o",
                markersize=3,
                label=backend,
            )
        axis.set_xscale("log", base=2)
        axis.set_title(
            f"{'AllGather-GEMM' if operation == 'ag' else 'GEMM-ReduceScatter'}, {shape}",
            fontsize=9,
        )
        axis.set_xlabel("M (rows)", fontsize=8)
        axis.set_ylabel("exposed communication (ms)", fontsize=8)
        axis.axhline(0, color="grey", linewidth=0.5)
    axes.flat[0].legend(fontsize=7)
    figure.suptitle(f"{document['gpus']} x {document['gpu']}", fontsize=10)
    picture = Path(results).with_suffix(".png")
    figure.savefig(picture, dpi=110)
    return picture


def draw_timeline(trace: Path | str, regions: Sequence[str] | None = None) -> Path:
    """Kernels and copies by stream within each named region of a profiler trace (default: all that
    record_function marked); written beside the trace as PNG.

    Without a GPU in the trace, the operators of the CPU threads are drawn.
    """
    from matplotlib.figure import Figure

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
    colours = {"communication": "tab:orange", "gemm": "tab:blue", "other": "tab:grey"}
    for axis, (region, (begin, end)) in zip(axes, spans.items(), strict=True):
        inside = [e for e in drawn if begin <= e["ts"] < end]
        streams = sorted({e["tid"] for e in inside}, key=str)
        for event in inside:
            axis.barh(
                streams.index(event["tid"]),
                event["dur"],
                left=event["ts"] - begin,
                height=0.7,
                color=colours[_kind(event)],
            )
        axis.set_yticks(range(len(streams)), [f"stream {s}" for s in streams], fontsize=7)
        axis.set_ylabel(region, fontsize=8)
    axes[-1].set_xlabel(
        "microseconds from the call (orange: communication, blue: GEMM, grey: other)", fontsize=8
    )
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
    parser.add_argument("kind", choices=("exposed", "timeline"))
    parser.add_argument("file", type=Path, help="a result file, or a trace")
    options = parser.parse_args(arguments)
    print(draw_exposed(options.file) if options.kind == "exposed" else draw_timeline(options.file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
