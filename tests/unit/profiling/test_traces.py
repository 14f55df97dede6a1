"""What a trace says of communication and computation."""

import pytest

from megatron_fluid.profiling import traces


def _event(
    name: str, category: str, begin: float, end: float, device: int | None = 0
) -> dict[str, object]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": begin,
        "dur": end - begin,
        "args": {"device": device},
    }


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
    first, second = traces.summarise(events)
    assert (first.device, first.window, first.compute, first.communication) == ("GPU 0", 10, 6, 5.5)
    assert (first.exposed, first.idle) == (3.0, 1.0)
    assert first.hidden == pytest.approx(2.5 / 5.5)
    assert first.exposed_by_name == (("Memcpy PtoP (Device -> Device)", 2.0), ("push_kernel", 2.0))
    assert any("45.5% of it hidden" in line for line in first.lines())
    assert (second.device, second.hidden) == ("GPU 1", None)


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        *((n, True) for n in ("scatter_kernel", "reduce_kernel", "begin_combine_kernel")),
        *(
            (n, True)
            for n in (
                "arrive_heads_kernel",
                "reduce_push_kernel",
                "ncclDevKernel_AllGather_RING_LL",
            )
        ),
        *(
            (n, True)
            for n in (
                "push_kernel",
                "send_rows_kernel",
                "publish_kernel",
                "barrier_kernel",
                "combine_put_kernel",
            )
        ),
        ("void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)", False),
        ("void at::native::_scatter_gather_elementwise_kernel", False),
        ("void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits>", False),
        *(
            (n, True)
            for n in (
                "plan_kernel",
                "void hybrid_ep::dispatch_kernel<bf16>",
                "two_shot_all_reduce_kernel<bf16>",
            )
        ),
        *((n, False) for n in ("grouped_forward", "activation_kernel", "topk_softmax_kernel")),
    ],
)
def test_what_waits_for_peers_is_told_from_what_computes(name: str, moves: bool) -> None:
    """By whole names where others have kernels called alike."""
    [found] = traces.summarise([_event(name, "kernel", 0, 1000)])
    assert (found.communication, found.compute) == ((1.0, 0.0) if moves else (0.0, 1.0))
