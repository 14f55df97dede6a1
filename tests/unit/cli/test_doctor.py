"""`megatron-fluid doctor`: findings, abilities, what follows and what to do."""

import dataclasses
import importlib
import importlib.metadata
import json
import re
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.requirements import Requirement

from megatron_fluid.cli import checks, doctor, main
from megatron_fluid.cli.checks import CHECKS, Look
from megatron_fluid.cli.terminal import install_command
from megatron_fluid.cuda import devices, kernel_build

ROOT = Path(__file__).resolve().parents[3]


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, look: Look) -> None:
    monkeypatch.setitem(CHECKS, name, dataclasses.replace(CHECKS[name], look=look))  # type: ignore[arg-type]


def test_doctor_passes_here_and_says_why_something_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor"]) == 0
    assert torch.__version__ in capsys.readouterr().out
    gpu_status = main(["doctor", "--require", "gpu", "nvlink"])
    text = capsys.readouterr()
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in text.out
    else:
        assert gpu_status == 1
        assert "required, but missing: gpu, which lacks cuda" in text.err


@pytest.mark.parametrize(("version", "status", "said"), [
    ("2.9.1", 1, r"- +2\.9\.1 found, 2\.10 or newer needed"),
    ("2.10.0a0+b558c986e8.nv25.11", 0, r"ok +2\.10\.0a0\+b558c986e8\.nv25\.11"),
])  # fmt: skip
def test_the_torch_of_nvidias_containers_is_new_enough(
    version: str, status: int, said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """For doctor, and for pip, which would replace it otherwise."""
    monkeypatch.setattr(torch, "__version__", version)
    assert main(["doctor"]) == status
    text = capsys.readouterr()
    assert re.search(rf"^torch +{said}", text.out, re.MULTILINE)
    assert ("missing: core, which lacks torch: see above" in text.err) is bool(status)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    assert wanted.specifier.contains(version) is not bool(status)


@pytest.mark.parametrize(("capabilities", "ok", "words"), [
    ([(8, 0), (9, 0)], False, "pip install cuda-bindings nvidia-cuda-nvrtc"),
    ([], False, "pip install cuda-bindings nvidia-cuda-nvrtc"),
    ([(8, 0), (10, 0)], True, "nor needed: no GPU of compute capability 9.0 among 2"),
])  # fmt: skip
def test_doctor_asks_for_nvrtc_where_a_gpu_needs_it(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], ok: bool, words: str
) -> None:
    monkeypatch.setattr(kernel_build, "_nvrtc", mock.Mock(side_effect=ImportError))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(devices, "is_hopper", lambda index: capabilities[index] == (9, 0))
    finding = {f.name: f for f in doctor.examine()}["nvrtc"]
    assert finding.ok == ok and words in finding.detail, finding


def test_doctor_fits_100_columns_and_says_what_follows_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in CHECKS:
        reason = f"no {name}, " + "and a long reason " * 9 + "/with/a/path" * 9
        _replace(monkeypatch, name, lambda reason=reason: (False, reason))
    assert main(["doctor", "--require", *doctor.ABILITIES]) == 1
    text = capsys.readouterr()
    assert max(map(len, text.out.splitlines())) <= 100
    flat = re.sub(r"\s+", " ", text.out)
    for name, check in CHECKS.items():
        assert flat.count(f"no {name}, and a long reason") == 1
        assert check.after or check.consequence in flat
    for name, ability in doctor.ABILITIES.items():
        assert f"{name} no {ability.what} lacks {', '.join(ability.needs)}" in flat
        assert f"missing: {name}, which lacks {', '.join(ability.needs)}" in text.err
    steps = flat.partition("what to do")[2]
    # What follows from another failed check is not explained, and not asked for.
    assert "no NVSHMEM on EFA" not in flat
    waiting = "gpu, nvlink, nvshmem, ibgda, ibrc, libfabric, transformer-engine"
    assert f"- for {waiting}: let `nvidia-smi`" in steps
    assert "modprobe" not in steps and steps.count("pip install nvidia-nvshmem-") == 1


