"""`megatron-fluid doctor --hosts`: what is said of the hosts of a job and of their settings."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.cli import bandwidth, main
from megatron_fluid.cli.hosts import Facts, HostsReport, Link, advice, examine, report_text
from tests.support.launch import run_ranks


def _host(name: str, first: int, **settings: str) -> Facts:
    return Facts(name, [first, first + 1], ["mlx5_0"], ["eth0"], settings)


def _links(rate: float) -> list[Link]:
    return [Link(a, b, "nccl", r, r, 4) for a, b, r in (("a", "b", 40.0), ("b", "a", rate))]


def test_two_hosts_that_fit_need_nothing() -> None:
    hosts = [_host("a", 0), _host("b", 2)]
    assert advice("nccl", hosts, _links(41.0)) == []


@pytest.mark.parametrize(
    ("second", "backend", "said"),
    [
        (_host("b", 2, NCCL_IB_DISABLE="1"), "nccl", "RDMA devices of b are not used"),
        (_host("b", 2, NCCL_NET="Socket"), "nccl", "NCCL_NET differs: unset on a, Socket on b"),
        (Facts("b", [2], [], ["eth0"], {}), "nccl", "no RDMA device on b"),
        (
            Facts("b", [2], ["mlx5_0"], ["eth0", "eth1"], {}),
            "nccl",
            "NCCL_SOCKET_IFNAME is not set on b",
        ),
        (Facts("b", [2], [], ["eth0", "eth1"], {}), "gloo", "GLOO_SOCKET_IFNAME is not set on b"),
    ],
)
def test_what_is_missing_is_named_with_its_host(second: Facts, backend: str, said: str) -> None:
    found = advice(backend, [_host("a", 0), second], [])
    assert any(said in text for text in found), found


def test_a_slow_link_is_named() -> None:
    [said] = advice("nccl", [_host("a", 0), _host("b", 2)], _links(9.0))
    assert "below half of the median" in said and "b to a" in said and "a to b" not in said


def test_the_report_fits_a_terminal() -> None:
    names = [f"node{number:03}.cluster.example" for number in range(4)]
    hosts = [Facts(name, range(8 * i, 8 * i + 8), ["mlx5_0"], ["eth0"], {"NCCL_DEBUG": "WARN"})
             for i, name in enumerate(names)]  # fmt: skip
    links = [Link(a, b, "nccl over RDMA (mlx5_0)", 45.0, 44.0, 64) for a in names for b in names]
    text = report_text(HostsReport("nccl", "NVIDIA H200", hosts, links, ["set it"], []))
    assert "32 x NVIDIA H200 on 4 hosts, nccl" in text and "24-31" in text and "- set it" in text
    assert max(map(len, text.splitlines())) <= 100


def _examined(rank: int, world: int) -> HostsReport:
    os.environ["MEGATRON_FLUID_NVLINK_DOMAIN"] = f"host{rank // 2}"
    sizes = mock.patch.multiple(
        bandwidth, _COPY_BYTES={"cpu": 3000}, _ALL_TO_ALL_BYTES={"cpu": (600,)}
    )
    assert dist.group.WORLD is not None
    with sizes:
        return examine(dist.group.WORLD, torch.device("cpu"))


def test_ranks_are_grouped_by_host_and_all_pairs_are_measured() -> None:
    report = run_ranks(_examined, 3)[0]
    assert [list(host.ranks) for host in report.hosts] == [[0, 1], [2]]
    assert [("host0" in k.source, "host0" in k.target, k.pairs) for k in report.links] == [
        (True, True, 2),
        (True, False, 2),
        (False, True, 2),
    ]
    assert all(link.slowest > 0 for link in report.links)
    assert "gloo over TCP" in report.links[1].how


def test_it_is_not_run_beside_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--hosts", "--bandwidth"]) == 2
    assert "--hosts: found 'it beside --bandwidth'" in capsys.readouterr().err
