"""`megatron-fluid doctor`: what this machine has, what megatron_fluid can do on it, exactly why not
where it cannot, what follows from that, and what to do.

With --bandwidth it measures the copies between all pairs of ranks instead, in at most about two
minutes: on the GPUs of this host, on CPU cores where there is none, or on the ranks of a job that
`torchrun` or `megatron-fluid run` has started:

    megatron-fluid run --nproc-per-node 8 -m megatron_fluid.cli doctor --bandwidth

With --hosts it says of such a job which hosts reach each other by what, how fast, and which
settings of NCCL, NVSHMEM or gloo are missing or differ.
"""

import argparse
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from megatron_fluid import patches
from megatron_fluid.cli import nvshmem_preflight
from megatron_fluid.cli.advice import ADVICE, install_command, to_do
from megatron_fluid.cli.arguments import positive
from megatron_fluid.cli.tables import paragraph, wrapped_table
from megatron_fluid.errors import ConfigError

__all__ = ["ABILITIES", "Finding", "add_parser", "examine", "run"]

MINIMUM_PYTHON = (3, 12)
MINIMUM_TORCH = (2, 11)


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, whether it is usable, and what was found or why it is not."""

    name: str
    ok: bool
    detail: str


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and why not",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--require",
        nargs="+",
        action="extend",
        default=["core"],
        choices=list(ABILITIES),
        metavar="ABILITY",
        help=f"fail where one of these is missing: {', '.join(ABILITIES)}. "
        "'core' is always required.",
    )
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    measure = "measure copies between all pairs of ranks, and all-to-alls"
    parser.add_argument("--bandwidth", action="store_true", help=measure)
    hosts = "the hosts of a job: who reaches whom by what, how fast, and what is missing"
    parser.add_argument("--hosts", action="store_true", help=hosts)
    ranks = "with --bandwidth or --hosts: processes to start; by default one a GPU, or 2 on a CPU"
    parser.add_argument("--ranks", type=positive, metavar="N", help=ranks)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print findings, abilities and advice; 1 if a required ability is missing."""
    if args.bandwidth or args.hosts:
        return _of_ranks(args)
    findings = {finding.name: finding for finding in examine()}
    abilities = {name: _ability(findings, needs) for name, needs in ABILITIES.items()}
    missing = [name for name in dict.fromkeys(args.require) if abilities[name]]
    steps = to_do([f.name for f in findings.values() if not f.ok], ABILITIES)
    if args.json:
        found = [asdict(f) | asdict(ADVICE[f.name]) for f in findings.values()]
        able = {name: lacks.split(", ") if lacks else [] for name, lacks in abilities.items()}
        report = {"findings": found, "abilities_lack": able, "to_do": steps, "missing": missing}
        print(json.dumps(report, indent=1))
    else:
        _print_report(findings, abilities, steps)
    for name in missing:
        lacks = f"{name}, which lacks {abilities[name]}: see above"
        print(f"\nrequired, but missing: {lacks}", file=sys.stderr)
    return 1 if missing else 0


def _print_report(
    findings: dict[str, Finding], abilities: dict[str, str], steps: Sequence[str]
) -> None:
    def detail(finding: Finding) -> str:
        so = "" if finding.ok else f"\n-> {ADVICE[finding.name].consequence}"
        return finding.detail + so

    found = ((f.name, "ok" if f.ok else "-", detail(f)) for f in findings.values())
    print(wrapped_table(("found", "", "detail, -> what follows"), found))
    able = ((a, "no" if lacks else "yes", lacks) for a, lacks in abilities.items())
    print("\n" + wrapped_table(("ability", "", "lacks"), able))
    print("\nwhat to do")
    for step in steps:
        print(paragraph(step, "  ", "- "))
    ready = ", ".join(name for name, lacks in abilities.items() if not lacks) or "nothing"
    measure = "`megatron-fluid doctor --bandwidth` measures the links between the ranks"
    print(paragraph(f"ready: {ready}; {measure}", "  ", "- "))


