"""The decode-time all-to-all over simulated peer memory, and over a fake NVSHMEM that delays puts
and delivers them in any order that fences allow; all ranks in one process, interpreted."""

import gc
import itertools
import mmap
import os
import re
import sysconfig
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.errors import PeerTimeoutError
from megatron_fluid.low_latency import AllToAll, open_transport
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.reference import combine_reference
from megatron_fluid.low_latency.transport import CombineSend, DispatchSend
from tests.support.all_to_all_calls import (
    bf16,
    build,
    check_close,
    check_received,
    pack,
    receive,
    receive_back,
    send,
    send_back,
    tensor_of,
    unpack,
)
from tests.support.fake_nvshmem import SIGNAL_SET, FakeNvshmem, fake_nvshmem
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["fake_nvshmem"]


def _routing(generator: torch.Generator, m: int, experts: int, k: int, masked: float) -> Tensor:
    ids = torch.rand(m, experts, generator=generator).topk(k, -1).indices.to(torch.int32)
    ids[torch.rand(ids.shape, generator=generator) < masked] = -1
    if m > 1:
        ids[-1] = ids[-1, 0]  # one expert named K times
    return ids


CASES = {
    # world, dp, experts, k, capacity, hidden, dtype, scale words, masked
    "two ranks": (2, 1, 4, 2, 3, 64, torch.bfloat16, 0, 0.0),
    "replicas, masks, scales": (4, 2, 4, 3, 3, 48, torch.float16, 3, 0.3),
    "one rank": (1, 1, 3, 1, 4, 8, torch.bfloat16, 0, 0.2),
    "three ranks, odd scales": (3, 1, 6, 6, 4, 272, torch.float8_e4m3fn, 5, 0.1),
    "top-16": (2, 2, 16, 16, 2, 16, torch.bfloat16, 1, 0.5),
}


@NEEDS_INTERPRETER
@pytest.mark.parametrize(("name", "packed", "nvshmem"), [
    *itertools.product(CASES, [False, True], [False]),
    ("replicas, masks, scales", False, True),
    ("three ranks, odd scales", True, True),
])  # fmt: skip
def test_dispatch_and_combine_match_the_reference(
    name: str, packed: bool, nvshmem: bool, fake_nvshmem: FakeNvshmem
) -> None:
    world, dp, experts, k, capacity, hidden, dtype, words, masked = CASES[name]
    layout = Layout(capacity, experts, k, world, dp, hidden, hidden * dtype.itemsize, words * 4)
    _, ranks = build(layout, fake_nvshmem if nvshmem else None)
    g = torch.Generator().manual_seed(len(name))
    local, alignment = layout.local_experts, 4
    rows = layout.max_rows * k + local * alignment
    for turn in range(2):
        tokens = torch.randint(0, capacity + 1, (layout.num_sources,), generator=g).tolist()
        if turn == 1:
            tokens[0] = 0
        x = [torch.randn(m, hidden, generator=g).to(dtype) for m in tokens]
        scale = [torch.rand(m, words, generator=g) for m in tokens]
        ids = [_routing(g, m, experts, k, masked) for m in tokens]
        weights = [torch.rand(m, k, generator=g) for m in tokens]
        for rank, ata in enumerate(ranks):
            s = rank // dp
            send(ata, x[s], ids[s], weights[s], scale=scale[s] if words else None)
        fake_nvshmem.deliver()
        # Expert outputs: padded for the reference, and packed as dispatch laid them out.
        padded = [torch.randn(local, layout.max_rows, hidden, generator=g) for _ in ranks]
        y = [p.to(torch.bfloat16) for p in padded]
        for rank, ata in enumerate(ranks):
            offsets, out = torch.zeros(local, dtype=torch.int32), torch.zeros(rows, hidden)
            more = {"out_expert_offsets": offsets, "alignment": alignment}
            received: Any
            if not packed:
                received, sent = receive(ata, dtype), y[rank]
            else:
                counts, *tensors = receive(ata, dtype, out.to(dtype), **more)
                sent, ends = pack(y[rank], counts, rows, alignment)
                assert offsets.tolist() == ends
                tensors = [t if t is None else unpack(t, counts, ends, alignment) for t in tensors]
                received = counts, *tensors
            check_received(received, rank, ids, x, scale)
            send_back(ata, sent)
        fake_nvshmem.deliver()
        wanted = combine_reference(ids, weights, y, local)
        for rank, ata in enumerate(ranks):
            s = rank // dp
            out = torch.full((tokens[s], hidden), 2.0, dtype=torch.bfloat16)
            receive_back(ata, out, ids[s], accumulate=turn == 1)
            ata.check_errors()
            check_close(out, wanted[s] + (2.0 if turn == 1 else 0.0))


