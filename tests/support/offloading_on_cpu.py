"""Megatron's manager of fine-grained activation offloading on a CPU: its own bookkeeping, with
streams and events that do nothing, tensors of the CPU taken for those of a GPU, and copies in
pageable memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading

__all__ = ["manager_on_cpu"]


class _Idle:
    """A stream or an event."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> _Idle:
        return self

    record_event = wait_event = wait_stream = synchronize = record


def _managed(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


@contextlib.contextmanager
def manager_on_cpu() -> Iterator[list[tuple[Any, ...]]]:
    """Inside, the manager is a new one; yields what it does, in order: (what, module, ...), with
    the shape of a tensor that is saved or asked for, and the bytes of a group that is copied."""
    log: list[tuple[Any, ...]] = []
    handler = offloading.ChunkOffloadHandler
    push, pop, copy = handler.tensor_push, handler.tensor_pop, handler.bulk_offload_group
    start, commit, offload = handler.on_group_start_forward, handler.bulk_offload, handler.offload

    def pushed(self: Any, tensor: torch.Tensor) -> Any:
        name = self.offload_groups[self._offloaded_group_index - 1]._name
        log.append(("saved", name, tuple(tensor.shape)))
        return push(self, tensor)

    def popped(self: Any, tag: Any) -> torch.Tensor:
        tensor = pop(self, tag)
        name = self.offload_groups[tag[0] - 1]._name
        log.append(("asked for", name, tuple(tensor.shape)))
        return tensor

    def copied(self: Any, group: Any) -> None:
        tensors = group._tensors.values()
        log.append(("copied", group._name, sum(t.numel() * t.element_size() for t in tensors)))
        copy(self, group)

    def started(self: Any, name: str) -> None:
        log.append(("started", name))
        start(self, name)

    def committed(self: Any, name: str, released: list[torch.Tensor]) -> None:
        log.append(("committed", name))
        commit(self, name, released)

    def put(self: Any, tensor: torch.Tensor, use_cpu_pool: bool = True) -> Any:
        return offload(self, tensor, pin_memory=False, use_cpu_pool=use_cpu_pool)

    idle = _Idle()
    with contextlib.ExitStack() as stack:
        change = stack.enter_context
        change(mock.patch.multiple(torch.cuda, Stream=_Idle, Event=_Idle))
        change(mock.patch.object(torch.cuda, "current_stream", return_value=idle))
        change(mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()))
        change(mock.patch.object(torch.Tensor, "record_stream", create=True))
        methods = {"tensor_push": pushed, "tensor_pop": popped, "bulk_offload_group": copied}
        methods |= {"on_group_start_forward": started, "bulk_offload": committed, "offload": put}
        methods["_can_manage_tensor_for_offload"] = staticmethod(_managed)  # type: ignore[assignment]
        change(mock.patch.multiple(handler, **methods))
        linears = "megatron.core.extensions.transformer_engine"
        engine = SimpleNamespace(CPUOffloadEnabled=False)
        change(mock.patch(f"{linears}.cpu_offload", engine, create=True))
        change(mock.patch(f"{linears}.set_save_original_input"))
        offloading.PipelineOffloadManager.reset_instance()
        try:
            yield log
        finally:
            offloading.PipelineOffloadManager.OFFLOAD_MGR = None
