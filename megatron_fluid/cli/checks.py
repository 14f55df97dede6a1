"""The checks of `megatron-fluid doctor`: what each looks at, the consequence where it fails, and
the remedy.

NVSHMEM loads one remote transport at start-up: IBGDA (`NVSHMEM_IB_ENABLE_IBGDA=1`), else what
`NVSHMEM_REMOTE_TRANSPORT` names (ibrc, libfabric, ucx, ibdevx, none). Inside a host it uses peer
access and needs none of it. Its checks read the file system and load nothing.
"""

from __future__ import annotations

import ctypes.util
import functools
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from megatron_fluid import patches
from megatron_fluid.cli.terminal import install_command

__all__ = ["CHECKS", "Check", "Look"]

Look = Callable[[], tuple[bool, str]]
_MINIMUM_TORCH = (2, 10)
_ROOT = Path("/")  # tests look at another


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        look: returns whether the check passed, and what was found or why it failed.
        consequence: what does not work, or works otherwise, where it fails.
        remedy: what to do then; "" where another check's remedy comes first.
        after: checks that must pass before this one can.
    """

    look: Look
    consequence: str
    remedy: str = ""
    after: tuple[str, ...] = ()


def _torch() -> tuple[bool, str]:
    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    minimum = ".".join(map(str, _MINIMUM_TORCH))
    ok = found >= _MINIMUM_TORCH
    return ok, torch.__version__ if ok else f"{torch.__version__} found, {minimum} or newer needed"


def _package(name: str) -> tuple[bool, str]:
    importlib.import_module(name)
    return True, str(sys.modules[name.partition(".")[0]].__version__)


def _gloo() -> tuple[bool, str]:
    ok = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return ok, "available" if ok else "this torch was built without gloo"


def _cuda() -> tuple[bool, str]:
    cuda = torch.version.cuda
    if cuda is None:
        return False, f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return False, f"torch is built for CUDA {cuda}, but sees no GPU or no driver for it"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return True, f"CUDA {cuda}, {counted}"


def _several_gpus() -> tuple[bool, str]:
    count = torch.cuda.device_count()
    return count > 1, f"{count} visible"


def _peer_access() -> tuple[bool, str]:
    pairs = list(itertools.permutations(range(torch.cuda.device_count()), 2))
    refused = [f"{i}->{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if not pairs:
        return False, "no pair of GPUs"
    if refused:
        return False, f"refused for {', '.join(refused)}"
    return True, f"all {len(pairs)} ordered pairs"


def _nccl() -> tuple[bool, str]:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return False, "this torch was built without NCCL"
    return True, ".".join(map(str, torch.cuda.nccl.version()))


def _nvrtc() -> tuple[bool, str]:
    """NVRTC compiles the experts' GEMMs for Hopper GPUs; other GPUs use torch's GEMMs."""
    from megatron_fluid.cuda import devices, kernel_build
    from megatron_fluid.errors import FluidError

    try:
        major, minor = kernel_build.version()
    except FluidError as error:
        count = torch.cuda.device_count()
        if count and not any(devices.is_hopper(index) for index in range(count)):
            return True, f"not found, nor needed: no GPU of compute capability 9.0 among {count}"
        return False, str(error)
    return True, f"{major}.{minor}"


def _wheels() -> list[Path]:
    """Folders of NVSHMEM's wheels (nvidia-nvshmem-cu12, -cu13), wherever they are importable."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # there is no nvidia package at all
        return []
    return [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]


def _library(pattern: str) -> tuple[bool, str]:
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
    return _library("libnvshmem_device.bc")


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


def _nvshmem() -> tuple[bool, str]:
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    found, where = _library("libnvshmem_host.so*")
    if symmetric_memory.is_nvshmem_available():
        return True, f"torch finds it: {where}" if found else "torch finds it"
    if not found:
        return False, f"not installed ({install_command('nvshmem')})"
    return False, f"{where}, but torch cannot load it: put that folder on LD_LIBRARY_PATH"


def _megatron() -> tuple[bool, str]:
    if not patches.megatron_installed():
        return False, f"not installed ({install_command('megatron')})"
    problem = patches.version_problem()
    return problem is None, problem or patches.megatron_version()


def _transformer_engine() -> tuple[bool, str]:
    if importlib.util.find_spec("transformer_engine") is None:
        return False, f"not installed ({install_command('te')})"
    return _package("transformer_engine.pytorch")


