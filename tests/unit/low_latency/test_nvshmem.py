"""The NVSHMEM transport over a fake NVSHMEM that drops puts; test_kernels.py has what it computes.

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

from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.open_transport import open_transport
from tests.support.all_to_all_calls import bf16, build, receive, receive_back, send, send_back
from tests.support.fake_nvshmem import SIGNAL_SET, FakeNvshmem, fake_nvshmem
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["fake_nvshmem"]


@NEEDS_INTERPRETER
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_peer_whose_puts_are_lost_is_named(
    fake_nvshmem: FakeNvshmem, operation: str, before: int
) -> None:
    """Also after exchanges that went well: what they left must not pass for the signal that is
    missing."""
    _, ranks = build(Layout(2, 6, 1, 3, 1, 16, 32, 0), fake_nvshmem)
    x, ids, y = bf16(2, 16), torch.zeros(2, 1, dtype=torch.int32), bf16(2, 6, 16)

    def send_all(what: str, lost: bool) -> None:
        for r, ata in enumerate(ranks):
            # Nothing that rank 1 sends reaches rank 0.
            fake_nvshmem.dropped = {0} if lost and r == 1 else set()
            send(ata, x, ids, torch.ones(2, 1)) if what == "dispatch" else send_back(ata, y)
        fake_nvshmem.deliver()

    def receive_one(what: str, ata: AllToAll) -> None:
        receive(ata) if what == "dispatch" else receive_back(ata, torch.zeros_like(x), ids)
        ata.check_errors()

    for what in (["dispatch", "combine"] * (before + 1))[: 2 * before + (operation == "combine")]:
        send_all(what, lost=False)
        for ata in ranks:
            receive_one(what, ata)
    send_all(operation, lost=True)
    receive_one(operation, ranks[2])
    with pytest.raises(PeerTimeoutError, match=rf"rank 0: no answer from peer 1 in .*{operation}"):
        receive_one(operation, ranks[0])


def test_the_signal_operation_is_that_of_nvshmems_headers(fake_nvshmem: FakeNvshmem) -> None:
    from megatron_fluid.kernels.low_latency import nvshmem as kernels

    assert kernels.SIGNAL_SET.value == SIGNAL_SET
    wheel = os.path.join(sysconfig.get_path("purelib"), "nvidia/nvshmem")
    homes = filter(None, (os.environ.get("NVSHMEM_HOME"), wheel))
    header = "include/device_host_transport/nvshmem_common_transport.h"
    found = [path for home in homes for path in Path(home).glob(header)]
    if not found:
        pytest.skip("NVSHMEM's headers are not installed")
    for header in found:
        values = re.findall(r"\bNVSHMEM_SIGNAL_SET\s*=\s*(\d+)", header.read_text())
        assert values == [str(SIGNAL_SET)], header


@NEEDS_INTERPRETER
def test_destroy_lets_go_of_every_symmetric_buffer(fake_nvshmem: FakeNvshmem) -> None:
    layout = Layout(2, 2, 1, 1, 1, 16, 32, 0)
    _, (ata,) = build(layout, fake_nvshmem)
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

    chosen = peer_memory.Tuning
    monkeypatch.setattr(peer_memory, "Tuning", lambda layout, _: chosen(layout, 132))
    monkeypatch.setattr(
        nvshmem,
        "NvshmemWorkspace",
        lambda group, timeout_s, flag_words: SimulatedWorkspace(128, flag_words=flag_words).rank(
            127
        ),
    )
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: range(128))
    layout = Layout(128, 128, 1, 128, 1, 16, 32, 0)
    transport, _ = open_transport("nvshmem", layout, None, 5.0)  # type: ignore[arg-type]
    regions = [transport._dispatch_flags, transport._combine_flags, transport._weight_flags]  # type: ignore[attr-defined]
    assert [region.flags.numel() for region in regions] == [32768, 32768, 256]
    for region in regions:
        last = int(region.addresses[127]) + 4 * (region.flags.numel() - 1)
        assert last == region.flags[-1:].data_ptr()