def test_two_objects_of_one_group_share_neither_buffers_nor_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two microbatches may be in flight: test_collective.py sends them."""
    monkeypatch.setattr(
        open_transport, "SymmetricWorkspace", lambda *_, **__: SimulatedWorkspace(2).rank(0)
    )
    layout, group = Layout(4, 4, 2, 2, 1, 16, 32, 0), SimpleNamespace(rank=0)
    transports: list[Any] = [
        open_transport.open_transport("nvlink", layout, group, 5.0)[0]  # type: ignore[arg-type]
        for _ in range(2)
    ]
    memory = [[b.local.data_ptr() for b in t.workspace._buffers.values()] for t in transports]
    assert memory[0] and not set(memory[0]) & set(memory[1])


@NEEDS_INTERPRETER
@pytest.mark.parametrize("small", [True, False], ids=["rows one by one", "weights exchanged"])
def test_weights_given_to_combine(small: bool) -> None:
    layout = Layout(5, 8, 3, 4, 2, 24, 48, 0)
    _, ranks = build(layout)
    transports = [ata._transport for ata in ranks]
    if not small:
        for transport in transports:
            transport._small = 1  # type: ignore[attr-defined]  # only sources of one token
    g = torch.Generator().manual_seed(3)
    for tokens in ([5, 4], [1, 5], [0, 3]):
        x = [torch.randn(m, 24, generator=g).to(torch.bfloat16) for m in tokens]
        ids = [_routing(g, m, 8, 3, 0.1) for m in tokens]
        weights = [torch.rand(m, 3, generator=g) for m in tokens]
        for r, ata in enumerate(ranks):
            send(ata, x[r // 2], ids[r // 2])
        y = [bf16(2, layout.max_rows, 24) for _ in ranks]
        for ata in ranks:
            receive(ata)
        if not small:
            # Ranks run one after another here, and each waits for the others' weights: a first pass
            # delivers them.
            for r, transport in enumerate(transports):
                transport.combine_send(CombineSend(y[r], weights[r // 2]))
                errors = transport.workspace.errors  # type: ignore[attr-defined]
                errors.words.zero_()
                errors.abort.zero_()
        for r, ata in enumerate(ranks):
            send_back(ata, y[r], weights[r // 2])
            ata.check_errors()
        wanted = combine_reference(ids, weights, y, 2)
        for r, ata in enumerate(ranks):
            out = torch.full((tokens[r // 2], 24), 4.0, dtype=torch.bfloat16)
            check_close(receive_back(ata, out, ids[r // 2], weights[r // 2]), wanted[r // 2])


@NEEDS_INTERPRETER
def test_bound_m_counts_only_the_first_tokens() -> None:
    _, ranks = build(Layout(6, 4, 2, 2, 1, 16, 32, 0))
    x, ids = [bf16(6, 16) for _ in ranks], torch.tensor([[0, 3]] * 6, dtype=torch.int32)
    bound = [torch.tensor([n], dtype=torch.int32) for n in (2, 5)]
    for r, ata in enumerate(ranks):
        send(ata, x[r], ids, torch.ones(6, 2), bound_m=bound[r])
    for ata in ranks:
        counts, out, _ = receive(ata)
        assert sorted(counts.tolist()) == [0, 7]
        send_back(ata, out)
    for r, ata in enumerate(ranks):
        result = torch.full((6, 16), 9.0, dtype=torch.bfloat16)
        receive_back(ata, result, ids, bound_m=bound[r])
        n = int(bound[r])
        assert torch.equal(result[:n], x[r][:n] * 2)
        assert bool((result[n:] == 9.0).all())


@NEEDS_INTERPRETER
def test_a_bound_of_any_size_a_token_and_fp32_results_in_any_strides() -> None:
    _, (ata,) = build(Layout(4, 2, 1, 1, 1, 16, 32, 0))
    no_bound = torch.tensor([2**32 - 1], dtype=torch.uint32)
    for m, width in ((1, 17), (3, 24)):
        x, ids = bf16(m, width)[:, :16], torch.zeros(m, 1, dtype=torch.int32)
        send(ata, x, ids, torch.ones(m, 1), bound_m=no_bound)
        send_back(ata, receive(ata)[1])
        wide = torch.full((m, 20), 9.0)
        receive_back(ata, wide[:, :16], ids, bound_m=no_bound)
        assert torch.equal(wide[:, :16], x.float()) and bool((wide[:, 16:] == 9).all())


@NEEDS_INTERPRETER
def test_fewer_tokens_are_combined_than_were_dispatched() -> None:
    _, ranks = build(Layout(32, 4, 1, 2, 1, 16, 32, 0))
    x, ids, ones = bf16(30, 16), torch.zeros(30, 1, dtype=torch.int32), torch.ones(30, 1)
    bound = torch.tensor([4], dtype=torch.int32)
    # Weights of more than 16 tokens are exchanged, whatever is combined. What the bound of a
    # dispatch left out comes back as 0, and not as an earlier call's.
    for bound_m, m in ((None, 30), (None, 10), (bound, 30)):
        for ata in ranks:
            send(ata, x, ids, bound_m=bound_m)
        rows = [receive(ata)[1] for ata in ranks]
        for again in (False, True):  # as in test_weights_given_to_combine
            for ata, y in zip(ranks, rows, strict=True):
                if again:
                    send_back(ata, y, ones[:m])
                    ata.check_errors()
                    continue
                ata._transport.combine_send(CombineSend(y, ones[:m]))
                errors = ata._transport.workspace.errors  # type: ignore[attr-defined]
                errors.words.zero_()
                errors.abort.zero_()
        wanted = x[:m].clone()
        wanted[m if bound_m is None else 4 :] = 0
        for ata in ranks:
            out = torch.full((m, 16), 9.0, dtype=torch.bfloat16)
            assert torch.equal(receive_back(ata, out, ids[:m], ones[:m]), wanted)


def _far_experts(local: int, rows: int, hidden: int) -> Tensor:
    """bf16 zeros [local, rows, hidden], experts 2**32 words apart, which is 0 in 32 bits. Only
    pages written take memory."""
    stride = 2 << 32
    unreserved = getattr(mmap, "MAP_NORESERVE", 0)
    size = 2 * ((local - 1) * stride + rows * hidden)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unreserved)
    return torch.frombuffer(pages, dtype=torch.bfloat16).as_strided(
        (local, rows, hidden), (stride, hidden, 1)
    )


@NEEDS_INTERPRETER
@pytest.mark.parametrize("nvshmem", [False, True])
def test_experts_may_lie_gigabytes_apart_and_ids_beyond_32_bits_are_masks(
    nvshmem: bool, fake_nvshmem: FakeNvshmem
) -> None:
    _, (ata,) = build(Layout(4, 2, 2, 1, 1, 16, 32, 0), fake_nvshmem if nvshmem else None)
    x = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 16).contiguous().to(torch.bfloat16)
    ids = torch.tensor([[1 << 40, 1], [torch.iinfo(torch.int64).min, (1 << 32) + 1], [0, -1]])
    far = _far_experts(2, 4, 16)
    send(ata, x, ids, torch.ones(3, 2))
    fake_nvshmem.deliver()
    assert receive(ata, out=far)[0].tolist() == [1, 1]
    assert far[:, 0, 0].tolist() == [3, 1]
    send_back(ata, far)
    fake_nvshmem.deliver()
    assert receive_back(ata, torch.full_like(x, 4.0), ids)[:, 0].tolist() == [1, 0, 3]


@NEEDS_INTERPRETER
def test_both_halves_may_be_given_all_tensors() -> None:
    """As serving engines call them: the same arguments twice, do_send and do_recv swapped."""
    layout = Layout(4, 4, 2, 2, 1, 16, 32, 0)
    _, ranks = build(layout)
    ids = torch.tensor([[0, 3], [1, 2], [2, -1]], dtype=torch.int32)
    bound, weights = torch.tensor([3], dtype=torch.int32), [torch.rand(3, 2) for _ in ranks]
    x, out = [bf16(3, 16) for _ in ranks], [tensor_of(layout, 16) for _ in ranks]
    counts = torch.zeros(2, dtype=torch.int32)
    results = [torch.zeros(3, 16, dtype=torch.bfloat16) for _ in ranks]
    unsigned = ids.view(torch.uint32)
    for halves in ({"do_recv": False}, {"do_send": False}):
        for r, ata in enumerate(ranks):
            ata.dispatch(counts, out[r], None, x[r], None, unsigned, bound, **halves)
    for halves in ({"do_recv": False}, {"do_send": False}):
        for r, ata in enumerate(ranks):
            ata.combine(results[r], unsigned, weights[r], out[r], bound, **halves)
    wanted = combine_reference([ids] * 2, weights, out, 2)
    for found, reference in zip(results, wanted, strict=True):
        check_close(found, reference)


# ---- NVSHMEM that drops puts, and its memory


@NEEDS_INTERPRETER
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_peer_whose_puts_are_lost_is_named(
    fake_nvshmem: FakeNvshmem, operation: str, before: int
) -> None:
    """Also after exchanges that went well: what they left is not the signal that is missing."""
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
    ranks[0]._transport.dispatch_send(DispatchSend(x, ids, torch.ones(2, 1)))  # queued behind it
    assert not fake_nvshmem.queue


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
    transport, _ = open_transport.open_transport("nvshmem", layout, None, 5.0)  # type: ignore[arg-type]
    regions = [transport._dispatch_flags, transport._combine_flags, transport._weight_flags]  # type: ignore[attr-defined]
    assert [region.flags.numel() for region in regions] == [32768, 32768, 256]
    for region in regions:
        last = int(region.addresses[127]) + 4 * (region.flags.numel() - 1)
        assert last == region.flags[-1:].data_ptr()
