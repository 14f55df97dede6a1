"""What fixed orders of sums cost on one GPU, beside forms that leave the order to the scheduler.

    NPROC=1 benchmarks/launch.sh determinism --output benchmarks/results/determinism-1gpu.json
    TRITON_INTERPRET=1 NPROC=1 benchmarks/launch.sh determinism --smoke      (one tiny case, no GPU)

Modes, each with `fluid`, the form that this package runs, and others that do the same work:

- `combine`: a token's K rows are summed in fp32. `atomic`: each row is added to its token's sum by
  atomics, and the sum is then cast. `index_add`: the same by torch.
- `row order`: rows are sorted by expert. `fluid` is stable, by prefix sums; `atomic` gives a row
  the next place of its expert's counter, after a histogram by atomics; `argsort` is torch's,
  unstable.
- `rank sum`: a sum over 8 slots, one a rank, in rank order and fp32. `torch_sum` chooses its order.
- `layer train`: forward and backward of one whole layer of one rank (`fluid` only): what the other
  rows are a share of.

`rank sum` is not part of a layer of one rank; it is counted all the same.

A row's config says whether two calls gave the same bits (`bitwise`). Of the layer these are its
output and all gradients. `fluid` must: a difference ends the run with status 1. A summary line of a
case gives the time over the fastest form, of all modes together, as a share of the layer's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.cases.moe import CASES, MoECase, router_logits
from benchmarks.harness.options import chosen, need_gpu_or_smoke, refuse_ignored
from benchmarks.harness.results import Row, write_results
from benchmarks.harness.timing import layer_head_start_ms, measure
from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.kernels.move_tokens.reduce_slots import reduce_slots
from megatron_fluid.moe.local.kernel_plan import KernelPlan, make_plan
from megatron_fluid.moe.sharding import local_part

__all__ = ["main"]

SLOTS = 8
type _Calls = dict[str, Callable[[], tuple[Tensor, ...]]]


@triton.jit
def _scatter_add_kernel(
    z, tokens, out, H: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out fp32 [T, H] += z[r] at tokens[r]. Grid (R, H / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(z + row * H + column, mask=column < H, other=0.0).to(tl.float32)
    tl.atomic_add(out + tl.load(tokens + row) * H + column, value, mask=column < H, sem="relaxed")


@triton.jit
def _count_kernel(ids, counts, N, BLOCK: tl.constexpr):
    """counts int32 [E] += how often each expert is in ids [N]. Grid (N / BLOCK,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + i, mask=i < N, other=0)
    tl.atomic_add(counts + expert, 1, mask=i < N, sem="relaxed")


