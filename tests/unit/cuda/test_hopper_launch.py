"""What our kernels for Hopper are started with, seen by a driver that only writes it down."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fluid.cuda import kernel_build, tensor_maps
from megatron_fluid.cuda.tensor_maps import BOXES, GATED, TensorMaps, in_boxes, token_boxes
from megatron_fluid.errors import FluidError
from megatron_fluid.kernels.grouped_gemm.launch import GROUPED
from megatron_fluid.kernels.sm90 import launch as sm90
from megatron_fluid.kernels.sm90.launch import HopperKernels
from tests.support.cuda_driver import FakeDriver, driver_in_place, word
from tests.support.machine import sms_in_use

KERNELS = tuple(GROUPED.kernels)


class Driver(FakeDriver):
    """Writes down launches, and encodes a map as its number: `maps` has what it describes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[dict[str, Any]] = []
        self.maps: list[dict[str, Any]] = []
        self.places: list[int] = []  # of the last launch's maps
        self.refusals: list[int] = []  # statuses of the next maps
        self.answers["cuModuleLoadData"] = lambda code: (code,)
        self.answers["cuModuleGetFunction"] = lambda module, name: (
            self.CUfunction(1 + KERNELS.index(name.decode())),
        )
        mode = self.CUstreamCaptureMode(0)
        self.answers["cuThreadExchangeStreamCaptureMode"] = lambda _: (mode,)

    def encode(  # type: ignore[no-untyped-def]
        self, place, element, rank, data, sizes, pitches, box, steps, inner, swizzle, l2, fill
    ) -> int:
        assert place.value % 64 == 0 and steps[:rank] == [1] * rank
        assert swizzle == (3 if box[0] == 64 else 2)
        found = [
            [word(words.value + 8 * i) for i in range(count)]
            for words, count in ((sizes, rank), (pitches, rank - 1))
        ]
        if self.refusals:
            return self.refusals.pop(0)
        told = {"data": data.value, "sizes": found[0], "pitches": found[1], "box": box[:rank]}
        self.maps.append(told)
        ctypes.c_uint64.from_address(place.value).value = len(self.maps)
        return 1 if any(pitch % 16 for pitch in found[1]) else 0

    def map_at(self, place: int) -> dict[str, Any] | None:
        number = word(place)
        return self.maps[number - 1] if number else None

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:
        function, x, y, z, bx, by, bz, shared, stream, parameters, extra = arguments
        assert extra == 0 and shared == sm90._DYNAMIC_SHARED
        told = {"name": int(function), "grid": (x, y, z), "block": (bx, by, bz)}
        told["stream"] = int(stream)
        self.places = [word(parameters + 8 * i) for i in range(3)]
        told["words"] = [word(word(parameters + 8 * i)) for i in range(3, 13)]
        places = (*self.places, self.places[2] + 128)
        told["maps"] = [self.map_at(place) for place in places]
        self.launches.append(told)
        return self._call("cuLaunchKernel", arguments)


class _Library:
    """What ctypes loads."""

    def __init__(self, driver: Driver) -> None:
        self.cuTensorMapEncodeTiled = driver.encode


class Machine:
    device, stream, capturing = 0, 0x51, False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(tensor_maps.ctypes, "CDLL", lambda name: _Library(found))
    tensor_maps._encoded.cache_clear()
    tensor_maps._encoder.cache_clear()
    monkeypatch.setattr(kernel_build, "machine_code", lambda unit: unit.name.encode())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Machine.capturing)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: Machine.device, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: Machine.stream, raising=False
    )

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        before, Machine.device = Machine.device, index
        yield
        Machine.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    for name, value in (("device", 0), ("stream", 0x51), ("capturing", False)):
        monkeypatch.setattr(Machine, name, value)
    with driver_in_place(found):
        yield found
    tensor_maps._encoded.cache_clear()
    tensor_maps._encoder.cache_clear()


def _rows(n: int = 96, width: int = 64) -> torch.Tensor:
    return torch.zeros(n, width, dtype=torch.bfloat16)


