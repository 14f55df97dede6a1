"""The first step of a process: an MoE layer's construction, forward and backward, with the caches
of compiled kernels empty (cold) and filled (warm).

    make bench ARGS="--only cold_start"
    python -m benchmarks.suites.cold_start --cases qwen3-30b-a3b --rounds 3

Each figure is of a process of its own. It begins when the layer is constructed: torch is imported
and the GPU is in use by then. Rows hold the seconds of the whole process, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases.moe import CASES
from benchmarks.harness.options import chosen
from benchmarks.harness.results import Row, result_path, write_results

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]
_TOKENS = 4096
_LIMIT_S = 300.0


def first_step(case: str, tokens: int) -> dict[str, Any]:
    """Construct and run a layer in this process. Returns seconds of each part, and the output's
    checksum."""
    import torch
    import torch.distributed as dist

    from megatron_fluid import MoEConfig, MoELayer

    shape = CASES[case]
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x @ x.t()).sum().item()  # the GPU's context and cuBLAS are not ours to load
    begin = time.monotonic()
    config = MoEConfig(shape.hidden, shape.ffn, shape.experts, shape.top_k, backend="local")
    layer = MoELayer(config, dist.group.WORLD, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    built = time.monotonic()
    out = layer(x)
    torch.cuda.synchronize()
    forward = time.monotonic()
    out.float().pow(2).sum().backward()
    torch.cuda.synchronize()
    end = time.monotonic()
    layer(x).float().pow(2).sum().backward()
    torch.cuda.synchronize()
    again = time.monotonic()
    return {
        "first_s": end - begin,
        "construct_s": built - begin,
        "forward_s": forward - built,
        "backward_s": end - forward,
        "second_s": again - end,
    }


def _process(case: str, tokens: int, caches: Path) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "CUDA_CACHE_PATH": str(caches / "cuda"),  # NVRTC keeps what it compiled there, too
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.suites.cold_start", "--measure", case]
        + ["--tokens", str(tokens)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "process_s": time.monotonic() - begin}


def _row(case: str, mode: str, found: Sequence[dict[str, Any]], tokens: int) -> Row:
    times = sorted(1e3 * one["first_s"] for one in found)
    parts = {
        name: round(statistics.median(one[name] for one in found), 3)
        for name in found[0]
        if name != "first_s"
    }
    median = statistics.median(times)
    config = {"tokens": tokens, **parts}
    return Row(case, mode, "fluid", median, times[0], times[-1], len(times), config)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each case cold and warm; the last line of a case says both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", default="qwen3-30b-a3b", help=", ".join(CASES))
    add("--rounds", type=int, default=3, help="processes cold, and as many warm (%(default)s)")
    add("--tokens", type=int, default=_TOKENS, help="of the layer (%(default)s)")
    add("--measure", metavar="CASE", choices=CASES, default=None, help="in this process, as JSON")
    add("--output", default=None, help="result file")
    options = parser.parse_args(arguments)
    if options.measure is not None:
        print(json.dumps(first_step(options.measure, options.tokens)))
        return 0
    if options.rounds < 1:
        parser.error(f"--rounds: found {options.rounds}, allowed: 1 or more")
    import torch

    if not torch.cuda.is_available():
        parser.error("cold_start needs a GPU, found none")
    rows: list[Row] = []
    target = Path(options.output) if options.output else result_path("cold_start", 1)
    for case in chosen(parser, "--cases", options.cases, CASES):
        cold, warm = [], []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(_process(case, options.tokens, Path(folder)))
                warm.append(_process(case, options.tokens, Path(folder)))
        rows += [_row(case, "cold", cold, options.tokens), _row(case, "warm", warm, options.tokens)]
        write_results("cold_start", rows, 1, target)
        for row in rows[-2:]:
            print(f"{case:16} {row.mode}: {row.median_ms / 1e3:6.2f} s  {row.config}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
