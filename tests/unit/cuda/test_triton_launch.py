"""Direct launches: what the driver is handed, with a stand-in for the driver."""

import contextlib
import ctypes
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from megatron_fluid.cuda import driver_api
from megatron_fluid.cuda.triton_launch import Launch, Launcher
from megatron_fluid.errors import ConfigError


class _Driver:
    """cuda.bindings.driver, but launches are recorded; kernel parameters have the `widths`."""

    def __init__(self) -> None:
        self.launches: list[tuple[list[int], list[int]]] = []
        self.widths: list[int] = []

    def __getattr__(self, name: str) -> Any:
        from cuda.bindings import driver

        return getattr(driver, name)

    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[Any, ...]:
        if index >= len(self.widths):
            return self.CUresult(1), None, None
        return self.CUresult(0), 0, self.widths[index]

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any, ...]:
        function, *shape, stream, parameters, extra = arguments
        assert extra == 0
        values = [_word(_word(parameters + 8 * i), width) for i, width in enumerate(self.widths)]
        self.launches.append(([int(function), *shape, int(stream)], values))
        return (self.CUresult(0),)


def _word(address: int, width: int = 8) -> int:
    """The unsigned integer of so many bytes at `address`."""
    return int.from_bytes(ctypes.string_at(address, width), sys.byteorder)


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 33, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    found = _Driver()
    monkeypatch.setattr(driver_api, "driver", lambda: found)
    return found


def _compiled(signature: dict[str, str]) -> SimpleNamespace:
    metadata = SimpleNamespace(
        num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, shared=2048
    )
    return SimpleNamespace(function=77, metadata=metadata, src=SimpleNamespace(signature=signature))


_SIGNATURE = {
    "x": "*i32", "absent": "constexpr", "y": "*fp32", "flags": "*i32", "errors": "*i64",
    "m": "i32", "timeout": "i64", "BLOCK": "constexpr",
}  # fmt: skip


class _Started:
    """A kernel of (x, n, table, one, BLOCK), of which Triton makes `one` a constant, as it does
    with an integer 1."""

    def __init__(self, signature: dict[str, str]) -> None:
        self.compiled = _compiled(signature)
        self.compiled.packed_metadata = None
        self.compiled.run = lambda *arguments: self.through_triton.append(arguments)
        self.through_triton: list[tuple[Any, ...]] = []
        self.arg_names = tuple(signature)
        self.first: list[tuple[Any, ...]] = []  # grid, arguments, keywords of launches by Triton

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **keywords: Any) -> Any:
            self.first.append((grid, arguments, keywords))
            return self.compiled

        return launch


@pytest.mark.parametrize("widths", [[8, 4, 8], [8, 8, 8, 8], []])  # it takes 8, 4, 8, 8
def test_launch_of_a_kernel_with_other_parameters_goes_through_triton(
    driver: _Driver, widths: list[int]
) -> None:
    driver.widths = widths
    kernel = _Started({"x": "*fp32", "n": "i32", "BLOCK": "constexpr"})
    x, prepared = torch.zeros(4), Launch(kernel, 4, {"BLOCK": 64}, (9,))
    stream: Any = SimpleNamespace(cuda_stream=33)
    for _ in range(2):
        prepared((2, 1), (x,), stream)
    assert not driver.launches
    (arguments,) = kernel.through_triton
    assert arguments == (2, 1, 1, 33, 77, None, None, None, None, x.data_ptr(), 9, 64)


