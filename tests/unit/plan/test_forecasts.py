"""What the figures of a machine predict: the order of forms as it was measured, and what follows
from a figure."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases.attention import CASES
from megatron_fluid.cli.plan import Model, _attention, _links
from megatron_fluid.plan.attention import EXCHANGED, OVERLAPPED, AttentionWork, attention_forms
from megatron_fluid.plan.experts import MEGATRON, ExpertWork, expert_forms
from megatron_fluid.plan.linears import fastest_linear, linear_forms
from megatron_fluid.plan.machine import Machine, reference_machine
from megatron_fluid.plan.model import Forecast, fastest, gemm_s, in_turn, pass_s

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
LINEARS = {"collective": "torch", "copy_engine": "fluid_copy_engine", "fused": "fluid_fused"}


def _measured(name: str) -> tuple[int, dict[tuple[str, str], dict[str, dict[str, Any]]]]:
    """Ranks, and (case, mode) -> variant -> row, of a result file."""
    document = json.loads((RESULTS / f"{name}.json").read_text())
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in document["rows"]:
        found.setdefault((row["case"], row["mode"]), {})[row["variant"]] = row
    return document["gpus"], found


@pytest.fixture
def machine() -> Machine:
    return reference_machine("cuda", 4)


def _linear_cases() -> Iterator[tuple[str, float, float]]:
    """Of every measured linear: the predicted form, and its and the collective's time as multiples
    of the best form's."""
    for name in ("tp_overlap", "tp_overlap-2gpu"):
        ranks, cases = _measured(name)
        for (case, _), rows in cases.items():
            kind, m, n, k = case.split("-")
            times = {
                form: max(rows[variant]["median_ms"], rows[variant]["config"]["host_us"] / 1e3)
                for form, variant in LINEARS.items()
            }
            operation = "gather" if kind == "ag" else "scatter"
            shape = int(m), int(n), int(k)
            figures = reference_machine("cuda", ranks)
            chosen = fastest_linear(figures, operation, ranks, shape, 2, True)
            best = min(times.values())
            yield chosen, times[chosen] / best, times["collective"] / best


def test_the_predicted_form_of_a_linear_is_close_to_the_best_that_was_measured() -> None:
    cases = list(_linear_cases())
    assert {form for form, _, _ in cases} == set(LINEARS), "each form is the best of some shape"
    chosen, collective = (statistics.mean(times) for times in list(zip(*cases, strict=True))[1:])
    assert chosen < 1.02 < 1.15 < collective
    assert max(time for _, time, _ in cases) < 1.35


@pytest.mark.parametrize("name", ["attention-2gpu", "attention-local-2gpu"])
def test_the_predicted_form_of_attention_is_the_one_that_was_faster(name: str) -> None:
    ranks, cases = _measured(name)
    for (case, mode), rows in cases.items():
        if mode != "train":
            continue
        sizes = CASES[case]
        model = Model(
            sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim,
            sequence=sizes.length, context=ranks,
        )  # fmt: skip
        figures = _links(reference_machine("cuda", ranks), ranks)
        forms = attention_forms(figures, _attention(model))
        assert fastest(forms, EXCHANGED) == OVERLAPPED, case
        theirs = rows["fluid_megatron"]["median_ms"], rows["fluid_megatron_exchange"]["median_ms"]
        assert theirs[0] <= 1.01 * theirs[1], case
        predicted = forms[OVERLAPPED].seconds / forms[EXCHANGED].seconds
        assert abs(predicted - theirs[0] / theirs[1]) < 0.13, case


WORK = AttentionWork(
    ranks=4, rows=4096, hidden=4096, qkv_columns=6144, output_columns=4096, core_flops=0.5e12,
    by_copies=True,
)  # fmt: skip


