"""Cases of overlapped MoE layers against the oracle, for pytest (gloo ranks) and torchrun.

A case stacks layers with residual connections over fixed random routings. Every rank computes the
whole oracle by itself and compares its own part: outputs, dX, dprobs, and every weight gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.moe.hierarchical.plan import plan_hierarchical
from megatron_fluid.moe.rounds.plan import ExactPlan
from tests.support.expert_calls import hierarchical_moe, overlapped_moe
from tests.support.launch import world_group
from tests.support.moe_reference import moe_reference, routing

# Relative error of a whole tensor, in the 2-norm. In fp64 anything but rounding is caught.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    """Weights are "stacked", "tuple" (one parameter for each expert) or "in_out" (the transposed
    layout). The activation "callable" is one that only autograd can differentiate.
    """

    routing: str = "random"  # a name in ROUTINGS
    tokens: int = 13  # of the largest rank; the others' number depends on the routing
    top_k: int = 2
    experts_per_rank: int = 2
    layers: int = 1
    microbatches: int = 1
    dx_chunks: int = 1
    deferred: bool = False  # weight gradients go through the scheduler
    activation: str = "swiglu"
    weights: str = "stacked"
    dtype: torch.dtype = torch.float64
    train_tokens: bool = True  # the first layer's tokens, and probabilities, want gradients
    seed: int = 0
    hidden: int = 16
    ffn: int = 24
    chunks: int | None = None  # pieces of tokens between hosts; None: the transport of one level

    @property
    def gain(self) -> float:
        """Weight of a layer in the residual sum. With tanh before each layer it keeps deep stacks
        well conditioned: else rounding errors grow with a power of the depth."""
        return 1.0 / self.layers

    def __str__(self) -> str:
        """Its name: whatever differs from the defaults."""
        parts = [self.routing]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name != "routing" and value != f.default:
                parts.append(f"{f.name}={str(value).removeprefix('torch.')}")
        return ",".join(parts)


# name -> (how ids are drawn, tokens of rank r of w, given those of the largest)
ROUTINGS: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "random": ("random", lambda n, r, w: n), "uneven": ("random", lambda n, r, w: n * (r + 1) // w),
    "first rank has no tokens": ("random", lambda n, r, w: 0 if r == 0 else n),
    "only the last rank has tokens": ("random", lambda n, r, w: n if r == w - 1 else 0),
    "all to one expert": ("same expert twice", lambda n, r, w: n),
    "empty experts": ("empty", lambda n, r, w: max(0, n - r)),
    "masked": ("dropped", lambda n, r, w: n), "all masked": ("nothing", lambda n, r, w: n),
}  # fmt: skip


def _odd_activation(h: Tensor) -> Tensor:
    return torch.sin(h) * torch.sigmoid(h)


@dataclass
class _Inputs:
    """Of a microbatch, all ranks: x [T, H], the output's grad [T, H], ids and probs [T, K]."""

    counts: list[int]
    x: Tensor
    grad: Tensor
    ids: list[Tensor]
    probs: list[Tensor]

    def rows(self, rank: int) -> slice:
        """Of a rank's tokens."""
        begin = sum(self.counts[:rank])
        return slice(begin, begin + self.counts[rank])


def _draw(case: Case, world: int, microbatch: int) -> _Inputs:
    g = torch.Generator().manual_seed(1000 * case.seed + microbatch)
    kind, tokens_of = ROUTINGS[case.routing]
    counts = [tokens_of(case.tokens + microbatch, rank, world) for rank in range(world)]
    experts, total = case.experts_per_rank * world, sum(counts)
    ids = [
        torch.cat([routing(kind, n, experts, case.top_k, g) for n in counts])
        for _ in range(case.layers)
    ]
    probs = [
        torch.rand(total, case.top_k, generator=g, dtype=torch.float64) + 0.5
        for _ in range(case.layers)
    ]
    x = torch.randn(total, case.hidden, generator=g, dtype=torch.float64)
    grad = torch.randn(total, case.hidden, generator=g, dtype=torch.float64)
    return _Inputs(counts, x, grad, ids, probs)


