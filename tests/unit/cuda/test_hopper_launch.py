"""What our kernels for Hopper are started with, seen by a driver that only writes it down."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fluid.cuda import driver_api, kernel_build
from megatron_fluid.cuda import hopper_kernels as hopper
from megatron_fluid.cuda.hopper_kernels import HopperModule, Operands
from megatron_fluid.cuda.tensor_maps import TensorMaps
from megatron_fluid.errors import FluidError
from megatron_fluid.kernels import grouped_gemm

KERNELS = (*hopper.GROUPED.kernels, *hopper.FUSED.kernels)


class _Exported:
    """A function whose argtypes may be set."""

    argtypes: Any = None

    def __init__(self, call: Any) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> Any:
        assert self.argtypes is None
        return self.call(*arguments)


class Driver:
    """The CUDA driver's functions as far as they are called; `statuses` are what the next launches
    answer."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.maps: dict[int, dict[str, Any]] = {}
        self.statuses: list[int] = []
        self.parameters: list[int] = []  # of the last launch: addresses of maps
        self.contexts_set, self.modes = 0, []
        self.refusals, self.refusal = 0, 1  # of maps, that come next
        self.encoded: list[tuple[int, int]] = []

    def places_of(self, tensor: torch.Tensor) -> list[int]:
        """Where maps of `tensor` were made, one after the other."""
        return [place for data, place in self.encoded if data == tensor.data_ptr()]

    def cuTensorMapEncodeTiled(
        self, place, element, rank, data, sizes, pitches, box, steps, inner, swizzle, l2, fill
    ):  # type: ignore[no-untyped-def]  # noqa: E501, N802
        assert (
            place.value % 64 == 0
            and steps[:rank] == [1] * rank
            and swizzle == (3 if box[0] == 64 else 2)
        )
        found = [
            [ctypes.c_uint64.from_address(words.value + 8 * i).value for i in range(count)]
            for words, count in ((sizes, rank), (pitches, rank - 1))
        ]
        if self.refusals:
            self.refusals -= 1
            return self.refusal
        self.encoded.append((data.value, place.value))
        self.maps[place.value] = {
            "data": data.value,
            "sizes": found[0],
            "pitches": found[1],
            "box": box[:rank],
        }
        return 1 if any(pitch % 16 for pitch in found[1]) else 0

    def cuLaunchKernel(self, function, x, y, z, bx, by, bz, shared, stream, parameters, extra):  # type: ignore[no-untyped-def]  # noqa: N802
        if len(parameters) == 3:  # by addresses, and a counter
            counter = ctypes.c_int.from_address(parameters[2]).value
            self.launches.append(
                {"name": function.value, "addresses": parameters[:2], "counter": counter}
            )
            return self.statuses.pop(0) if self.statuses else 0
        words = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(3, 13)]
        self.parameters = list(parameters[0:3])
        maps = [
            self.maps.get(place)
            for place in (*self.parameters[:2], *[self.parameters[2] + 128 * i for i in range(2)])
        ]
        self.launches.append(
            {
                "name": function.value,
                "grid": (x, y, z),
                "block": (bx, by, bz),
                "stream": stream.value,
                "words": words,
                "maps": maps,
            }
        )
        return self.statuses.pop(0) if self.statuses else 0

    def cuModuleGetFunction(self, function, module, name):  # type: ignore[no-untyped-def]  # noqa: N802
        function._obj.value = 1 + KERNELS.index(name.decode())
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):  # type: ignore[no-untyped-def]  # noqa: N802
        self.modes.append(mode._obj.value)
        mode._obj.value = 0
        return 0

    def cuGetErrorName(self, status, name):  # type: ignore[no-untyped-def]  # noqa: N802
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}[
            status
        ]
        return 0

    def cuCtxSetCurrent(self, context):  # type: ignore[no-untyped-def]  # noqa: N802
        self.contexts_set += 1
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def __getitem__(self, name: str) -> Any:
        """A function without argtypes, as ctypes gives it: integers are taken for C's int."""
        function = getattr(self, name)

        def call(*arguments: Any) -> Any:
            assert all(not isinstance(a, int) or -(1 << 31) <= a < 1 << 31 for a in arguments)
            return function(*arguments)

        return _Exported(call)


