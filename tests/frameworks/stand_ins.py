"""What frameworks around Megatron-Core do to it, as far as this package meets it. Written for these
tests; none of their code is here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

# A model of Hugging Face's Qwen3MoeConfig, for the builders of real packages.
MODEL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 48, "num_experts": 4,
    "num_experts_per_tok": 2, "vocab_size": 64, "max_position_embeddings": 16,
    "rope_theta": 10000.0, "architectures": ["Qwen3MoeForCausalLM"],
}  # fmt: skip

# ---- slime

_new_group = dist.new_group
_QUERIES = ("get_rank", "get_world_size", "get_backend", "get_global_rank", "get_group_rank")
_MOVES = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "isend", "irecv")
_wrapped: list[WrappedGroup] = []


class WrappedGroup(dist.ProcessGroup):
    """A process group whose inner group comes and goes; it has neither a name nor a store."""

    def __init__(self, inner: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        super().__init__(rank=inner.rank(), size=inner.size())
        self.inner: dist.ProcessGroup | None = inner
        self.made_by = args, kwargs
        _wrapped.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def rank(self) -> int:
        return self.inner.rank()  # type: ignore[union-attr]

    def size(self) -> int:
        return self.inner.size()  # type: ignore[union-attr]

    def _forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    # Functions of torch that Megatron imported before they were wrapped call these.
    _allgather_base = functools.partialmethod(_forward, "_allgather_base")
    _reduce_scatter_base = functools.partialmethod(_forward, "_reduce_scatter_base")
    all_gather_single = functools.partialmethod(_forward, "all_gather_single")  # from torch 2.14
    reduce_scatter_single = functools.partialmethod(_forward, "reduce_scatter_single")


def wrap_groups() -> None:
    """From now on torch makes wrapped groups, and its functions take them."""

    def unwrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(x: Any) -> Any:
            return x.inner if isinstance(x, WrappedGroup) else x

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(inner, args), **{k: inner(x) for k, x in kwargs.items()})

        return call

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = _new_group(*args, **kwargs)
        several = isinstance(group, dist.ProcessGroup) and group.size() > 1
        return WrappedGroup(group, *args, **kwargs) if several else group

    dist.new_group = new_group
    for name in (*_QUERIES, *_MOVES, "get_process_group_ranks", "barrier"):
        setattr(dist, name, unwrapping(getattr(dist, name)))


def sleep() -> None:
    """Destroy the groups."""
    for group in _wrapped:
        dist.destroy_process_group(group.inner)
        group.inner = None


def wake() -> None:
    """Make them again, in the wrappers that everybody holds."""
    for group in _wrapped:
        args, kwargs = group.made_by
        group.inner = _new_group(*args, **kwargs)


# ---- verl


def _buffers(model: Any) -> list[Any]:
    return [*model.buffers, *model.expert_parallel_buffers]


def offload(model: Any) -> None:
    """Give the memory of a DistributedDataParallel's parameters and gradients back."""
    for buffer in _buffers(model):
        buffer.kept = buffer.param_data.clone()
        for data in (buffer.param_data, buffer.grad_data):
            data.untyped_storage().resize_(0)


def load(model: Any) -> None:
    """Allocate it again under the same views."""
    for buffer in _buffers(model):
        for data in (buffer.param_data, buffer.grad_data):
            data.untyped_storage().resize_(data.numel() * data.element_size())
        buffer.param_data.copy_(buffer.kept)
        buffer.grad_data.zero_()


def replay(experts: torch.Tensor) -> Callable[[], None]:
    """Let every router take these experts [T, K] in place of its own; returns what undoes it."""
    stock = TopKRouter.routing

    @functools.wraps(stock)
    def routing(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        stock(self, logits, *args, **kwargs)  # its losses and counts
        logits = logits.view(-1, logits.shape[-1])
        chosen = torch.softmax(logits.gather(1, experts), dim=-1)
        probs = torch.zeros_like(logits).scatter(1, experts, chosen)
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)

    TopKRouter.routing = routing
    return functools.partial(setattr, TopKRouter, "routing", stock)


# ---- ms-swift


def mend_count(seen: list[torch.Size]) -> Callable[[], None]:
    """Wrap the count of tokens for the expert bias, which reads dense maps; `seen` gets their
    shapes. Returns what undoes it."""
    stock = TopKRouter._apply_expert_bias

    def apply_expert_bias(self: Any, routing_map: torch.Tensor, padding_mask: Any = None) -> Any:
        seen.append(routing_map.shape)
        if padding_mask is not None and padding_mask.dim() == routing_map.dim() - 1:
            padding_mask = padding_mask.unsqueeze(-1)
        return stock(self, routing_map, padding_mask=padding_mask)

    TopKRouter._apply_expert_bias = apply_expert_bias
    return functools.partial(setattr, TopKRouter, "_apply_expert_bias", stock)


# ---- models


class OwnForward(MoELayer):
    """An MoE layer with a forward of its own, which scales what goes in."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(2.0 * hidden_states, *args, **kwargs)
