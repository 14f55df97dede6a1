"""What follows from each finding of `megatron-fluid doctor` that is missing, and what to do."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ADVICE", "Advice", "install_command", "to_do"]


@dataclass(frozen=True)
class Advice:
    """Of a finding that is missing.

    Attributes:
        consequence: what does not work, or works otherwise.
        remedy: what to do about it; "" where another finding's remedy comes first.
        after: findings that have to be there before this one can be.
    """

    consequence: str
    remedy: str = ""
    after: tuple[str, ...] = ()


def install_command(extra: str) -> str:
    """How to get what an extra of this package names. Where it is installed, pip reads its extras
    there. A source tree alone is given by its path: no registry has this package's name."""
    try:
        importlib.metadata.distribution("megatron-fluid")
    except importlib.metadata.PackageNotFoundError:
        return f"pip install '{Path(__file__).parents[2]}[{extra}]'"
    return f"pip install 'megatron-fluid[{extra}]'"


_NO_NVSHMEM = "no transport 'nvshmem' for AllToAll.internode; nvlink+nccl needs none of it"
_NVSHMEM_WHEEL = f"{install_command('nvshmem')}, or set NVSHMEM_HOME to an installation"
_CUDA = ("cuda",)

# Finding -> its advice, in the order of the findings.
ADVICE: Mapping[str, Advice] = {
    "python": Advice("nothing of this package works", "install Python 3.12 or newer"),
    "torch": Advice("nothing of this package works", "pip install 'torch>=2.11'"),
    "wrapt": Advice("Megatron is not patched", "pip install 'wrapt>=1.16'"),
    "torch.distributed": Advice(
        "one process alone can compute, several cannot", "install a torch with torch.distributed"
    ),
    "gloo": Advice("no training on CPU cores with several ranks", "install a torch with gloo"),
    "cuda": Advice(
        "everything runs on CPU cores over gloo, for trying out and for tests",
        "let `nvidia-smi` list the GPUs: install the NVIDIA driver, or give the container GPUs",
    ),
    "several GPUs": Advice(
        "one rank: MoE layers take the local path, and there is nothing to overlap",
        "use a machine with several GPUs, or start ranks on several machines",
        _CUDA,
    ),
    "peer access": Advice(
        "no symmetric memory: MoE and attention exchange in rounds over NCCL",
        "look at `nvidia-smi topo -p2p r`; in a virtual machine, ask for NVLink or switch ACS off",
        ("cuda", "several GPUs"),
    ),
    "nccl": Advice("no training on several GPUs", "install a torch for CUDA, which brings NCCL"),
    "triton": Advice(
        "no kernels of this package: local and NVLink paths are off", "pip install 'triton>=3.6'"
    ),
    "nvrtc": Advice(
        "on Hopper GPUs the experts' GEMMs cannot be compiled", "pip install nvidia-cuda-nvrtc"
    ),
    "symmetric memory": Advice(
        "no NVLink path: MoE and attention exchange in rounds over NCCL", "update torch"
    ),
    "nvshmem": Advice(_NO_NVSHMEM, _NVSHMEM_WHEEL),
    "nvshmem device library": Advice(_NO_NVSHMEM, _NVSHMEM_WHEEL, ("nvshmem",)),
    "nvshmem bootstrap": Advice(_NO_NVSHMEM, _NVSHMEM_WHEEL, ("nvshmem",)),
    "nvshmem ibgda": Advice(
        "NVSHMEM takes ibrc or libfabric between hosts", _NVSHMEM_WHEEL, ("nvshmem",)
    ),
    "nvshmem ibrc": Advice(
        "NVSHMEM takes ibgda or libfabric between hosts", _NVSHMEM_WHEEL, ("nvshmem",)
    ),
    "nvshmem libfabric": Advice("no NVSHMEM on EFA or Slingshot", _NVSHMEM_WHEEL, ("nvshmem",)),
    "rdma devices": Advice(
        "NVSHMEM stays inside this host; NCCL goes over sockets between hosts",
        "give the container /dev/infiniband and look at `ibv_devinfo`; one host needs none",
        _CUDA,
    ),
    "gpu direct rdma": Advice(
        "what goes between hosts is copied through host memory, and ibgda and ibrc do not start",
        "modprobe nvidia-peermem",
        ("cuda", "rdma devices"),
    ),
    "nvidia driver options": Advice(
        "ibgda does not start by itself; ibrc does",
        "set NVSHMEM_IBGDA_NIC_HANDLER=cpu, or the driver's options that the finding names",
        ("cuda", "rdma devices"),
    ),
    "libfabric provider": Advice(
        "no NVSHMEM on EFA or Slingshot",
        "install libfabric, on EFA by its installer; other networks need none",
        ("cuda", "rdma devices"),
    ),
    "megatron-core": Advice(
        "there is nothing to patch; the layers work on plain torch", install_command("megatron")
    ),
    "transformer-engine": Advice(
        "Megatron takes its local layers (--transformer-impl local), without FP8",
        install_command("te"),
        _CUDA,
    ),
}


def to_do(missing: Collection[str], abilities: Mapping[str, Sequence[str]]) -> list[str]:
    """Remedies, each once, with the abilities that wait for it.

    Args:
        missing: names of the findings that are missing.
        abilities: what each ability stands on.
    """
    lines: dict[str, list[str]] = {}
    for name in (name for name in ADVICE if name in missing):
        advice = ADVICE[name]
        if advice.remedy and not set(advice.after) & set(missing):
            waiting = [ability for ability, needs in abilities.items() if name in needs]
            lines.setdefault(advice.remedy, []).extend(waiting)
    return [
        f"for {', '.join(dict.fromkeys(waiting))}: {remedy}" if waiting else remedy
        for remedy, waiting in lines.items()
    ]
