"""batch_invariant on GPUs: a token has the same bits beside other tokens, on one rank and on
several, over every transport, in the training layer and in the inference layer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import MoEBaseline, MoELayer
from megatron_fluid.cuda.devices import is_hopper
from megatron_fluid.kernels.fixed_tiles.launch import fixed_tile_matmul, product_by_kernel
from megatron_fluid.low_latency import InferenceMoELayer
from tests.support.batch_invariance import bits_in_batches, tokens_seen
from tests.support.launch import run_ranks
from tests.support.machine import RANKS, SHARED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(RANKS < 1, reason="needs a GPU")]
WORLDS = [world for world in (1, 2, 4) if world <= RANKS]
HOPPER = torch.cuda.is_available() and is_hopper(0)
CONFIG: dict[str, Any] = {
    "hidden_size": 512, "ffn_hidden_size": 256, "num_experts": 16, "top_k": 4, "init_std": 0.05,
    "batch_invariant": True,
}  # fmt: skip
BF16, FP32 = torch.bfloat16, torch.float32
# By name: the dtype, how many times the numbers of other tokens, and what CONFIG changes.
CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "swiglu": (BF16, 40, {"shared_ffn_hidden_size": 256}),
    "sigmoid, gelu": (BF16, 40, {"score_function": "sigmoid", "activation": "gelu"}),
    "fp32": (FP32, 40, {"shared_ffn_hidden_size": 256}),
    "widths of no multiple of 8": (BF16, 20, {"ffn_hidden_size": 100, "activation": "relu2"}),
    # Tiles of up to nine units pay for some of these batches and not for others.
    "wide tiles": (BF16, 80, {"hidden_size": 4096, "num_experts": 4, "top_k": 2}),
    "fp8": (BF16, 40, {"fp8_recipe": "blockwise"}),
}
if not HOPPER:
    del CASES["fp8"]


def _kinds(world: int, case: str) -> list[str]:
    """What moves tokens. Rounds and plain all-to-alls have no fp8; gloo sends no GPU tensors."""
    exchanged = [] if SHARED or case == "fp8" else ["rounds", "baseline"]
    return (["local"] if world == 1 else ["nvlink"]) + exchanged


def _layer(kind: str, case: str) -> MoELayer | MoEBaseline:
    group, device = dist.group.WORLD, torch.device("cuda", torch.cuda.current_device())
    dtype, _, changes = CASES[case]
    if kind == "baseline":
        return MoEBaseline(CONFIG | changes, group, device=device, dtype=dtype)
    return MoELayer(CONFIG | changes | {"backend": kind}, group, device=device, dtype=dtype)


def _bits(layer: Any, rank: int, case: str, scale: int | None = None) -> Tensor:
    dtype, times, changes = CASES[case]
    hidden, device = (CONFIG | changes)["hidden_size"], torch.device("cuda")
    return bits_in_batches(layer, rank, hidden, dtype, device, times if scale is None else scale)


def _training(rank: int, world: int, case: str) -> dict[str, Tensor]:
    found = {}
    for kind in _kinds(world, case):
        layer = _layer(kind, case)
        found[f"{kind} on {world}"] = _bits(layer, rank, case)
        assert layer.backend == {"baseline": "all_to_all"}.get(kind, kind)
    return found


def _differing(ranks: list[dict[str, Tensor]]) -> list[str]:
    """Which layers gave bits that differ among their batches, or from the first layer's."""
    (first, *_) = ranks[0].values()
    every = [(name, bits) for found in ranks for name, bits in found.items()]
    return [name for name, bits in every if tokens_seen([first, bits]) > 1]


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_same_bits_in_every_batch_over_every_transport(case: str) -> None:
    ranks: list[dict[str, Tensor]] = []
    for world in WORLDS:
        ranks += run_ranks(_training, world, case, backend="nccl", timeout_s=200)
    assert _differing(ranks) == []


def _inference(rank: int, world: int, case: str) -> dict[str, Tensor]:
    training = _layer("auto", case)
    found = {f"training on {world}": _bits(training, rank, case, 2)}
    for transport in ("nvlink",) if SHARED else ("nvlink", "nccl"):
        layer = InferenceMoELayer.of(training, max_num_tokens=128, transport=transport)
        found[f"{transport} on {world}"] = _bits(layer, rank, case, 2)
        if transport == "nvlink":
            found[f"replayed on {world}"] = _bits(_replayed(layer), rank, case, 2)
        layer.destroy()
    return found


def _replayed(layer: InferenceMoELayer) -> Any:
    """The layer as a CUDA graph, replayed with other tokens."""

    def call(tokens: Tensor) -> Tensor:
        held = torch.zeros_like(tokens)
        layer(held)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(held)
        held.copy_(tokens)
        graph.replay()
        return out.clone()

    return call


@pytest.mark.parametrize("case", ["swiglu", "sigmoid, gelu"])
def test_the_inference_layer_gives_the_bits_of_the_training_layer(case: str) -> None:
    ranks: list[dict[str, Tensor]] = []
    for world in WORLDS:
        ranks += run_ranks(_inference, world, case, backend="nccl", timeout_s=200)
    assert _differing(ranks) == []


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("apart", [False, True], ids=["stacked", "a matrix for each expert"])
def test_the_kernel_with_fixed_tiles_multiplies(dtype: torch.dtype, apart: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    counts = [0, 70, 1, 0, 31, 33, 200]
    x = torch.randn(sum(counts) + 9, 200, device="cuda", generator=generator).to(dtype)
    weights = torch.randn(7, 90, 200, device="cuda", generator=generator).to(dtype).transpose(1, 2)
    offsets = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    given = [matrix.clone() for matrix in weights] if apart else weights
    out = torch.full((len(x), 90), -7.0, device="cuda", dtype=FP32)
    product_by_kernel(x, given, offsets, out)
    wanted = fixed_tile_matmul(x.cpu(), weights.cpu(), offsets.cpu(), dtype=FP32)
    used = sum(counts)
    torch.testing.assert_close(out[:used].cpu(), wanted[:used], rtol=1e-4, atol=1e-3)
    assert (out[used:] == -7.0).all()
    alone = torch.empty(1, 90, device="cuda", dtype=FP32)
    for row, expert in ((0, 1), (69, 1), (70, 2), (102, 5), (used - 1, 6)):
        one = (torch.arange(7, device="cuda") >= expert).int()
        product_by_kernel(x[row : row + 1], given, one, alone)
        assert torch.equal(alone[0], out[row]), row
