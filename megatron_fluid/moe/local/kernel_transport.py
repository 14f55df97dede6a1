"""The local transport by kernels: tokens are planned, brought into expert order and summed by one
kernel each, in plain memory, and the host reads nothing where one GEMM takes all experts. Forward
and backward can be captured in a CUDA graph, and compute the same bits there.

A gather of its own, not in the GEMM's loads: docs/tuning_notes.md#one-gpu.

Shapes: T tokens, K top-k, E experts, H hidden, N = T * K expert rows, fewer where choices are
dropped.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, aligned, power_of_two
from megatron_fluid.kernels.grouped_gemm.launch import host_ends
from megatron_fluid.kernels.move_tokens.kernel import row_pieces
from megatron_fluid.kernels.move_tokens.permute import (
    count_choices_kernel,
    permute_kernel,
    sort_choices_kernel,
    unpermute_kernel,
)
from megatron_fluid.moe.expert_weights import RowGroups
from megatron_fluid.moe.transport import Exchange, Segment, TokenTransport, check_tokens

__all__ = ["KernelPlan", "KernelTransport", "likely_ends", "make_plan", "permute", "unpermute"]

# Of probabilities, as kernels read them; their gradients are rounded to the same.
PROB_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAN_TOKENS = 32  # of one program of the plan
_WARPS = 4  # of a program that moves rows, one token each


@functools.cache
def _plan_launches(
    device: torch.device, ids: torch.dtype, probs: torch.dtype, top_k: int, experts: int
) -> tuple[Launch, Launch]:
    """Counting and sorting, of ids and probabilities of these dtypes."""
    # Triton 3.6 fails to compile some gathers and scans of rows narrower than 16 bytes: pad E.
    padded = max(4, power_of_two(experts))
    shape = {"E": experts, "EP": padded, "BT": _PLAN_TOKENS}
    count = Launch(count_choices_kernel, _WARPS, {"K": top_k, **shape})
    shape = {"K": top_k, "KP": power_of_two(top_k), **shape, "RB": max(4, min(32, 4096 // padded))}
    return count, Launch(sort_choices_kernel, _WARPS, shape)


@functools.cache
def _permute_launch(device: torch.device, dtype: torch.dtype, hidden: int, top_k: int) -> Launch:
    # Of more experts a token, the rows' numbers take the registers of values in flight.
    in_flight = (8 if top_k <= 16 else 4) * 2 // dtype.itemsize
    constants = {"H": hidden, "K": top_k, "ROWS": _WARPS} | row_pieces(hidden, max(1, in_flight))
    return Launch(permute_kernel, _WARPS, constants)


@functools.cache
def _unpermute_launch(
    device: torch.device, dtype: torch.dtype, hidden: int, top_k: int, grads: torch.dtype | None
) -> Launch:
    """grads: of the probabilities, None without."""
    in_flight = (8 if top_k > 2 else 16) // dtype.itemsize
    constants: dict[str, object] = {"HAS_GRAD": grads is not None, "H": hidden, "K": top_k}
    constants["ROWS"] = _WARPS
    return Launch(unpermute_kernel, _WARPS, constants | row_pieces(hidden, in_flight))


@dataclass(frozen=True)
class KernelPlan:
    """Where every token of one call goes. Made by the forward, used again by the backward.

    Attributes:
        offsets: rows up to and including each expert. int32 [E]
        inverse: the row of each choice, -1 where dropped. int32 [T, K]
        row_prob: the probability of each row. fp32 [T * K]
        groups: the rows' division among the experts.
        probs: dtype of the probabilities that were given, and of their gradients.
    """

    offsets: Tensor
    inverse: Tensor
    row_prob: Tensor
    groups: RowGroups
    probs: torch.dtype = torch.float32


@functools.lru_cache(maxsize=256)
def likely_ends(rows: int, experts: int) -> tuple[int, ...]:
    """Where the experts' rows end if each row draws its expert by chance: quantiles of the normal
    distribution of an expert's count. A guess without a host read, for choices that only speed
    depends on."""
    spread = statistics.NormalDist(rows / experts, max((rows / experts) ** 0.5, 1e-3))
    ends, total = [], 0.0
    for e in range(experts):
        total += max(0.0, spread.inv_cdf((e + 0.5) / experts))
        ends.append(min(rows, round(total)))
    return tuple(ends)


def make_plan(ids: Tensor, probs: Tensor, experts: int, read_ends: bool) -> KernelPlan:
    """The plan of ids [T, K] (integers, -1 where dropped) and probs [T, K] (fp32 or
    16-bit floats), T at least 1. read_ends: the host waits for the offsets."""
    ids, probs, device = aligned(ids), aligned(probs.detach()), ids.device
    tokens, top_k = ids.shape
    rows, blocks = tokens * top_k, -(-tokens // _PLAN_TOKENS)
    counts = torch.empty(blocks, experts, dtype=torch.int32, device=device)
    offsets = torch.empty(experts, dtype=torch.int32, device=device)
    inverse = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    row_prob = torch.empty(rows, dtype=torch.float32, device=device)
    count, sort = _plan_launches(device, ids.dtype, probs.dtype, top_k, experts)
    count((blocks, 1), (ids, counts, tokens))
    sort((blocks, 1), (ids, probs, counts, offsets, inverse, row_prob, tokens, blocks))
    ends = host_ends(offsets, None) if read_ends else None
    likely = likely_ends(rows, experts) if ends is None else None
    groups = RowGroups(offsets, ends, likely, offsets[-1:], filled=True)
    return KernelPlan(offsets, inverse, row_prob, groups, probs.dtype)


def permute(plan: KernelPlan, x: Tensor) -> Tensor:
    """x [T, H] in expert order: [N, H]. Dropped choices leave rows at the end unwritten."""
    (tokens, top_k), hidden = plan.inverse.shape, x.shape[1]
    ends = plan.groups.ends
    out = x.new_empty(tokens * top_k if ends is None else ends[-1], hidden)
    launch = _permute_launch(x.device, x.dtype, hidden, top_k)
    launch((-(-tokens // _WARPS), 1), (x, plan.inverse, out, tokens))
    return out


def unpermute(
    plan: KernelPlan, y: Tensor, row_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sum of each token's rows y [N, H], in fp32 by k, in y's dtype [T, H]; with row_grad fp32
    [N] also that by choice, in the dtype of the plan's probabilities [T, K]."""
    (tokens, top_k), hidden = plan.inverse.shape, y.shape[1]
    out = y.new_empty(tokens, hidden)
    grads, kind = None, None if row_grad is None else plan.probs
    if kind is not None:
        grads = torch.empty(tokens, top_k, dtype=kind, device=y.device)
    launch = _unpermute_launch(y.device, y.dtype, hidden, top_k, kind)
    of_probs = (plan.row_prob, plan.row_prob) if grads is None else (row_grad, grads)
    launch((-(-tokens // _WARPS), 1), (y, plan.inverse, out, *of_probs, tokens))  # type: ignore[arg-type]
    return out, grads


class KernelTransport(TokenTransport):
    """Moves the tokens of one call within this rank. Arguments of its plan: see make_plan."""

    recomputable = ("rows", "hidden")
    regathers = True
    carries_packed_rows = True

    def __init__(self, plan: KernelPlan) -> None:
        self.plan = plan

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [T, H], probs [T, K]"""
        check_tokens(x, probs, self.plan.inverse.shape)
        if probs is not None and probs.dtype not in PROB_DTYPES:
            probs = probs.float()
        return aligned(x), probs

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> _KernelExchange:
        return _KernelExchange(self.plan, x)

    def backward(self, grad: Tensor, keep: bool) -> _KernelExchange:
        return _KernelExchange(self.plan, aligned(grad))

    def recompute_rows(self, x: Tensor) -> list[Tensor]:
        return [permute(self.plan, x)]


class _KernelExchange(Exchange):
    def __init__(self, plan: KernelPlan, x: Tensor) -> None:
        self.plan, self.x = plan, x
        self.results: list[Tensor] = []

    def segments(self) -> Iterator[Segment]:
        plan = self.plan
        yield Segment(permute(plan, self.x), plan.groups, plan.row_prob)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        out, grads = unpermute(self.plan, aligned(rows), row_grad)
        self.results = [out] if grads is None else [out, grads]
