"""The self-test of the links between ranks: what is measured, and what is said of it."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.cli import bandwidth, main
from megatron_fluid.cli.bandwidth import BandwidthReport, measure, report_text
from tests.support.launch import run_ranks
from tests.support.machine import GPUS

CPU = torch.device("cpu")


def _measured(rank: int, world: int) -> BandwidthReport:
    sizes = mock.patch.multiple(
        bandwidth, _COPY_BYTES={"cpu": 3000}, _ALL_TO_ALL_BYTES={"cpu": (600, 6000)}
    )
    assert dist.group.WORLD is not None
    with sizes:
        return measure(dist.group.WORLD, CPU)


def test_every_pair_is_measured_in_both_directions() -> None:
    reports = run_ranks(_measured, 3)
    assert reports[0].copies == reports[1].copies == reports[2].copies
    report = reports[0]
    for i, row in enumerate(report.copies):
        for j, rate in enumerate(row):
            assert (rate is None) if i == j else (rate is not None and rate > 0)
    assert (report.ranks, report.hosts, report.backend, report.wrong) == (3, 1, "gloo", [])
    assert [sent for sent, _, _ in report.all_to_all] == [400, 4000]
    assert all(ms > 0 and rate > 0 for _, ms, rate in report.all_to_all)


def _corrupted(rank: int, world: int) -> BandwidthReport:
    real = dist.recv

    def recv(tensor: Tensor, **named: object) -> object:
        result = real(tensor, **named)  # type: ignore[arg-type]
        if rank == 1 and tensor.dtype == torch.uint8:
            tensor[5] = 0
        return result

    with mock.patch.object(dist, "recv", recv):
        return _measured(rank, world)


def test_what_arrives_wrong_is_found() -> None:
    report = run_ranks(_corrupted, 2)[0]
    assert report.wrong == ["rank 1: what rank 0 sent: 1 of 3000 bytes are wrong"]
    assert "WRONG DATA: rank 1: what rank 0 sent" in report_text(report)


def _report(ranks: int, slow: tuple[int, int] | None = None) -> BandwidthReport:
    copies: list[list[float | None]] = [
        [None if i == j else (20.0 if (i, j) == slow else 350.5) for j in range(ranks)]
        for i in range(ranks)
    ]
    moved = [(1 << 20, 0.25, 4.2)]
    return BandwidthReport(ranks, 1, "NVIDIA H200", "nccl", 64 << 20, copies, True, moved, [])


@pytest.mark.parametrize("ranks", [2, 8, 10, 64])
def test_the_report_names_slow_pairs_and_fits_100_columns(ranks: int) -> None:
    sound, slow = report_text(_report(ranks)), report_text(_report(max(ranks, 3), (1, 2)))
    assert max(map(len, (sound + "\n" + slow).splitlines())) <= 100
    assert "all pairs agree within a factor of two" in sound and "slow pairs" not in sound
    assert "slow pairs, below half of the median: 1 to 2." in slow
    assert "slowest 20.0 (1 to 2), median 350.5" in slow
    assert ("from \\ to" in sound) == (ranks <= 10)


def test_one_rank_has_no_pair() -> None:
    assert "no pair to measure" in report_text(_report(1))


def test_a_job_of_a_launcher_is_joined(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    with mock.patch.object(bandwidth, "run_rank", return_value=_report(2)):
        assert main(["doctor", "--bandwidth", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["copies"] == [[None, 350.5], [350.5, None]]
    assert main(["doctor", "--bandwidth", "--ranks", "2"]) == 2
    assert capsys.readouterr().err.startswith("--ranks: found 2, allowed: none in a job")


@pytest.mark.skipif(GPUS == 1, reason="one GPU has no peer")
@pytest.mark.process
def test_ranks_are_started_without_a_launcher(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--bandwidth", "--ranks", "2"]) == 0
    text = capfd.readouterr().out
    assert text.startswith("bandwidth: 2 x ") and "all-to-all: a rank sends" in text
