"""One call of a layer's experts: what its caller wants.

    call = ExpertCall(x=x, probs=probs, w1=w1, w2=w2, num_experts=El)
    y = run_experts(call, transport)                       # moe/autograd.py

Shapes: T tokens, K top-k, N expert rows of this rank, El local experts, H hidden, F1 width of fc1's
output, F width of fc2's input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.moe.activations import Activation
from megatron_fluid.moe.expert_weights import ExpertWeights, GivenBiases, GivenWeights, Packed

__all__ = ["ExpertCall", "Offload", "Offloaded", "in_dtype"]


class Offloaded(Protocol):
    """Handle to offloaded tensors; holds no device memory."""

    def take(self) -> list[Tensor]:
        """The tensors, ready on the current stream. Once.

        Raises:
            RuntimeError: they were taken before.
        """
        ...

    def finish(self) -> None:
        """What the tensors were needed for has been launched on the current stream: those that a
        later backward wants may come."""
        ...


class Offload(Protocol):
    """Offloads parts of a call's activations between forward and backward. Without one, autograd
    keeps them.

    Attributes:
        parts: which of "rows" (the input of fc1) and "hidden" (its output). They are kept, and not
            recomputed.
    """

    parts: Collection[str]

    def put(self, part: str, tensors: Sequence[Tensor]) -> Offloaded | None:
        """Take over the tensors of a part, at the end of a call's forward; None where autograd is
        to save them. Of a call without a backward the tensors are none."""
        ...


@dataclass(kw_only=True, slots=True)
class ExpertCall:
    """What a caller wants of its experts, once.

    Attributes:
        x: tokens, as the call's transport takes them. [T, H] or [N, H]
        probs: what the activation of each row is multiplied with, None for ones. [T, K] or [N]
        w1, w2: [El, F1, H] and [El, H, F], stacked or one matrix for each expert; never copied. An
            ExpertWeights made of them before spares looking at each again.
        num_experts: El.
        activation: a name in moe.activations.ACTIVATIONS, or a callable.
        layout: "out_in" as above, or "in_out": [El, H, F1] and [El, F, H], also folded into two
            dimensions. An ExpertWeights has its own.
        biases: of fc1 [El, F1] and fc2 [El, H] (see moe/biases.py), or None.
        fp8: compute forward and dgrad in fp8 e4m3 with a scale for each block.
        fp8_weight_grads: with fp8: compute weight gradients so, too. False: in bf16.
        fused_main_grad: add weight gradients straight to `param.main_grad` (Megatron's gradient
            accumulation fusion). Parameters with an owner (backward/autograd.py) get theirs there
            in any case.
        recompute: what the backward makes again in place of keeping it: "rows", the dispatched
            tokens (by another dispatch), "hidden", the output of fc1 (by another GEMM).
        offload: what offloads rows or hidden between forward and backward, or None. Its parts are
            not recomputed.
        batch_invariant: a row's result has the same bits whatever the other rows are, and whatever
            their number.
        scheduler: None takes the process-wide one. If it is enabled and the weights are leaves,
            their gradients are deferred.
        name: of the layer, for errors.
    """

    x: Tensor
    probs: Tensor | None
    w1: GivenWeights | ExpertWeights
    w2: GivenWeights | ExpertWeights
    num_experts: int
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu"
    layout: str = "out_in"
    biases: GivenBiases | None = None
    fp8: bool = False
    fp8_weight_grads: bool = True
    fused_main_grad: bool = False
    recompute: Collection[str] = ()
    offload: Offload | None = None
    batch_invariant: bool = False
    scheduler: WeightGradScheduler | None = None
    name: str = "moe"


def in_dtype(given: Any, dtype: torch.dtype) -> Any:
    """Cast weights or biases for one call, as autocast does. given: GivenWeights or an
    ExpertWeights. Returned unchanged if it has the dtype already."""
    if isinstance(given, ExpertWeights):
        if all(param.dtype == dtype for param in given.params):
            return given
        # The result is not an ExpertWeights, and of a Packed one `param` is cast.
        given = given.given
    if isinstance(given, Packed):
        return given if given.param.dtype == dtype else given.param.to(dtype)
    return given.to(dtype) if isinstance(given, Tensor) else [each.to(dtype) for each in given]
