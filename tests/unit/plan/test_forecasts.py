"""The cost model: its choices against measured rows in benchmarks/results, and what follows from a
figure."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases.attention import CASES
from benchmarks.cases.slow_wire import CASES as WIRE_CASES
from benchmarks.cases.wire_times import hosts_reached
from megatron_fluid.cli.models import Model
from megatron_fluid.cli.plan import attention_work
from megatron_fluid.moe.hierarchical.choice import ExpertCost, ExpertShape, expert_cost, works
from megatron_fluid.moe.hierarchical.model import FORMS, Form, Wire, Work, best_form, two_level_s
from megatron_fluid.plan.layers import (
    EXCHANGED,
    MEGATRON,
    OVERLAPPED,
    AttentionWork,
    ExpertWork,
    attention_forms,
    expert_forms,
)
from megatron_fluid.plan.machine import REFERENCE, Machine
from megatron_fluid.plan.model import (
    Forecast,
    fastest,
    fastest_linear,
    gemm_s,
    linear_forms,
    pass_s,
    pipelined_s,
)
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


@pytest.fixture
def machine() -> Machine:
    return REFERENCE["h200"]


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
            chosen = fastest_linear(REFERENCE["h200"], operation, ranks, shape, 2, True)
            best = min(times.values())
            table = measured_backend("NVIDIA H200", ranks, operation, *shape)
            assert table is not None and times[table] <= best / 0.98, "as tune/tp_table.py takes it"
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
        forms = attention_forms(REFERENCE["h200"], attention_work(model))
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
    cpu = REFERENCE["cpu"]
    assert gemm_s(cpu, 129, 256, 64) < 1.1 * gemm_s(cpu, 128, 256, 64)
    assert gemm_s(machine, 0, 256, 64) == pass_s(machine, 0) == 0


def test_pieces_in_turn_hide_all_but_the_last(machine: Machine) -> None:
    link = machine.copies
    assert link is not None
    clear = dataclasses.replace(link, hidden=1.0, latency_s=0.0, bytes_per_s=1.0)
    assert pipelined_s(clear, [2.0, 2.0], [1.0, 1.0]) == 5.0
    assert pipelined_s(clear, [2.0, 2.0], [1.0, 0.0]) == 4.0
    assert pipelined_s(clear, [1.0, 1.0], [3.0, 3.0]) == 7.0, "the wire is the bottleneck"
    assert pipelined_s(clear, [2.0, 2.0], [1.0, 1.0], rest_s=2.0) == 6.0
    opaque = dataclasses.replace(clear, hidden=0.0)
    assert pipelined_s(opaque, [2.0, 2.0], [1.0, 0.0]) == 5.0


def test_a_form_must_win_by_more_than_noise() -> None:
    forms = {"plain": Forecast(1.0, 0.0), "other": Forecast(0.995, 0.0)}
    assert fastest(forms, "plain") == "plain"
    assert fastest(forms | {"other": Forecast(0.9, 0.0)}, "plain") == "other"
    assert fastest(forms | {"other": Forecast(0.9, 1.1)}, "plain") == "plain", "the host is late"


def test_of_experts_the_ones_that_move_less_are_predicted_to_be_faster(machine: Machine) -> None:
    forms = expert_forms(machine, ExpertWork(4096, 2048, 768, 8, 128, 4))
    assert forms[OVERLAPPED].device_s < forms[MEGATRON].device_s
    alone = expert_forms(machine, ExpertWork(4096, 2048, 768, 8, 128, 1))
    assert alone[OVERLAPPED].device_s < forms[OVERLAPPED].device_s


def test_without_peers_memory_a_linear_has_the_collective_alone(machine: Machine) -> None:
    assert list(linear_forms(REFERENCE["cpu"], "gather", 2, 64, 64, 64)) == ["collective"]
    assert set(linear_forms(machine, "scatter", 4, 64, 64, 64)) == set(LINEARS)


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
