"""Prepared launches go to the driver, on the stream, thread and graph that they are meant for."""

import threading

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch
from tests.support.machine import GPUS, INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS or INTERPRETED, reason="needs a GPU and compiled kernels"),
]


@triton.jit(do_not_specialize=["n", "more"])
def _kernel(x, out, n, more, table, one, wide, BLOCK: tl.constexpr):
    """out = x + more + table[0] + one + wide / 2**40, of which Triton makes `one` a constant."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + i, mask=i < n) + more + tl.load(table) + one + (wide >> 40)
    tl.store(out + i, total, mask=i < n)


class _Prepared:
    """A launch that has run once, and what it should make."""

    def __init__(self) -> None:
        self.table = torch.tensor([100, 0], dtype=torch.int32, device="cuda")
        self.launch = Launch(_kernel, 4, {"BLOCK": 128}, (self.table, 1, 5 << 40))
        self.x = torch.arange(1000, dtype=torch.int32, device="cuda")
        assert torch.equal(self(7), self.x + 113)
        assert self.launch._direct is not None

    def __call__(self, more: int, stream: torch.cuda.Stream | None = None) -> Tensor:
        out = torch.empty_like(self.x)
        self.launch((8, 1), (self.x, out, 1000, more), stream)
        return out


def test_every_call_brings_its_own_arguments() -> None:
    prepared = _Prepared()
    assert torch.equal(prepared(-3), prepared.x + 103)
    prepared.x = torch.arange(1000, 2000, dtype=torch.int32, device="cuda")
    assert torch.equal(prepared(16), prepared.x + 122)


def test_on_a_stream_that_is_named_or_current() -> None:
    prepared, side = _Prepared(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        prepared.x.add_(1)
        current = prepared(2)
    named = prepared(3, side)
    side.synchronize()
    assert torch.equal(current, prepared.x + 108)
    assert torch.equal(named, prepared.x + 109)


def test_on_a_thread_without_a_context() -> None:
    prepared = _Prepared()
    out = torch.zeros_like(prepared.x)
    errors: list[Exception] = []

    def run() -> None:
        try:
            prepared.launch((8, 1), (prepared.x, out, 1000, 9))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors
    assert torch.equal(out, prepared.x + 115)


def test_in_a_graph() -> None:
    prepared, graph = _Prepared(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prepared(11)
    for step in range(2):
        prepared.x.add_(step)
        graph.replay()
        assert torch.equal(out, prepared.x + 117)
