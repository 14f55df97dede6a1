"""What NVSHMEM needs on this machine, transport by transport: checks for `megatron-fluid doctor`.

NVSHMEM loads one remote transport at start-up: IBGDA (`NVSHMEM_IB_ENABLE_IBGDA=1`), else what
`NVSHMEM_REMOTE_TRANSPORT` names (ibrc, libfabric, ucx, ibdevx, none). Inside a host it uses peer
access and needs none of it. The file system is read, nothing is loaded or started.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path

__all__ = ["LOOKS", "Look", "find_library"]

Look = Callable[[], tuple[bool, str]]
_ROOT = Path("/")  # tests look at another


def _wheels() -> list[Path]:
    """Folders of NVSHMEM's wheels (nvidia-nvshmem-cu12, -cu13), wherever they are importable."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no nvidia package at all
        return []
    return [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]


def find_library(pattern: str) -> tuple[bool, str]:
    """Look for a library of NVSHMEM: in NVSHMEM_LIB_DIR, NVSHMEM_HOME, wheels, system folders."""
    folders = [Path(os.environ["NVSHMEM_LIB_DIR"])] if "NVSHMEM_LIB_DIR" in os.environ else []
    home = os.environ.get("NVSHMEM_HOME")
    folders += [Path(home) / folder for folder in ("lib", "lib64")] if home else []
    folders += [wheel / "lib" for wheel in _wheels()]
    folders += [_ROOT / path for path in ("usr/local/lib", "usr/lib", "opt/nvidia/nvshmem/lib")]
    for folder in folders:
        for found in sorted(folder.glob(pattern)):
            return True, f"{found.name} in {folder}"
    return False, f"no {pattern} in {', '.join(map(str, folders))}"


def _device_library() -> tuple[bool, str]:
    if importlib.util.find_spec("torch.distributed._symmetric_memory._nvshmem_triton") is None:
        return False, "this torch has no NVSHMEM bindings for Triton"
    return find_library("libnvshmem_device.bc")


def _rdma_devices() -> tuple[bool, str]:
    folder = _ROOT / "sys/class/infiniband"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    if not devices:
        state = "empty" if folder.is_dir() else "absent"
        return False, f"no RDMA network device ({folder} is {state})"
    verbs = _ROOT / "dev/infiniband"
    if not list(verbs.glob("uverbs*")):
        return False, f"{len(devices)} devices, but no {verbs}/uverbs* in this container or machine"
    states = []
    for device in devices:
        files = device.glob("ports/*/state")
        ports = [f"port {p.parent.name} {p.read_text().split(':')[-1].strip()}" for p in files]
        states.append(f"{device.name} ({', '.join(ports) or 'no port'})")
    active = any("ACTIVE" in state for state in states)
    return active, ", ".join(states) + ("" if active else ": no port is ACTIVE")


def _direct_rdma() -> tuple[bool, str]:
    modules = _ROOT / "proc/modules"
    lines = modules.read_text().splitlines() if modules.exists() else []
    found = sorted({line.split()[0] for line in lines} & {"nvidia_peermem", "nv_peer_mem"})
    if found:
        return True, f"{found[0]} is loaded"
    kernel = _ROOT / "proc/sys/kernel/osrelease"
    release = kernel.read_text().strip() if kernel.exists() else "unknown"
    version = _ROOT / "proc/driver/nvidia/version"
    numbers = [int(part) for part in re.findall(r"\d+", release)[:2]]
    if version.exists() and "Open Kernel Module" in version.read_text() and numbers >= [5, 12]:
        return True, f"by dma-buf: open kernel modules on kernel {release}"
    lacks = "nvidia_peermem is not loaded (modprobe nvidia-peermem), nor is there dma-buf"
    return False, f"{lacks} (kernel {release})"


def _driver_options() -> tuple[bool, str]:
    if os.environ.get("NVSHMEM_IBGDA_NIC_HANDLER", "").lower() == "cpu":
        return True, "NVSHMEM_IBGDA_NIC_HANDLER=cpu needs none"
    path = _ROOT / "proc/driver/nvidia/params"
    if not path.exists():
        return False, f"{path} is absent: no NVIDIA driver here"
    params = dict(line.split(": ", 1) for line in path.read_text().splitlines() if ": " in line)
    memory = params.get("EnableStreamMemOPs", "0").strip()
    missing = [] if memory == "1" else ["NVreg_EnableStreamMemOPs=1"]
    if "PeerMappingOverride=1" not in params.get("RegistryDwords", ""):
        missing.append('NVreg_RegistryDwords="PeerMappingOverride=1;"')
    if missing:
        lacks = f"the nvidia module lacks {' and '.join(missing)}"
        where = "(options nvidia ... in /etc/modprobe.d)"
        return False, f"{lacks} {where}; or set NVSHMEM_IBGDA_NIC_HANDLER=cpu"
    return True, "EnableStreamMemOPs=1, PeerMappingOverride=1"


def _libfabric() -> tuple[bool, str]:
    efa = sorted((_ROOT / "opt/amazon/efa").glob("lib*/libfabric.so*"))
    found = ctypes.util.find_library("fabric") or next(map(str, efa), None)
    if found is None:
        return False, "no libfabric.so (the EFA installer puts it into /opt/amazon/efa)"
    default = "cxi, NVSHMEM's default; on EFA set it to efa"
    provider = os.environ.get("NVSHMEM_LIBFABRIC_PROVIDER", default)
    return True, f"{found}; NVSHMEM_LIBFABRIC_PROVIDER: {provider}"


LOOKS: dict[str, Look] = {
    "nvshmem device library": _device_library,
    # torch starts NVSHMEM by a unique id that it passes round itself.
    "nvshmem bootstrap": functools.partial(find_library, "nvshmem_bootstrap_uid.so*"),
    **{
        f"nvshmem {name}": functools.partial(find_library, f"nvshmem_transport_{name}.so*")
        for name in ("ibgda", "ibrc", "libfabric")
    },
    "rdma devices": _rdma_devices,
    "gpu direct rdma": _direct_rdma,
    "nvidia driver options": _driver_options,
    "libfabric provider": _libfabric,
}
