"""Calls of the CUDA driver, against one that keeps a current context per thread as the real one
does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.errors import FluidError
from tests.support.cuda_driver import FakeDriver, driver_in_place

INVALID_VALUE, INVALID_CONTEXT = 1, 201
HERE, EVENT, STREAM = 0x7F1234567890, 0x7F2234567890, 0x7F3234567890  # as handles and addresses are


@pytest.fixture
def library() -> Iterator[FakeDriver]:
    fake = FakeDriver(contexts=True)
    fake.answers["cuEventCreate"] = lambda flags: (fake.real.CUevent(EVENT),)
    with driver_in_place(fake):
        yield fake


CALLS: dict[str, tuple[Callable[[CudaDriver], object], tuple[str, tuple[Any, ...]]]] = {
    "event": (lambda driver: driver.event(), ("cuEventCreate", (2,))),
    "record": (lambda driver: driver.record(EVENT, STREAM), ("cuEventRecord", (EVENT, STREAM))),
    "wait": (lambda driver: driver.wait(EVENT, STREAM), ("cuStreamWaitEvent", (STREAM, EVENT, 0))),
    "copy": (
        lambda driver: driver.copy(HERE, HERE + 9, 3, STREAM),
        ("cuMemcpyAsync", (HERE, HERE + 9, 3, STREAM)),
    ),
    "write": (
        lambda driver: driver.write(HERE, -1, STREAM),
        ("cuStreamWriteValue32", (STREAM, HERE, 0xFFFFFFFF, 0)),
    ),
    "wait_value": (
        lambda driver: driver.wait_value(HERE, 5, STREAM),
        ("cuStreamWaitValue32", (STREAM, HERE, 5, 0)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_without_a_context_gets_the_primary_one_and_the_call_is_made_once(
    library: FakeDriver, name: str
) -> None:
    call, expected = CALLS[name]
    driver = CudaDriver(torch.device("cuda", 1))
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            call(driver)
            call(driver)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failures
    assert library.calls == [expected] * 2
    assert library.contexts_set == 1, (
        "the second call found the context that the first one made current"
    )


def test_a_block_of_rows_is_copied_with_its_pitch_and_a_whole_one_as_it_lies(
    library: FakeDriver,
) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = 1
    driver.copy_block(100, 200, 64, 16, 3, 40)
    ((name, (found, stream)),) = library.calls
    assert (name, stream) == ("cuMemcpy2DAsync", 40)
    assert (int(found.dstDevice), found.dstPitch, int(found.srcDevice), found.srcPitch) == (
        *(100, 64, 200, 64),
    )
    assert (found.WidthInBytes, found.Height) == (16, 3)
    assert found.srcMemoryType == found.dstMemoryType == library.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    assert not any((found.srcXInBytes, found.srcY, found.dstXInBytes, found.dstY))
    library.calls.clear()
    driver.copy_block(100, 200, 64, 64, 3, 40)
    driver.copy_block(100, 200, 64, 16, 1, 40)
    assert library.calls == [
        ("cuMemcpyAsync", (100, 200, 192, 40)),
        ("cuMemcpyAsync", (100, 200, 16, 40)),
    ]


@pytest.mark.parametrize("name", CALLS)
def test_any_other_error_is_raised_at_once(library: FakeDriver, name: str) -> None:
    call, (function, _) = CALLS[name]
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = 1
    library.broken[function] = [INVALID_VALUE]
    with pytest.raises(FluidError, match=rf"{function}: CUDA_ERROR_INVALID_VALUE \(1\)"):
        call(driver)
    assert library.contexts_set == 0


def test_a_context_that_does_not_help_is_not_tried_twice(library: FakeDriver) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = 1
    library.broken["cuEventRecord"] = [INVALID_CONTEXT] * 2
    with pytest.raises(FluidError, match="cuEventRecord: CUDA_ERROR_INVALID_CONTEXT"):
        driver.record(7, 40)
    assert library.contexts_set == 1


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_context_that_cannot_be_had_is_named(library: FakeDriver, function: str) -> None:
    library.broken[function] = [INVALID_VALUE]
    with pytest.raises(FluidError, match=f"{function}: CUDA_ERROR_INVALID_VALUE"):
        CudaDriver(torch.device("cuda", 1)).record(7, 40)
