"""What moves tokens to their experts and back: the interface between moe/autograd.py and the
transports.

A transport serves one call. `forward` and `backward` each give an Exchange: a dispatch, and the
combine that answers it. The backward moves gradients along the same routes: the transpose of
combine is dispatch, and the other way round.

    exchange = transport.forward(x, probs)
    for segment in exchange.segments():                     # rows arrive
        exchange.combine_product(segment, a, w2)            # and their results go back
    exchange.finish()
    y = exchange.results[0]

Experts that this package does not compute take the rows, and `combine_rows` sends what they return
(moe/open_exchange.py).

Implementations: moe/rounds (P2P exchanges over NCCL or gloo), moe/nvlink (symmetric memory),
moe/local (a group of one rank). A layer has a Backend, which plans a call and makes its transport;
moe/backends.py is the table of them.

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
    """Rows that have arrived from one source or from all of them, sorted by expert.

    Attributes:
        rows: tokens; in a backward, gradients of the experts' results. [n, H]
        groups: their division among the local experts.
        probs: what the activation of each row is multiplied with; None for ones, and in a backward.
            [n] or longer
        index: which segment of the exchange, as the transport counts them.
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
        """Dispatch. Segments come in the same order in forward and backward. What a transport
        launches around a segment, it launches when the next one is asked for: exhaust it."""
        ...

    def combine_product(
        self, segment: Segment, x: Tensor | Fp8Rows, matrices: Matrices,
        row_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Start sending the rows x[rows of e] @ matrices[e] back to where the segment came from:
        x [n, in], El matrices [in, H]; in a backward with the gradients of the probabilities [n].
        fp8 rows come with their Fp8Matrices.
        """
        self.combine_rows(segment, grouped_product(x, matrices, segment.groups), row_grad)

    def combine_rows(self, segment: Segment, rows: Tensor, row_grad: Tensor | None = None) -> None:
        """combine_product for rows [n, H] that are ready."""
        ...

    def run_queued(self, scheduler: WeightGradScheduler, submit: Callable[[], None]) -> None:
        """Of a backward whose weight gradients are deferred: run what is queued while results
        travel, and `submit` those of this layer, here for the exchange of the next one."""
        scheduler.finish_batch()
        submit()

    def finish(self, later: bool = False) -> None:
        """Complete the results on the current stream; here they are. With `later`, a transport may
        leave this to the node of autograd's graph that it put before the call."""
        return None


class TokenTransport(Protocol):
    """Moves the tokens of one call, forward and backward.

    Attributes:
        recomputable: which of "rows" and "hidden" a backward may compute again.
        regathers: whether recompute_rows involves this rank alone, so that it may run at any time.
        carries_packed_rows: whether tokens, gradients and the x of recompute_rows may be packed
            rows of fp8 (kernels/fp8_casts), narrower than H: what a segment then holds,
            bit for bit. Results are [T, H] all the same.
        starts_ahead: whether `start` launches anything, and a backward may leave dX on its way
            (`finish(later=True)`) until `wait_returning`.
        permutes: whether `accept` gives rows in an order of their own, which `leave` undoes.
    """

    recomputable: Collection[str] = ("hidden",)
    regathers: bool = False
    carries_packed_rows: bool = False
    starts_ahead: bool = False
    permutes: bool = False

    def check_experts(self, activation: Activation, num_experts: int, biased: bool) -> None:
        """Raise ConfigError where the experts cannot be computed over this transport."""
        return None

    def accept(self, x: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [T, H] and probabilities [T, K] as `forward` reads them, differentiably:
        contiguous, in a dtype and an order that the transport takes. Raises ConfigError where
        their shapes do not fit."""
        return x, probs

    def leave(self, y: Tensor) -> Tensor:
        """The forward's result as tokens [T, H], differentiably, where `accept` permuted them."""
        return y

    def start(self, x: Tensor, probs: Tensor | None) -> None:
        """Launch what need not wait for `forward`, which follows with the same tensors."""
        return None

    def wait_returning(self) -> None:
        """Complete the dX that a backward left on its way."""
        return None

    def forward(self, x: Tensor, probs: Tensor | None, keep: bool) -> Exchange:
        """Move tokens x. keep: the segments' rows outlive the call."""
        ...

    def backward(self, grad: Tensor, keep: bool) -> Exchange:
        """Move the gradient of the forward's result. keep: as above."""
        ...

    def recompute_rows(self, x: Tensor) -> list[Tensor]:
        """The forward's segments' rows again, by another dispatch."""
        raise AssertionError("rows are not among `recomputable`")


def check_tokens(x: Tensor, probs: Tensor | None, shape: Sequence[int]) -> None:
    """Raise ConfigError unless x is [T, H] and probs [T, K], of choices of `shape` [T, K]."""
    if x.shape[0] != shape[0] or (probs is not None and list(probs.shape) != list(shape)):
        found = f"{list(x.shape)}, {None if probs is None else list(probs.shape)}"
        raise ConfigError.of("x, probs", found, f"[{shape[0]}, H], {list(shape)}")


type ExpertPair = tuple[ExpertWeights, ExpertWeights, Activation]  # fc1, fc2, activation
type MakeTransport = Callable[[], TokenTransport]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a backend has to know of a layer, once.

    Attributes:
        group: the expert-parallel group.
        num_experts, top_k, ffn: E, K and F.
        name: of the layer, for errors and to identify exchanges.
        dx_chunks: as in MoEConfig.
        capacity_factor: of bounded mode, None for exact mode.
        captured: the rows that calls in a CUDA graph have room for; None where none is captured.
        room: how many times the tokens of the first call buffers are made for.
    """

    group: dist.ProcessGroup
    num_experts: int
    top_k: int
    ffn: int
    name: str
    dx_chunks: int = 1
    capacity_factor: float | None = None
    captured: LayerRoom | None = None
    room: int = 1


class Backend:
    """How one layer moves its tokens, standalone or Megatron's, with experts that this package
    computes or others. It holds no state of any call, and not the layer. One call::

        make = backend.plan(x, ids, probs, experts=..., again=recompute)
        y = run_experts(call, make())                     # or OpenExchange(make())

    A recomputation repeats all but the plan.

    Attributes:
        name: as in MoEConfig.backend.
        ascending: whether sums depend on the order of a token's choices, and Megatron's is wanted:
            experts in ascending order.
        exact_over: where tokens go, if this has neither bounded mode nor fp8.
    """

    name: str
    ascending = False
    exact_over: str | None = None

    def __init__(self, shape: LayerShape, rounds: P2PRounds) -> None:
        self.shape, self.rounds = shape, rounds

    def plan(
        self, x: Tensor, ids: Tensor, probs: Tensor, *, experts: ExpertPair | None, again: bool
    ) -> MakeTransport:
        """Route one call: what is returned makes its transport, and that of its recomputation.

        Args:
            x: tokens. [T, H]
            ids: integers, -1 where dropped. [T, K]
            probs: [T, K]
            experts: fc1, fc2 and activation; None where others compute them.
            again: whether the plan serves a recomputation, too.
        """
        raise NotImplementedError

    def check_overflow(self) -> None:
        """Raise FluidError where the capacity was exceeded."""
