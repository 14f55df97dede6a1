"""`megatron-fluid doctor`: what this machine has, what megatron_fluid can do on it, and the reason
and the remedy for what it cannot."""

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_fluid.cli.checks import CHECKS
from megatron_fluid.cli.tables import paragraph, wrapped_table

__all__ = ["ABILITIES", "Finding", "add_parser", "examine", "run"]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_NVSHMEM = "python, torch, cuda, triton, nvshmem, nvshmem device library, nvshmem bootstrap"
# Ability -> the checks that must pass.
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


@dataclass(frozen=True)
class Finding:
    """The result of one check: whether it passed, and what was found or why it failed."""

    name: str
    ok: bool
    detail: str


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "doctor", help="what this machine can do, and why not", description=__doc__
    )
    parser.add_argument(
        "--require",
        nargs="+",
        action="extend",
        default=["core"],
        choices=list(ABILITIES),
        metavar="ABILITY",
        help=f"exit with status 1 where one of these is missing: {', '.join(ABILITIES)}. "
        "'core' is always required.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print findings, abilities and remedies; 1 if a required ability is missing."""
    findings = {finding.name: finding for finding in examine()}
    lacks = {
        ability: [name for name in needs if not findings[name].ok]
        for ability, needs in ABILITIES.items()
    }
    missing = [ability for ability in dict.fromkeys(args.require) if lacks[ability]]
    steps = _to_do([f.name for f in findings.values() if not f.ok])
    if args.json:
        results = [
            {
                "name": f.name,
                "ok": f.ok,
                "detail": f.detail,
                "consequence": CHECKS[f.name].consequence,
                "remedy": CHECKS[f.name].remedy,
            }
            for f in findings.values()
        ]
        report = {"findings": results, "abilities_lack": lacks, "to_do": steps, "missing": missing}
        print(json.dumps(report, indent=1))
    else:
        _print_report(list(findings.values()), lacks, steps)
    for ability in missing:
        print(
            f"\nrequired, but missing: {ability}, which lacks {', '.join(lacks[ability])}: "
            "see above",
            file=sys.stderr,
        )
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


def _to_do(missing: Collection[str]) -> list[str]:
    """Return each remedy once, with the abilities that need it."""
    lines: dict[str, list[str]] = {}
    for name in missing:
        check = CHECKS[name]
        if check.remedy and not set(check.after) & set(missing):
            waiting = [ability for ability, needs in ABILITIES.items() if name in needs]
            lines.setdefault(check.remedy, []).extend(waiting)
    return [
        f"for {', '.join(dict.fromkeys(waiting))}: {remedy}" if waiting else remedy
        for remedy, waiting in lines.items()
    ]


def _print_report(
    findings: Sequence[Finding], lacks: dict[str, list[str]], steps: Sequence[str]
) -> None:
    rows = [
        (f.name, "ok", f.detail)
        if f.ok
        else (f.name, "-", f"{f.detail}\n-> {CHECKS[f.name].consequence}")
        for f in findings
    ]
    print(wrapped_table(("found", "", "detail, -> consequence"), rows))
    able = ((a, "no" if names else "yes", ", ".join(names)) for a, names in lacks.items())
    print("\n" + wrapped_table(("ability", "", "lacks"), able))
    print("\nwhat to do")
    for step in steps:
        print(paragraph(step, "  ", "- "))
    ready = ", ".join(ability for ability, names in lacks.items() if not names) or "nothing"
    print(paragraph(f"ready: {ready}", "  ", "- "))
