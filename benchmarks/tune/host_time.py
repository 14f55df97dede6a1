"""Compare the host time of calls between two checkouts: this one and `--other`.

    python -m benchmarks.tune.host_time --other ../before --output host_time.json

Host time is the time from a call to its return; the device is idle when a call begins. Each process
measures one checkout, chosen by PYTHONPATH, and the processes alternate: this, other, this, other.
The shapes are small, so that no call waits for a full launch queue. This file imports nothing from
`benchmarks`: the same file runs against both checkouts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["main"]

Call = Callable[[], object]
TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 256, 1024, 512, 8, 2
HEADS, KV_HEADS = 8, 2


def _train(module: torch.nn.Module, x: torch.Tensor) -> Call:
    grad = torch.randn_like(x)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(grad)

    return step


def _module_calls(
    name: str, module: torch.nn.Module, x: torch.Tensor
) -> Iterator[tuple[str, Call]]:
    @torch.no_grad()
    def forward() -> object:
        return module(x)

    yield f"{name} forward", forward
    yield f"{name} train", _train(module, x.detach().requires_grad_())


def _moe(group: dist.ProcessGroup, device: torch.device, backend: str) -> torch.nn.Module:
    from megatron_fluid import MoELayer

    config = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": FFN,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "backend": backend,
    }
    return MoELayer(config, group, device, torch.bfloat16)


def _attention(group: dist.ProcessGroup, device: torch.device) -> torch.nn.Module:
    from megatron_fluid import SelfAttention

    shape: dict[str, Any] = {"num_kv_heads": KV_HEADS, "group": group}
    return SelfAttention(HIDDEN, HEADS, **shape, device=device, dtype=torch.bfloat16)


def _linears(group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[str, Call]]:
    from megatron_fluid import all_gather_matmul, matmul_reduce_scatter

    a = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    b = torch.randn(HIDDEN, HIDDEN, device=device, dtype=torch.bfloat16)
    yield "all_gather_matmul", lambda: all_gather_matmul(a, b, group)
    yield "matmul_reduce_scatter", lambda: matmul_reduce_scatter(a, b, group)


def _decode(group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[str, Call]]:
    from megatron_fluid import AllToAll

    tokens = 32
    ata = AllToAll.intranode(
        tokens, EXPERTS, TOP_K, 0, 1, 1, HIDDEN, 2 * HIDDEN, 0, group=group, timeout_s=30.0
    )
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS, device=device).topk(TOP_K).indices.to(torch.int32)
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, device=device)
    counts = torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    rows = torch.zeros(EXPERTS, tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    out = torch.zeros_like(x)

    def decode() -> None:
        ata.dispatch(counts, rows, None, x, None, ids)
        ata.combine(out, ids, weights, rows)

    yield "decode dispatch + combine", decode


def _calls(
    group: dist.ProcessGroup, device: torch.device, backends: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, Call]]]]]:
    """Names of calls, and what makes them: a maker that raises costs its own calls alone."""
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    for name, backend in backends.items():
        label = f"moe {name}"
        yield label, lambda n=label, b=backend: _module_calls(n, _moe(group, device, b), x)  # type: ignore[misc]
    sequence = x.view(1, TOKENS, HIDDEN)
    yield "attention", lambda: _module_calls("attention", _attention(group, device), sequence)
    yield "linears", lambda: _linears(group, device)
    yield "decode", lambda: _decode(group, device)


def _sampled(call: Call, device: torch.device, warmup: int, iters: int) -> float:
    """The median of host milliseconds per call."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else int
    for _ in range(warmup):
        call()
    samples = []
    gc.collect()
    gc.disable()
    for _ in range(iters):
        synchronize()
        began = time.perf_counter()
        call()
        samples.append((time.perf_counter() - began) * 1e3)
    synchronize()
    gc.enable()
    return statistics.median(samples)


