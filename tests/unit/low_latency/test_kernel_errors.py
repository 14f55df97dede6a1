"""What the decode-time all-to-all refuses, and how a wait for a peer that does not come ends."""

from typing import Any

import pytest
import torch

from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.peer_memory import PeerMemory
from megatron_fluid.low_latency.transport import CombineSend
from tests.support.all_to_all_calls import bf16, build, receive, receive_back, send, send_back
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = NEEDS_INTERPRETER
LONE = Layout(2, 2, 1, 1, 1, 16, 32, 0)  # one rank
THREE = Layout(2, 6, 1, 3, 1, 16, 32, 0)
ZEROS = torch.zeros(2, 1, dtype=torch.int32)


def test_a_dead_peer_is_named_and_the_call_ends() -> None:
    _, ranks = build(THREE)
    for r in (0, 1):  # rank 2 never sends
        send(ranks[r], bf16(2, 16), ZEROS)
    receive(ranks[0])
    with pytest.raises(PeerTimeoutError, match=r"rank 0: no answer from peer 2 in .*dispatch"):
        ranks[0].check_errors()
    with pytest.raises(PeerTimeoutError):
        send(ranks[0], bf16(2, 16), ZEROS)


def test_halves_out_of_order_are_refused() -> None:
    _, (ata,) = build(LONE)
    x, y, ones = bf16(2, 16), torch.zeros(2, 2, 16, dtype=torch.bfloat16), torch.ones(2, 1)
    with pytest.raises(FluidError, match="do_recv without a send"):
        receive(ata)
    with pytest.raises(ConfigError, match="at least one"):
        ata.dispatch(None, None, None, x, None, ZEROS, do_send=False, do_recv=False)
    with pytest.raises(FluidError, match="before any dispatch was received"):
        send_back(ata, y, ones)
    send(ata, x, ZEROS)
    with pytest.raises(FluidError, match="do_send again"):
        send(ata, x, ZEROS)
    with pytest.raises(FluidError, match="between the halves of a dispatch"):
        send_back(ata, y, ones)
    receive(ata)
    send_back(ata, y, ones)
    with pytest.raises(FluidError, match="between the halves of a combine"):
        send(ata, x, ZEROS)
    ata.destroy()
    ata.destroy()
    with pytest.raises(FluidError, match="after destroy"):
        ata.combine(None, None, None, None)


_SHIFTED = torch.zeros(3, dtype=torch.int32)[1:].view(2, 1)
_FP16 = torch.zeros(2, 2, 16, dtype=torch.float16)
CALL: dict[str, Any] = {
    "out_expert_num_tokens": torch.zeros(2, dtype=torch.int32),
    "out_expert_x": torch.zeros(2, 2, 16, dtype=torch.bfloat16),
    "dp_x": bf16(2, 16), "indices": ZEROS, "weights": torch.ones(2, 1),
    "bound_m": torch.ones(1).int(), "out_expert_x_scale": None, "dp_x_scale": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "said"), [
    ("dp_x", bf16(3, 16), "dp_x.*allowed"),
    ("indices", ZEROS.float(), "indices.*torch.uint32"),
    ("indices", _SHIFTED, "address of indices.*multiple of 16"),
    ("out_expert_num_tokens", torch.zeros(4).int()[1:3], "address of out_expert_num_tokens"),
    ("out_expert_x", _FP16, "out_expert_x: found torch.float16, allowed: torch.bfloat16"),
    *(
        (name, CALL[name].to("meta"), f"{name}: found 'meta'")
        for name in ("dp_x", "weights", "bound_m")
    ),
    # The kernel writes them one after another.
    ("out_expert_offsets", torch.zeros(4).int()[::2], "out_expert_offsets: found 'strides"),
])  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_also_after_one_that_does(
    name: str, tensor: torch.Tensor, said: str
) -> None:
    _, (ata,) = build(LONE)
    ata.dispatch(**CALL)
    changed = {**CALL, name: tensor}
    if name == "out_expert_offsets":
        changed["out_expert_x"] = bf16(ata.packed_rows(), 16)
    with pytest.raises(ConfigError, match=said):
        ata.dispatch(**changed)
    ata.dispatch(**CALL)  # nothing was sent
    with pytest.raises(ConfigError, match="address of indices"):
        ata.combine(CALL["dp_x"].clone(), _SHIFTED, None, CALL["out_expert_x"])
    ata.dispatch(**CALL)


