"""Choices by reference figures and by the table of measured shapes, against measured rows in
benchmarks/results."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.slow_wire import CASES as WIRE_CASES
from benchmarks.cases.wire_times import hosts_reached
from megatron_fluid.moe.hierarchical.choice import ExpertCost, ExpertShape, expert_cost, works
from megatron_fluid.moe.hierarchical.model import FORMS, Form, Wire, Work, best_form, two_level_s
from megatron_fluid.plan.machine import REFERENCE
from megatron_fluid.tensor_parallel.measured import measured_backend

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
LINEARS = {"collective": "torch", "copy_engine": "fluid_copy_engine", "fused": "fluid_fused"}


def _measured(name: str) -> tuple[int, dict[tuple[str, str], dict[str, dict[str, Any]]]]:
    """Ranks, and (case, mode) -> variant -> row, of a result file."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
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


def _form_of(text: str) -> Form:
    """The form that a row of slow_wire.json names."""
    if text == "at once":
        return FORMS[0]
    pieces, first = text.split(" pieces, ")
    return Form(int(pieces), float(first.split()[0]))


def test_reference_figures_choose_pieces_that_are_as_good_as_those_of_measured_experts() -> None:
    """Rows of slow_wire.json have the form that a measurement of the experts led to."""
    lost = []
    document = json.loads((RESULTS / "slow_wire.json").read_text())
    for row in document["rows"]:
        name, config = row["case"].rsplit("-wire-", 1)[0], row["config"]
        if row["variant"] != "fluid" or WIRE_CASES[name].kind != "moe":
            continue
        case = WIRE_CASES[name]
        moe, own = case.moe, case.tokens * case.moe.top_k / case.hosts
        rows, train = case.tokens * moe.top_k, row["mode"] == "train"
        tokens = case.tokens * hosts_reached(case.hosts, moe.experts, moe.top_k)
        shape = ExpertShape(moe.hidden, 2 * moe.ffn, moe.ffn, torch.float32)
        reference = expert_cost(REFERENCE["cpu"], shape, moe.experts // (case.hosts * case.ranks))
        # What a row really took follows from the time over a link without a limit.
        pass_s = config["unlimited_ms"] / 1e3 / (3 if train else 1) - reference.pass_s
        real = reference._replace(row_s=pass_s / rows)

        def passes(cost: ExpertCost) -> tuple[Work, ...]:
            given = own, rows - own, tokens, moe.hidden * 4, moe.top_k, cost  # noqa: B023
            return works(*given)[: 2 if train else 1]  # noqa: B023

        sent = sum(work.out_bytes + work.back_bytes for work in passes(real))
        rate = config["rate_bits_per_s"] or 8e12
        wire = Wire(sent * rate / 8 / config["wire_bytes"], streams=(case.hosts - 1) * case.ranks)
        chosen, then = best_form(passes(reference), wire), _form_of(config["form"])
        times = [sum(two_level_s(w, wire, f) for w in passes(real)) for f in (chosen, then)]
        lost.append(times[0] / times[1])
    assert len(lost) > 40 and max(lost) < 1.04 and statistics.mean(lost) < 1.005
