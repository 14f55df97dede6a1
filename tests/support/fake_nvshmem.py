"""A fake NVSHMEM for Triton's interpreter: it delays puts, delivers them in any order that fences
allow, and drops them. As inside a host, SIGNAL_SET sets a signal, other operations add to it."""

import ctypes
import random
import sys
from types import ModuleType
from typing import Any

import pytest

SIGNAL_SET = 9
_BINDINGS = "torch.distributed._symmetric_memory._nvshmem_triton"
_KERNELS = "megatron_fluid.kernels.low_latency.nvshmem"


class FakeNvshmem(ModuleType):
    """Puts are copied at the call; `deliver` delivers them in any order that fences leave free."""

    def __init__(self) -> None:
        super().__init__(_BINDINGS)
        self.ranks: list[Any] = []
        # fence epoch, order, address, bytes, whether they are a number to be added
        self.queue: list[tuple[int, float, int, bytes, bool]] = []
        self.epoch = 0
        self.random = random.Random(1)
        self.dropped: set[int] = set()  # PEs that nothing reaches

    def _remote(self, here: int, pe: int) -> int:
        for rank in self.ranks:
            for buffer in rank._buffers.values():
                start = buffer.local.data_ptr()
                if start <= here < start + buffer.local.numel() * buffer.local.element_size():
                    return buffer.peers[pe].data_ptr() + here - start
        raise AssertionError("a put outside symmetric memory")

    def _enqueue(self, address: int, payload: bytes, pe: int, add: bool = False) -> None:
        if pe not in self.dropped:
            self.queue.append(
                (self.epoch, self.random.random(), self._remote(address, pe), payload, add)
            )

    def put(self, dest: Any, source: Any, count: Any, pe: Any) -> None:
        size = _number(count) * dest.dtype.element_ty.primitive_bitwidth // 8
        self._enqueue(_number(dest), ctypes.string_at(_number(source), size), _number(pe))

    def fence(self) -> None:
        self.epoch += 1

    def putmem_signal_block(
        self, dest: Any, source: Any, size: Any, signal: Any, value: Any, operation: Any, pe: Any
    ) -> None:
        self._enqueue(_number(dest), ctypes.string_at(_number(source), _number(size)), _number(pe))
        self.fence()  # the signal comes after its own data
        self._enqueue(
            _number(signal),
            _number(value).to_bytes(8, "little"),
            _number(pe),
            _number(operation) != SIGNAL_SET,
        )

    def deliver(self) -> None:
        for _, _, address, payload, add in sorted(self.queue, key=lambda item: item[:2]):
            if add:
                old = int.from_bytes(ctypes.string_at(address, len(payload)), "little")
                payload = (old + int.from_bytes(payload, "little")).to_bytes(len(payload), "little")  # noqa: PLW2901
            ctypes.memmove(address, payload, len(payload))
        self.queue.clear()


def _number(value: Any) -> int:
    handle = getattr(value, "handle", None)
    return (
        int(getattr(value, "value", value)) if handle is None else int(handle.data.reshape(-1)[0])
    )


@pytest.fixture
def fake_nvshmem(monkeypatch: pytest.MonkeyPatch) -> FakeNvshmem:
    import torch.distributed._symmetric_memory as symmetric_memory

    import megatron_fluid.kernels.low_latency as kernels

    found = FakeNvshmem()
    monkeypatch.setitem(sys.modules, _BINDINGS, found)
    monkeypatch.setattr(symmetric_memory, "_nvshmem_triton", found, raising=False)
    monkeypatch.delitem(sys.modules, _KERNELS, raising=False)
    monkeypatch.delattr(kernels, "nvshmem", raising=False)
    return found
