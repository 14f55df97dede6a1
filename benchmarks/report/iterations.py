"""Measured training iterations of models, as `megatron-fluid plan` shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.results import RESULTS, read_results
from benchmarks.report.tables import age

__all__ = ["FILE", "iterations"]

FILE = Path(__file__).resolve().parents[2] / "megatron_fluid" / "plan" / "iterations.json"


def iterations(folder: Path = RESULTS) -> str:
    """The fastest bf16 iteration of Megatron with Transformer Engine, and with megatron_fluid, for
    each model, number of GPUs and number of sequences a microbatch that the suite `pretrain` has
    measured, as JSON. Where versions of cuBLAS or earlier ones of this package differ the smallest
    gain stands. Figures of an earlier version (`earlier`) stand where there are none of this
    one."""
    found: list[dict[str, Any]] = []
    files = [
        *sorted(folder.glob("pretrain-*.json")),
        *sorted(folder.glob("archive/pretrain-*.json")),
    ]
    for document in sorted(map(read_results, files), key=age):
        rows = [row for row in document["rows"] if not row["variant"].endswith("_fp8")]
        for case in dict.fromkeys(row["case"] for row in rows):
            fastest = {
                kind: min(
                    (r for r in rows if r["case"] == case and r["variant"].startswith(kind)),
                    key=lambda row: float(row["median_ms"]),
                    default=None,
                )
                for kind in ("megatron", "fluid")
            }
            megatron, fluid = fastest["megatron"], fastest["fluid"]
            if megatron is None or fluid is None:
                continue
            sequences = fluid["config"].get("micro_batch_size", 1)
            model = case.partition("-cublas")[0].removesuffix("-forced")  # in the archive
            model = model.removesuffix(f"-mbs{sequences}")
            where = {"model": model, "gpus": document["gpus"], "sequences": sequences}
            known = next((entry for entry in found if where.items() <= entry.items()), None)
            gain = megatron["median_ms"] / fluid["median_ms"]
            earlier = bool(age(document))
            if known and (
                (earlier and not known["earlier"])
                or known["megatron_ms"] / known["fluid_ms"] <= gain
            ):
                continue
            found = [entry for entry in found if entry is not known]
            found.append(where | {
                "gpu": document["gpu"].removeprefix("NVIDIA "),
                "date": fluid["config"].get("measured", document["date"][:10]),
                "layers": fluid["config"]["layers"], "experts": fluid["config"]["experts"],
                "routing": fluid["config"].get("routing", "forced"),
                "graph": "whole_graph" in fluid["variant"],
                "megatron_ms": round(megatron["median_ms"], 2),
                "fluid_ms": round(fluid["median_ms"], 2), "earlier": earlier,
                "cublas": fluid["config"].get("cublas", document.get("cublas")),
            })  # fmt: skip
    lines = ",\n ".join(json.dumps(entry) for entry in found)
    return f"[{lines}]\n"