_NO_NVSHMEM = "no transport 'nvshmem' for AllToAll.internode; nvlink+nccl does without it"
_NVSHMEM_WHEEL = f"{install_command('nvshmem')}, or set NVSHMEM_HOME to an installation"
_CUDA = ("cuda",)
_RDMA = ("cuda", "rdma devices")

CHECKS: Mapping[str, Check] = {
    "torch": Check(_torch, "nothing of this package works", "pip install 'torch>=2.10.0a0'"),
    "wrapt": Check(
        functools.partial(_package, "wrapt"), "Megatron is not patched", "pip install 'wrapt>=1.16'"
    ),
    "gloo": Check(
        _gloo, "no training on CPU cores with several ranks", "install a torch with gloo"
    ),
    "cuda": Check(
        _cuda,
        "everything runs on CPU cores over gloo, which is for trials and tests",
        "let `nvidia-smi` list the GPUs: install the NVIDIA driver, or give the container GPUs",
    ),
    "several GPUs": Check(
        _several_gpus,
        "one rank: MoE layers take the local path, and there is nothing to overlap",
        "use a machine with several GPUs, or start ranks on several machines",
        _CUDA,
    ),
    "peer access": Check(
        _peer_access,
        "no symmetric memory: exchanges stay Megatron's; layers on plain torch take rounds",
        "look at `nvidia-smi topo -p2p r`; in a virtual machine, ask for NVLink or switch ACS off",
        ("cuda", "several GPUs"),
    ),
    "nccl": Check(
        _nccl, "no training on several GPUs", "install a torch for CUDA, which brings NCCL"
    ),
    "triton": Check(
        functools.partial(_package, "triton"),
        "no kernels of this package: local and NVLink paths are off",
        "pip install 'triton>=3.6'",
    ),
    "nvrtc": Check(
        _nvrtc,
        "on Hopper GPUs the experts' GEMMs cannot be compiled",
        "pip install cuda-bindings nvidia-cuda-nvrtc",
    ),
    "nvshmem": Check(_nvshmem, _NO_NVSHMEM, _NVSHMEM_WHEEL),
    "nvshmem device library": Check(_device_library, _NO_NVSHMEM, _NVSHMEM_WHEEL, ("nvshmem",)),
    # torch starts NVSHMEM by a unique id that it passes round itself.
    "nvshmem bootstrap": Check(
        functools.partial(_library, "nvshmem_bootstrap_uid.so*"), _NO_NVSHMEM, _NVSHMEM_WHEEL,
        ("nvshmem",),
    ),
    **{
        f"nvshmem {name}": Check(
            functools.partial(_library, f"nvshmem_transport_{name}.so*"), consequence,
            _NVSHMEM_WHEEL, ("nvshmem",),
        )
        for name, consequence in (
            ("ibgda", "NVSHMEM takes ibrc or libfabric between hosts"),
            ("ibrc", "NVSHMEM takes ibgda or libfabric between hosts"),
            ("libfabric", "no NVSHMEM on EFA or Slingshot"),
        )
    },
    "rdma devices": Check(
        _rdma_devices,
        "NVSHMEM stays inside this host; NCCL goes over sockets between hosts",
        "give the container /dev/infiniband and look at `ibv_devinfo`; one host needs none",
        _CUDA,
    ),
    "gpu direct rdma": Check(
        _direct_rdma,
        "what goes between hosts is copied through host memory, and ibgda and ibrc do not start",
        "modprobe nvidia-peermem",
        _RDMA,
    ),
    "nvidia driver options": Check(
        _driver_options,
        "ibgda does not start by itself; ibrc does",
        "set NVSHMEM_IBGDA_NIC_HANDLER=cpu, or the driver's options that the check names",
        _RDMA,
    ),
    "libfabric provider": Check(
        _libfabric,
        "no NVSHMEM on EFA or Slingshot",
        "install libfabric, on EFA by its installer; other networks need none",
        _RDMA,
    ),
    "megatron-core": Check(
        _megatron,
        "there is nothing to patch; the layers work on plain torch",
        install_command("megatron"),
    ),
    "transformer-engine": Check(
        _transformer_engine,
        "Megatron takes its local layers (--transformer-impl local), without FP8",
        install_command("te"),
        _CUDA,
    ),
}  # fmt: skip