def test_a_faster_wire_takes_from_what_overlap_wins(machine: Machine) -> None:
    assert machine.copies is not None

    def won(rate: float) -> float:
        link = dataclasses.replace(machine.copies, bytes_per_s=rate)  # type: ignore[type-var]
        forms = attention_forms(dataclasses.replace(machine, copies=link), WORK)
        return forms[EXCHANGED].device_s - forms[OVERLAPPED].device_s

    assert won(50e9) > won(390e9) > won(1e15)


def test_pieces_that_cost_the_host_much_are_not_taken(machine: Machine) -> None:
    many = dataclasses.replace(WORK, ranks=16, rows=64, core_flops=1e9)
    forms = attention_forms(dataclasses.replace(machine, operation_s=50e-6), many)
    assert fastest(forms, EXCHANGED) == EXCHANGED
    assert fastest(attention_forms(machine, WORK), EXCHANGED) == OVERLAPPED


def test_under_tensor_parallelism_the_linears_hide_their_own_gathers(machine: Machine) -> None:
    def gap(shards: int) -> float:
        forms = attention_forms(machine, dataclasses.replace(WORK, shards=shards))
        return forms[OVERLAPPED].device_s - forms[EXCHANGED].device_s

    assert gap(2) > gap(1)


def test_a_last_wave_of_tiles_costs_as_much_as_a_full_one(machine: Machine) -> None:
    full = gemm_s(machine, 128 * machine.units, 256, 4096)
    assert gemm_s(machine, 128 * (machine.units + 1), 256, 4096) - machine.gemm_s == pytest.approx(
        2 * (full - machine.gemm_s)
    )
    cpu = reference_machine("cpu", 2)
    assert gemm_s(cpu, 129, 256, 64) < 1.1 * gemm_s(cpu, 128, 256, 64)
    assert gemm_s(machine, 0, 256, 64) == pass_s(machine, 0) == 0


def test_pieces_in_turn_hide_all_but_the_last(machine: Machine) -> None:
    link = machine.copies
    assert link is not None
    clear = dataclasses.replace(link, hidden=1.0, latency_s=0.0, bytes_per_s=1.0)
    assert in_turn(clear, [2.0, 2.0], [1.0, 1.0]) == 5.0
    assert in_turn(clear, [2.0, 2.0], [1.0, 0.0]) == 4.0
    assert in_turn(clear, [1.0, 1.0], [3.0, 3.0]) == 7.0, "the wire is the bottleneck"
    assert in_turn(clear, [2.0, 2.0], [1.0, 1.0], rest_s=2.0) == 6.0
    opaque = dataclasses.replace(clear, hidden=0.0)
    assert in_turn(opaque, [2.0, 2.0], [1.0, 0.0]) == 5.0


def test_a_form_must_win_by_more_than_noise() -> None:
    forms = {"plain": Forecast(1.0, 0.0), "other": Forecast(0.995, 0.0)}
    assert fastest(forms, "plain") == "plain"
    assert fastest(forms | {"other": Forecast(0.9, 0.0)}, "plain") == "other"
    assert fastest(forms | {"other": Forecast(0.9, 1.1)}, "plain") == "plain", "the host is late"


def test_of_experts_the_ones_that_move_less_are_predicted_to_be_faster(machine: Machine) -> None:
    forms = expert_forms(machine, ExpertWork(4096, 2048, 768, 8, 128, 4))
    assert forms[OVERLAPPED].device_s < forms[MEGATRON].device_s
    alone = expert_forms(
        dataclasses.replace(machine, copies=None, collective=None),
        ExpertWork(4096, 2048, 768, 8, 128, 1),
    )
    assert alone[OVERLAPPED].device_s < forms[OVERLAPPED].device_s


def test_without_peers_memory_a_linear_has_the_collective_alone(machine: Machine) -> None:
    cpu = reference_machine("cpu", 2)
    assert list(linear_forms(cpu, "gather", 2, 64, 64, 64)) == ["collective"]
    one = reference_machine("cuda", 1)
    assert list(linear_forms(one, "scatter", 1, 64, 64, 64)) == ["collective"]
    assert set(linear_forms(machine, "scatter", 4, 64, 64, 64)) == set(LINEARS)
