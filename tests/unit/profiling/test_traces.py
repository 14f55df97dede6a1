"""Which events of a trace count, as what, and what they add up to."""

import pytest

from megatron_fluid.profiling import traces
from megatron_fluid.profiling.timeline import read_timeline


def _event(
    name: str, category: str, begin: float, end: float, device: int = 0
) -> dict[str, object]:
    span = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "name": name, "cat": category, **span, "args": {"device": device}}


def test_hidden_is_what_computation_covers() -> None:
    events = [
        _event("nvjet_gemm", "kernel", 0, 4000),
        _event("nvjet_gemm", "kernel", 3000, 5000),
        _event("ncclDevKernel_AllGather", "kernel", 1000, 3000),  # hidden
        _event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 4500, 7000),  # 2 ms of it exposed
        _event("push_kernel", "kernel", 6000, 8000),  # 1 ms of it beside the copy: exposed once
        _event("Memcpy HtoD", "gpu_memcpy", 8000, 8500),
        _event("aten::mm", "cpu_op", 0, 9000),
        _event("elementwise", "kernel", 9000, 10000),
        _event("nvjet_gemm", "kernel", 0, 1000, device=1),
        {"ph": "M", "name": "process_name"},
    ]
    timeline = read_timeline({"traceEvents": events}, "a trace")
    figures = dict(timeline.figures)
    for label, value in (("trace", "10.00"), ("computation", "6.00"), ("communication", "5.50")):
        assert figures[label] == f"{value} ms"
    assert (figures["exposed"], figures["hidden share"]) == ("3.00 ms", "45.5%")
    assert figures["host gaps"].startswith("1, 0.50 ms in all")
    longest = ("Memcpy PtoP (Device -> Device)", "push_kernel")
    assert timeline.notes[:2] == tuple(f"Exposed for 2.00 ms: {name}" for name in longest)
    assert "  Exposed for 2.00 ms: push_kernel" in timeline.lines()


def test_a_gemm_on_a_cpu_computes_although_it_has_inner_operators() -> None:
    events = [
        _event("FunctionBackward", "cpu_op", 0, 9000),  # may wait for a peer
        _event("aten::mm", "cpu_op", 1000, 5000),
        _event("aten::resolve_conj", "cpu_op", 1000, 1100),
        _event("gloo:send", "user_annotation", 3000, 6000),
    ]
    timeline = read_timeline({"traceEvents": [{**e, "tid": 1} for e in events]}, "a trace")
    figures = dict(timeline.figures)
    assert figures["computation"] == "4.00 ms"
    assert figures["hidden share"] == "66.7%"


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (
            "scatter_kernel begin_combine_kernel arrive_heads_kernel reduce_push_kernel "
            "push_kernel send_rows_kernel publish_kernel barrier_kernel combine_put_kernel "
            "plan_kernel ncclDevKernel_AllGather_RING_LL hybrid_ep::dispatch_kernel<bf16> "
            "two_shot_all_reduce_kernel<bf16>",
            "communication",
        ),
        (
            "grouped_forward activation_kernel topk_softmax_kernel "
            "at::native::reduce_kernel<512> at::native::_scatter_gather_elementwise_kernel "
            "flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits>",
            "compute",
        ),
    ],
)
def test_what_waits_for_peers_is_told_from_what_computes(names: str, kind: str) -> None:
    """By whole names where others have kernels called alike."""
    for name in names.split():
        assert traces.kind_of(_event(name, "kernel", 0, 1000)) == kind, name