def _worker(options: argparse.Namespace, backends: Mapping[str, str]) -> None:
    """Measure the checkout that PYTHONPATH names; write name -> milliseconds, or why not."""
    import megatron_fluid

    folder, found = options.worker.resolve(), Path(megatron_fluid.__file__).resolve()
    if folder not in found.parents:
        raise SystemExit(f"imported {found}, expected a file in {folder}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as rendezvous:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{rendezvous}/store",
            rank=0,
            world_size=1,
            **({"device_id": device} if device.type == "cuda" else {}),
        )
        group = dist.group.WORLD
        assert group is not None
        torch.manual_seed(0)
        measured: dict[str, float | str] = {}
        for name, make in _calls(group, device, backends):
            if options.only and not any(word in name for word in options.only):
                continue
            try:
                for label, call in make():
                    measured[label] = _sampled(call, device, options.warmup, options.iters)
            except Exception as error:
                measured[name] = f"{type(error).__name__}: {error}".split("\n")[0][:160]
        options.output.write_text(json.dumps(measured))
        dist.destroy_process_group()


def _run(folder: Path, backends: str, options: argparse.Namespace) -> dict[str, float | str]:
    """What a fresh process measures of the checkout in `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "measured.json"
        command = [sys.executable, __file__, "--worker", str(folder), "--output", str(output)]
        command += ["--backends", backends]
        command += ["--iters", str(options.iters), "--warmup", str(options.warmup)]
        command += ["--only", *options.only] if options.only else []
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        subprocess.run(command, env=environment, check=True, cwd=scratch)
        return json.loads(output.read_text())


def _summary(runs: Mapping[str, Sequence[Mapping[str, float | str]]]) -> list[dict[str, Any]]:
    """A row a call: the median over each checkout's processes, their ratio, and all figures."""
    names = dict.fromkeys(name for measured in runs.values() for run in measured for name in run)
    rows = []
    for name in names:
        row: dict[str, Any] = {"call": name}
        for checkout, measured in runs.items():
            values = [run[name] for run in measured if name in run]
            times = [value for value in values if isinstance(value, float)]
            row[f"{checkout}_ms"] = statistics.median(times) if times else None
            row[f"{checkout}_runs_ms"] = times
            errors = [value for value in values if isinstance(value, str)]
            if errors:
                row[f"{checkout}_error"] = errors[0]
        this, other = row["this_ms"], row["other_ms"]
        row["ratio"] = this / other if this and other else None
        rows.append(row)
    return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def cell(row: Mapping[str, Any], checkout: str) -> str:
        times = row[f"{checkout}_runs_ms"]
        if not times:
            return "-"
        return f"{row[f'{checkout}_ms']:.3f} ({min(times):.3f} to {max(times):.3f})"

    lines = ["| call | this, host ms | other, host ms | this / other |", "|---|---|---|---|"]
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.3f}"
        lines.append(f"| {row['call']} | {cell(row, 'this')} | {cell(row, 'other')} | {ratio} |")
    for row in rows:
        for checkout in ("this", "other"):
            if f"{checkout}_error" in row:
                lines.append(f"{row['call']}, {checkout}: {row[f'{checkout}_error']}")
    return lines


def _backends(text: str, checkout: str) -> dict[str, str]:
    """ "nvlink,local=nvlink" -> row name -> the backend of `checkout` ("this" or "other")."""
    found = {}
    for entry in text.split(","):
        this, _, other = entry.partition("=")
        found[entry] = other if other and checkout == "other" else this
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the processes in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--this", type=Path, default=here, help="the checkout under test")
    parser.add_argument("--other", type=Path, help="the checkout to compare it with")
    parser.add_argument(
        "--backends",
        default="nvlink,local=nvlink,rounds",
        help="MoE backends, each NAME or NAME_HERE=NAME_IN_OTHER (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=4, help="processes of each checkout")
    parser.add_argument("--iters", type=int, default=200, help="samples of a call in a process")
    parser.add_argument("--warmup", type=int, default=20, help="calls before them")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only calls with such a word")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        _worker(options, json.loads(options.backends))
        return 0
    if options.other is None:
        parser.error("--other is required")
    checkouts = {"this": options.this.resolve(), "other": options.other.resolve()}
    for folder in checkouts.values():
        if not (folder / "megatron_fluid" / "__init__.py").is_file():
            parser.error(f"{folder} holds no megatron_fluid")
    runs: dict[str, list[dict[str, float | str]]] = {name: [] for name in checkouts}
    for _ in range(options.rounds):
        for name, folder in checkouts.items():
            backends = json.dumps(_backends(options.backends, name))
            runs[name].append(_run(folder, backends, options))
    rows = _summary(runs)
    print("\n".join(_table(rows)))
    if options.output:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        found = {"device": device, "iters": options.iters, "rows": rows}
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
