"""Where the time of one attention layer goes: the parts of its forward, each by itself, the host's
time for a call, and the kernels of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases.attention import AttentionCase, NormedAttention, step_call
from benchmarks.harness.timing import layer_head_start_ms, measure

__all__ = ["attention_phases", "kernel_table"]


def _host_us(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Microseconds that the host takes to enqueue a call, the device left to catch up
    afterwards."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    took = (time.perf_counter() - start) / repeats * 1e6
    if device.type == "cuda":
        torch.cuda.synchronize()
    return took


def attention_phases(
    case: AttentionCase, module: NormedAttention, x: Tensor, iters: int
) -> dict[str, float]:
    """Milliseconds of the forward's parts, each by itself, and the host's time for the whole."""
    from megatron_fluid.attention.exchange.protocol import Projection

    attention, device = module.attention, x.device
    head_start = layer_head_start_ms(device)
    call, weights = attention.call(x), attention.weights()
    exchange, part = call.exchange, call.exchange.heads
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        normed = module.norm(x)
        of_qkv, of_out = Projection(weights.w_qkv.t(), None), weights.w_out
        width = case.heads * case.head_dim
        gathered = torch.randn(x.shape[0], 1, width, device=device, dtype=x.dtype)
        arriving = exchange.project("phase", normed, of_qkv)
        packed, *_ = (
            arriving.take(g)[1] for g in range(part.groups)
        )  # all of them: what is sent must be taken

        def exchange_heads() -> None:
            sent = exchange.project("phase", normed, of_qkv)
            for g in range(part.groups):
                sent.take(g)

        outputs = [
            torch.randn(
                case.length,
                1,
                part.part(exchange.rank, g).output_width,
                device=device,
                dtype=x.dtype,
            )
            for g in range(part.groups)
        ]

        def exchange_rows() -> None:
            sent = [exchange.send_rows("phase", g, outputs[g], True) for g in range(part.groups)]
            for _ in exchange.collect(sent, True):
                pass

        from megatron_fluid.attention.packed import expand_shared, split

        first = part.part(exchange.rank, 0)
        q, k, v = split(packed, first)
        core = call.kernel, call.case
        calls["norm"] = lambda: module.norm(x)
        calls["projections"] = lambda: (normed @ weights.w_qkv.t(), gathered @ of_out.t())
        calls["qkv projection and its exchange"] = exchange_heads
        calls["output exchange"] = exchange_rows
        calls[f"attention of 1 of {part.groups} head groups"] = lambda: core[0].run(
            q, expand_shared(k, first), expand_shared(v, first), core[1]
        )
        calls["forward"] = lambda: module(x)
        timings = measure(calls, device, iters=iters, warmup=3, head_start_ms=head_start)
        found = {phase: timing.median_ms for phase, timing in timings.items()}
        found["host, forward"] = _host_us(calls["forward"], device) / 1e3
    step = step_call(module, x)
    train = measure({"train": step}, device, iters=iters, warmup=3, head_start_ms=head_start)
    found["train"] = train["train"].median_ms
    found["host, train"] = _host_us(step, device) / 1e3
    return found


def kernel_table(call: Callable[[], object], device: torch.device, top: int = 18) -> str:
    """The kernels (on a CPU: operators) of three calls by their own time."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(3):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return str(
        profiler.key_averages().table(sort_by=order, row_limit=top, max_name_column_width=70)
    )