def _weights(case: Case, world: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(7 + case.seed)
    experts = case.experts_per_rank * world
    width = case.ffn * (2 if case.activation in ("swiglu", "geglu") else 1)
    return [
        (
            torch.randn(experts, width, case.hidden, generator=g, dtype=torch.float64) * 0.5,
            torch.randn(experts, case.hidden, case.ffn, generator=g, dtype=torch.float64) * 0.5,
        )
        for _ in range(case.layers)
    ]


def _activation(case: Case) -> str | Callable[[Tensor], Tensor]:
    return _odd_activation if case.activation == "callable" else case.activation


def oracle(case: Case, world: int, rank: int, drop: bool = False) -> dict[str, Tensor]:
    """What this rank should find, in fp64 on the CPU. With `drop`, one choice of this rank's first
    layer is lost."""
    weights = [(a.requires_grad_(), b.requires_grad_()) for a, b in _weights(case, world)]
    found: dict[str, Tensor] = {}
    for m in range(case.microbatches):
        inputs = _draw(case, world, m)
        if drop and m == 0:
            mine = inputs.ids[0][inputs.rows(rank)]
            kept = (mine >= 0).nonzero()
            if len(kept):
                mine[kept[0, 0], kept[0, 1]] = -1
        x = inputs.x.requires_grad_()
        probs = [p.requires_grad_() for p in inputs.probs]
        y = x
        for ids, p, (w1, w2) in zip(inputs.ids, probs, weights, strict=True):
            y = y + case.gain * moe_reference(torch.tanh(y), ids, p, w1, w2, _activation(case))
        (y * inputs.grad).sum().backward()
        rows = inputs.rows(rank)
        found[f"out {m}"] = y[rows].detach()
        if case.train_tokens:
            found[f"dX {m}"] = _gradient(x)[rows]
            for layer, p in enumerate(probs):
                found[f"dprobs {m}.{layer}"] = _gradient(p)[rows]
    local = slice(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)
    for layer, (w1, w2) in enumerate(weights):
        found[f"dW1 {layer}"], found[f"dW2 {layer}"] = _gradient(w1)[local], _gradient(w2)[local]
    return found


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _parameters(case: Case, weight: Tensor, device: torch.device) -> list[Tensor]:
    weight = weight.to(device, case.dtype)
    if case.weights == "tuple":
        return [one.clone().requires_grad_() for one in weight]
    if case.weights == "in_out":
        weight = weight.transpose(1, 2).contiguous()
    return [weight.clone().requires_grad_()]


def _stacked_gradient(case: Case, parameters: list[Tensor]) -> Tensor:
    assert all(p.grad is not None for p in parameters), "a weight without a gradient"
    gradients = [_gradient(p) for p in parameters]
    if case.weights == "tuple":
        return torch.stack(gradients)
    return gradients[0].transpose(1, 2) if case.weights == "in_out" else gradients[0]


def overlapped(case: Case, group: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """What this rank does find."""
    rounds = shared_rounds(group)
    world, rank = rounds.world_size, rounds.rank
    local = slice(rank * case.experts_per_rank, (rank + 1) * case.experts_per_rank)
    weights = [
        (_parameters(case, w1[local], device), _parameters(case, w2[local], device))
        for w1, w2 in _weights(case, world)
    ]
    scheduler = WeightGradScheduler()
    if case.deferred:
        scheduler.enable()
    probs_dtype = torch.promote_types(case.dtype, torch.float32)
    found: dict[str, Tensor] = {}
    for m in range(case.microbatches):
        inputs = _draw(case, world, m)
        mine = inputs.rows(rank)
        x = inputs.x[mine].to(device, case.dtype).requires_grad_(case.train_tokens)
        probs = [
            p[mine].to(device, probs_dtype).requires_grad_(case.train_tokens) for p in inputs.probs
        ]
        y = x
        for layer, (w1, w2) in enumerate(weights):
            ids, total = inputs.ids[layer][mine].to(device), case.experts_per_rank * world
            stacked = (w1, w2) if case.weights == "tuple" else (w1[0], w2[0])
            tokens, act = torch.tanh(y), _activation(case)
            settings: dict[str, Any] = {
                "scheduler": scheduler,
                "name": f"layer {layer}",
                "layout": "in_out" if case.weights == "in_out" else "out_in",
            }
            plan: Any
            if case.chunks is not None:
                plan = plan_hierarchical(ids, total, rounds, 0, chunks=case.chunks)
                call = hierarchical_moe
            else:
                plan = ExactPlan.from_topk(ids, total, rounds)
                call, settings["dx_chunks"] = overlapped_moe, case.dx_chunks
            out = call(tokens, probs[layer], plan, *stacked, act, rounds, **settings)
            y = y + case.gain * out
        y.backward(inputs.grad[mine].to(device, case.dtype))
        assert scheduler.pending() == 0, "tasks are left after backward"
        found[f"out {m}"] = y.detach()
        if case.train_tokens:
            found[f"dX {m}"] = _gradient(x)
            for layer, p in enumerate(probs):
                found[f"dprobs {m}.{layer}"] = _gradient(p)
    for layer, (w1, w2) in enumerate(weights):
        found[f"dW1 {layer}"] = _stacked_gradient(case, w1)
        found[f"dW2 {layer}"] = _stacked_gradient(case, w2)
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of `expected` (itself, where 0); NaN is never small."""
    difference = (found.detach().to(expected.device).double() - expected.double()).norm().item()
    scale = expected.double().norm().item()
    return difference / scale if scale else difference


def check_case(case: Case, group: dist.ProcessGroup, device: torch.device) -> float:
    """Run one case on this rank and return its largest relative error. It fails when a quantity is
    off, or when the tolerance is so wide that a lost row would not have been seen."""
    rank, world = group.rank(), group.size()
    tolerance = TOLERANCE[case.dtype] * case.layers  # rounding errors grow with depth
    expected, found = oracle(case, world, rank), overlapped(case, group, device)
    assert found.keys() == expected.keys(), f"{case}: {found.keys() ^ expected.keys()}"
    assert all(found[name].shape == right.shape for name, right in expected.items()), case
    errors = {name: relative_error(found[name], right) for name, right in expected.items()}
    # Written so that a NaN fails.
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not bad, f"rank {rank} of {world}, {case}: errors beyond {tolerance:g}: {bad}"
    inputs = _draw(case, world, 0)
    # In fp64 anything but rounding was caught, and a row may well be zero by nature (squared ReLU).
    if case.dtype != torch.float64 and (inputs.ids[0][inputs.rows(rank)] >= 0).any():
        lost = relative_error(oracle(case, world, rank, drop=True)["out 0"], expected["out 0"])
        assert lost > 1.5 * tolerance, (
            f"{case}: the tolerance {tolerance:g} could not catch a lost row ({lost:g})"
        )
    return max(errors.values())


def run_cases(rank: int, world: int, cases: Sequence[Case]) -> float:
    """Body of a gloo rank: all cases, one after the other. Returns the largest relative error."""
    return max(check_case(case, world_group(), torch.device("cpu")) for case in cases)