@triton.jit
def _place_kernel(ids, next_row, rows, N, BLOCK: tl.constexpr):
    """rows int64 [N]: the next free row of each choice's expert. Grid (N / BLOCK,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids + i, mask=i < N, other=0)
    row = tl.atomic_add(next_row + expert, 1, mask=i < N, sem="relaxed")
    tl.store(rows + i, row.to(tl.int64), mask=i < N)


def _atomic_order(ids: Tensor, experts: int) -> Tensor:
    """Row of each choice, [T, K]: any order within an expert."""
    n, block = ids.numel(), 256
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(n, block),)
    _count_kernel[grid](ids, counts, n, BLOCK=block)
    first = counts.cumsum(0, dtype=torch.int32) - counts
    rows = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    _place_kernel[grid](ids, first, rows, n, BLOCK=block)
    return rows


def _atomic_combine(z: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    rows, hidden = z.shape
    block = min(2048, triton.next_power_of_2(hidden))
    grid = (rows, triton.cdiv(hidden, block))
    _scatter_add_kernel[grid](z, tokens, total, H=hidden, BLOCK=block)
    return total.to(out.dtype)


class _Case:
    """The tensors of one case and its calls by mode and variant; each returns its results."""

    def __init__(self, case: MoECase, tokens: int, device: torch.device) -> None:
        # The interpreter multiplies no bf16.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.case, self.device = case, device
        torch.manual_seed(1)
        config = MoEConfig(case.hidden, case.ffn, case.experts, case.top_k, backend="local")
        self.layer = MoELayer(config, dist.group.WORLD, device=device, dtype=dtype)
        logits = router_logits(case, tokens, 0.0, 1, device)
        self.probs, ids = logits.softmax(1).topk(case.top_k)
        self.ids = ids.int()
        self.plan = self._make_plan()
        order = ids.flatten().argsort(stable=True)
        self.token_of_row = order // case.top_k
        self.z = torch.randn(order.numel(), case.hidden, device=device, dtype=dtype)
        self.out = self.z.new_empty(tokens, case.hidden)
        self.slots = torch.randn(SLOTS, tokens // SLOTS, case.hidden, device=device, dtype=dtype)
        self.x = torch.randn(tokens, case.hidden, device=device, dtype=dtype)

    def modes(self) -> dict[str, _Calls]:
        return {
            "combine": {
                "fluid": self._combine,
                "atomic": lambda: (_atomic_combine(self.z, self.token_of_row, self.out),),
                "index_add": lambda: (self._index_add(),),
            },
            "row order": {
                "fluid": lambda: (self._make_plan().inverse,),
                "atomic": lambda: (_atomic_order(self.ids, self.case.experts),),
                "argsort": lambda: (self.ids.flatten().argsort(),),
            },
            "rank sum": {
                "fluid": lambda: (reduce_slots(self.slots),),
                "torch_sum": lambda: (self.slots.sum(0),),
            },
            "layer train": {"fluid": self._train},
        }

    def _combine(self) -> tuple[Tensor, ...]:
        return tuple(self.plan.unpermute(self.z))

    def _index_add(self) -> Tensor:
        total = torch.zeros(self.out.shape, dtype=torch.float32, device=self.device)
        return total.index_add_(0, self.token_of_row, self.z.float()).to(self.out.dtype)

    def _make_plan(self) -> KernelPlan:
        return make_plan(self.ids, self.probs, self.case.experts, read_ends=False)

    def _train(self) -> tuple[Tensor, ...]:
        x = self.x.detach().requires_grad_()
        self.layer.zero_grad(set_to_none=True)
        y = self.layer(x)
        y.backward(self.x)
        grads = [local_part(p.grad) for p in self.layer.parameters() if p.grad is not None]
        return (y.detach(), *([x.grad] if x.grad is not None else []), *grads)


def _alike(call: Callable[[], tuple[Tensor, ...]], times: int = 4) -> bool:
    """Whether calls of the same inputs give the same bits."""
    first = [result.clone() for result in call()]
    return all(
        all(torch.equal(a, b) for a, b in zip(first, call(), strict=True)) for _ in range(times)
    )


def _check(mode: str, calls: _Calls) -> None:
    """Variants agree up to rounding; the order of rows has no single answer."""
    if mode == "row order":
        return
    base = calls["fluid"]()[0].float().clone()
    for variant, call in calls.items():
        gap = float((call()[0].float() - base).norm() / base.norm())
        assert gap < 1e-2, f"{mode} {variant} is off by {gap:.1e}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table and write the results; 1 if a form of ours gave different bits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny case, on a CPU with the interpreter"
    )
    parser.add_argument("--output", type=Path, default=None, help="result file")
    options = parser.parse_args(arguments)
    if options.smoke:
        refuse_ignored(parser, options, ("cases", "tokens", "iters"), "without --smoke")
    cases = {name: CASES[name] for name in chosen(parser, "--cases", options.cases, CASES)}
    need_gpu_or_smoke(parser, "determinism", options.smoke)
    device = torch.device("cpu")
    if options.smoke:
        cases, options.tokens, options.iters = {"smoke": MoECase(32, 16, 8, 2)}, 16, 1
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rows: list[Row] = []
    differ = []
    for name, case in cases.items():
        modes = _Case(case, options.tokens, device).modes()
        over_ms, layer_ms = 0.0, 0.0
        for mode, calls in modes.items():
            _check(mode, calls)
            alike = {variant: _alike(call) for variant, call in calls.items()}
            differ += [f"{name} {mode}"] * (not alike["fluid"])
            timings = measure(
                calls, device, iters=options.iters, head_start_ms=layer_head_start_ms(device)
            )
            for variant, timing in timings.items():
                config = {"tokens": options.tokens, "bitwise": alike[variant]}
                rows.append(timing.row(name, mode, variant, config))
                same = "the same bits" if alike[variant] else "other bits each time"
                figure = f"{timing.median_ms * 1e3:9.1f} us"
                print(f"{name:16} {mode:12} {variant:10} {figure}  {same}", flush=True)
            mine = timings["fluid"].median_ms
            layer_ms = mine
            if mode != "layer train":
                over_ms += max(0.0, mine - min(t.median_ms for t in timings.values()))
        share = over_ms / layer_ms
        print(f"{name:16} over the fastest forms: {share:.2%} of the layer", flush=True)
        if options.output is not None:
            write_results("determinism", rows, 1, options.output)
    if differ:
        print(f"NOT THE SAME BITS: {', '.join(differ)}", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
