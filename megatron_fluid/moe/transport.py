"""The interface between moe/autograd.py and the transports, which move tokens to their experts and
back.

A transport serves one call. `forward` and `backward` each return an Exchange: a dispatch and its
combine. The backward moves gradients along the same routes, because dispatch and combine are each
other's transpose.

    exchange = transport.forward(x, probs)
    for segment in exchange.segments():                     # rows arrive
        exchange.combine_product(segment, a, w2)            # and their results go back
    exchange.finish()
    y = exchange.results[0]

If other code computes the experts, it gets the segments' rows, and `combine_rows` sends back its
results (moe/open_exchange.py).

Implementations: moe/rounds (P2P exchanges over NCCL or gloo), moe/nvlink (symmetric memory),
moe/hierarchical (several hosts), moe/local (a group of one rank). A layer has a Backend, which
plans each call and makes its transport. moe/backends.py lists the backends.

Shapes: T tokens, K top-k, n rows of a segment, H hidden, El local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.comm.p2p_rounds import P2PRounds
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import ExpertWeights, Matrices, RowGroups, grouped_product
from megatron_fluid.moe.room import LayerRoom

__all__ = [
    "Backend",
    "Exchange",
    "ExpertPair",
    "LayerShape",
    "MakeTransport",
    "Segment",
    "TokenTransport",
    "check_tokens",
]


@dataclass(slots=True)
class Segment:
    """Rows received from some or all of the ranks, sorted by expert.

    Attributes:
        rows: tokens; in a backward, gradients of the experts' results. [n, H]
        groups: which rows belong to which local expert.
        probs: factor of each row's activation. None means 1; always None in a backward.
            [n] or longer
        index: the transport's number for this segment of the exchange.
    """

    rows: Tensor
    groups: RowGroups
    probs: Tensor | None = None
    index: int = 0


class Exchange(Protocol):
    """One dispatch and its combine.

    Attributes:
        results: complete after `finish`. Forward: y. Backward: dx, and dprobs if there are
            probabilities.
    """

    results: list[Tensor]

    def segments(self) -> Iterator[Segment]:
        """Dispatch, and yield segments in the same order in forward and backward. Exhaust the
        iterator: a transport may launch work of one segment when it is asked for the next."""
        ...

    def combine_product(
        self, segment: Segment, x: Tensor | Fp8Rows, matrices: Matrices,
        row_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start sending the rows x[rows of e] @ matrices[e] back to the segment's source ranks.
        x is [n, in], and there are El matrices [in, H]. Fp8Rows need Fp8Matrices. row_grad: in a
        backward, the gradients of the probabilities [n].
        """
        self.combine_rows(segment, grouped_product(x, matrices, segment.groups), row_grad)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        """Like combine_product, for rows [n, H] that are computed already."""
        ...

    def run_queued(self, scheduler: WeightGradScheduler, submit: Callable[[], None]) -> None:
        """In a backward with deferred weight gradients: run queued ones while results travel, and
        `submit` this layer's. By default these wait for the next layer's exchange."""
        scheduler.finish_batch()
        submit()

    def finish(self, later: bool = False) -> None:
        """Complete the results on the current stream. By default they are complete already. With
        `later`, a transport that `starts_ahead` may leave dX to `wait_returning`."""
        return None


