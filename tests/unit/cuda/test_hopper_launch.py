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
from megatron_fluid.kernels.fused_gemm.launch import FUSED
from megatron_fluid.kernels.grouped_gemm import launch as grouped_gemm
from megatron_fluid.kernels.grouped_gemm.launch import GROUPED
from megatron_fluid.kernels.sm90 import launch as sm90
from megatron_fluid.kernels.sm90.launch import HopperKernels
from tests.support.cuda_driver import FakeDriver, driver_in_place, word
from tests.support.machine import sms_in_use

KERNELS = (*GROUPED.kernels, *FUSED.kernels)


class Driver(FakeDriver):
    """Writes down launches, and encodes a map as its number: `maps` has what it describes."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[dict[str, Any]] = []
        self.maps: list[dict[str, Any]] = []
        self.places: list[int] = []  # of the last launch's maps
        self.modes: list[int] = []
        self.refusals: list[int] = []  # statuses of the next maps
        self.answers["cuModuleLoadData"] = lambda code: (code,)
        self.answers["cuModuleGetFunction"] = lambda module, name: (
            self.CUfunction(1 + KERNELS.index(name.decode())),
        )
        self.answers["cuThreadExchangeStreamCaptureMode"] = self._exchange

    def _exchange(self, mode: Any) -> tuple[Any]:
        self.modes.append(int(mode))
        return (self.CUstreamCaptureMode(0),)

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
        if list(FUSED.kernels).count(KERNELS[int(function) - 1]):  # by addresses, and a counter
            told["addresses"] = [word(parameters + 8 * i) for i in range(2)]
            told["counter"] = word(word(parameters + 16), 4)
        else:
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


def _launch(module: HopperKernels, programs: int = 132) -> None:
    x = _rows()
    maps = (in_boxes(x, 32), token_boxes(x), (in_boxes(x, 64),))
    with sms_in_use(programs):
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


@pytest.mark.parametrize(("programs", "grid"), [(1, 2), (2, 2), (3, 2), (132, 132)])
def test_there_is_always_a_cluster(driver: Driver, programs: int, grid: int) -> None:
    _launch(HopperKernels(GROUPED, torch.bfloat16), programs=programs)
    assert driver.launches[0]["grid"] == (grid, 1, 1)


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


def test_loading_inside_a_capture_is_allowed_and_the_mode_put_back(driver: Driver) -> None:
    module = HopperKernels(GROUPED, torch.bfloat16)
    _launch(module)
    assert driver.modes == [2, 0]
    _launch(module)
    assert driver.modes == [2, 0], "loaded once"


@pytest.fixture
def as_on_hopper(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Grouped GEMMs of tensors on a CPU go to `driver`."""
    module = HopperKernels(GROUPED, torch.bfloat16)
    monkeypatch.setattr(grouped_gemm, "_rows_fit", lambda *tensors: True)
    monkeypatch.setattr(grouped_gemm, "hopper_kernels", lambda source, dtype, index: module)
    monkeypatch.setattr(sm90, "multiprocessors", lambda index: 132)
    return driver


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_a_gated_product_reads_both_halves_and_writes_boxes_of_its_tiles(
    as_on_hopper: Driver, monkeypatch: pytest.MonkeyPatch, wide: bool, keep: bool
) -> None:
    monkeypatch.setattr(grouped_gemm, "wide_tiles_pay", lambda ends, depth: wide)
    x, w, out = _rows(96, 64), torch.zeros(2, 32, 64, dtype=torch.bfloat16), _rows(96, 16)
    offsets, prob = torch.tensor([40, 96], dtype=torch.int32), torch.ones(96)
    h = grouped_gemm.gated_matmul(x, w.transpose(1, 2), offsets, prob, out, keep, [40, 96])
    [launch] = as_on_hopper.launches
    own, rows, first, second = launch["maps"]
    assert launch["name"] == 1 + KERNELS.index("grouped_wide" if wide else "grouped_gated")
    assert own["data"] == w.data_ptr() and own["box"] == [64, 8, 2, 8, 1]
    assert rows["data"] == x.data_ptr()
    box = [32, 32 if wide else 64, 1]
    assert second == _map(out, [16, 96, 1], [32, 3072], box)
    assert (h is not None) == keep == (first is not None)
    if h is not None:  # gate and up beside one another in a row
        assert first == _map(h, [16, 96, 2], [64, 32], box)
    places = [0 if h is None else h.data_ptr(), out.data_ptr(), offsets.data_ptr(), prob.data_ptr()]
    assert launch["words"] == [*places, 2, 96, 32, 64, keep, 0]


def test_weights_are_read_as_they_lie_and_looked_at_once(as_on_hopper: Driver) -> None:
    x, w = _rows(96, 64), torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([40, 96], dtype=torch.int32)
    for weights, name, box in (
        (w.transpose(1, 2), "grouped_forward", 128),
        (w, "grouped_backward", 64),
    ):
        for _ in range(2):
            grouped_gemm.grouped_matmul(x, weights, offsets)
        first, second = as_on_hopper.launches[-2:]
        described = [found for found in as_on_hopper.maps if found["data"] == w.data_ptr()]
        assert [found["box"][1] for found in described].count(box) == 1, "encoded once"
        assert first["name"] == second["name"] == 1 + KERNELS.index(name)
        assert first["maps"][0] == _map(w, [64, 64, 2], [128, 8192], [64, box, 1])


def test_a_map_in_a_thread_without_a_context_is_made_again(driver: Driver) -> None:
    driver.refusals, (maps, x) = [201], (TensorMaps(1), _rows())
    maps.fill(0, in_boxes(x, 32))
    assert [found["data"] for found in driver.maps] == [x.data_ptr()]
    assert word(maps.address) == 1 and driver.contexts_set == 1


def test_a_kernel_is_started_with_addresses_and_a_counter_of_its_stream(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = HopperKernels(FUSED, torch.bfloat16)
    for stream in (1, 2, 1):
        monkeypatch.setattr(Machine, "stream", stream)
        kernels.start("scatter_forward", 132, (1 << 40, 5 << 40))
    name = 1 + KERNELS.index("scatter_forward")
    assert all(launch["name"] == name for launch in driver.launches)
    assert [launch["addresses"] for launch in driver.launches] == [[1 << 40, 5 << 40]] * 3
    first, other, again = (launch["counter"] for launch in driver.launches)
    assert first == again != other
