"""The router: top-k of softmax or sigmoid scores, and the load-balancing loss of the Switch
Transformer.

Legend: T tokens, K top-k, E experts, H hidden.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass

from megatron_fluid.backward.autograd import once_differentiable
from megatron_fluid.backward.deferred_linear import deferred_linear
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fixed_tiles.launch import row_by_row
from megatron_fluid.moe.experts import have_triton

__all__ = [
    "ROUTER_DTYPES",
    "SCORE_FUNCTIONS",
    "Routing",
    "TopKRouter",
    "attach_aux_loss",
    "load_balancing_loss",
    "route",
    "set_aux_loss_scale",
]

SCORE_FUNCTIONS = ("softmax", "sigmoid")
ROUTER_DTYPES = {None: None, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Routing:
    """Where tokens go.

    Attributes:
        ids: expert of each choice, best first. [T, K] int64; int32 from the fused router
        probs: its weight. [T, K] fp32 (or fp64)
        scores: each expert's share of a token, summing to 1: what the load-balancing loss is made
            of. None where it is not wanted. [T, E]
    """

    ids: Tensor
    probs: Tensor
    scores: Tensor | None


# FSDP2 finds the tensors of a module's output by it, and a router may be sharded by itself.
register_dataclass(Routing)


def _check_routing(top_k: int, num_experts: int, score_function: str) -> None:
    if not 1 <= top_k <= num_experts:
        raise ConfigError.of("top_k", top_k, f"1 to {num_experts} experts")
    if score_function not in SCORE_FUNCTIONS:
        raise ConfigError.of("score_function", score_function, ", ".join(SCORE_FUNCTIONS))


def route(
    logits: Tensor,
    top_k: int,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    scaling: float | None = None,
    expert_bias: Tensor | None = None,
    batch_invariant: bool = False,
) -> Routing:
    """Choose K experts for each token, as Megatron-Core's router does.

    Args:
        logits: [T, E]; computed with in fp32 or better.
        top_k: K, 1 to E.
        score_function: "softmax", or "sigmoid" (the K chosen scores are then divided by their sum,
            for K > 1).
        pre_softmax: softmax over all experts before choosing; otherwise over the chosen ones.
        scaling: multiplies the probabilities.
        expert_bias: added to sigmoid scores for the choice alone. [E]
        batch_invariant: a token's ids and probs have the same bits whatever the other tokens are.
            Of equal scores the expert with the lower number is chosen.

    Raises:
        ConfigError: top_k out of range, an unknown score function, or a bias with softmax.
    """
    _check_routing(top_k, logits.shape[-1], score_function)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))

    def best(scores: Tensor) -> tuple[Tensor, Tensor]:
        if not batch_invariant:
            values, ids = scores.topk(top_k, dim=-1)
            return values, ids
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :top_k].contiguous(), ids[:, :top_k].contiguous()

    if score_function == "softmax":
        if expert_bias is not None:
            raise ConfigError.of("expert_bias", "given", "only with score_function sigmoid")
        scores = torch.softmax(logits, dim=-1)
        if pre_softmax:
            probs, ids = best(scores)
        else:
            chosen, ids = best(logits)
            probs = torch.softmax(chosen, dim=-1)
    else:
        gates = row_by_row(torch.sigmoid, logits) if batch_invariant else torch.sigmoid(logits)
        choice = gates if expert_bias is None else gates + expert_bias
        _, ids = best(choice)
        probs = gates.gather(-1, ids)
        if top_k > 1:
            total = probs.sum(-1, keepdim=True)
            if batch_invariant:
                total = functools.reduce(torch.add, probs.split(1, dim=-1))
            probs = probs / (total + 1e-20)
        scores = gates / (gates.sum(-1, keepdim=True) + 1e-20)
    if scaling is not None:
        probs = probs * scaling
    return Routing(ids, probs, scores)


def load_balancing_loss(routing: Routing, coefficient: float) -> Tensor:
    """coefficient * E * sum over experts of (share of choices that it got) * (mean score that it
    got).

    From Switch Transformers (Fedus et al., 2021), equation 4, for top-k as in Megatron-Core; 1 *
    coefficient when balanced. Gradients flow through the scores. Tokens without any (T = 0) give 0.
    """
    scores = routing.scores
    if scores is None:
        raise ConfigError.of("scores of the routing", None, "those of each expert")
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return scores.sum() * 0.0
    chosen = torch.zeros(num_experts, dtype=scores.dtype, device=scores.device)
    flat = routing.ids.reshape(-1).long()
    chosen.scatter_add_(0, flat, torch.ones_like(flat, dtype=chosen.dtype))
    return coefficient * num_experts * torch.sum(chosen / flat.numel() * scores.mean(0))


_aux_loss_scale: float | Tensor = 1.0


def set_aux_loss_scale(scale: float | Tensor) -> None:
    """The weight of every load-balancing loss in the backwards from now on: what the main loss is
    multiplied by before its own, as by a GradScaler, or divided by over several microbatches. 1 to
    begin with.
    """
    global _aux_loss_scale
    _aux_loss_scale = scale


class _AttachAuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.detach().new_ones(())
        return probs.view_as(probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_probs, ctx.loss * _aux_loss_scale


def attach_aux_loss(probs: Tensor, loss: Tensor) -> Tensor:
    """The probabilities unchanged; whatever is trained through them trains `loss` (a scalar) too,
    with the weight of set_aux_loss_scale.
    """
    return _AttachAuxLoss.apply(probs, loss)


class TopKRouter(nn.Module):
    """Logits, choice and load-balancing loss. Its weight gradient is deferred while the scheduler
    is enabled.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K.
        score_function, pre_softmax, scaling: as for `route`.
        aux_loss_coefficient: weight of the load-balancing loss in training; 0 for none.
        router_dtype: "fp32" or "fp64" computes logits and probabilities in it, also under autocast,
            as Megatron's --moe-router-dtype; the weight keeps its dtype. None: in the weight's, and
            probabilities in fp32.
        name: for errors.
        batch_invariant: as for `route`, and so for the logits.

    Attributes:
        weight: [E, H]
        last_aux_loss: of the last forward, detached, for logging; None if there was none.

    Raises:
        ConfigError: a setting out of range; softmax after the choice of one expert, where every
            probability is 1 and the router would get no gradient.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        score_function: str = "softmax",
        pre_softmax: bool = False,
        scaling: float | None = None,
        aux_loss_coefficient: float = 0.0,
        router_dtype: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "router",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        _check_routing(top_k, num_experts, score_function)
        if top_k == 1 and score_function == "softmax" and not pre_softmax:
            allowed = (
                "True, or score_function sigmoid: softmax of one choice is 1, without gradient"
            )
            raise ConfigError.of("pre_softmax with top_k 1", pre_softmax, allowed)
        if router_dtype not in ROUTER_DTYPES:
            raise ConfigError.of("router_dtype", router_dtype, "fp32, fp64, None")
        shape = num_experts, hidden_size
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.top_k, self.score_function = top_k, score_function
        self.pre_softmax, self.scaling = pre_softmax, scaling
        self.aux_loss_coefficient, self.name = aux_loss_coefficient, name
        self.dtype, self.batch_invariant = ROUTER_DTYPES[router_dtype], batch_invariant
        self.last_aux_loss: Tensor | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Routing:
        """tokens [T, H] -> where they go."""
        balanced = bool(self.aux_loss_coefficient and self.training and torch.is_grad_enabled())
        if self._is_fused(tokens):
            routing = self._fused(tokens, balanced)
        else:
            routing = self._plain(tokens)
        self.last_aux_loss = None
        if balanced:
            loss = load_balancing_loss(routing, self.aux_loss_coefficient)
            self.last_aux_loss = loss.detach()
            routing = Routing(routing.ids, attach_aux_loss(routing.probs, loss), routing.scores)
        return routing

    def _plain(self, tokens: Tensor) -> Routing:
        # A router may be kept in another dtype than the model: `layer.router.float()`.
        dtype, kind = self.dtype or self.weight.dtype, tokens.device.type
        keeps = self.dtype is None and torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=keeps):
            logits = deferred_linear(
                *(tokens.to(dtype), self.weight.to(dtype), self.name),
                fixed_tiles=self.batch_invariant,
            )
        settings = self.top_k, self.score_function, self.pre_softmax, self.scaling
        made = route(logits, *settings, batch_invariant=self.batch_invariant)
        probs = made.probs.to(torch.promote_types(tokens.dtype, torch.float32))
        return Routing(made.ids, probs, made.scores)

    def _is_fused(self, tokens: Tensor) -> bool:
        """Whether one GEMM and one kernel do it: softmax over the chosen experts, bf16 on a GPU."""
        plain = self.pre_softmax or self.dtype is not None
        fits = self.score_function == "softmax" and not plain and tokens.is_cuda
        narrow = tokens.dtype == self.weight.dtype == torch.bfloat16
        return fits and narrow and not torch.is_autocast_enabled("cuda") and have_triton()

    def _fused(self, tokens: Tensor, with_scores: bool) -> Routing:
        """As `route`, with logits summed and kept in fp32."""
        from megatron_fluid.moe.fused_router import topk_softmax

        logits = deferred_linear(
            tokens, self.weight, self.name, wide=True, fixed_tiles=self.batch_invariant
        )
        ids, probs = topk_softmax(logits, self.top_k)
        if self.scaling is not None:
            probs = probs * self.scaling
        return Routing(ids, probs, torch.softmax(logits, dim=-1) if with_scores else None)