class TokenTransport(Protocol):
    """Moves the tokens of one call, forward and backward.

    Attributes:
        recomputable: which of "rows" and "hidden" a backward can recompute.
        regathers: whether recompute_rows needs no other rank, so that it may run at any time.
        carries_packed_rows: whether tokens, gradients and the x of recompute_rows may be packed
            fp8 rows (kernels/fp8_casts), narrower than H. Segments then hold these rows, bit for
            bit. Results are always [T, H].
        starts_ahead: whether `start` launches anything, and `finish(later=True)` may leave dX in
            flight until `wait_returning`.
        permutes: whether `accept` permutes the tokens, which `leave` undoes.
    """

    recomputable: Collection[str] = ("hidden",)
    regathers: bool = False
    carries_packed_rows: bool = False
    starts_ahead: bool = False
    permutes: bool = False

    def check_experts(self, activation: Activation, num_experts: int, biased: bool) -> None:
        """Raise ConfigError if this transport cannot serve these experts."""
        return None

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Convert tokens [T, H] and probabilities [T, K] to `forward`'s input: contiguous, in the
        transport's dtype and order. Differentiable. Raises ConfigError if shapes do not fit."""
        return x, probs

    def leave(self, y: Tensor) -> Tensor:
        """Undo the permutation of `accept` on the forward's result [T, H]. Differentiable."""
        return y

    def start(self, x: Tensor, probs: Tensor | None) -> None:
        """Launch what can precede `forward`, which must follow with the same tensors."""
        return None

    def wait_returning(self) -> None:
        """Complete the dX that `finish(later=True)` left in flight."""
        return None

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> Exchange:
        """Exchange tokens x. keep: the caller holds the segments' rows after the exchange."""
        ...

    def backward(self, grad: Tensor, keep: bool) -> Exchange:
        """Exchange the gradient of the forward's result. keep: as in `forward`."""
        ...

    def recompute_rows(self, x: Tensor) -> list[Tensor]:
        """Dispatch x again and return the rows of the forward's segments."""
        raise AssertionError("rows are not among `recomputable`")


def check_tokens(x: Tensor, probs: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless x is [T, H] and probs None or [T, K]. shape: [T, K]"""
    if x.shape[0] != shape[0] or (probs is not None and list(probs.shape) != list(shape)):
        found = f"{list(x.shape)}, {None if probs is None else list(probs.shape)}"
        raise ConfigError.of("x, probs", found, f"[{shape[0]}, H], {list(shape)}")


type ExpertPair = tuple[ExpertWeights, ExpertWeights, Activation]  # fc1, fc2, activation
type MakeTransport = Callable[[], TokenTransport]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a backend needs to know about a layer; the same in every call.

    Attributes:
        group: the expert-parallel group.
        num_experts, top_k, ffn: E, K and F.
        name: the layer's name, for errors and to identify exchanges.
        dx_chunks: as in MoEConfig.
        capacity_factor: the factor of bounded mode; None means exact mode.
        captured: gives the capacity of calls in a CUDA graph; None if no call is captured.
        batch_invariant: a token's rows are summed in the order of its choices, whatever the ranks.
        room: buffers are sized for the first call's tokens times this.
    """

    group: dist.ProcessGroup
    num_experts: int
    top_k: int
    ffn: int
    name: str
    dx_chunks: int = 1
    capacity_factor: float | None = None
    captured: LayerRoom | None = None
    batch_invariant: bool = False
    room: int = 1


class Backend:
    """Makes the transports of one layer, standalone or Megatron's, whoever computes its experts. It
    holds no state of a call and no reference to the layer. One call::

        make = backend.plan(x, ids, probs, experts=..., again=recompute)
        y = run_experts(call, make())                     # or OpenExchange(make())

    A recompute repeats everything except the plan.

    Attributes:
        name: as in MoEConfig.backend.
        ascending: whether a token's choices must be sorted by expert. Rows are then summed in that
            order, as in Megatron.
        exact_over: None if there is bounded mode or fp8, else what to call this path in errors.
    """

    name: str
    ascending = False
    exact_over: str | None = None

    def __init__(self, shape: LayerShape, rounds: P2PRounds) -> None:
        self.shape, self.rounds = shape, rounds

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        """Route one call. The returned function makes its transport, also for a recompute.

        Args:
            x: tokens. [T, H]
            ids: expert of each choice, as integers; -1 means dropped. [T, K]
            probs: [T, K]
            experts: fc1, fc2 and activation; None if other code computes the experts.
            again: whether the plan must also serve a recompute.
        """
        raise NotImplementedError

    def check_overflow(self) -> None:
        """Raise FluidError if an earlier call exceeded the capacity."""
