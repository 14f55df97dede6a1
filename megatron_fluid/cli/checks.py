"""The checks of `megatron-fluid doctor`: what each looks at, the consequence where it fails, and
the remedy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed

from megatron_fluid import patches
from megatron_fluid.cli import nvshmem_checks
from megatron_fluid.cli.arguments import install_command
from megatron_fluid.cli.nvshmem_checks import LOOKS, Look

__all__ = ["CHECKS", "Check"]

_MINIMUM_TORCH = (2, 10)


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
    from megatron_fluid.cuda import devices, nvrtc
    from megatron_fluid.errors import FluidError

    try:
        major, minor = nvrtc.version()
    except FluidError as error:
        count = torch.cuda.device_count()
        if count and not any(devices.is_hopper(index) for index in range(count)):
            return True, f"not found, nor needed: no GPU of compute capability 9.0 among {count}"
        return False, str(error)
    return True, f"{major}.{minor}"


def _nvshmem() -> tuple[bool, str]:
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    found, where = nvshmem_checks.find_library("libnvshmem_host.so*")
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
        "no symmetric memory: MoE and attention exchange in rounds over NCCL",
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
    **{
        name: Check(LOOKS[name], consequence, _NVSHMEM_WHEEL, ("nvshmem",))
        for name, consequence in (
            ("nvshmem device library", _NO_NVSHMEM),
            ("nvshmem bootstrap", _NO_NVSHMEM),
            ("nvshmem ibgda", "NVSHMEM takes ibrc or libfabric between hosts"),
            ("nvshmem ibrc", "NVSHMEM takes ibgda or libfabric between hosts"),
            ("nvshmem libfabric", "no NVSHMEM on EFA or Slingshot"),
        )
    },
    "rdma devices": Check(
        LOOKS["rdma devices"],
        "NVSHMEM stays inside this host; NCCL goes over sockets between hosts",
        "give the container /dev/infiniband and look at `ibv_devinfo`; one host needs none",
        _CUDA,
    ),
    "gpu direct rdma": Check(
        LOOKS["gpu direct rdma"],
        "what goes between hosts is copied through host memory, and ibgda and ibrc do not start",
        "modprobe nvidia-peermem",
        _RDMA,
    ),
    "nvidia driver options": Check(
        LOOKS["nvidia driver options"],
        "ibgda does not start by itself; ibrc does",
        "set NVSHMEM_IBGDA_NIC_HANDLER=cpu, or the driver's options that the check names",
        _RDMA,
    ),
    "libfabric provider": Check(
        LOOKS["libfabric provider"],
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
}