class Machine:
    device, stream, capturing = 0, 0x51, False


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    found = Driver()
    monkeypatch.setattr(driver_api, "library", lambda: found)
    driver_api.primary_context.cache_clear()
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
    yield found
    driver_api.primary_context.cache_clear()


def _rows(n: int = 96, width: int = 64) -> torch.Tensor:
    return torch.zeros(n, width, dtype=torch.bfloat16)


def _launch(module: HopperModule, name: str = "grouped_forward", programs: int = 132) -> None:
    x = _rows()
    module.launch(name, Operands((x, 32), x, ((x, 64),)), (6, 7, 8, 9), (1, 2, 3, 4), programs)


def test_a_launch_carries_maps_pointers_a_counter_and_sizes(driver: Driver) -> None:
    module = HopperModule(torch.bfloat16)
    x, stack = _rows(), torch.zeros(5, 48, 64, dtype=torch.bfloat16)
    weights = TensorMaps(1)
    weights.fill(0, stack, 128)
    maps = Operands(weights, (x, 32), ((x[:32], 64),))
    module.launch("grouped_sums", maps, (6, 7, 8, 9), (1, 2, 3, 4), 131)
    [launch] = driver.launches
    assert launch["name"] == 1 + KERNELS.index("grouped_sums")
    assert launch["grid"] == (130, 1, 1), "whole clusters of two"
    assert launch["block"] == (384, 1, 1)
    assert launch["words"] == [6, 7, 8, 9, 0, 1, 2, 3, 4, 1]
    own, both, out, other = launch["maps"]
    assert other is None and launch["stream"] == 0x51
    assert own == {
        "data": stack.data_ptr(),
        "sizes": [64, 48, 5],
        "pitches": [128, 6144],
        "box": [64, 128, 1],
    }
    assert both == {
        "data": x.data_ptr(),
        "sizes": [64, 96, 1],
        "pitches": [128, 12288],
        "box": [64, 32, 1],
    }
    assert out == {
        "data": x.data_ptr(),
        "sizes": [64, 32, 1],
        "pitches": [128, 4096],
        "box": [64, 64, 1],
    }


def test_the_kernels_fit_into_an_sms_shared_memory() -> None:
    ends = 4 * 256  # of experts
    assert hopper._DYNAMIC_SHARED + ends + 256 <= 227 * 1024


def test_a_block_of_columns_keeps_the_pitch_of_its_rows(driver: Driver) -> None:
    TensorMaps(1).fill(0, torch.zeros(5, 48, 64, dtype=torch.float16)[:, :, 8:40], 64)
    [found] = driver.maps.values()
    assert found["sizes"] == [32, 48, 5] and found["pitches"] == [128, 6144]


def test_gate_and_up_are_read_in_turns_of_8_rows(driver: Driver) -> None:
    weights = torch.zeros(5, 96, 136, dtype=torch.bfloat16)[:, :, :128]
    TensorMaps(1).fill_halves(weights)
    [found] = driver.maps.values()
    assert found["sizes"] == [128, 8, 2, 6, 5] and found["box"] == [64, 8, 2, 8, 1]
    assert found["pitches"] == [272, 48 * 272, 8 * 272, 96 * 272]