def test_rows_of_another_type_than_was_sent_are_refused() -> None:
    _, (ata,) = build(LONE)
    send(ata, bf16(2, 16), ZEROS)
    with pytest.raises(ConfigError, match="out_expert_x: found torch.float16, allowed: torch.bf"):
        receive(ata, out=_FP16)


SIZES: dict[str, Any] = {
    "max_num_tokens": 4, "num_experts": 8, "experts_per_token": 2, "world_size": 4, "dp_size": 1,
    "hidden_dim": 16, "hidden_dim_bytes": 32, "hidden_dim_scale_bytes": 0,
}  # fmt: skip
WRONG: dict[str, tuple[Any, ...]] = {
    "max_num_tokens": (True, "8"), "num_experts": (7, 4.0), "experts_per_token": (9, None),
    "world_size": (0,), "dp_size": (3, 1.0), "hidden_dim": (16.0, 0), "hidden_dim_bytes": (24,),
    "hidden_dim_scale_bytes": (3, -4), "batch_invariant": ("no",),
}  # fmt: skip


def test_a_size_that_cannot_be_met_is_named() -> None:
    for setting, value in ((name, value) for name, values in WRONG.items() for value in values):
        with pytest.raises(ConfigError, match=rf"^{setting}: found {value!r}"):
            Layout(**{**SIZES, setting: value})


def test_packed_rows_that_cannot_hold_what_may_arrive_are_refused() -> None:
    _, (ata, _) = build(Layout(4, 4, 2, 2, 1, 16, 32, 0))
    assert ata.packed_rows(8) == 4 * 2 * 2 + 2 * 7
    send(ata, bf16(1, 16), torch.zeros(1, 2, dtype=torch.int32))
    more = {"out_expert_offsets": torch.zeros(2, dtype=torch.int32), "alignment": 8}
    with pytest.raises(ConfigError, match=r"29 packed rows.*packed_rows\(8\) = 30"):
        receive(ata, out=bf16(29, 16), **more)


def test_more_tokens_and_fewer_packed_rows_than_were_dispatched_are_refused() -> None:
    _, (ata,) = build(Layout(4, 2, 1, 1, 1, 16, 32, 0))
    rows, ids = ata.packed_rows(8), torch.tensor([[0], [1]])
    send(ata, torch.ones(2, 16, dtype=torch.bfloat16), ids, torch.ones(2, 1))
    offsets = torch.zeros(2, dtype=torch.int32)
    receive(ata, out=bf16(rows, 16), out_expert_offsets=offsets, alignment=8)
    y, out = torch.ones(rows, 16, dtype=torch.bfloat16), torch.zeros(3, 16)
    with pytest.raises(ConfigError, match="out_tokens: found '3 tokens', allowed: at most the 2"):
        ata.combine(out, torch.zeros(3, 1, dtype=torch.int64), None, y)
    with pytest.raises(ConfigError, match=f"expert_y: found '{rows - 1} packed rows'"):
        send_back(ata, y[1:])
    send_back(ata, y)
    assert torch.equal(receive_back(ata, out[:2], ids), torch.ones(2, 16))


def test_weights_of_too_many_entries_belong_to_the_dispatch() -> None:
    layout = Layout((1 << 16) + 1, 16, 16, 1, 1, 8, 16, 0)
    transport = PeerMemory(layout, SimulatedWorkspace(1).rank(0))
    with pytest.raises(ConfigError, match=r"max_num_tokens \* experts_per_token: found 1048592"):
        transport.combine_send(CombineSend(bf16(16, 1, 8), torch.ones(1, 16)))
