"""The routing of one call on one rank, by kernels: one kernel each plans tokens, brings them into
expert order and sums them, in plain memory. The host reads nothing where one GEMM takes all
experts. Forward and backward can be captured in a CUDA graph, and compute the same bits there.

A gather of its own, not in the GEMM's loads: docs/tuning_notes.md#one-gpu.

Shapes: T tokens, K top-k, E experts, H hidden, N = T * K expert rows, fewer where choices are
dropped.
"""

from __future__ import annotations

import functools
import statistics
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

__all__ = ["KernelPlan", "likely_ends", "make_plan"]

# Of probabilities, as kernels read them; their gradients are rounded to the same.
_PROB_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


@dataclass(frozen=True)
class KernelPlan:
    """Where every token of one call goes. Made by the forward, used again by the backward. Its
    methods are those of LocalPlan.

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

    @property
    def shape(self) -> torch.Size:
        """[T, K]"""
        return self.inverse.shape

    def wide_probs(self, probs: Tensor) -> Tensor:
        """Probabilities in a dtype that the kernels read."""
        return probs if probs.dtype in _PROB_DTYPES else probs.float()

    def row_probs(self, probs: Tensor) -> Tensor:
        """The probability of each row, as planned. fp32 [T * K]"""
        return self.row_prob

    def permute(self, x: Tensor) -> Tensor:
        """x [T, H] in expert order: [N, H]. Dropped choices leave rows at the end unwritten."""
        (tokens, top_k), hidden = self.inverse.shape, x.shape[1]
        ends, x = self.groups.ends, aligned(x)
        out = x.new_empty(tokens * top_k if ends is None else ends[-1], hidden)
        launch = _permute_launch(x.device, x.dtype, hidden, top_k)
        launch((-(-tokens // _WARPS), 1), (x, self.inverse, out, tokens))
        return out

    def unpermute(self, rows: Tensor, row_grad: Tensor | None = None) -> list[Tensor]:
        """The sum of each token's rows [N, H], in fp32 by k, in their dtype [T, H]; with row_grad
        fp32 [N] also that by choice, in the dtype of the plan's probabilities [T, K]."""
        (tokens, top_k), rows = self.inverse.shape, aligned(rows)
        found = [rows.new_empty(tokens, rows.shape[1])]
        of_probs, kind = (self.row_prob, self.row_prob), None
        if row_grad is not None:
            kind = self.probs
            found.append(torch.empty(tokens, top_k, dtype=kind, device=rows.device))
            of_probs = row_grad, found[1]
        launch = _unpermute_launch(rows.device, rows.dtype, rows.shape[1], top_k, kind)
        launch((-(-tokens // _WARPS), 1), (rows, self.inverse, found[0], *of_probs, tokens))
        return found


def make_plan(ids: Tensor, probs: Tensor, experts: int, read_ends: bool) -> KernelPlan:
    """The plan of ids [T, K] (integers, -1 where dropped) and probs [T, K], T at least 1.
    read_ends: the host waits for the offsets."""
    probs = probs.detach() if probs.dtype in _PROB_DTYPES else probs.detach().float()
    ids, probs, device = aligned(ids), aligned(probs), ids.device
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