def _of_ranks(args: argparse.Namespace) -> int:
    """Measure as a rank of a job, or start ranks; 1 where data was wrong."""
    from megatron_fluid.cli import bandwidth, hosts

    if args.bandwidth and args.hosts:
        print(ConfigError.of("--hosts", "it beside --bandwidth", "one of them"), file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        words = ["--hosts" if args.hosts else "--bandwidth", *(["--json"] if args.json else [])]
        return bandwidth.start_ranks(args.ranks, words)
    try:
        if args.ranks is not None:
            raise ConfigError.of("--ranks", args.ranks, "none in a job whose ranks are started")
        report: bandwidth.BandwidthReport | hosts.HostsReport | None
        if args.hosts:
            report = found = bandwidth.run_rank(hosts.examine)
            text = "" if found is None else hosts.report_text(found)
        else:
            report = measured = bandwidth.run_rank(bandwidth.measure)
            text = "" if measured is None else bandwidth.report_text(measured)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if report is None:
        return 0
    print(json.dumps(asdict(report), indent=1) if args.json else text)
    return 1 if report.wrong else 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_NVSHMEM = "python, torch, cuda, triton, nvshmem, nvshmem device library, nvshmem bootstrap"
# Ability -> the findings that it stands on.
ABILITIES = {
    "core": _names("python, torch, wrapt, torch.distributed"),
    "cpu": _names("python, torch, gloo"),
    "gpu": _names("python, torch, cuda, nccl, triton, nvrtc"),
    "nvlink": _names(
        "python, torch, cuda, several GPUs, peer access, triton, nvrtc, symmetric memory"
    ),
    "nvshmem": _names(_NVSHMEM),
    "ibgda": _names(
        f"{_NVSHMEM}, nvshmem ibgda, rdma devices, gpu direct rdma, nvidia driver options"
    ),
    "ibrc": _names(f"{_NVSHMEM}, nvshmem ibrc, rdma devices, gpu direct rdma"),
    "libfabric": _names(f"{_NVSHMEM}, nvshmem libfabric, rdma devices, libfabric provider"),
    "megatron": _names("python, torch, wrapt, megatron-core"),
    "transformer-engine": _names("python, torch, cuda, transformer-engine"),
}


def examine() -> list[Finding]:
    """Look at everything; a look that itself fails is a finding too."""
    return [_look(name, look) for name, look in _LOOKS.items()]


def _ability(findings: dict[str, Finding], needs: Sequence[str]) -> str:
    """The findings that an ability lacks, which say why themselves; an empty string if there are
    none."""
    return ", ".join(name for name in needs if not findings[name].ok)


def _look(name: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    try:
        ok, detail = look()
    except Exception as error:  # a broken installation may fail in any way; this says how
        ok, detail = False, f"{type(error).__name__}: {error}".splitlines()[0]
    return Finding(name, ok, detail)


def _at_least(found: str, minimum: tuple[int, int]) -> tuple[bool, str]:
    major, minor = (int(part) for part in re.findall(r"\d+", found)[:2])
    ok = (major, minor) >= minimum
    return ok, found if ok else f"{found} found, {minimum[0]}.{minimum[1]} or newer needed"


def _python() -> tuple[bool, str]:
    return _at_least(platform.python_version(), MINIMUM_PYTHON)


def _torch() -> tuple[bool, str]:
    import torch

    return _at_least(torch.__version__, MINIMUM_TORCH)


def _package(name: str) -> Callable[[], tuple[bool, str]]:
    def look() -> tuple[bool, str]:
        importlib.import_module(name)
        return True, importlib.metadata.version(name)

    return look


def _distributed() -> tuple[bool, str]:
    import torch.distributed as dist

    ok = dist.is_available()
    return ok, "available" if ok else "this torch was built without torch.distributed"


def _gloo() -> tuple[bool, str]:
    import torch.distributed as dist

    ok = dist.is_available() and dist.is_gloo_available()
    return ok, "available" if ok else "this torch was built without gloo"


def _cuda() -> tuple[bool, str]:
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        return False, f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available():
        return False, f"torch is built for CUDA {cuda}, but sees no GPU or no driver for it"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return True, f"CUDA {cuda}, {counted}"


def _several_gpus() -> tuple[bool, str]:
    import torch

    count = torch.cuda.device_count()
    return count > 1, f"{count} visible" + ("" if count > 1 else ", a peer needs a second one")


def _peer_access() -> tuple[bool, str]:
    import torch

    count = torch.cuda.device_count()
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    refused = [f"{i}->{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if not pairs:
        return False, "no pair of GPUs"
    if refused:
        return False, f"refused for {', '.join(refused)}"
    return True, f"all {len(pairs)} ordered pairs"


def _nccl() -> tuple[bool, str]:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return False, "this torch was built without NCCL"
    return True, ".".join(str(part) for part in torch.cuda.nccl.version())


def _triton() -> tuple[bool, str]:
    triton = importlib.import_module("triton")
    return True, str(triton.__version__)


def _nvrtc() -> tuple[bool, str]:
    """NVRTC compiles the experts' GEMMs for Hopper GPUs; other GPUs have torch's, and do without
    it."""
    import torch

    from megatron_fluid.cuda import hopper_kernels, nvrtc
    from megatron_fluid.errors import FluidError

    try:
        library = nvrtc.load()
    except FluidError as error:
        count = torch.cuda.device_count()
        if count and not any(hopper_kernels.is_hopper(index) for index in range(count)):
            return True, f"not found, nor needed: no GPU of compute capability 9.0 among {count}"
        return False, str(error)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return True, f"{major.value}.{minor.value}, {library._name}"


def _symmetric_memory() -> tuple[bool, str]:
    importlib.import_module("torch.distributed._symmetric_memory")
    return True, "torch.distributed._symmetric_memory imports"


def _nvshmem() -> tuple[bool, str]:
    """Torch loads it; where it cannot, what is installed of it says why."""
    symmetric_memory = importlib.import_module("torch.distributed._symmetric_memory")
    installed = nvshmem_preflight.installed()
    if symmetric_memory.is_nvshmem_available():
        return True, "torch finds it" + (f": {installed}" if installed else "")
    if not installed:
        return False, f"not installed ({install_command('nvshmem')})"
    return False, f"{installed}, but torch cannot load it: put its lib folder on LD_LIBRARY_PATH"


def _megatron() -> tuple[bool, str]:
    if not patches.megatron_installed():
        return False, f"not installed ({install_command('megatron')})"
    problem = patches.version_problem()
    return problem is None, problem or patches.megatron_version()


def _transformer_engine() -> tuple[bool, str]:
    if importlib.util.find_spec("transformer_engine") is None:
        return False, f"not installed ({install_command('te')})"
    importlib.import_module("transformer_engine.pytorch")
    return True, importlib.metadata.version("transformer_engine")


_LOOKS: dict[str, Callable[[], tuple[bool, str]]] = {
    "python": _python,
    "torch": _torch,
    "wrapt": _package("wrapt"),
    "torch.distributed": _distributed,
    "gloo": _gloo,
    "cuda": _cuda,
    "several GPUs": _several_gpus,
    "peer access": _peer_access,
    "nccl": _nccl,
    "triton": _triton,
    "nvrtc": _nvrtc,
    "symmetric memory": _symmetric_memory,
    "nvshmem": _nvshmem,
    **nvshmem_preflight.LOOKS,
    "megatron-core": _megatron,
    "transformer-engine": _transformer_engine,
}
