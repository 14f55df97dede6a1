"""What the overlapped forms of the tensor-parallel linears refuse, and the errors when a
peer stays away."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.tensor_parallel.gemm import Gemm
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.tensor_parallel_forms import copy_engine_forms, fused_forms

pytestmark = NEEDS_INTERPRETER


def test_a_gather_that_nobody_finishes_is_waited_for_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its signals would not be seen, and the next but one might overwrite what a peer still
    reads."""
    backends = fused_forms(3, monkeypatch)
    shard = torch.randn(4, 64).to(torch.bfloat16)
    for rank in (0, 2):
        backends[rank].start_gather(shard)  # rank 1 stays away
    with pytest.raises(PeerTimeoutError, match="rank 0.*peer 1.*tp_fused_gather"):
        backends[0].start_gather(shard)


@pytest.mark.parametrize("name", ["copy_engine", "fused"])
def test_nothing_is_moved_in_a_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would turn to the half of the capture, which a peer may still read."""
    (backend,) = copy_engine_forms(1) if name == "copy_engine" else fused_forms(1, monkeypatch)
    monkeypatch.setattr(backend._driver, "capturing", lambda: True)
    a, b = (torch.randn(16, 16).to(torch.bfloat16) for _ in range(2))
    for call in (
        lambda: backend.start_gather(a),
        lambda: backend.gather_matmul(a, Gemm(b)),
        lambda: backend.matmul_scatter(a, Gemm(b)),
    ):
        with pytest.raises(FluidError, match=f"the {name} backend .* cannot be captured"):
            call()
    assert not backend._gathers._addresses[0] and not backend._scatters._addresses[0]


def test_a_chunk_is_not_sent_before_the_kernel_has_counted_its_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = fused_forms(2, monkeypatch)
    a, gemm = torch.randn(8, 16).to(torch.bfloat16), Gemm(torch.randn(16, 528).to(torch.bfloat16))
    for backend in backends:
        _, blocks = backend._matmul_blocks(a, gemm)
    backends[1]._counters[0, 1] -= 1  # as if a part of a tile were missing
    with pytest.raises(FluidError, match="would wait for 4 forever"):
        backends[1]._send(blocks)


def test_a_block_that_never_comes_is_reported_by_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = fused_forms(3, monkeypatch)
    a, gemm = torch.randn(12, 16).to(torch.bfloat16), Gemm(torch.randn(16, 16).to(torch.bfloat16))
    for rank in (0, 2):
        slots, blocks = backends[rank]._matmul_blocks(a, gemm)
        backends[rank]._send(blocks)
    backends[2]._add(slots, None)
    with pytest.raises(PeerTimeoutError, match="rank 2.*peer 1.*tp_fused_scatter"):
        backends[2]._matmul_blocks(a, gemm)


def test_the_fused_form_refuses_what_its_kernel_cannot_multiply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (backend,) = fused_forms(1, monkeypatch)

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.bfloat16)

    for a, b, reason in (
        (torch.randn(4, 16), torch.randn(16, 16), "multiplies bf16 and fp16, not torch.float32"),
        (half(4, 24), half(24, 16), "K 24 and N 16 are not multiples of 16"),
        (half(4, 16), half(16, 64)[:, ::2], r"B has strides \(64, 2\)"),
        (half(0, 16), half(16, 16), "A has no rows"),
        (half(65)[1:].view(4, 16), half(16, 16), "does not begin on a 16-byte boundary"),
    ):
        for call in (backend.gather_matmul, backend.matmul_scatter):
            with pytest.raises(ConfigError, match=reason):
                call(a, Gemm(b))
