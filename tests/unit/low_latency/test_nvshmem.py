"""The NVSHMEM transport over a fake NVSHMEM that delays puts, delivers them in any order that
fences allow, and drops them.

Kernels run in Triton's interpreter, all ranks in one process.
"""

from __future__ import annotations

import gc
import os
import re
import sysconfig
import weakref
from pathlib import Path

import pytest
import torch

from megatron_fluid.comm.workspace import Buffer, Workspace
from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.open_transport import open_transport
from megatron_fluid.low_latency.reference import combine_reference, dispatch_reference
from tests.support.fake_nvshmem import SIGNAL_SET, FakeNvshmem, fake_nvshmem
from tests.support.far_experts import far_experts
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["fake_nvshmem"]


def _build(fake_nvshmem: FakeNvshmem, layout: Layout) -> list[AllToAll]:
    from megatron_fluid.low_latency.nvshmem import Nvshmem

    simulated = SimulatedWorkspace(layout.world_size)
    fake_nvshmem.ranks = [simulated.rank(r) for r in range(layout.world_size)]
    return [
        AllToAll(layout, Nvshmem(layout, space), torch.device("cpu"))
        for space in fake_nvshmem.ranks
    ]


@NEEDS_INTERPRETER
@pytest.mark.parametrize(("world", "dp", "scale_words"), [(3, 1, 2), (4, 2, 0)])
def test_puts_in_any_order_arrive_before_their_signals(
    fake_nvshmem: FakeNvshmem, world: int, dp: int, scale_words: int
) -> None:
    local, k, capacity, hidden = 2, 3, 3, 32
    layout = Layout(capacity, local * world, k, world, dp, hidden, hidden * 2, scale_words * 4)
    ranks = _build(fake_nvshmem, layout)
    generator = torch.Generator().manual_seed(world)
    for _ in range(3):
        tokens = [
            int(torch.randint(0, capacity + 1, (1,), generator=generator))
            for _ in range(world // dp)
        ]
        x = [torch.randn(m, hidden, generator=generator).to(torch.bfloat16) for m in tokens]
        scale = [torch.rand(m, scale_words, generator=generator) for m in tokens]
        ids = [
            torch.rand(m, local * world, generator=generator).topk(k, -1).indices.int()
            for m in tokens
        ]
        weights = [torch.rand(m, k, generator=generator) for m in tokens]
        for r, ata in enumerate(ranks):
            s = r // dp
            ata.dispatch(
                None,
                None,
                None,
                x[s],
                scale[s] if scale_words else None,
                ids[s],
                do_recv=False,
                weights=weights[s],
            )
        fake_nvshmem.deliver()
        y = []
        for r, ata in enumerate(ranks):
            counts = torch.zeros(local, dtype=torch.int32)
            out = torch.zeros(local, layout.max_rows, hidden, dtype=torch.bfloat16)
            out_scale = torch.zeros(local, layout.max_rows, scale_words) if scale_words else None
            ata.dispatch(counts, out, out_scale, None, None, None, do_send=False)
            ata.check_errors()
            expected = dispatch_reference(ids, r, local)
            assert torch.equal(counts, expected.counts)
            for e in range(local):
                assert torch.equal(out[e, : counts[e]], expected.gather(e, x))
                if out_scale is not None:
                    assert torch.equal(out_scale[e, : counts[e]], expected.gather(e, scale))
            y.append(
                torch.randn(local, layout.max_rows, hidden, generator=generator).to(torch.bfloat16)
            )
        for r, ata in enumerate(ranks):
            ata.combine(None, None, None, y[r], do_recv=False)
        fake_nvshmem.deliver()
        wanted = combine_reference(ids, weights, y, local)
        for r, ata in enumerate(ranks):
            result = torch.zeros(tokens[r // dp], hidden, dtype=torch.bfloat16)
            ata.combine(result, ids[r // dp], None, None, do_send=False)
            ata.check_errors()
            reference = wanted[r // dp]
            if reference.numel():
                assert (result.float() - reference).norm() / reference.norm() < 8e-3


@NEEDS_INTERPRETER
def test_experts_may_lie_gigabytes_apart_and_ids_beyond_32_bits_are_masks(
    fake_nvshmem: FakeNvshmem,
) -> None:
    (ata,) = _build(fake_nvshmem, Layout(3, 2, 1, 1, 1, 16, 32, 0))
    x = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 16).contiguous().to(torch.bfloat16)
    ids, counts = torch.tensor([[0], [1], [1 << 40]]), torch.zeros(2, dtype=torch.int32)
    far, result = far_experts(2, 3, 16), torch.zeros_like(x)
    ata.dispatch(None, None, None, x, None, ids, do_recv=False, weights=torch.ones(3, 1))
    fake_nvshmem.deliver()
    ata.dispatch(counts, far, None, None, None, None, do_send=False)
    assert counts.tolist() == [1, 1]
    ata.combine(None, None, None, far, do_recv=False)
    fake_nvshmem.deliver()
    ata.combine(result, ids, None, None, do_send=False)
    assert result[:, 0].tolist() == [1, 2, 0]


@NEEDS_INTERPRETER
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_peer_whose_puts_are_lost_is_named(
    fake_nvshmem: FakeNvshmem, operation: str, before: int
) -> None:
    """Also after exchanges that went well: what they left must not pass for the signal that is
    missing."""
    layout = Layout(2, 6, 1, 3, 1, 16, 32, 0)
    ranks = _build(fake_nvshmem, layout)
    x, ids, weights = (
        torch.randn(2, 16).to(torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, 1),
    )
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 6, 16, dtype=torch.bfloat16)

    def send(what: str, lost: bool) -> None:
        for r, ata in enumerate(ranks):
            fake_nvshmem.dropped = (
                {0} if lost and r == 1 else set()
            )  # nothing that rank 1 sends reaches rank 0
            if what == "dispatch":
                ata.dispatch(None, None, None, x, None, ids, do_recv=False, weights=weights)
            else:
                ata.combine(None, None, None, out, do_recv=False)
        fake_nvshmem.deliver()

    def receive(what: str, ata: AllToAll) -> None:
        if what == "dispatch":
            ata.dispatch(counts, out, None, None, None, None, do_send=False)
        else:
            ata.combine(torch.zeros_like(x), ids, None, None, do_send=False)
        ata.check_errors()

    steps = ["dispatch", "combine"] * (before + 1)
    for what in steps[: 2 * before + (operation == "combine")]:
        send(what, lost=False)
        for ata in ranks:
            receive(what, ata)
    send(operation, lost=True)
    receive(operation, ranks[2])
    with pytest.raises(PeerTimeoutError, match=rf"rank 0: no answer from peer 1 in .*{operation}"):
        receive(operation, ranks[0])


def test_the_signal_operation_is_that_of_nvshmems_headers(fake_nvshmem: FakeNvshmem) -> None:
    from megatron_fluid.kernels.low_latency import nvshmem as kernels

    assert kernels.SIGNAL_SET.value == SIGNAL_SET
    found = [
        header
        for folder in [
            os.environ.get("NVSHMEM_HOME", ""),
            os.path.join(sysconfig.get_path("purelib"), "nvidia/nvshmem"),
        ]
        for header in Path(folder).glob("include/device_host_transport/nvshmem_common_transport.h")
        if folder
    ]
    if not found:
        pytest.skip("NVSHMEM's headers are not installed")
    for header in found:
        values = re.findall(r"\bNVSHMEM_SIGNAL_SET\s*=\s*(\d+)", header.read_text())
        assert values == [str(SIGNAL_SET)], header


@NEEDS_INTERPRETER
def test_destroy_lets_go_of_every_symmetric_buffer(fake_nvshmem: FakeNvshmem) -> None:
    layout = Layout(2, 2, 1, 1, 1, 16, 32, 0)
    (ata,) = _build(fake_nvshmem, layout)
    (space,) = fake_nvshmem.ranks
    storages = [weakref.ref(buffer.local.untyped_storage()) for buffer in space._buffers.values()]
    fake_nvshmem.ranks = []
    space._owner._memory.clear()  # type: ignore[attr-defined]
    assert len(storages) == 9 and all(storage() is not None for storage in storages)
    ata.destroy()
    gc.collect()
    assert all(storage() is None for storage in storages)


def test_many_ranks_have_room_for_their_signals(
    fake_nvshmem: FakeNvshmem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 ranks of 132 multiprocessors that bring 128 tokens each: more words than a workspace has
    by default."""
    from megatron_fluid.low_latency import nvshmem, peer_memory

    chosen = peer_memory.choose_tuning
    monkeypatch.setattr(peer_memory, "choose_tuning", lambda layout, _: chosen(layout, 132))
    monkeypatch.setattr(nvshmem, "NvshmemWorkspace", _Alone)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: range(128))
    layout = Layout(128, 128, 1, 128, 1, 16, 32, 0)
    transport, _ = open_transport("nvshmem", layout, None, 5.0)  # type: ignore[arg-type]
    regions = [transport._dispatch_flags, transport._combine_flags, transport._weight_flags]  # type: ignore[attr-defined]
    assert [region.flags.numel() for region in regions] == [32768, 32768, 256]
    for region in regions:
        last = int(region.addresses[127]) + 4 * (region.flags.numel() - 1)
        assert last == region.flags[-1:].data_ptr()


class _Alone(Workspace):
    """Rank 0 of 128, which holds everybody's memory."""

    def __init__(self, group: object, timeout_s: float, flag_words: int = 0) -> None:
        super().__init__(0, 128, torch.device("cpu"), timeout_s, False, flag_words)
        self._open_arenas()

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        local = torch.zeros(numel, dtype=dtype)
        pointers = torch.full((128,), local.data_ptr(), dtype=torch.int64)
        return Buffer(local, [local] * 128, pointers, None)
