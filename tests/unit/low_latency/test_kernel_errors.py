"""What the decode-time kernels refuse, and how a wait for a peer that does not come ends."""

from __future__ import annotations

import pytest
import torch

from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout
from tests.support.machine import NEEDS_INTERPRETER
from tests.unit.low_latency.test_kernels import _build


@NEEDS_INTERPRETER
def test_a_dead_peer_is_named_and_the_call_ends() -> None:
    layout = Layout(2, 6, 1, 3, 1, 16, 32, 0)
    _, ranks = _build(layout)
    x = torch.randn(2, 16).to(torch.bfloat16)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    for r in (0, 1):  # rank 2 never sends
        ranks[r].dispatch(None, None, None, x, None, ids, do_recv=False)
    counts, out = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 6, 16, dtype=torch.bfloat16)
    ranks[0].dispatch(counts, out, None, None, None, None, do_send=False)
    with pytest.raises(PeerTimeoutError, match=r"rank 0: no answer from peer 2 in .*dispatch"):
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
