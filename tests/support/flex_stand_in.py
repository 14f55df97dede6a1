"""Megatron's flex dispatcher over a stand-in for DeepEP, which needs GPUs: Megatron's all-gather
dispatcher does the exchange."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor


class _Manager:
    """What the flex dispatcher asks of DeepEP's manager."""

    def __init__(
        self, group: Any, num_local_experts: int, router_topk: int, num_experts: int, config: Any
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

        groups = SimpleNamespace(
            ep=parallel_state.get_expert_model_parallel_group(),
            expt_tp=parallel_state.get_expert_tensor_parallel_group(),
            tp_ep=group,
        )
        first = groups.ep.rank() * num_local_experts
        indices = list(range(first, first + num_local_experts))
        self._all: Any = MoEAllGatherTokenDispatcher(
            num_local_experts, indices, config, pg_collection=groups
        )
        self.token_probs: Tensor
        self.dispatched_probs: Tensor

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        self._map, self.token_probs = routing_map.flatten(1), probs.flatten(1)

    def dispatch(self, hidden_states: Tensor, *_: Any) -> Tensor:
        found: Tensor
        flat, probs = self._all.dispatch_preprocess(hidden_states, self._map, self.token_probs)
        found, self.dispatched_probs = self._all.token_dispatch(flat, probs)
        return found

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        found = self._all.dispatch_postprocess(hidden_states, self.dispatched_probs)
        rows, self._counts, probs = found
        return rows, probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        return self._counts  # type: ignore[no-any-return]

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        return self._all.combine_preprocess(hidden_states)  # type: ignore[no-any-return]

    def combine(self, hidden_states: Tensor, *_: Any) -> Tensor:
        return self._all.token_combine(hidden_states)  # type: ignore[no-any-return]


@contextlib.contextmanager
def flex_without_deepep() -> Iterator[None]:
    """Inside, layers with moe_token_dispatcher_type="flex" are built over the stand-in."""
    with mock.patch("megatron.core.transformer.moe.token_dispatcher._DeepepManager", _Manager):
        yield
