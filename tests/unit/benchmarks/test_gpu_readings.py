"""What nvidia-smi says of a GPU that is measured, and what the steps of a layer sum up to."""

from __future__ import annotations

import torch

from benchmarks.harness.gpu_readings import parse_readings, read_gpu
from benchmarks.suites.moe_phases import Step, _sums


def test_readings_are_medians_and_leave_out_what_has_no_number() -> None:
    said = "1980, 300.5\n1400, 690.0\n1395, 700.0\nsomething else\n"
    assert parse_readings(said) == {"sm_mhz": 1400.0, "watts": 690.0}
    assert parse_readings("1980, [N/A]\n") == {"sm_mhz": 1980.0}
    assert parse_readings("") == {}


def test_nothing_is_read_on_a_cpu() -> None:
    with read_gpu(torch.device("cpu")) as found:
        pass
    assert found == {}


def test_no_overlap_gets_below_the_larger_of_gemms_and_exchange() -> None:
    steps = [
        Step("forward", "push", lambda: None, 1.0, "wire"),
        Step("forward", "fc1", lambda: None, 1.0, "FLOP"),
        Step("forward", "plan", lambda: None),
        Step("backward", "fc1 dgrad", lambda: None, 1.0, "FLOP"),
        Step("reference", "fc1, even rows", lambda: None, 1.0, "FLOP"),
    ]
    rows = _sums("case", steps, [[3.0, 2.0, 1.0, 5.0, 9.0], [3.0, 6.0, 1.0, 5.0, 9.0]])
    found = {(row.mode, row.variant): row.median_ms for row in rows}
    assert found["phase forward", "in turn"] == 8.0  # of 6 and 10
    assert found["phase forward", "GEMMs"] == 4.0
    assert found["phase forward", "exchange"] == 4.0
    assert found["phase forward", "limit"] == 5.0  # of 4 and 6
    assert found["phase backward", "limit"] == found["phase backward", "in turn"] == 5.0
