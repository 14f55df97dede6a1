"""What a layer compiles in the background while it is built is what its calls launch: a kernel that
was compiled for other types, constants or alignments would be compiled again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.cuda import triton_launch
from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.kernels.fp8_casts import packed_rows as fp8_packed_rows
from megatron_fluid.moe import fused_activation, fused_router
from megatron_fluid.moe.activations import RowBiases, resolve_activation
from megatron_fluid.moe.local import kernel_transport
from megatron_fluid.moe.local.transport import compile_local_ahead

GPU = torch.device("cuda", 0)
T, H, F, E, K = 50, 64, 48, 6, 2

type Seen = set[tuple[object, ...]]


def _seen(launch: Launch, arguments: Sequence[Tensor | int]) -> tuple[object, ...]:
    """All that a compilation depends on."""
    kinds = [(a.dtype, a.data_ptr() % 16) if isinstance(a, Tensor) else type(a) for a in arguments]
    return launch._kernel.__name__, *kinds, *launch._constants.items(), launch._num_warps


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found: Seen = set()

    def record(self: Launch, grid: Any, arguments: Any, *rest: Any) -> None:
        found.add(_seen(self, arguments))

    def at_once(device: torch.device, kernels: Sequence[Any], call: Callable[[], object]) -> None:
        before = set(found)
        call()
        assert {name for name, *_ in found - before} <= {kernel.__name__ for kernel in kernels}

    monkeypatch.setattr(triton_launch.Launch, "_by_triton", record)
    for module in (fused_activation, fused_router, kernel_transport, fp8_packed_rows):
        monkeypatch.setattr(module, "rehearse", at_once)
    for ahead in (
        fused_activation.compile_ahead,
        fused_router.compile_ahead,
        kernel_transport.compile_ahead,
        fp8_packed_rows.compile_packed_ahead,
    ):
        ahead.cache_clear()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("probs_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_layers_kernels_are_those_of_its_calls(
    launched: Seen,
    dtype: torch.dtype,
    ids: torch.dtype,
    probs_dtype: torch.dtype,
    name: str,
    biased: bool,
) -> None:
    kind = resolve_activation(name), probs_dtype, biased
    compile_local_ahead(GPU, dtype, ids, (H, F, E, K), *kind)
    rehearsed = set(launched)
    launched.clear()

    routing = torch.zeros(T, K, dtype=ids), torch.ones(T, K, dtype=probs_dtype)
    plan = kernel_transport.make_plan(*routing, E, False)
    x = torch.zeros(T, H, dtype=dtype)
    rows = kernel_transport.permute(plan, x)
    h = torch.zeros(T * K, F * (2 if name == "swiglu" else 1), dtype=dtype)
    count, probs = plan.groups.count, plan.row_prob
    bias = RowBiases(h[:E], plan.groups.experts_of(T * K)) if biased else None
    if biased or (name, dtype) != ("swiglu", torch.bfloat16):  # else the GEMM has it
        fused_activation.fused_activation_forward(name, h, probs, count, bias=bias)
    kernel_transport.unpermute(plan, rows)
    da = torch.zeros(T * K, F, dtype=dtype)
    given = name, h, da, probs, count
    *_, dprobs = fused_activation.fused_activation_backward(*given, bias=bias)
    kernel_transport.unpermute(plan, rows, dprobs)
    assert rehearsed == launched and len(launched) >= 6


def test_an_fp8_layers_tokens_are_packed_and_moved_by_kernels_that_were_compiled_ahead(
    launched: Seen,
) -> None:
    wide, bf16 = 256, torch.bfloat16
    kind = resolve_activation("swiglu")
    compile_local_ahead(GPU, bf16, torch.int32, (wide, 128, E, K), kind, fp8=True)
    rehearsed = set(launched)
    launched.clear()

    plan = kernel_transport.make_plan(
        torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K), E, False
    )
    packed = kernel_transport.permute(
        plan, fp8_packed_rows.pack_rows(torch.zeros(T, wide, dtype=bf16))
    )
    fp8_packed_rows.unpack_rows(packed, wide)
    rows = torch.zeros(T * K, wide, dtype=bf16)
    kernel_transport.unpermute(plan, rows)
    kernel_transport.unpermute(plan, rows, torch.zeros(T * K))
    assert rehearsed == launched and len(launched) == 7


def test_a_routers_kernels_are_those_of_its_calls(launched: Seen) -> None:
    fused_router.compile_ahead(GPU, E, K)
    rehearsed = set(launched)
    launched.clear()
    logits = torch.zeros(T, E, requires_grad=True)
    _, probs = fused_router.topk_softmax(logits, K)
    probs.sum().backward()
    assert rehearsed == launched and len(launched) == 2


def test_nothing_is_compiled_for_a_cpu_or_for_an_activation_of_the_callers_own(
    launched: Seen,
) -> None:
    shape = (H, F, E, K)
    compile_local_ahead(
        torch.device("cpu"), torch.bfloat16, torch.int64, shape, resolve_activation("swiglu")
    )
    own = resolve_activation(torch.nn.functional.selu)
    compile_local_ahead(GPU, torch.bfloat16, torch.int64, shape, own)
    assert not launched
