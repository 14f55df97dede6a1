"""What the GPU does in one step: the time of its kernels by what they are for, and how long none
runs.

Kernels of several streams may run at once, so that the sums may exceed the time in which any runs.
The profiler slows the host down: idle time of a step that the host does not keep up with is longer
than without it.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["kernel_times", "kind_of", "time_with_kernel", "totals"]

# In this order: the first that is found in a kernel's name.
_KINDS = {
    # With the waits for peers, which are inside of them.
    "exchange of megatron_fluid": r"^(publish|plan|push|scatter|begin_combine|send_rows|reduce"
    r"|reduce_push|barrier)_kernel$",
    "expert GEMMs of megatron_fluid": r"^(grouped|sent|gather|fp8)_\w+$",
    "sums of tensors by torch": r"CUDAFunctor_?add",
    "attention": r"flash|fmha|attention|attn|cudnn.*sdpa",
    "GEMMs of libraries": r"gemm|nvjet|cutlass|xmma|cublas",
    "optimizer": r"multi_tensor|adam|l2norm",
    "communication": r"nccl",
    "copies and fills": r"memcpy|memset|copy|fill|cat(array|_)",
    "tokens moved, cast and activated": r"permute|sort_choices|count_choices|swiglu|silu|cast|topk",
    "normalisation": r"norm",
}
_MOST_NAMED = 8


@functools.cache
def kind_of(name: str) -> str:
    """What a kernel is for, by its name."""
    return next(
        (kind for kind, words in _KINDS.items() if re.search(words, name, re.IGNORECASE)), "other"
    )


def time_with_kernel(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans (begin, end) lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def kernel_times(
    step: Callable[[], Any], ready: Callable[[], None] = lambda: None
) -> tuple[Any, dict[str, Any]]:
    """What `step` returns, and where its time went on the current GPU, in milliseconds.

    `ready` is called before it, while the profiler runs already: on several ranks a barrier of the
    hosts. A profiler takes long to start, on one rank longer than on another, and the first kernel
    that waits for peers would be given the difference.

    `kinds`: the sum of the kernels' times by kind, the largest first. `kernels`: the longest
    kernels by name, their times and how many ran. `busy_ms`: how long any ran. `span_ms`: from the
    first kernel's begin to the last one's end.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        ready()
        result = step()
        torch.cuda.synchronize()
    # Not `profiler.events()`: an iteration of Megatron has 100,000, of which it makes a tree.
    traced = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_gpu = [each for each in traced if each.device_type() == torch.autograd.DeviceType.CUDA]
    zero = min((each.start_ns() for each in on_gpu), default=0)
    return result, totals(
        (each.name(), (each.start_ns() - zero) / 1e6, (each.end_ns() - zero) / 1e6)
        for each in on_gpu
    )


def totals(kernels: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Of kernels (name, begin, end in milliseconds) what `kernel_times` says."""
    kinds: dict[str, float] = defaultdict(float)
    names: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float]] = []
    for name, begin, end in kernels:
        spans.append((begin, end))
        kinds[kind_of(name)] += end - begin
        names[name[:80]].append(end - begin)
    longest = sorted(names.items(), key=lambda item: -sum(item[1]))[:_MOST_NAMED]
    return {
        "kinds": {k: round(v, 3) for k, v in sorted(kinds.items(), key=lambda kv: -kv[1])},
        "kernels": {name: [round(sum(times), 3), len(times)] for name, times in longest},
        "busy_ms": round(time_with_kernel(spans), 3),
        "span_ms": round(max(e for _, e in spans) - min(b for b, _ in spans), 3) if spans else 0.0,
    }
