"""Calls of the CUDA driver, against one that keeps a current context per thread as the real one
does. What the real bindings make of their arguments: test_driver_bindings.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from megatron_fluid.cuda.copy_engine import CudaDriver
from megatron_fluid.errors import FluidError
from tests.support.cuda_driver import FakeDriver, driver_in_place

INVALID_VALUE = 1
HERE, EVENT, STREAM = 0x7F1234567890, 0x7F2234567890, 0x7F3234567890  # as handles and addresses are


@pytest.fixture
def library() -> Iterator[FakeDriver]:
    fake = FakeDriver(contexts=True)
    fake.answers["cuEventCreate"] = lambda flags: (fake.real.CUevent(EVENT),)
    with driver_in_place(fake):
        yield fake


CALLS: dict[str, Callable[[CudaDriver], object]] = {
    "cuEventCreate": lambda driver: driver.event(),
    "cuEventRecord": lambda driver: driver.record(EVENT, STREAM),
    "cuStreamWaitEvent": lambda driver: driver.wait(EVENT, STREAM),
    "cuMemcpyAsync": lambda driver: driver.copy(HERE, HERE + 9, 3, STREAM),
    "cuMemcpy2DAsync": lambda driver: driver.copy_block(HERE, HERE + 9, 64, 16, 3, STREAM),
    "cuStreamWriteValue32": lambda driver: driver.write(HERE, -1, STREAM),
    "cuStreamWaitValue32": lambda driver: driver.wait_value(HERE, 5, STREAM),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_without_a_context_gets_the_primary_one_and_other_errors_are_raised(
    library: FakeDriver, name: str
) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    failures: list[BaseException] = []

    def backward() -> None:
        try:
            CALLS[name](driver)
            CALLS[name](driver)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert not failures
    assert [called for called, _ in library.calls] == [name] * 2
    assert library.contexts_set == 1, "the second call has the context that the first one set"
    library.thread.context = 1
    library.broken[name] = [INVALID_VALUE]
    with pytest.raises(FluidError, match=rf"{name}: CUDA_ERROR_INVALID_VALUE \(1\)"):
        CALLS[name](driver)
    assert library.contexts_set == 1


def test_a_whole_block_of_rows_is_one_copy(library: FakeDriver) -> None:
    driver = CudaDriver(torch.device("cuda", 1))
    library.thread.context = 1
    driver.copy_block(100, 200, 64, 64, 3, 40)
    driver.copy_block(100, 200, 64, 16, 1, 40)
    assert library.calls == [
        ("cuMemcpyAsync", (100, 200, 192, 40)),
        ("cuMemcpyAsync", (100, 200, 16, 40)),
    ]


@pytest.mark.parametrize("function", ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"])
def test_a_context_that_cannot_be_had_is_named(library: FakeDriver, function: str) -> None:
    library.broken[function] = [INVALID_VALUE]
    with pytest.raises(FluidError, match=f"{function}: CUDA_ERROR_INVALID_VALUE"):
        CudaDriver(torch.device("cuda", 1)).record(7, 40)