@pytest.mark.parametrize("keep", [True, False])
def test_the_gated_kernel_has_a_second_result_and_keeps_the_first_if_it_is_to(
    driver: Driver, keep: bool
) -> None:
    module, x = HopperModule(torch.bfloat16), _rows()
    maps = Operands((x, 32), x, ((x, 32, 32) if keep else None, (x[:8], 32, 32)))
    module.launch("grouped_gated", maps, (6, 7, 8, 9), (1, 2, 3, 4), 132, keep)
    [launch] = driver.launches
    assert launch["words"][-1] == keep
    first, second = launch["maps"][2:]
    assert first == (
        {"data": x.data_ptr(), "sizes": [64, 96, 1], "pitches": [128, 12288], "box": [32, 32, 1]}
        if keep
        else None
    )
    assert second == {
        "data": x.data_ptr(),
        "sizes": [64, 8, 1],
        "pitches": [128, 1024],
        "box": [32, 32, 1],
    }


def test_what_tma_cannot_address_is_named(driver: Driver) -> None:
    with pytest.raises(
        FluidError,
        match=r"cuTensorMapEncodeTiled of sizes \[60, 96, 1\].*pitches of \[120, 11520\] bytes",
    ):
        TensorMaps(1).fill(0, _rows(width=60), 32)
    with pytest.raises(FluidError, match=r"cuTensorMapEncodeTiled of sizes \[60, 8, 2, 1, 1\]"):
        TensorMaps(1).fill_halves(torch.zeros(1, 16, 60, dtype=torch.bfloat16))


@pytest.mark.parametrize(("programs", "grid"), [(1, 2), (2, 2), (3, 2), (132, 132)])
def test_there_is_always_a_cluster(driver: Driver, programs: int, grid: int) -> None:
    _launch(HopperModule(torch.bfloat16), programs=programs)
    assert driver.launches[0]["grid"] == (grid, 1, 1)


