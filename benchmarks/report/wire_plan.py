"""The plan for many hosts, computed and not measured: `python -m benchmarks.report.wire_plan`
writes docs/wire_plan.svg; `make readme` writes the table. Needs matplotlib for the picture.

Hosts of 8 GPUs, each GPU with a link of its own; an MoE layer of DeepSeek-V3's widths, 4096 tokens
a GPU, bf16, every expert as likely as another, and above 256 GPUs an expert a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases.wire_times import Forward, Wire, hosts_reached, plain_s, two_level_s
from megatron_fluid.moe.hierarchical.plan import chunks_for

__all__ = ["CHART", "SIZES", "Planned", "draw_wire_plan", "plan_for", "wire_plan"]

CHART = Path(__file__).resolve().parents[2] / "docs" / "wire_plan.svg"
SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GPUS_PER_HOST, GBIT_S = 8, 400
_TOKENS, _TOP_K, _HIDDEN, _FFN, _EXPERTS = 4096, 8, 7168, 2048, 256
_FLOPS, _LATENCY_S, _NVLINK_BYTES_PER_S, _PIECE_S = 400e12, 20e-6, 300e9, 60e-6


@dataclass(frozen=True)
class Planned:
    """A forward on so many GPUs.

    Attributes:
        hosts_reached: other hosts that a token goes to. once_gb: of tokens, one way, a GPU.
        each_gb: with a row for each choice. routing_gb: choices of all ranks, a GPU.
        compute_ms, plain_ms, ours_ms: the computation, one after the other, two levels.
        chunks: pieces that tokens cross in.
    """

    gpus: int
    hosts_reached: float
    once_gb: float
    each_gb: float
    routing_gb: float
    compute_ms: float
    plain_ms: float
    ours_ms: float
    chunks: int


def plan_for(gpus: int) -> Planned:
    """What the model says of `gpus` expert-parallel GPUs."""
    hosts, experts = gpus // GPUS_PER_HOST, max(_EXPERTS, gpus)
    row = _HIDDEN * 2
    reached = hosts_reached(hosts, experts, _TOP_K)
    away = 1 - 1 / hosts
    once, each = _TOKENS * reached * row, _TOKENS * _TOP_K * away * row
    routing = _TOKENS * _TOP_K * 2 * (gpus - GPUS_PER_HOST)
    compute_s = 6 * _TOKENS * _TOP_K * _HIDDEN * _FFN / _FLOPS
    wire = Wire(GBIT_S * 1e9 / 8, _LATENCY_S, _NVLINK_BYTES_PER_S)
    own, crossing = compute_s * (1 - away), compute_s * away
    before = routing / wire.bytes_per_s
    chunks = chunks_for(_TOKENS * min(_TOP_K, hosts - 1) * row, "cuda")
    ours = two_level_s(Forward(own, crossing, once, before, _PIECE_S), wire, chunks)
    plain = plain_s(Forward(own, crossing, each), wire)
    gigabytes = (once / 1e9, each / 1e9, routing / 1e9)
    return Planned(gpus, reached, *gigabytes, compute_s * 1e3, plain * 1e3, ours * 1e3, chunks)


def wire_plan() -> str:
    """The table, in Markdown."""
    lines = [
        "| GPUs | other hosts a token goes to | GB that cross, once a host | a row a choice | "
        "routing | experts alone, ms | all-to-alls, ms | two levels, ms | pieces |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for gpus in SIZES:
        p = plan_for(gpus)
        lines.append(
            f"| {gpus:,} | {p.hosts_reached:.2f} | {p.once_gb:.3f} | {p.each_gb:.3f} | "
            f"{p.routing_gb:.3f} | {p.compute_ms:.1f} | {p.plain_ms:.1f} | {p.ours_ms:.1f} | "
            f"{p.chunks} |"
        )
    return "\n".join(lines)


def draw_wire_plan(chart: Path = CHART) -> Path:
    """The three times against the number of GPUs."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "megatron_fluid"
    planned = [plan_for(gpus) for gpus in SIZES]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axis = figure.subplots()
    axis.plot(SIZES, [p.plain_ms for p in planned], "s-", color="0.35", label="all-to-alls")
    axis.plot(SIZES, [p.ours_ms for p in planned], "o-", color="tab:green", label="two levels")
    axis.plot(SIZES, [p.compute_ms for p in planned], ":", color="0.6", label="experts alone")
    axis.set_xscale("log", base=2)
    axis.set_xticks(SIZES, [f"{gpus:,}" for gpus in SIZES])
    axis.set_ylim(bottom=0)
    axis.set_xlabel(f"expert-parallel GPUs, {GPUS_PER_HOST} a host, {GBIT_S} Gbit/s each")
    axis.set_ylabel("ms, forward of one layer")
    axis.set_title("Computed, not measured: an MoE layer of DeepSeek-V3's widths", fontsize=10)
    axis.legend()
    figure.savefig(chart, metadata={"Date": None, "Creator": None})
    return chart


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(draw_wire_plan())
