"""Megatron's fine-grained activation offloading (`--offload-modules expert_fc1 moe_act`) of experts
that megatron_fluid computes.

Its manager copies groups of tensors to the host at the end of a module's forward, and back before
its backward: of expert_fc1 the input of fc1, of moe_act that of the activation. They are what
megatron_fluid's experts keep, rows and hidden (moe/call.py). Megatron's experts tell the
manager by autograd functions around a module, under hooks for saved tensors. Here it is told from
within the one autograd function, of both modules at the end of the forward, and in the backward
when a part is needed and when the layer is done:

    forward    group start, the tensors, group commit      which releases their memory
    backward   group commit: waits until they are back; the tensors; group start: fetches the next

What is offloaded, when, and by how much ahead it comes back is Megatron's (the last group of a name
stays, small tensors stay, activation_offload_fraction, delay_offload_until_cuda_graph).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_fluid.config import FluidConfig, moe_recompute
from megatron_fluid.moe.call import Offload

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["MegatronOffload", "offload_of"]

logger = logging.getLogger("megatron_fluid")

# Of each part its module, in the order in which Megatron's experts come to them.
_MODULES = {"rows": "expert_fc1", "hidden": "moe_act"}


def offload_of(config: TransformerConfig, fluid: FluidConfig) -> Offload | None:
    """What offloads activations of a layer's experts, None where its settings ask for none."""
    if not config.fine_grained_activation_offloading:
        return None
    parts = tuple(part for part, name in _MODULES.items() if name in (config.offload_modules or ()))
    if not parts:
        return None
    if unused := [part for part in parts if part in moe_recompute(fluid)]:
        _say_unused(fluid.moe_recompute, tuple(_MODULES[part] for part in unused))
    return MegatronOffload(parts, bool(config.delay_offload_until_cuda_graph))


@functools.cache
def _say_unused(recompute: str, modules: tuple[str, ...]) -> None:
    logger.warning(
        f"megatron_fluid: --fluid-moe-recompute {recompute} has no effect on "
        f"{' and '.join(modules)}, which offload_modules names: they are offloaded"
    )


class MegatronOffload:
    """Puts parts of a call's activations into groups of Megatron's offloading manager.

    Args:
        parts: some of "rows" and "hidden", in this order.
        delayed: launch copies after the next replay of a CUDA graph, where a replay is under way
            (delay_offload_until_cuda_graph).
    """

    def __init__(self, parts: tuple[str, ...], delayed: bool) -> None:
        self.parts: Collection[str] = parts
        self._delayed = delayed

    def put(self, part: str, tensors: Sequence[Tensor]) -> _Group | None:
        """See moe.call.Offload."""
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading

        name = _MODULES[part]
        chunk: Any = offloading.PipelineOffloadManager.get_instance().pop_forward_chunk(name=name)
        if chunk is None or not chunk.do_offload:
            return None
        chunk.on_group_start_forward(name)
        # Detached: an input of the function would hold the graph that made it.
        tags = [chunk.tensor_push(tensor.detach()) for tensor in tensors]
        commit = offloading.fine_grained_offloading_group_offload
        commit(torch.empty(0), name, delay_offload=self._delayed)
        return _Group(chunk, name, tags)


class _Group:
    """The tensors of one call and module with the manager. tags: by which it knows them."""

    def __init__(self, chunk: Any, name: str, tags: list[Any]) -> None:
        self._chunk, self._name = chunk, name
        self._tags: list[Any] | None = tags

    def take(self) -> list[Tensor]:
        """See moe.call.Offloaded."""
        tags, self._tags = self._tags, None
        if tags is None:
            what = "a second backward of one forward (retain_graph) finds them gone"
            raise RuntimeError(f"offload_modules: {self._name} is offloaded, and {what}")
        self._chunk.on_group_commit_backward(self._name)
        # What it has not fetched ahead, in the first iteration everything, the manager reads
        # without a look at whether the copy to the host is complete.
        for index in {tag[0] for tag in tags if isinstance(tag, tuple)}:
            group = self._chunk.offload_groups[index - 1]
            group.wait_offload_event(torch.cuda.current_stream())
        return [self._chunk.tensor_pop(tag) for tag in tags]

    def finish(self) -> None:
        """See moe.call.Offloaded."""
        self._chunk.on_group_start_backward()
