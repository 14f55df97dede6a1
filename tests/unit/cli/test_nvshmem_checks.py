"""The doctor's checks of what NVSHMEM needs, on machines made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fluid.cli import checks


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without anything."""
    monkeypatch.setattr(checks, "_ROOT", tmp_path)
    monkeypatch.setattr(checks, "_wheels", lambda: [tmp_path / "site/nvidia/nvshmem"])
    monkeypatch.setattr(checks.ctypes.util, "find_library", lambda name: None)
    for name in ("NVSHMEM_LIB_DIR", "NVSHMEM_HOME", "NVSHMEM_IBGDA_NIC_HANDLER"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def _write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


# What a bare machine is told that it lacks, and a file that mends it.
FILES = {
    "nvshmem device library": ("libnvshmem_device.bc", "site/nvidia/nvshmem/lib/{}", ""),
    "nvshmem bootstrap": ("nvshmem_bootstrap_uid.so", "site/nvidia/nvshmem/lib/{}.3", ""),
    **{
        f"nvshmem {name}": (f"nvshmem_transport_{name}.so", "site/nvidia/nvshmem/lib/{}.3", "")
        for name in ("ibgda", "ibrc", "libfabric")
    },
    "rdma devices": (
        "sys/class/infiniband is absent",
        "sys/class/infiniband/mlx5_0/ports/1/state",
        "4: ACTIVE\n",
    ),
    "gpu direct rdma": (
        "nvidia_peermem is not loaded",
        "proc/modules",
        "nvidia_peermem 16384 0 - Live\n",
    ),
    "nvidia driver options": (
        "proc/driver/nvidia/params is absent",
        "proc/driver/nvidia/params",
        'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n',
    ),
    "libfabric provider": ("no libfabric.so", "opt/amazon/efa/lib64/libfabric.so.1", ""),
}


def test_a_bare_machine_is_told_what_it_lacks_and_a_furnished_one_passes(machine: Path) -> None:
    _write(machine, "dev/infiniband/uverbs0")
    for name, (lacks, path, text) in FILES.items():
        ok, detail = checks.CHECKS[name].look()
        assert not ok and lacks in detail, (name, detail)
        _write(machine, path.format(lacks), text)
        ok, detail = checks.CHECKS[name].look()
        assert ok, (name, detail)


def test_half_furnished_machines_hear_what_is_left(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(machine, "sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    assert "uverbs" in checks.CHECKS["rdma devices"].look()[1]
    _write(machine, "dev/infiniband/uverbs0")
    assert checks.CHECKS["rdma devices"].look() == (
        False,
        "mlx5_0 (port 1 DOWN): no port is ACTIVE",
    )
    _write(machine, "proc/driver/nvidia/params", 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n')
    ok, detail = checks.CHECKS["nvidia driver options"].look()
    assert not ok and "NVreg_EnableStreamMemOPs=1 and NVreg_RegistryDwords" in detail
    monkeypatch.setenv("NVSHMEM_IBGDA_NIC_HANDLER", "cpu")
    assert checks.CHECKS["nvidia driver options"].look()[0]
    _write(machine, "proc/sys/kernel/osrelease", "6.8.0-40-generic\n")
    assert not checks.CHECKS["gpu direct rdma"].look()[0]
    _write(
        machine,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64\n",
    )
    assert (
        "dma-buf" in checks.CHECKS["gpu direct rdma"].look()[1]
        and checks.CHECKS["gpu direct rdma"].look()[0]
    )
