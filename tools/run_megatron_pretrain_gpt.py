"""Train a few iterations with Megatron-LM's own pretrain_gpt.py, unchanged but for one added line,
`import megatron_fluid`.

    python tools/run_megatron_pretrain_gpt.py --megatron-lm PATH [--ranks 2] [further Megatron
    flags, after --]

PATH is a checkout of Megatron-LM at tag core_v0.19.x; it is only read: pretrain_gpt.py, the line
added, and its neighbours are copied to a temporary folder and run on the megatron-core that is
installed. Mock data, so it needs none. Prints the training log's loss lines and ends with status 0
if training, evaluation and test ran through and every loss is finite.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ARGUMENTS", "losses", "main", "run", "with_import"]

ROOT = Path(__file__).resolve().parent.parent
ARGUMENTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32 "
    "--max-position-embeddings 32 --position-embedding-type rope --disable-bias-linear --swiglu "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-iters 4 "
    "--eval-iters 1 --eval-interval 100 --log-interval 1 --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 128 "
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
).split()
_LOSS = re.compile(r"lm loss(?: value)?: ([0-9.E+-]+|nan|inf)")


def with_import(source: str) -> str:
    """The script with the one line: after its docstring, comments and `from __future__` lines."""
    lines = source.splitlines(keepends=True)
    first = next(
        i for i, line in enumerate(lines) if re.match(r"(import|from) (?!__future__)", line)
    )
    return "".join([*lines[:first], "import megatron_fluid\n", *lines[first:]])


def losses(log: str) -> list[float]:
    """Every loss that the log names, in order: one an iteration, then validation and test."""
    return [float(text) for text in _LOSS.findall(log)]


def run(
    checkout: Path, ranks: int, arguments: Sequence[str] = (), timeout_s: float = 600.0
) -> tuple[int, str]:
    """Run it on `ranks` processes; returns the exit status and the whole log.

    Raises:
        FileNotFoundError: the checkout has no pretrain_gpt.py.
        subprocess.TimeoutExpired: it took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="pretrain-gpt-") as temporary:
        folder = Path(temporary)
        for neighbour in checkout.glob("*.py"):  # model_provider.py, gpt_builders.py ...
            shutil.copy(neighbour, folder)
        script = folder / "pretrain_gpt.py"
        script.write_text(with_import((checkout / "pretrain_gpt.py").read_text()))
        (folder / "megatron_fluid").symlink_to(ROOT / "megatron_fluid", target_is_directory=True)
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
        ]
        command += [str(script), *ARGUMENTS]
        command += ["--expert-model-parallel-size", str(math.gcd(ranks, 4)), *arguments]
        process = subprocess.Popen(
            command,
            cwd=temporary,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            log, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends its ranks
                process.wait(60)
        return process.returncode, log


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the losses, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megatron-lm", type=Path, required=True, metavar="PATH", help="a Megatron-LM checkout"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "megatron_args", nargs="*", default=[], help="further arguments for Megatron, after --"
    )
    options = parser.parse_args(arguments)
    status, log = run(options.megatron_lm.resolve(), options.ranks, options.megatron_args)
    found = losses(log)
    print("\n".join(line for line in log.splitlines() if _LOSS.search(line)))
    if status != 0 or not found or not all(map(math.isfinite, found)):
        print("\n".join(log.splitlines()[-60:]))
        print(f"failed: exit status {status}, {len(found)} losses")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