def test_doctor_as_json_survives_a_broken_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _replace(monkeypatch, "wrapt", mock.Mock(side_effect=OSError("cannot open shared object")))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert set(found) == set(CHECKS)
    wrapt = found["wrapt"]
    assert (wrapt["ok"], wrapt["detail"]) == (False, "OSError: cannot open shared object")
    assert wrapt["consequence"] == "Megatron is not patched"
    assert report["abilities_lack"]["core"] == ["wrapt"] and report["missing"] == ["core"]
    assert "for core, megatron: pip install 'wrapt>=1.16'" in report["to_do"]


def test_a_source_tree_alone_is_installed_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install_command("te").startswith("pip install 'transformer-engine[pytorch]>=")
    absent = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    assert install_command("te") == f"pip install '{ROOT}[te]'"
    texts = {path: path.read_text() for path in (ROOT / "megatron_fluid").rglob("*.py")}
    assert not [path for path, text in texts.items() if "pip install 'megatron-fluid[" in text]


def test_doctor_finds_nvshmem_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "wheels" / "nvidia" / "nvshmem"
    home = tmp_path / "home"
    for folder in (package / "lib", home / "lib64"):
        folder.mkdir(parents=True)
        (folder / "libnvshmem_host.so.3").touch()
    monkeypatch.setattr(checks, "_wheels", lambda: [package])
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    monkeypatch.setattr(symmetric_memory, "is_nvshmem_available", lambda: False)
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    ok, detail = CHECKS["nvshmem"].look()
    wheel = f"libnvshmem_host.so.3 in {package / 'lib'}"
    assert not ok and detail.startswith(f"{wheel}, but torch cannot load it")
    monkeypatch.setenv("NVSHMEM_HOME", str(home))
    assert f"libnvshmem_host.so.3 in {home / 'lib64'}" in CHECKS["nvshmem"].look()[1]
    monkeypatch.setattr(symmetric_memory, "is_nvshmem_available", lambda: True)
    assert CHECKS["nvshmem"].look()[0]


def test_abilities_and_checks_name_checks_that_exist() -> None:
    named = {name for ability in doctor.ABILITIES.values() for name in ability.needs}
    assert named == set(CHECKS)
    assert {name for check in CHECKS.values() for name in check.after} <= set(CHECKS)


# ---- what NVSHMEM needs, on machines made of files


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
    "rdma devices": ("sys/class/infiniband is absent",
        "sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n"),
    "gpu direct rdma": ("nvidia_peermem is not loaded",
        "proc/modules", "nvidia_peermem 16384 0 - Live\n"),
    "nvidia driver options": ("proc/driver/nvidia/params is absent", "proc/driver/nvidia/params",
        'EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n'),
    "libfabric provider": ("no libfabric.so", "opt/amazon/efa/lib64/libfabric.so.1", ""),
}  # fmt: skip


def test_a_bare_machine_is_told_what_it_lacks_and_a_furnished_one_passes(machine: Path) -> None:
    _write(machine, "dev/infiniband/uverbs0")
    for name, (lacks, path, text) in FILES.items():
        ok, detail = CHECKS[name].look()
        assert not ok and lacks in detail, (name, detail)
        _write(machine, path.format(lacks), text)
        ok, detail = CHECKS[name].look()
        assert ok, (name, detail)


def test_half_furnished_machines_hear_what_is_left(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heard(check: str, path: str, text: str = "") -> tuple[bool, str]:
        """What a check finds once there is that file."""
        _write(machine, path, text)
        return CHECKS[check].look()

    port, params = "sys/class/infiniband/mlx5_0/ports/1/state", "proc/driver/nvidia/params"
    assert "uverbs" in heard("rdma devices", port, "1: DOWN\n")[1]
    down = False, "mlx5_0 (port 1 DOWN): no port is ACTIVE"
    assert heard("rdma devices", "dev/infiniband/uverbs0") == down
    options = 'EnableStreamMemOPs: 0\nRegistryDwords: ""\n'
    ok, detail = heard("nvidia driver options", params, options)
    assert not ok and "NVreg_EnableStreamMemOPs=1 and NVreg_RegistryDwords" in detail
    monkeypatch.setenv("NVSHMEM_IBGDA_NIC_HANDLER", "cpu")
    assert CHECKS["nvidia driver options"].look()[0]
    assert not heard("gpu direct rdma", "proc/sys/kernel/osrelease", "6.8.0-40-generic\n")[0]
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64\n"
    ok, detail = heard("gpu direct rdma", "proc/driver/nvidia/version", version)
    assert ok and "dma-buf" in detail
