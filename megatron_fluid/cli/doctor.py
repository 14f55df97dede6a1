"""`megatron-fluid doctor`: what this machine has, what megatron_fluid can do on it, and the reason
and the remedy for what it cannot."""

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from megatron_fluid.cli.checks import CHECKS
from megatron_fluid.cli.terminal import paragraph, wrapped_table

__all__ = ["ABILITIES", "HELP", "Ability", "Finding", "add_arguments", "examine", "run"]

HELP = "what this machine can do, and why not"


class Ability(NamedTuple):
    """What a machine can do, and the checks that must pass for it."""

    what: str
    needs: tuple[str, ...]


class Finding(NamedTuple):
    """The result of one check: whether it passed, and what was found or why it failed."""

    name: str
    ok: bool
    detail: str


_NVSHMEM = "torch, cuda, triton, nvshmem, nvshmem device library, nvshmem bootstrap"
_CONNECTX = "rdma devices, gpu direct rdma"
ABILITIES = {
    name: Ability(what, tuple(needs.split(", ")))
    for name, what, needs in (
        ("core", "layers on plain torch", "torch, wrapt"),
        ("cpu", "training on CPU cores", "torch, gloo"),
        ("gpu", "training on GPUs", "torch, cuda, nccl, triton, nvrtc"),
        ("nvlink", "GPUs that write into each other's memory",
            "torch, cuda, several GPUs, peer access, triton, nvrtc"),
        ("nvshmem", "low-latency all-to-all over NVSHMEM", _NVSHMEM),
        ("ibgda", "... between hosts: the GPU drives the network card",
            f"{_NVSHMEM}, nvshmem ibgda, {_CONNECTX}, nvidia driver options"),
        ("ibrc", "... between hosts: a host thread drives it",
            f"{_NVSHMEM}, nvshmem ibrc, {_CONNECTX}"),
        ("libfabric", "... between hosts, on EFA or Slingshot",
            f"{_NVSHMEM}, nvshmem libfabric, rdma devices, libfabric provider"),
        ("megatron", "patches of Megatron-Core", "torch, wrapt, megatron-core"),
        ("transformer-engine", "Megatron with Transformer Engine",
            "torch, cuda, transformer-engine"),
    )
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the subcommand takes."""
    required = f"exit with status 1 where one of these is missing: {', '.join(ABILITIES)}. "
    parser.add_argument(
        "--require", nargs="+", action="extend", default=["core"], choices=list(ABILITIES),
        metavar="ABILITY", help=required + "'core' is always required.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print findings, abilities and remedies; 1 if a required ability is missing."""
    findings = examine()
    failed = [finding.name for finding in findings if not finding.ok]
    lacks = {
        name: [need for need in ability.needs if need in failed]
        for name, ability in ABILITIES.items()
    }
    missing = [ability for ability in dict.fromkeys(args.require) if lacks[ability]]
    steps = _to_do(failed)
    if args.json:
        checked = [(finding._asdict(), CHECKS[finding.name]) for finding in findings]
        results = [
            {**found, "consequence": check.consequence, "remedy": check.remedy}
            for found, check in checked
        ]
        report = {"findings": results, "abilities_lack": lacks, "to_do": steps, "missing": missing}
        print(json.dumps(report, indent=1))
    else:
        _print_report(findings, lacks, steps)
    for ability in missing:
        text = f"{ability}, which lacks {', '.join(lacks[ability])}: see above"
        print(f"\nrequired, but missing: {text}", file=sys.stderr)
    return 1 if missing else 0


def examine() -> list[Finding]:
    """Run every check. A check that raises counts as failed."""
    results = []
    for name, check in CHECKS.items():
        try:
            ok, detail = check.look()
        except Exception as error:  # a broken installation may fail in any way; this says how
            ok, detail = False, f"{type(error).__name__}: {error}".splitlines()[0]
        results.append(Finding(name, ok, detail))
    return results


def _is_first(name: str, failed: Collection[str]) -> bool:
    """Whether a failed check does not follow from another that failed too."""
    return not set(CHECKS[name].after) & set(failed)


def _to_do(failed: Collection[str]) -> list[str]:
    """Return each remedy once, with the abilities that need it."""
    lines: dict[str, list[str]] = {}
    for name in failed:
        if CHECKS[name].remedy and _is_first(name, failed):
            waiting = [each for each, ability in ABILITIES.items() if name in ability.needs]
            lines.setdefault(CHECKS[name].remedy, []).extend(waiting)
    return [f"for {', '.join(dict.fromkeys(waiting))}: {fix}" for fix, waiting in lines.items()]


def _print_report(
    findings: Sequence[Finding], lacks: dict[str, list[str]], steps: Sequence[str]
) -> None:
    failed = [finding.name for finding in findings if not finding.ok]
    rows = []
    for name, ok, detail in findings:
        if not ok and _is_first(name, failed):
            detail += f"\n-> {CHECKS[name].consequence}"
        rows.append((name, "ok" if ok else "-", detail))
    print(wrapped_table(("check", "", "found, -> what follows where it fails"), rows))
    able = []
    for name, lacking in lacks.items():
        what = ABILITIES[name].what + (f"\nlacks {', '.join(lacking)}" if lacking else "")
        able.append((name, "no" if lacking else "yes", what))
    print("\n" + wrapped_table(("ability", "", "what it is"), able))
    if steps:
        print("\nwhat to do for the rest")
    for step in steps:
        print(paragraph(step, "  ", "- "))
