"""fp8 experts on a Hopper GPU: the grouped GEMM against its reference over uneven groups, and the
layer on one rank against the same layer in bf16."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.kernels.fp8_casts import launch as casts
from megatron_fluid.kernels.fp8_casts.packed_rows import pack_rows, unpack_rows
from megatron_fluid.kernels.fp8_grouped_gemm.launch import (
    Fp8Matrices,
    Fp8Rows,
    fp8_grouped_matmul,
    fp8_sent_matmul,
)
from megatron_fluid.kernels.grouped_gemm.launch import Owners
from megatron_fluid.moe import fp8_experts
from megatron_fluid.moe.local.transport import LocalTransport
from tests.support import fp8_reference as reference
from tests.support.fp8_reference import cast_rows, cast_weights, scaled_grouped_product
from tests.support.machine import sms_in_use

HOPPER = torch.cuda.is_available() and is_hopper(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def operands(
    counts: list[int], width: int, depth: int, extra: int = 0
) -> tuple[Fp8Rows, Fp8Matrices, Tensor, list[int]]:
    """Rows with outliers, matrices, offsets on the device and on the host."""
    g = torch.Generator("cuda").manual_seed(1)
    ends = list(itertools.accumulate(counts))
    x = torch.randn(ends[-1] + extra, depth, device="cuda", generator=g)
    x[::7, ::50] *= 1e3
    w = torch.randn(len(counts), width, depth, device="cuda", generator=g) * depth**-0.5
    w[:, ::100, ::90] *= 30.0
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    return Fp8Rows(*cast_rows(x)), Fp8Matrices(*cast_weights(w)), offsets, ends


def gap(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


COUNTS = [
    [300],
    [1, 0, 63, 64, 65, 0, 127, 128, 129, 255, 256, 257, 0],
    [700, 3, 511, 513, 2050],
    [0, 0],
    [5] * 300,  # more experts than have room in shared memory
]


@pytest.mark.parametrize("counts", COUNTS, ids=lambda c: f"{len(c)} experts, {sum(c)} rows")
@pytest.mark.parametrize(("width", "depth"), [(256, 128), (384, 1152), (128, 512)])
def test_rows_of_every_expert_are_multiplied(counts: list[int], width: int, depth: int) -> None:
    x, w, offsets, ends = operands(counts, width, depth, extra=9)
    right = scaled_grouped_product(*x, *w, ends)
    for programs in (None, 2):
        with sms_in_use(programs):
            found = fp8_grouped_matmul(x, w, offsets)[: ends[-1]]
        assert found.dtype == torch.bfloat16 and bool(found.isfinite().all())
        if ends[-1]:
            error = (found.float() - right[: ends[-1]]).norm(dim=1) / right[: ends[-1]].norm(dim=1)
            assert float(error.max()) < 4e-3  # row by row: bf16's rounding, and tensor cores' sums
    again = fp8_grouped_matmul(x, w, offsets)[: ends[-1]]
    assert torch.equal(again, found)


def test_a_nan_stays_in_its_row_and_an_unknown_count_on_the_device() -> None:
    x, w, offsets, ends = operands([70, 200], 256, 512)
    clean = fp8_grouped_matmul(x, w, offsets)
    x.scales[1, 69] = float("nan")
    x.values.view(torch.uint8)[100, 300] = 0x7F
    found = fp8_grouped_matmul(x, w, offsets)
    assert bool(found[[69, 100]].isnan().all())
    others = [n for n in range(ends[-1]) if n not in (69, 100)]
    assert torch.equal(found[others], clean[others])


def test_rows_are_sent_to_their_owners() -> None:
    x, w, offsets, ends = operands([130, 0, 7, 290], 384, 256)
    rows, shift = ends[-1], 12
    buffers = [torch.zeros(rows, 384, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    order = torch.randperm(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    origins = (order + (torch.arange(rows, device="cuda") % 2 << shift)).int()
    addresses = torch.tensor([b.data_ptr() for b in buffers], device="cuda")
    fp8_sent_matmul(x, w, offsets, Owners(origins, addresses, shift))
    product = fp8_grouped_matmul(x, w, offsets)
    for rank, buffer in enumerate(buffers):
        mine = torch.arange(rows, device="cuda") % 2 == rank
        assert torch.equal(buffer[order[mine]], product[mine])
        assert not bool(buffer[order[~mine]].any())


@pytest.mark.parametrize("depth", [128, 384, 1152])
def test_rows_that_lie_in_packed_ones_are_multiplied_like_dense_ones(depth: int) -> None:
    counts = [3, 0, 130, 64]
    _, w, offsets, ends = operands(counts, 256, depth)
    x = torch.randn(ends[-1], depth, device="cuda", dtype=torch.bfloat16)
    packed = unpack_rows(pack_rows(x), depth)
    dense = casts.cast_rows(x)
    assert packed.values.stride(0) > depth and torch.equal(packed.scales, dense.scales)
    assert torch.equal(packed.values.float(), dense.values.float())
    assert torch.equal(casts.restore_rows(packed), casts.restore_rows(dense))
    assert torch.equal(
        fp8_grouped_matmul(packed, w, offsets), fp8_grouped_matmul(dense, w, offsets)
    )


@pytest.mark.parametrize("recompute", [(), ("rows",), ("hidden",), ("rows", "hidden")])
@pytest.mark.parametrize("hidden", [512, 384])
def test_tokens_cast_before_they_are_permuted_give_the_bits_of_rows_cast_afterwards(
    monkeypatch: pytest.MonkeyPatch, recompute: tuple[str, ...], hidden: int
) -> None:
    config = {"hidden_size": hidden, "ffn_hidden_size": 256, "num_experts": 8, "top_k": 3}
    layer = MoELayer(
        MoEConfig(**config, init_std=0.05, fp8_recipe="blockwise", recompute=recompute),  # type: ignore[arg-type]
        device="cuda",
        dtype=torch.bfloat16,
    )
    g = torch.Generator("cuda").manual_seed(3)
    given = torch.randn(2, 333, hidden, device="cuda", generator=g).bfloat16()
    # What a cast leaves as it is: dW2 is of dy as it was cast, or of bf16 dy.
    x, grad = (reference.restore_rows(*cast_rows(part)).bfloat16() for part in given)
    found: list[list[Tensor]] = []
    for packs in (True, False):
        monkeypatch.setattr(LocalTransport, "carries_packed_rows", packs)
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(leaf)
        y.backward(grad)
        assert layer.backend == "local" and leaf.grad is not None
        gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
        found.append([y.detach(), leaf.grad, *gradients])
    for value, right in zip(*found, strict=True):
        assert torch.equal(value, right)


@pytest.mark.parametrize("fp8_weight_grads", ["fp8", "bf16"])
@pytest.mark.parametrize("recompute", [(), ("hidden",), ("rows", "hidden")])
def test_the_layer_on_one_rank_against_bf16(
    recompute: tuple[str, ...], fp8_weight_grads: str
) -> None:
    config = {"hidden_size": 512, "ffn_hidden_size": 384, "num_experts": 8, "top_k": 2}
    fp8 = {"fp8_recipe": "blockwise", "fp8_weight_grads": fp8_weight_grads}
    kinds = {"bf16": {}, "fp8": {**fp8, "recompute": recompute}}
    found: dict[str, list[Tensor]] = {}
    for kind, settings in kinds.items():
        layer = MoELayer(
            MoEConfig(**config, init_std=0.05, **settings),  # type: ignore[arg-type]
            device="cuda",
            dtype=torch.bfloat16,
        )
        found[kind] = []
        for tokens in (700, 33):
            x = torch.randn(
                tokens, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(tokens)
            )
            x = x.bfloat16().requires_grad_()
            layer.zero_grad()
            y = layer(x)
            y.backward(torch.ones_like(y) + x.detach())
            assert layer.backend == "local" and x.grad is not None
            found[kind] += [y.detach(), x.grad]
            found[kind] += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    assert len(found["fp8"]) == len(found["bf16"])
    errors = [gap(v, r) for v, r in zip(found["fp8"], found["bf16"], strict=True)]
    assert max(errors) < 0.12, errors
    assert min(errors[0], errors[1]) > 0.01, "this was not fp8"


def test_a_graph_of_two_microbatches_casts_the_weights_once_in_each_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"hidden_size": 512, "ffn_hidden_size": 384, "num_experts": 8, "top_k": 2}
    layer = MoELayer(
        MoEConfig(**config, init_std=0.05, fp8_recipe="blockwise"),  # type: ignore[arg-type]
        device="cuda",
        dtype=torch.bfloat16,
    )
    made: list[object] = []
    plain = fp8_experts.cast_weights
    monkeypatch.setattr(fp8_experts, "cast_weights", lambda *given: made.append(plain(*given)))
    g = torch.Generator("cuda").manual_seed(3)
    given = [torch.randn(300, 512, device="cuda", generator=g).bfloat16() for _ in range(2)]

    def microbatches() -> list[Tensor]:
        return [layer(x).detach() for x in given]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        microbatches()
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), len(made)
    with torch.cuda.graph(graph, stream=side):
        found = microbatches()
    assert len(made) == before + 2, "of fc1 and of fc2"
    for scale in (1.0, 0.5):
        for param in layer.parameters():
            param.data.mul_(scale)  # past the version counter
        graph.replay()
        replayed = [y.clone() for y in found]
        with torch.no_grad():
            for param in layer.parameters():
                param.mul_(1.0)  # counted: an eager forward casts again
        eager = microbatches()
        for value, right in zip(replayed, eager, strict=True):
            assert torch.equal(value, right)
