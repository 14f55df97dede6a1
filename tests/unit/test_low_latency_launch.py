"""The direct launch: what the driver is handed, with a driver made of ctypes callbacks."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.errors import FluidError
from megatron_fluid.low_latency import fast_launch

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)


class _Driver:
    """Records launches; a kernel's parameters have the widths given."""

    def __init__(self, widths: list[int], status: int = 0) -> None:
        self.widths, self.status = widths, status
        self.calls: list[tuple[list[int], list[int]]] = []
        self.cuLaunchKernel = _LAUNCH(self._launch)

    def _launch(self, function: int, *rest: int) -> int:
        *shape, stream, parameters, _ = rest
        pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        values = []
        for index, width in enumerate(self.widths):
            kind = ctypes.c_uint64 if width == 8 else ctypes.c_uint32
            values.append(kind.from_address(pointers[index] or 0).value)
        self.calls.append(([function, *shape, stream or 0], values))
        return self.status

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        if index.value >= len(self.widths):
            return 1
        size._obj.value = self.widths[index.value]
        return 0


def _compiled(signature: dict[str, str]) -> SimpleNamespace:
    metadata = SimpleNamespace(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, shared=2048)
    return SimpleNamespace(function=77, metadata=metadata, src=SimpleNamespace(signature=signature))


_SIGNATURE = {
    "x": "*i32", "absent": "constexpr", "y": "*fp32", "flags": "*i32", "errors": "*i64", "m": "i32", "timeout": "i64",
    "BLOCK": "constexpr",
}  # fmt: skip


def test_parameters_arrive_in_the_kernels_order(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver([8, 8, 8, 8, 4, 8, 8, 8])
    monkeypatch.setattr(fast_launch, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1234, raising=False)
    own = fast_launch.OwnTensors(torch.zeros(1), torch.zeros(1))
    launch = fast_launch._DriverLaunch.of(_compiled(_SIGNATURE), 4, 2, own, 2)
    assert launch is not None
    for first in (0x7F0000001000, 0x7F0000002000):
        launch(9, [first, 0], [128, 5_000_000_000])
    shape, values = driver.calls[-1]
    assert shape == [77, 9, 1, 1, 128, 1, 1, 2048, 1234]
    assert values == [0x7F0000002000, 0, *own.addresses, 128, 5_000_000_000, 0, 0]
    assert driver.calls[0][1][0] == 0x7F0000001000


@pytest.mark.parametrize("widths", [[8, 8, 8, 8, 4, 8, 8], [8, 8, 8, 8, 8, 8, 8, 8], []])
def test_a_kernel_with_other_parameters_is_left_to_triton(monkeypatch: pytest.MonkeyPatch, widths: list[int]) -> None:
    monkeypatch.setattr(fast_launch, "_driver", lambda: _Driver(widths))
    own = fast_launch.OwnTensors(torch.zeros(1), torch.zeros(1))
    assert fast_launch._DriverLaunch.of(_compiled(_SIGNATURE), 4, 2, own, 2) is None


def test_a_refused_launch_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_launch, "_driver", lambda: _Driver([8, 8, 8, 8, 4, 8, 8, 8], status=700))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    own = fast_launch.OwnTensors(torch.zeros(1), torch.zeros(1))
    launch = fast_launch._DriverLaunch.of(_compiled(_SIGNATURE), 4, 2, own, 2)
    assert launch is not None
    with pytest.raises(FluidError, match="700"):
        launch(1, [0, 0], [1, 1])


class _Kernel:
    """A kernel of the three arguments x, own, m."""

    arg_names = ("x", "own", "m", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **keywords: Any) -> None:
        self.compiled.append((*arguments[2:], grid, keywords))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        raise AssertionError("started")


def test_compile_only_starts_nothing() -> None:
    kernel = _Kernel()
    launch = fast_launch.FastLaunch(kernel, {"BLOCK": 64}, 4)
    own = fast_launch.OwnTensors(torch.zeros(1))
    with fast_launch.compile_only():
        launch(3, (torch.zeros(4),), own, (7,))
    assert kernel.compiled == [(7, (3,), {"BLOCK": 64, "num_warps": 4})]
    with pytest.raises(AssertionError, match="started"):
        launch(3, (torch.zeros(4),), own, (7,))
