"""Compare the bits of two runs of one job: every loss and every tensor of the last checkpoint.

    megatron-fluid run examples/pretrain_gpt_moe.py --save first
    megatron-fluid run examples/pretrain_gpt_moe.py --save second
    python -m tools.compare_two_runs first second

The exit status is 0 if nothing differs. On a GPU, --deterministic-mode keeps Megatron and
Transformer Engine from sums of their own whose order is not fixed; this package's have one anyway.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["differences", "main"]

_TRACKER = "latest_checkpointed_iteration.txt"


def differences(first: Path, second: Path) -> list[str]:
    """One line for each loss, and each tensor of the last checkpoint (parameters, optimizer), that
    two run folders do not have alike.

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
    digests = [_digests(_last_checkpoint(folder)) for folder in (first, second)]
    for name in sorted(digests[0].keys() | digests[1].keys()):
        ours, theirs = (found.get(name, "missing") for found in digests)
        if ours != theirs:
            lines.append(f"tensor {name}: {ours}, then {theirs}")
    return lines


def _last_checkpoint(run: Path) -> Path:
    return run / f"iter_{int((run / _TRACKER).read_text()):07d}"


def _digests(checkpoint: Path) -> dict[str, str]:
    """Of every tensor of a checkpoint, by name."""
    reader = FileSystemReader(checkpoint)
    state = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in reader.read_metadata().state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    if not state:
        raise FileNotFoundError(f"no tensors in {checkpoint}")
    load(state, storage_reader=reader, no_dist=True)
    return {name: _digest(tensor) for name, tensor in state.items()}


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Print what differs between two folders of runs."""
    if len(arguments) != 2:
        raise SystemExit(f"found {len(arguments)} folders, needed: two\n\n{__doc__}")
    first, second = map(Path, arguments)
    lines = differences(first, second)
    count = sum(map(len, json.loads((first / "losses.json").read_text()).values()))
    print("\n".join(lines) or f"the same bits: {count} losses and the last checkpoint")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
