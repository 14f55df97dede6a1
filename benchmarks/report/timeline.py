"""A trace of one call of every variant, and a page and a picture of them: streams as lanes, a panel
a variant, drawn as `megatron-fluid profile` draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_fluid.profiling.draw import draw
from megatron_fluid.profiling.timeline import read_timeline
from megatron_fluid.profiling.traces import read_document

__all__ = ["write_trace"]


def write_trace(
    calls: Mapping[str, Callable[[], object]], device: torch.device, trace: Path
) -> None:
    """One call of each under torch's profiler, one after the other: rank 0 writes a trace of each
    for Perfetto, `timeline.html` and, where matplotlib is installed, `timeline.png` to the folder
    of ``trace``'s name without its suffix.

    Collective over all ranks. Each is called once before its trace starts.
    """
    timelines = []
    folder = trace.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, call in calls.items():
        call()
        dist.barrier()
        with torch.profiler.profile(acc_events=True) as profiler:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if dist.get_rank() == 0:
            written = folder / f"{name}.json.gz"
            profiler.export_chrome_trace(str(written))
            timelines.append(read_timeline(read_document(written), name))
    if dist.get_rank() == 0:
        print(f"traces for Perfetto and timelines: {draw(timelines, folder, folder.name)}")
    dist.barrier()
