"""How the kernels of a traced step are summed up."""

from __future__ import annotations

import pytest

from benchmarks.harness import kernel_times as module
from benchmarks.harness.kernel_times import kernel_times, kind_of, time_with_kernel


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("grouped_gated", "expert GEMMs of megatron_fluid"),
        ("fp8_grouped", "expert GEMMs of megatron_fluid"),
        ("sent_rows", "expert GEMMs of megatron_fluid"),
        ("push_kernel", "exchange of megatron_fluid"),
        ("scatter_kernel", "exchange of megatron_fluid"),
        ("reduce_push_kernel", "exchange of megatron_fluid"),
        ("ncclDevKernel_SendRecv", "communication"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "GEMMs of libraries"),
        ("cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void multi_tensor_apply_kernel<AdamFunctorMaster>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        (
            "void at::native::unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, "
            "at::native::memory::LoadWithCast<2>>",
            "sums of tensors by torch",
        ),
        ("permute_kernel", "tokens moved, cast and activated"),
        ("rmsnorm_fwd_general_kernel", "normalisation"),
        ("triton_red_fused_sum", "other"),
    ],
)
def test_a_kernel_is_counted_by_what_it_is_for(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_in_which_two_kernels_run_counts_once() -> None:
    assert time_with_kernel([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert time_with_kernel([]) == 0.0


def test_ranks_meet_after_their_profilers_started_and_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Profiler:
        def __enter__(self) -> Profiler:
            calls.append("profiler")
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("end")

        def events(self) -> list[object]:
            return []

    monkeypatch.setattr(module.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module.torch.profiler, "profile", lambda **_: Profiler())
    result, found = kernel_times(lambda: calls.append("step"), lambda: calls.append("met"))
    assert calls == ["profiler", "met", "step", "end"]
    assert result is None and found["span_ms"] == 0.0
