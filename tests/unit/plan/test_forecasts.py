"""Choices by the table of measured shapes, against measured rows in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_fluid.tensor_parallel.measured import measured_backend

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
LINEARS = {"collective": "torch", "copy_engine": "fluid_copy_engine", "fused": "fluid_fused"}


def _measured(name: str) -> tuple[int, dict[tuple[str, str], dict[str, dict[str, Any]]]]:
    """Ranks, and (case, mode) -> variant -> row, of a result file."""
    path = RESULTS / f"{name}.json"
    path = path if path.is_file() else RESULTS / "archive" / path.name
    document = json.loads(path.read_text())
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        found.setdefault((row["case"], row["mode"]), {})[row["variant"]] = row
    return document["gpus"], found


def test_the_table_names_the_fastest_form_of_every_measured_linear() -> None:
    for name in ("tp_overlap", "tp_overlap-2gpu"):
        ranks, cases = _measured(name)
        for (case, _), rows in cases.items():
            kind, m, n, k = case.split("-")
            times = {
                form: max(rows[variant]["median_ms"], rows[variant]["config"]["host_us"] / 1e3)
                for form, variant in LINEARS.items()
            }
            operation = "gather" if kind == "ag" else "scatter"
            chosen = measured_backend("NVIDIA H200", ranks, operation, int(m), int(n), int(k))
            assert times[chosen] <= min(times.values()) / 0.98, "as tune/tp_table.py takes it"


def test_attention_that_auto_overlaps_was_measured_to_be_faster_so() -> None:
    for name in ("attention-2gpu", "attention-local-2gpu"):
        _, cases = _measured(name)
        for (case, mode), rows in cases.items():
            if mode == "train":
                overlapped, exchanged = (
                    rows[variant]["median_ms"]
                    for variant in ("fluid_megatron", "fluid_megatron_exchange")
                )
                assert overlapped <= 1.01 * exchanged, case
