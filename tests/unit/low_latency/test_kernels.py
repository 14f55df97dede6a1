"""The decode-time all-to-all over simulated peer memory: all ranks in one process, kernels in
Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_fluid.comm.simulated import SimulatedWorkspace
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.low_latency import AllToAll, estimate_bytes
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.reference import (
    combine_reference,
    dispatch_reference,
    quantize_rows,
)
from tests.support.far_experts import far_experts
from tests.support.machine import NEEDS_INTERPRETER

_TOLERANCE = 8e-3  # two roundings to bf16


def _build(layout: Layout) -> tuple[SimulatedWorkspace, list[AllToAll]]:
    from megatron_fluid.low_latency.peer_memory import PeerMemory

    simulated, device = SimulatedWorkspace(layout.world_size), torch.device("cpu")
    transports = [PeerMemory(layout, simulated.rank(r)) for r in range(layout.world_size)]
    return simulated, [AllToAll(layout, transport, device) for transport in transports]


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
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("packed", [False, True])
def test_dispatch_and_combine_match_the_reference(name: str, packed: bool) -> None:
    world, dp, experts, k, capacity, hidden, dtype, scale_words, masked = CASES[name]
    layout = Layout(
        capacity, experts, k, world, dp, hidden, hidden * dtype.itemsize, scale_words * 4
    )
    _simulated, ranks = _build(layout)
    generator = torch.Generator().manual_seed(len(name))
    local, sources, alignment = layout.local_experts, layout.num_sources, 4
    for turn in range(2):
        tokens = [
            int(torch.randint(0, capacity + 1, (1,), generator=generator)) for _ in range(sources)
        ]
        if turn == 1:
            tokens[0] = 0
        x = [torch.randn(m, hidden, generator=generator).to(dtype) for m in tokens]
        scale = [torch.rand(m, scale_words, generator=generator) for m in tokens]
        ids = [_routing(generator, m, experts, k, masked) for m in tokens]
        weights = [torch.rand(m, k, generator=generator) for m in tokens]
        for rank, ata in enumerate(ranks):
            s = rank // dp
            scales = scale[s] if scale_words else None
            ata.dispatch(None, None, None, x[s], scales, ids[s], do_recv=False, weights=weights[s])
        outs = []
        for rank, ata in enumerate(ranks):
            counts = torch.full((local,), -7, dtype=torch.int32)
            offsets = torch.full((local,), -7, dtype=torch.int32) if packed else None
            rows = layout.max_rows * k + local * alignment
            lead = (rows,) if packed else (local, layout.max_rows)
            out = torch.zeros(*lead, hidden).to(dtype)
            out_scale = torch.zeros(*lead, scale_words) if scale_words else None
            ata.dispatch(
                counts, out, out_scale, None, None, None, do_send=False, out_expert_offsets=offsets,
                alignment=alignment if packed else 1,
            )  # fmt: skip
            expected = dispatch_reference(ids, rank, local)
            assert torch.equal(counts, expected.counts)
            ends = [0]
            for expert in range(local):
                n = int(counts[expert])
                first = ends[-1]
                ends.append(first + -(-n // alignment) * alignment)
                got = out[first : first + n] if packed else out[expert, :n]
                assert torch.equal(
                    got.view(torch.uint8), expected.gather(expert, x).view(torch.uint8)
                )
                if out_scale is not None:
                    got = out_scale[first : first + n] if packed else out_scale[expert, :n]
                    assert torch.equal(got, expected.gather(expert, scale))
            if offsets is not None:
                assert offsets.tolist() == ends[1:]
            outs.append((counts, ends))
        # Expert outputs: padded for the reference, and packed as dispatch laid them out.
        padded = [
            torch.randn(local, layout.max_rows, hidden, generator=generator).to(torch.bfloat16)
            for _ in ranks
        ]
        for rank, ata in enumerate(ranks):
            y = padded[rank]
            if packed:
                counts, ends = outs[rank]
                y = torch.zeros(
                    layout.max_rows * k + local * alignment, hidden, dtype=torch.bfloat16
                )
                for expert in range(local):
                    n = int(counts[expert])
                    y[ends[expert] : ends[expert] + n] = padded[rank][expert, :n]
            ata.combine(None, None, None, y, do_recv=False)
        wanted = combine_reference(ids, weights, padded, local)
        for rank, ata in enumerate(ranks):
            s = rank // dp
            out = torch.full((tokens[s], hidden), 2.0, dtype=torch.bfloat16)
            ata.combine(out, ids[s], None, None, do_send=False, accumulate=turn == 1)
            ata.check_errors()
            reference = wanted[s] + (2.0 if turn == 1 else 0.0)
            if reference.numel() and reference.norm() > 0:
                assert (out.float() - reference).norm() / reference.norm() < _TOLERANCE
            else:
                assert torch.equal(out.float(), reference)


@NEEDS_INTERPRETER
@pytest.mark.parametrize("small", [True, False], ids=["rows one by one", "weights exchanged"])
def test_weights_given_to_combine(small: bool) -> None:
    from megatron_fluid.low_latency.peer_memory import PeerMemory
    from megatron_fluid.low_latency.transport import CombineRequest

    layout = Layout(5, 8, 3, 4, 2, 24, 48, 0)
    simulated = SimulatedWorkspace(4)
    transports = [PeerMemory(layout, simulated.rank(r)) for r in range(4)]
    ranks = [AllToAll(layout, t, torch.device("cpu")) for t in transports]
    if not small:
        for transport in transports:
            transport._small = 1  # only sources of one token
    generator = torch.Generator().manual_seed(3)
    for tokens in ([5, 4], [1, 5], [0, 3]):
        x = [torch.randn(m, 24, generator=generator).to(torch.bfloat16) for m in tokens]
        ids = [_routing(generator, m, 8, 3, 0.1) for m in tokens]
        weights = [torch.rand(m, 3, generator=generator) for m in tokens]
        for r, ata in enumerate(ranks):
            ata.dispatch(None, None, None, x[r // 2], None, ids[r // 2], do_recv=False)
        y = [
            torch.randn(2, layout.max_rows, 24, generator=generator).to(torch.bfloat16)
            for _ in ranks
        ]
        for ata in ranks:
            counts, out = (
                torch.zeros(2, dtype=torch.int32),
                torch.zeros(2, layout.max_rows, 24, dtype=torch.bfloat16),
            )
            ata.dispatch(counts, out, None, None, None, None, do_send=False)
        if not small:
            # Ranks run one after another here, and each waits for the others' weights: a first pass
            # delivers them.
            for r, transport in enumerate(transports):
                transport.combine(
                    CombineRequest(
                        None,
                        None,
                        weights[r // 2],
                        y[r],
                        None,
                        True,
                        False,
                        accumulate=False,
                        exchange=True,
                    )
                )
                transport.workspace.errors.words.zero_()
                transport.workspace.errors.abort.zero_()
        for r, ata in enumerate(ranks):
            ata.combine(None, None, weights[r // 2], y[r], do_recv=False)
            ata.check_errors()
        wanted = combine_reference(ids, weights, y, 2)
        for r, ata in enumerate(ranks):
            result = torch.full((tokens[r // 2], 24), 4.0, dtype=torch.bfloat16)
            ata.combine(result, ids[r // 2], weights[r // 2], None, do_send=False)
            reference = wanted[r // 2]
            if reference.numel():
                assert (result.float() - reference).norm() / reference.norm() < _TOLERANCE


@NEEDS_INTERPRETER
def test_bound_m_counts_only_the_first_tokens() -> None:
    layout = Layout(6, 4, 2, 2, 1, 16, 32, 0)
    _simulated, ranks = _build(layout)
    x = [torch.randn(6, 16).to(torch.bfloat16) for _ in range(2)]
    ids = [torch.tensor([[0, 3]] * 6, dtype=torch.int32) for _ in range(2)]
    weights = [torch.ones(6, 2) for _ in range(2)]
    bound = [torch.tensor([2], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)]
    for r, ata in enumerate(ranks):
        ata.dispatch(
            None, None, None, x[r], None, ids[r], bound[r], do_recv=False, weights=weights[r]
        )
    for ata in ranks:
        counts, out = (
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2, 12, 16, dtype=torch.bfloat16),
        )
        ata.dispatch(counts, out, None, None, None, None, do_send=False)
        assert sorted(counts.tolist()) == [0, 7]
        ata.combine(None, None, None, out, do_recv=False)
    for r, ata in enumerate(ranks):
        result = torch.full((6, 16), 9.0, dtype=torch.bfloat16)
        ata.combine(result, ids[r], None, None, bound[r], do_send=False)
        n = int(bound[r])
        assert torch.equal(result[:n], x[r][:n] * 2)
        assert bool((result[n:] == 9.0).all())


@NEEDS_INTERPRETER
def test_quantised_on_the_way() -> None:
    layout = Layout(3, 2, 1, 2, 1, 256, 256, 8)
    _simulated, ranks = _build(layout)
    # Values that fp8 holds exactly, the largest of each 128 being its largest: the interpreter
    # rounds badly, so nothing is left to round. A GPU's rounding is held to the reference's in
    # test_all_to_all.
    x = [
        (torch.randn(3, 256) * 40).to(torch.float8_e4m3fn).float().clamp(-400, 400)
        for _ in range(2)
    ]
    for rows in x:
        rows[:, ::128] = 448.0
    x = [rows.to(torch.bfloat16) for rows in x]
    ids = [
        torch.tensor([[0], [1], [0]], dtype=torch.int32),
        torch.tensor([[1], [-1], [0]], dtype=torch.int32),
    ]
    for r, ata in enumerate(ranks):
        ata.dispatch(None, None, None, x[r], None, ids[r], do_recv=False, quantize=True)
    for r, ata in enumerate(ranks):
        counts, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 6, 256, dtype=torch.uint8)
        scales = torch.zeros(1, 6, 2)
        ata.dispatch(counts, out, scales, None, None, None, do_send=False, quantize=True)
        expected = dispatch_reference(ids, r, 1)
        wanted, wanted_scales = quantize_rows(expected.gather(0, x))
        n = int(counts[0])
        assert n == len(wanted) > 0
        assert torch.equal(scales[0, :n], wanted_scales)
        assert torch.equal(out[0, :n].view(torch.float8_e4m3fn).float(), wanted.float())


@NEEDS_INTERPRETER
def test_a_dead_peer_is_named_with_its_experts_and_the_call_ends() -> None:
    layout = Layout(2, 6, 1, 3, 1, 16, 32, 0)
    _, ranks = _build(layout)
    x = torch.randn(2, 16).to(torch.bfloat16)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    for r in (0, 1):  # rank 2 never sends
        ranks[r].dispatch(None, None, None, x, None, ids, do_recv=False)
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 6, 16, dtype=torch.bfloat16)
    ranks[0].dispatch(counts, out, None, None, None, None, do_send=False)
    with pytest.raises(
        PeerTimeoutError, match=r"rank 0: no answer from peer 2 in .*dispatch.*experts 0 to 1 wait"
    ):
        ranks[0].check_errors()
    with pytest.raises(PeerTimeoutError):
        ranks[0].dispatch(None, None, None, x, None, ids, do_recv=False)


@NEEDS_INTERPRETER
def test_of_several_late_peers_the_first_is_named_with_what_it_has_sent() -> None:
    from megatron_fluid.low_latency.peer_memory import PeerMemory
    from megatron_fluid.low_latency.transport import DispatchRequest

    layout = Layout(2, 6, 1, 3, 1, 16, 32, 0)
    _, ranks = _build(layout)
    transport = ranks[0]._transport
    assert isinstance(transport, PeerMemory)
    flags = transport._dispatch_flags.flags.view(-1)
    senders = transport.tuning.dispatch_senders
    transport.counters[:2] = torch.tensor([5, 4])
    for peer, generation in enumerate((5, 4, 1)):
        flags[peer * senders : (peer + 1) * senders] = generation
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 6, 16, dtype=torch.bfloat16)
    transport.dispatch(DispatchRequest(counts, out, receive=True))
    with pytest.raises(
        PeerTimeoutError, match=r"no answer from peer 1 .*expected generation 5, seen 4"
    ):
        transport.check_errors()


@NEEDS_INTERPRETER
def test_halves_out_of_order_and_misfits_are_refused() -> None:
    layout = Layout(4, 4, 2, 2, 1, 16, 32, 0)
    _, (ata, _) = _build(layout)
    x, ids = torch.randn(4, 16).to(torch.bfloat16), torch.zeros(4, 2, dtype=torch.int32)
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8, 16, dtype=torch.bfloat16)
    with pytest.raises(FluidError, match="do_recv without a send"):
        ata.dispatch(counts, out, None, None, None, None, do_send=False)
    with pytest.raises(ConfigError, match="at least one"):
        ata.dispatch(counts, out, None, x, None, ids, do_send=False, do_recv=False)
    with pytest.raises(ConfigError, match=r"dp_x.*allowed"):
        ata.dispatch(
            None, None, None, torch.randn(5, 16).to(torch.bfloat16), None, ids, do_recv=False
        )
    with pytest.raises(ConfigError, match=r"indices.*torch.uint32"):
        ata.dispatch(None, None, None, x, None, ids.float(), do_recv=False)
    shifted = torch.zeros(9, dtype=torch.int32)[1:].view(4, 2)
    with pytest.raises(ConfigError, match=r"address of indices.*multiple of 16"):
        ata.dispatch(None, None, None, x, None, shifted, do_recv=False)
    ata.dispatch(None, None, None, x, None, ids, do_recv=False)
    with pytest.raises(FluidError, match="do_send again"):
        ata.dispatch(None, None, None, x, None, ids, do_recv=False)
    with pytest.raises(FluidError, match="between the halves of a dispatch"):
        ata.combine(None, None, torch.ones(4, 2), out, do_recv=False)
    ata.destroy()
    ata.destroy()
    with pytest.raises(FluidError, match="after destroy"):
        ata.combine(None, None, None, None)


@NEEDS_INTERPRETER
def test_a_combine_before_any_dispatch_and_a_dispatch_amid_a_combine_are_refused() -> None:
    _, (ata,) = _build(Layout(2, 2, 1, 1, 1, 16, 32, 0))
    x, ids, weights = (
        torch.randn(2, 16).to(torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, 1),
    )
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(FluidError, match="before any dispatch was received"):
        ata.combine(None, None, weights, out, do_recv=False)
    ata.dispatch(counts, out, None, x, None, ids)
    ata.combine(None, None, weights, out, do_recv=False)
    with pytest.raises(FluidError, match="between the halves of a combine"):
        ata.dispatch(None, None, None, x, None, ids, do_recv=False)


@NEEDS_INTERPRETER
def test_a_tensor_on_another_device_is_refused_also_after_one_of_its_form() -> None:
    _, (ata,) = _build(Layout(2, 2, 1, 1, 1, 16, 32, 0))
    x, ids, weights = (
        torch.randn(2, 16).to(torch.bfloat16),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, 1),
    )
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, 16, dtype=torch.bfloat16)
    bound = torch.ones(1, dtype=torch.int32)
    given = {"dp_x": x, "weights": weights, "bound_m": bound}
    call = {"dp_x_scale": None, "indices": ids, **given}
    ata.dispatch(counts, out, None, **call)  # type: ignore[arg-type]
    for name, tensor in given.items():
        with pytest.raises(ConfigError, match=f"{name}: found 'meta'"):
            ata.dispatch(counts, out, None, **{**call, name: tensor.to("meta")})  # type: ignore[arg-type]


@NEEDS_INTERPRETER
@pytest.mark.parametrize("split", [False, True])
def test_rows_of_another_type_than_was_sent_are_refused(split: bool) -> None:
    _, (ata,) = _build(Layout(2, 2, 1, 1, 1, 16, 32, 0))
    x, ids, counts = (
        torch.randn(2, 16).to(torch.bfloat16),
        torch.zeros(2, 1).int(),
        torch.zeros(2, dtype=torch.int32),
    )
    sent, received = (x, None, ids), (counts, torch.zeros(2, 2, 16, dtype=torch.float16), None)
    if split:
        ata.dispatch(None, None, None, *sent, do_recv=False)
    with pytest.raises(
        ConfigError, match=r"out_expert_x: found torch.float16, allowed: torch.bfloat16"
    ):
        ata.dispatch(*received, *((None, None, None) if split else sent), do_send=not split)


@NEEDS_INTERPRETER
def test_ids_beyond_32_bits_are_masks() -> None:
    layout = Layout(4, 2, 2, 1, 1, 16, 32, 0)
    _, (ata,) = _build(layout)
    x = torch.ones(3, 16, dtype=torch.bfloat16)
    ids = torch.tensor([[1 << 40, 1], [torch.iinfo(torch.int64).min, (1 << 32) + 1], [0, -1]])
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, 16, dtype=torch.bfloat16)
    ata.dispatch(counts, out, None, x, None, ids, weights=torch.ones(3, 2))
    assert counts.tolist() == [1, 1]
    result = torch.full_like(x, 3.0)
    ata.combine(result, ids, None, out)
    assert result[:, 0].tolist() == [1, 0, 1]


@NEEDS_INTERPRETER
def test_experts_may_lie_gigabytes_apart() -> None:
    _, (ata,) = _build(Layout(2, 2, 1, 1, 1, 16, 32, 0))
    x = torch.tensor([1.0, 2.0])[:, None].expand(2, 16).contiguous().to(torch.bfloat16)
    ids, counts = torch.tensor([[0], [1]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    far = far_experts(2, 2, 16)
    ata.dispatch(counts, far, None, x, None, ids, weights=torch.ones(2, 1))
    assert far[:, 0, 0].tolist() == [1, 2]
    result = torch.zeros_like(x)
    ata.combine(result, ids, None, far)
    assert torch.equal(result, x)


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("num_experts", (4, 7, 2, 2, 1, 16, 32, 0)),
        ("experts_per_token", (4, 64, 17, 2, 1, 16, 32, 0)),
        ("dp_size", (4, 8, 2, 4, 3, 16, 32, 0)),
        ("hidden_dim_bytes", (4, 8, 2, 4, 1, 16, 24, 0)),
        ("hidden_dim_scale_bytes", (4, 8, 2, 4, 1, 16, 32, 3)),
    ],
)
def test_a_size_that_cannot_be_met_is_named(setting: str, values: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting}: found"):
        Layout(*values)


def test_memory_is_known_before_it_is_taken() -> None:
    from megatron_fluid.low_latency.peer_memory import PeerMemory

    layout = Layout(8, 8, 2, 2, 1, 64, 128, 4)
    simulated = SimulatedWorkspace(2)
    PeerMemory(layout, simulated.rank(0))
    flags = simulated.rank(0)._buffers["__flags__", torch.int32].local.numel() * 4
    estimate = estimate_bytes(8, 8, 2, 2, 1, 64, 128, 4)
    assert estimate["symmetric"] == simulated.rank(0).allocated_bytes() - flags
    assert estimate["total"] == estimate["symmetric"] + estimate["scratch"]


@NEEDS_INTERPRETER
def test_after_a_timeout_destroy_waits_for_nobody_and_keeps_the_memory() -> None:
    from megatron_fluid.comm.workspace import _ABANDONED

    layout = Layout(1, 2, 1, 2, 1, 16, 32, 0)
    simulated, (ata, _) = _build(layout)
    ata.dispatch(
        None,
        None,
        None,
        torch.zeros(1, 16).to(torch.bfloat16),
        None,
        torch.zeros(1, 1).int(),
        do_recv=False,
    )
    counts, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    ata.dispatch(counts, out, None, None, None, None, do_send=False)
    with pytest.raises(PeerTimeoutError, match="peer 1"):
        ata.check_errors()
    ata.destroy()
    assert simulated.rank(0) in _ABANDONED
    assert simulated.rank(0).allocated_bytes() > 0


@NEEDS_INTERPRETER
def test_packed_rows_that_cannot_hold_what_may_arrive_are_refused() -> None:
    layout = Layout(4, 4, 2, 2, 1, 16, 32, 0)
    _, (ata, _) = _build(layout)
    assert ata.packed_rows(8) == 4 * 2 * 2 + 2 * 7
    counts, offsets = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    ata.dispatch(
        None,
        None,
        None,
        torch.zeros(1, 16).to(torch.bfloat16),
        None,
        torch.zeros(1, 2).int(),
        do_recv=False,
    )
    with pytest.raises(ConfigError, match=r"29 packed rows.*packed_rows\(8\) = 30"):
        ata.dispatch(
            counts, torch.zeros(29, 16).to(torch.bfloat16), None, None, None, None, do_send=False,
            out_expert_offsets=offsets, alignment=8,
        )  # fmt: skip


@NEEDS_INTERPRETER
def test_both_halves_may_be_given_all_tensors() -> None:
    """As serving engines call them: the same arguments twice, with do_send and do_recv turned
    about."""
    layout = Layout(4, 4, 2, 2, 1, 16, 32, 0)
    _, ranks = _build(layout)
    x = [torch.randn(3, 16).to(torch.bfloat16) for _ in ranks]
    ids = [
        torch.tensor([[0, 3], [1, 2], [2, -1]], dtype=torch.int32).view(torch.uint32) for _ in ranks
    ]
    weights = [torch.rand(3, 2) for _ in ranks]
    calls = []
    for r in range(2):
        counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 8, 16, dtype=torch.bfloat16)
        calls.append((counts, out, None, x[r], None, ids[r], torch.tensor([3], dtype=torch.int32)))
    results = [torch.zeros(3, 16, dtype=torch.bfloat16) for _ in ranks]
    for halves in ({"do_recv": False}, {"do_send": False}):
        for r, ata in enumerate(ranks):
            ata.dispatch(*calls[r], **halves)  # type: ignore[arg-type]
    for halves in ({"do_recv": False}, {"do_send": False}):
        for r, ata in enumerate(ranks):
            ata.combine(results[r], ids[r], weights[r], calls[r][1], calls[r][6], **halves)  # type: ignore[arg-type]
    wanted = combine_reference(
        [t.view(torch.int32) for t in ids], weights, [c[1] for c in calls if c[1] is not None], 2
    )
    for r, result in enumerate(results):
        assert (result.float() - wanted[r]).norm() / wanted[r].norm() < _TOLERANCE
