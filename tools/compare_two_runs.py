"""Train the same job twice and compare the bits: every loss and every file of the last checkpoint.

    python -m tools.compare_two_runs [--nproc-per-node 1] [-- FLAGS of examples/pretrain_gpt_moe.py]

The exit status is 0 if nothing differs. On a GPU, --deterministic-mode keeps Megatron and
Transformer Engine from sums of their own whose order is not fixed; this package's have one anyway.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["differences", "main"]

ROOT = Path(__file__).resolve().parent.parent
_TRACKER = "latest_checkpointed_iteration.txt"


def differences(first: Path, second: Path) -> list[str]:
    """One line for each loss, and each tensor file of the last checkpoint, that two run folders do
    not have alike.

    Raises:
        FileNotFoundError: a run has written no losses or no checkpoint.
    """
    lines = []
    losses = [json.loads((folder / "losses.json").read_text()) for folder in (first, second)]
    for kind in losses[0].keys() | losses[1].keys():
        ours, theirs = (found.get(kind, {}) for found in losses)
        for iteration in sorted(ours.keys() | theirs.keys(), key=int):
            if ours.get(iteration) != theirs.get(iteration):
                found = f"{ours.get(iteration)!r}, then {theirs.get(iteration)!r}"
                lines.append(f"{kind} loss of iteration {iteration}: {found}")
    folders = [_last_checkpoint(folder) for folder in (first, second)]
    names = [{path.name for path in folder.glob("*.distcp")} for folder in folders]
    if not names[0]:
        raise FileNotFoundError(f"no tensors in {folders[0]}")
    for name in sorted(names[0] | names[1]):
        digests = [_digest(folder / name) for folder in folders]
        if digests[0] != digests[1]:
            lines.append(f"{folders[0].name}/{name}: {digests[0]}, then {digests[1]}")
    return lines


def _last_checkpoint(run: Path) -> Path:
    return run / f"iter_{int((run / _TRACKER).read_text()):07d}"


def _digest(path: Path) -> str:
    if not path.exists():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, print what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks")
    parser.add_argument("flags", nargs="*", help="of the training, after --")
    options = parser.parse_args(arguments)
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="two-runs-") as temporary:
        runs = [Path(temporary) / name for name in ("first", "second")]
        for run in runs:
            launcher = [sys.executable, "-m", "megatron_fluid.cli", "run"]
            launcher += ["--nproc-per-node", str(options.nproc_per_node)]
            script = str(ROOT / "examples" / "pretrain_gpt_moe.py")
            began = time.monotonic()
            done = subprocess.run(
                [*launcher, script, *options.flags, "--save", str(run)],
                cwd=temporary,
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                print(done.stdout[-4000:])
                print(f"the {run.name} run ended with status {done.returncode}")
                return 1
            print(f"the {run.name} run took {time.monotonic() - began:.0f} s", flush=True)
        lines = differences(*runs)
        losses = json.loads((runs[0] / "losses.json").read_text())
        count = sum(map(len, losses.values()))
    print("\n".join(lines) or f"the same bits: {count} losses and the last checkpoint")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