def test_a_launcher_compiles_for_each_type_alignment_and_constant_once(
    driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.widths = [8, 4, 8, 8]
    kernel = _Started({"x": "*fp32", "n": "i32", "BLOCK": "constexpr"})
    launcher = Launcher(kernel, 4)
    memory = torch.zeros(64)
    aligned = memory[-memory.data_ptr() // 4 % 4 :]
    assert aligned.data_ptr() % 16 == 0
    ways = [(aligned, 64), (aligned[1:], 64), (aligned.to(torch.float16), 64), (aligned, 128)]
    for seen in (1, 2):
        for way, (x, block) in enumerate(ways):
            launcher(5, (x, 7 + way), BLOCK=block)
        compiled = [(grid, *keywords.values()) for grid, _, keywords in kernel.first]
        assert compiled == [((5, 1), block, 4) for _, block in ways], "at the first calls alone"
        assert len(driver.launches) == len(ways) * (seen - 1)
    launcher(0, (aligned, 7), BLOCK=64)
    assert len(driver.launches) == len(ways), "nothing to start"
    launcher(5, (aligned, 1 << 31), BLOCK=64)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 3)
    launcher(5, (aligned, 7), BLOCK=64)
    assert len(kernel.first) == len(ways) + 2, "a wide integer and another device are compiled for"
    assert [values[:2] for _, values in driver.launches[:2]] == [
        [aligned.data_ptr(), 7],
        [aligned.data_ptr() + 4, 8],
    ]


def test_what_starts_again_takes_other_tensors_in_their_order_and_keeps_the_rest(
    driver: _Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.widths = [8, 8, 8, 8, 4, 8, 8, 8]
    kernel = _Started(_SIGNATURE)
    x, y, kept, errors, others = (torch.zeros(4, 8) for _ in range(5))
    launch = Launch(kernel, 4, {"BLOCK": 64}, (errors,), unaligned=("y",))
    given, integers = (x, None, y, kept), (-128, -5_000_000_000)
    again = launch.start_aligned(9, given, integers, (2, 1, 0))()
    launch.start_aligned(9, given, integers)
    again((y, None, x))
    assert driver.launches[0] == driver.launches[1]
    assert driver.launches[0][1][2:4] == [kept.data_ptr(), errors.data_ptr()]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch.start_aligned(9, (others, None, others, kept), integers, (2, 1, 0))()((y, None, x))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 44, raising=False)
    again((others.flatten()[1:], None, others))
    (shape, first), (_, last) = driver.launches[3:][:1] + driver.launches[-1:]
    assert (shape, first) == driver.launches[0], "on the device of the first launch"
    moved = [others.data_ptr(), others.data_ptr() + 4]
    assert last == [*moved, *first[2:]], "y may lie at any address"
    with pytest.raises(ConfigError, match="address of x: found '4 above a multiple of 16'"):
        again((y, None, others.flatten()[1:]))
    assert len(driver.launches) == 5


def test_an_aligned_start_takes_absent_tensors_and_integers_behind_the_fixed_ones(
    driver: _Driver,
) -> None:
    driver.widths = [8, 8, 8, 8, 4, 8, 8, 8]
    kernel, memory = _Started(_SIGNATURE), torch.zeros(64)
    aligned = memory[-memory.data_ptr() // 4 % 4 :][:32]
    fixed = (torch.zeros(1), torch.zeros(1))
    launch = Launch(kernel, 4, {"BLOCK": 64}, fixed, words=("x",), unaligned=("y",))
    for y in (aligned, aligned[1:]):
        launch.start_aligned(9, (aligned, None, y), (128, 5_000_000_000))
    ((_, given, _),) = kernel.first
    assert [getattr(a, "dtype", a) for a in given[:3]] == [torch.int32, None, torch.float32]
    ((shape, values),) = driver.launches
    assert shape == [77, 9, 1, 1, 128, 1, 1, 2048, 33]
    addresses = [tensor.data_ptr() for tensor in (aligned, aligned[1:], *fixed)]
    assert values == [*addresses, 128, 5_000_000_000, 0, 0]
    with pytest.raises(struct.error):
        launch.start_aligned(9, (aligned, None, aligned), (1 << 31, 1))  # of an int32
    with pytest.raises(ConfigError, match="address of x: found '4 above a multiple of 16'"):
        launch.start_aligned(9, (aligned[1:], None, aligned), (128, 1))
