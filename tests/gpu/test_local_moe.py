"""The MoE layer of one rank on a GPU, with biases and without, against the layer in plain torch in
fp32: every gradient, every dtype, in CUDA graphs, and without a host read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import TransformerLayer
from megatron_fluid.moe.activations import Variant, resolve_activation
from megatron_fluid.moe.biases import ExpertBiases
from megatron_fluid.moe.expert_weights import RowGroups
from tests.support.captured import replayed
from tests.support.expert_calls import expert_rows, local_moe
from tests.support.machine import GPUS
from tests.support.moe_reference import moe_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]

SHAPES = {  # T, H, F, E, K
    "small": (300, 256, 128, 8, 2),
    "one token": (1, 512, 256, 16, 4),
    "fine": (1000, 1024, 384, 64, 8),
    "many choices": (257, 512, 128, 32, 22),
    "deep": (700, 4096, 256, 8, 2),  # larger tiles are considered
    "one expert": (130, 256, 128, 1, 1),
}
# Relative to the norm of what is right in fp32.
GPT_OSS = resolve_activation("quick_geglu", variant=Variant(None, 1.0))
ERRORS = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 2e-3}


@pytest.fixture(scope="module")
def group() -> dist.ProcessGroup:
    torch.cuda.set_device(0)
    return dist.ProcessGroup(dist.HashStore(), 0, 1)


@dataclass
class Call:
    ids: Tensor
    leaves: list[Tensor]
    grad: Tensor

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, kind: str = "", seed: int = 0,
        biased: bool = False,
    ) -> Call:  # fmt: skip
        """leaves: x, probs, w1, w2; where biased b1, b2."""
        tokens, hidden, ffn, experts, top_k = shape
        g = torch.Generator(device="cuda").manual_seed(seed)
        scores = torch.rand(tokens, experts, generator=g, device="cuda")
        if kind == "empty":
            scores[:, ::2] -= 10.0 if experts >= 2 * top_k else 0.0
        if kind == "hot":
            scores[:, 0] += 10.0
        ids = scores.topk(top_k, -1).indices
        if kind == "dropped":
            ids[torch.rand(ids.shape, generator=g, device="cuda") < 0.4] = -1
        if kind == "nothing":
            ids[:] = -1

        def normal(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*sizes, generator=g, device="cuda") * scale).to(dtype)

        leaves = [
            normal(tokens, hidden),
            torch.rand(tokens, top_k, generator=g, device="cuda"),
            normal(experts, 2 * ffn, hidden, scale=hidden**-0.5),
            normal(experts, hidden, ffn, scale=ffn**-0.5),
        ]
        if biased:
            leaves += [normal(experts, 2 * ffn), normal(experts, hidden)]
        return cls(ids, [leaf.requires_grad_() for leaf in leaves], normal(tokens, hidden))

    def run(self, group: dist.ProcessGroup, **settings: tuple[str, ...]) -> list[Tensor]:
        x, probs, w1, w2, *biases = self.leaves
        kind, given = (GPT_OSS, (biases[0], biases[1])) if biases else ("swiglu", None)
        y = local_moe(x, self.ids, probs, w1, w2, kind, biases=given, **settings)  # type: ignore[arg-type]
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]

    def right(self) -> list[Tensor]:
        leaves = [leaf.detach().float().requires_grad_() for leaf in self.leaves]
        x, probs, w1, w2, *biases = leaves
        kind, given = (GPT_OSS, (biases[0], biases[1])) if biases else ("swiglu", None)
        y = moe_reference(x, self.ids, probs, w1, w2, kind, given)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grad.float())]


def check(found: list[Tensor], call: Call) -> None:
    names = ("y", "dx", "dprobs", "dw1", "dw2", "db1", "db2")[: 1 + len(call.leaves)]
    for name, value, right in zip(names, found, call.right(), strict=True):
        error = float((value.float() - right).norm() / right.norm().clamp(min=1e-20))
        assert error < ERRORS[call.leaves[0].dtype], f"{name}: {error}"


def same(found: list[Tensor], right: list[Tensor]) -> None:
    for number, (value, other) in enumerate(zip(found, right, strict=True)):
        assert torch.equal(value, other), number


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_every_gradient_agree_with_fp32(group: dist.ProcessGroup, shape: str) -> None:
    call = Call.of(SHAPES[shape], torch.bfloat16)
    check(call.run(group), call)


@pytest.mark.parametrize("kind", ["empty", "hot", "dropped", "nothing"])
def test_uneven_routings(group: dist.ProcessGroup, kind: str) -> None:
    call = Call.of(SHAPES["fine"], torch.bfloat16, kind)
    check(call.run(group), call)


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("kind", ["", "empty", "hot", "dropped"])
def test_biases(group: dist.ProcessGroup, kind: str, dtype: torch.dtype) -> None:
    call = Call.of(SHAPES["fine"], dtype, kind, biased=True)
    found = call.run(group)
    check(found, call)
    same(call.run(group), found)
    same(call.run(group, recompute=("rows", "hidden")), found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_bias_gradients_of_fp64_probabilities_repeat_their_bits(dtype: torch.dtype) -> None:
    counts = [700, 0, 1, 900, 64, 33, 0, 1300]
    offsets = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    groups = RowGroups.of_counts(counts, offsets)
    rows = torch.randn(sum(counts), 256, device="cuda").to(dtype)
    scale = torch.rand(sum(counts), device="cuda", dtype=torch.float64)
    biases = ExpertBiases(torch.zeros(8, 256, device="cuda"), 8, 256)
    first = biases.sums(rows, groups, scale)
    right = [part.sum(0) for part in (rows.double() * scale[:, None]).split(counts)]
    torch.testing.assert_close(first.double(), torch.stack(right), rtol=1e-4, atol=1e-3)
    for _ in range(100):
        assert torch.equal(biases.sums(rows, groups, scale), first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    call = Call.of(SHAPES["small"], dtype, "dropped")
    check(call.run(group), call)


@pytest.mark.parametrize("what", [("rows",), ("hidden",), ("rows", "hidden")], ids=str)
def test_what_is_computed_again_has_the_same_bits(
    group: dist.ProcessGroup, what: tuple[str, ...]
) -> None:
    call = Call.of(SHAPES["fine"], torch.bfloat16, "dropped")
    same(call.run(group, recompute=what), call.run(group))


def test_runs_repeat_bitwise(group: dist.ProcessGroup) -> None:
    call = Call.of(SHAPES["fine"], torch.bfloat16)
    first = call.run(group)
    for _ in range(3):
        same(call.run(group), first)


@pytest.mark.parametrize("what", [(), ("rows",)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_captured_step_equals_the_eager_one_bit_for_bit(
    group: dist.ProcessGroup, what: tuple[str, ...], biased: bool
) -> None:
    fine, dtype = SHAPES["fine"], torch.bfloat16
    call = Call.of(fine, dtype, biased=biased)
    others = [Call.of(fine, dtype, kind, 7, biased) for kind in ("", "dropped", "hot")]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.run(group, recompute=what)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = call.run(group, recompute=what)
    for other in others:
        expected = other.run(group, recompute=what)
        with torch.no_grad():
            call.ids.copy_(other.ids)
            call.grad.copy_(other.grad)
            for mine, leaf in zip(call.leaves, other.leaves, strict=True):
                mine.copy_(leaf)
        graph.replay()
        torch.cuda.synchronize()
        same(captured, expected)


@pytest.mark.parametrize("router_dtype", [None, "fp32"])
def test_a_captured_transformer_layer_equals_the_eager_one(router_dtype: str | None) -> None:
    made = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = {"num_attention_heads": 4, "num_experts": 8, "top_k": 2, "router_dtype": router_dtype}
    layer = TransformerLayer({"hidden_size": 256, "ffn_hidden_size": 128, **sizes}, **made)  # type: ignore[arg-type]
    x, upstream = (torch.randn(64, 2, 256, **made) for _ in range(2))  # type: ignore[arg-type]
    x.requires_grad_()

    def step() -> list[Tensor]:
        y = layer(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]

    for captured, expected in replayed(step, x):
        for mine, right in zip(captured, expected, strict=True):  # attention adds in any order
            assert (mine - right).float().square().mean() < 1e-4 * right.float().square().mean()


@pytest.mark.parametrize("biased", [False, True])
def test_the_host_waits_for_nothing(group: dist.ProcessGroup, biased: bool) -> None:
    call = Call.of(SHAPES["fine"], torch.bfloat16, biased=biased)
    call.run(group)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run(group)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_matrices_that_lie_apart(group: dist.ProcessGroup) -> None:
    call = Call.of(SHAPES["fine"], torch.bfloat16)
    x, probs, w1, w2 = call.leaves
    apart = [[m.detach().clone().requires_grad_() for m in w.flip(0)][::-1] for w in (w1, w2)]
    y = local_moe(x, call.ids, probs, *apart)  # type: ignore[arg-type]
    dx, dprobs, *dw = torch.autograd.grad(y, [x, probs, *apart[0], *apart[1]], call.grad)
    count = len(apart[0])
    check([y.detach(), dx, dprobs, torch.stack(dw[:count]), torch.stack(dw[count:])], call)


def _experts(descending: bool, dtype: torch.dtype, counts: list[int]) -> list[Tensor]:
    """Output and every gradient of experts whose matrices lie in ascending or descending order."""
    g = torch.Generator("cuda").manual_seed(3)
    experts, hidden, ffn = len(counts), 256, 128
    step = -1 if descending else 1

    def matrices(*shape: int) -> list[Tensor]:
        values = torch.randn(experts, *shape, generator=g, device="cuda") * shape[1] ** -0.5
        stack = values.flip(0) if descending else values
        return [m.requires_grad_() for m in list(stack.to(dtype).unbind(0))[::step]]

    rows = torch.randn(sum(counts), hidden, generator=g, device="cuda").to(dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=g, device="cuda").requires_grad_()
    w1, w2 = matrices(2 * ffn, hidden), matrices(hidden, ffn)
    leaves = [rows, probs, *w1, *w2]
    y = expert_rows(rows, probs, counts, w1, w2)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weights_in_descending_order_make_the_same_bits(dtype: torch.dtype) -> None:
    counts = [70, 0, 1, 300, 64, 33, 0, 257]
    ascending = _experts(False, dtype, counts)
    for mine, right in zip(_experts(True, dtype, counts), ascending, strict=True):
        assert torch.equal(mine, right)