def _map(tensor: torch.Tensor, sizes: list[int], pitches: list[int], box: list[int]) -> Any:
    return {"data": tensor.data_ptr(), "sizes": sizes, "pitches": pitches, "box": box}


def _launch(module: HopperKernels) -> None:
    x = _rows()
    maps = (in_boxes(x, 32), token_boxes(x), (in_boxes(x, 64),))
    with sms_in_use(132):
        module.launch("grouped_forward", maps, (6, 7, 8, 9, 1, 2, 3, 4, 1))


def test_a_launch_carries_maps_pointers_a_counter_and_sizes(driver: Driver) -> None:
    module = HopperKernels(GROUPED, torch.bfloat16)
    x, stack = _rows(), torch.zeros(5, 48, 64, dtype=torch.bfloat16)
    maps = (in_boxes(stack[:, :, :32], 128), token_boxes(x), (in_boxes(x[:32], 64),))
    with sms_in_use(131):
        module.launch("grouped_sums", maps, (6, 7, 8, 9, 1, 2, 3, 4, 1))
    [launch] = driver.launches
    assert launch["name"] == 1 + KERNELS.index("grouped_sums")
    assert launch["grid"] == (130, 1, 1), "whole clusters of two"
    assert launch["block"] == (384, 1, 1)
    assert launch["words"] == [6, 7, 8, 9, 1, 2, 3, 4, 1, 0]
    own, both, out, other = launch["maps"]
    assert other is None and launch["stream"] == 0x51
    assert own == _map(stack, [32, 48, 5], [128, 6144], [64, 128, 1]), "rows keep their pitch"
    assert both == _map(x, [64, 96, 1], [128, 12288], [64, 32, 1])
    assert out == _map(x, [64, 32, 1], [128, 4096], [64, 64, 1])
    boxes = [driver.map_at(driver.places[1] + 128 * i) for i in range(len(BOXES))]
    assert [found and found["box"][1] for found in boxes] == [32, 64, 128]


def test_gate_and_up_are_read_in_turns_of_8_rows(driver: Driver) -> None:
    weights = torch.zeros(5, 96, 136, dtype=torch.bfloat16)[:, :, :128]
    TensorMaps(1).fill(0, in_boxes(weights, *GATED))
    [found] = driver.maps
    assert found["sizes"] == [128, 8, 2, 6, 5] and found["box"] == [64, 8, 2, 8, 1]
    assert found["pitches"] == [272, 48 * 272, 8 * 272, 96 * 272]


def test_what_tma_cannot_address_is_named(driver: Driver) -> None:
    with pytest.raises(FluidError, match=r"cuTensorMapEncodeTiled of sizes \[60, 96, 1\]"):
        TensorMaps(1).fill(0, in_boxes(_rows(width=60), 32))
    with pytest.raises(FluidError, match=r"cuTensorMapEncodeTiled of sizes \[60, 8, 2, 1, 1\]"):
        TensorMaps(1).fill(0, in_boxes(torch.zeros(1, 16, 60, dtype=torch.bfloat16), *GATED))


def test_launches_that_may_run_together_have_counters_of_their_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = HopperKernels(GROUPED, torch.bfloat16)
    for stream, capturing in ((1, False), (2, False), (1, False), (1, True), (1, True), (2, False)):
        monkeypatch.setattr(Machine, "stream", stream)
        monkeypatch.setattr(Machine, "capturing", capturing)
        _launch(module)
    counters = [launch["words"][-1] for launch in driver.launches]
    first, second, again, captured, another, last = counters
    assert (again, last) == (first, second)
    assert len({first, second, captured, another}) == 4
    assert all(0 <= counter < 1 << 16 for counter in counters)


def test_a_map_in_a_thread_without_a_context_is_made_again(driver: Driver) -> None:
    driver.refusals, (maps, x) = [201], (TensorMaps(1), _rows())
    maps.fill(0, in_boxes(x, 32))
    assert [found["data"] for found in driver.maps] == [x.data_ptr()]
    assert word(maps.address) == 1 and driver.contexts_set == 1