def test_launches_that_may_run_together_have_counters_of_their_own(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = HopperModule(torch.bfloat16)
    for stream, capturing in ((1, False), (2, False), (1, False), (1, True), (1, True), (2, False)):
        monkeypatch.setattr(Machine, "stream", stream)
        monkeypatch.setattr(Machine, "capturing", capturing)
        _launch(module)
    counters = [launch["words"][4] for launch in driver.launches]
    first, second, again, captured, another, last = counters
    assert (again, last) == (first, second)
    assert len({first, second, captured, another}) == 4
    assert all(0 <= counter < 1 << 16 for counter in counters)


def test_a_thread_without_a_context_gets_one(driver: Driver) -> None:
    module = HopperModule(torch.bfloat16)
    before = driver.contexts_set
    driver.statuses = [201]
    _launch(module)
    assert driver.contexts_set == before + 1 and len(driver.launches) == 2


def test_a_launch_that_fails_says_so(driver: Driver) -> None:
    module = HopperModule(torch.bfloat16)
    driver.statuses = [700]
    with pytest.raises(FluidError, match=r"cuLaunchKernel: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
        _launch(module)


def test_another_current_device_is_left_as_it_was(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = HopperModule(torch.bfloat16)
    monkeypatch.setattr(Machine, "device", 3)
    _launch(module)
    assert len(driver.launches) == 1 and Machine.device == 3


def test_loading_inside_a_capture_is_allowed_and_the_mode_put_back(driver: Driver) -> None:
    module = HopperModule(torch.bfloat16)
    _launch(module)
    assert driver.modes == [2, 0]
    _launch(module)
    assert driver.modes == [2, 0], "loaded once"


def test_tokens_are_loaded_by_boxes_of_three_heights(driver: Driver) -> None:
    module, x = HopperModule(torch.bfloat16), _rows()
    module.launch(
        "grouped_forward", Operands((x, 128), x, ((x, 64),)), (6, 7, 8, 9), (1, 2, 3, 4), 132
    )
    both = driver.parameters[1]
    assert [driver.maps[both + 128 * i]["box"] for i in range(3)] == [
        [64, 32, 1],
        [64, 64, 1],
        [64, 128, 1],
    ]


@pytest.fixture
def as_on_hopper(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Grouped GEMMs of tensors on a CPU go to `driver`."""
    module = HopperModule(torch.bfloat16)
    monkeypatch.setattr(grouped_gemm, "_rows_fit", lambda *tensors: True)
    monkeypatch.setattr(grouped_gemm, "hopper_module", lambda dtype, index: module)
    monkeypatch.setattr(grouped_gemm, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(grouped_gemm, "_weight_maps", {})
    return driver


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("keep", [True, False])
def test_a_gated_product_reads_both_halves_and_writes_boxes_of_its_tiles(
    as_on_hopper: Driver, monkeypatch: pytest.MonkeyPatch, wide: bool, keep: bool
) -> None:
    monkeypatch.setattr(grouped_gemm, "wide_tiles_pay", lambda ends, depth: wide)
    x, w, out = _rows(96, 64), torch.zeros(2, 32, 64, dtype=torch.bfloat16), _rows(96, 16)
    offsets, prob = torch.tensor([40, 96], dtype=torch.int32), torch.ones(96)
    h = grouped_gemm.gated_matmul(x, w.transpose(1, 2), offsets, prob, out, keep, None, [40, 96])
    [launch] = as_on_hopper.launches
    own, rows, first, second = launch["maps"]
    assert launch["name"] == 1 + KERNELS.index("grouped_wide" if wide else "grouped_gated")
    assert own["data"] == w.data_ptr() and own["box"] == [64, 8, 2, 8, 1]
    assert rows["data"] == x.data_ptr()
    box = [32, 32 if wide else 64, 1]
    assert second == {
        "data": out.data_ptr(),
        "sizes": [16, 96, 1],
        "pitches": [32, 3072],
        "box": box,
    }
    assert (h is not None) == keep == (first is not None)
    if h is not None:  # gate and up beside one another in a row
        assert first == {
            "data": h.data_ptr(),
            "sizes": [16, 96, 2],
            "pitches": [64, 32],
            "box": box,
        }
    places = [0 if h is None else h.data_ptr(), out.data_ptr(), offsets.data_ptr(), prob.data_ptr()]
    assert launch["words"] == [*places, 0, 2, 96, 32, 64, keep]


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
        assert len(as_on_hopper.places_of(w)) == len(grouped_gemm._weight_maps), (
            "one map, filled once"
        )
        assert first["name"] == second["name"] == 1 + KERNELS.index(name)
        assert first["maps"][0] == {
            "data": w.data_ptr(),
            "sizes": [64, 64, 2],
            "pitches": [128, 8192],
            "box": [64, box, 1],
        }
    assert len(grouped_gemm._weight_maps) == 2


def test_weights_whose_map_could_not_be_made_are_looked_at_again(as_on_hopper: Driver) -> None:
    x, w = _rows(96, 64), torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([40, 96], dtype=torch.int32)
    as_on_hopper.refusals = 1
    with pytest.raises(FluidError, match="cuTensorMapEncodeTiled"):
        grouped_gemm.grouped_matmul(x, w, offsets)
    grouped_gemm.grouped_matmul(x, w, offsets)
    [launch] = as_on_hopper.launches
    assert launch["maps"][0]["data"] == w.data_ptr()


def test_a_map_in_a_thread_without_a_context_is_made_again(driver: Driver) -> None:
    driver.refusals, driver.refusal = 1, 201
    maps, x = TensorMaps(1), _rows()
    maps.fill(0, x, 32)
    assert driver.maps[maps.address]["data"] == x.data_ptr() and driver.contexts_set == 1


def test_a_kernel_is_started_with_addresses_and_a_counter_of_its_stream(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = hopper.HopperKernels(hopper.FUSED, torch.bfloat16)
    for stream in (1, 2, 1):
        monkeypatch.setattr(Machine, "stream", stream)
        kernels.start("scatter_forward", 132, (1 << 40, 5 << 40))
    name = 1 + KERNELS.index("scatter_forward")
    assert all(launch["name"] == name for launch in driver.launches)
    assert [launch["addresses"] for launch in driver.launches] == [[1 << 40, 5 << 40]] * 3
    first, other, again = (launch["counter"] for launch in driver.launches)
    assert first == again != other
