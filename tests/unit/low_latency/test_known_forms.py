"""Calls of the decode-time all-to-all with tensors whose forms are known: a transport may have
prepared them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.peer_memory import PeerMemory
from megatron_fluid.low_latency.transport import (
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
)
from tests.support.all_to_all_calls import bf16
from tests.support.simulated_workspace import SimulatedWorkspace


class _Transport:
    """Records the requests that it gets, and what it starts again with which tensors."""

    rank, name = 0, "recorded"

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.again: list[tuple[str, list[int | None]]] = []

    def __getattr__(self, half: str) -> Any:
        def start(tensors: Sequence[Tensor | None]) -> None:
            self.again.append((half, [t if t is None else t.data_ptr() for t in tensors]))

        def enqueue(request: Any) -> Any:
            self.requests.append(half)
            return lambda: start

        return enqueue

    def check_errors(self) -> None: ...

    def close(self) -> None: ...


def _build() -> tuple[AllToAll, _Transport]:
    transport = _Transport()
    layout = Layout(4, 4, 2, 1, 1, 16, 32, 0)
    return AllToAll(layout, transport, torch.device("cpu")), transport  # type: ignore[arg-type]


def _sent(tokens: int = 3, dtype: torch.dtype = torch.int32) -> dict[str, Tensor]:
    return {"dp_x": bf16(tokens, 16), "indices": torch.zeros(tokens, 2, dtype=dtype)}


def _call(ata: AllToAll, **sent: Any) -> tuple[Tensor, Tensor]:
    counts, out = torch.zeros(4, dtype=torch.int32), bf16(4, 4, 16)
    ata.dispatch(counts, out, None, sent.pop("dp_x"), None, sent.pop("indices"), **sent)
    return counts, out


@pytest.fixture(params=["torch's guards", "none in this torch"], autouse=True)
def _guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param.startswith("none"):
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards", raising=False)


def test_a_call_of_known_forms_starts_again_with_its_own_tensors() -> None:
    ata, transport = _build()
    _call(ata, **_sent())
    assert transport.requests == ["dispatch_send", "dispatch_receive"]
    sent = _sent()
    counts, out = _call(ata, **sent)
    pointers = [sent[name].data_ptr() for name in ("dp_x", "indices")]
    assert transport.again == [
        ("dispatch_send", [*pointers, None, None, None]),
        ("dispatch_receive", [counts.data_ptr(), out.data_ptr(), None, None]),
    ]
    weights, result = torch.ones(3, 2), bf16(3, 16)
    for accumulate in (True, False, True):
        ata.combine(result, sent["indices"], weights, out, accumulate=accumulate)
    halves = ["combine_send", "combine_receive", "combine_receive"]
    assert transport.requests[2:] == halves, "one that adds and one that does not"


@pytest.mark.parametrize("changed", [
    _sent(2), _sent(3, torch.int64), {**_sent(), "weights": torch.ones(3, 2)},
    {**_sent(), "bound_m": torch.ones(1, dtype=torch.int32)},
    {**_sent(), "dp_x": bf16(3, 24)[:, :16]},
    {**_sent(), "dp_x": torch.zeros(3, 32, dtype=torch.int8)},
], ids=["tokens", "dtype", "weights", "bound_m", "strides", "type of rows"])  # fmt: skip
def test_other_forms_make_a_request_of_their_own(changed: dict[str, Tensor]) -> None:
    ata, transport = _build()
    for sent in (_sent(), changed, _sent(), changed):
        _call(ata, **sent)
    assert transport.requests.count("dispatch_send") == 2
    assert [half for half, _ in transport.again].count("dispatch_send") == 2


def test_a_tensor_that_has_changed_in_place_is_checked_again() -> None:
    ata, transport = _build()
    sent = _sent()
    _call(ata, **sent)
    sent["indices"].data = torch.zeros(3, 3, dtype=torch.int32)
    with pytest.raises(ConfigError, match="indices: found"):
        _call(ata, **sent)
    assert transport.requests == ["dispatch_send", "dispatch_receive"] and not transport.again


@pytest.mark.parametrize("alignment", [4.0, True, 0, "4"])
def test_a_setting_of_a_wrong_type_is_refused_and_not_taken_for_an_equal_one(
    alignment: Any,
) -> None:
    ata, transport = _build()
    more = {"out_expert_offsets": torch.zeros(4, dtype=torch.int32)}
    ids, rows = torch.zeros(3, 2, dtype=torch.int32), bf16(ata.packed_rows(4), 16)

    def dispatch(alignment: Any) -> None:
        counts = torch.zeros(4, dtype=torch.int32)
        ata.dispatch(counts, rows, None, bf16(3, 16), None, ids, alignment=alignment, **more)

    for _ in range(2):
        for call in (dispatch, ata.packed_rows):
            with pytest.raises(ConfigError, match="alignment: found .*, allowed: an integer of at"):
                call(alignment)
        dispatch(4)
        dispatch(1)
        with pytest.raises(ConfigError, match="accumulate: found 1, allowed: True or False"):
            ata.combine(bf16(3, 16), ids, torch.ones(3, 2), rows, accumulate=1)  # type: ignore[arg-type]
    assert transport.requests.count("dispatch_receive") == 2


def test_neither_half_starts_where_the_other_is_refused() -> None:
    ata, transport = _build()
    _call(ata, **_sent())
    with pytest.raises(ConfigError, match="out_expert_x: found"):
        ata.dispatch(
            torch.zeros(4).int(), bf16(4, 3, 16), None, bf16(3, 16), None, _sent()["indices"]
        )
    assert not transport.again


def test_what_is_known_is_bounded_and_goes_with_the_object() -> None:
    ata, _ = _build()
    for width in range(16, 16 + 8 * 12, 8):
        _call(ata, **{**_sent(), "dp_x": bf16(3, width)[:, :16]})
    assert max(map(len, ata._known.values())) == 8
    ata.destroy()
    assert not ata._known


def test_over_nvlink_the_tensors_of_a_request_move_in_the_order_of_its_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(
        Launch,
        "start_aligned",
        lambda self, programs, tensors, integers, moving: found.append(
            [tensors[i] for i in moving]
        ),
    )
    transport = PeerMemory(Layout(4, 4, 2, 1, 1, 16, 32, 4), SimulatedWorkspace(1).rank(0))
    x, ids, weights, scale = (
        bf16(3, 16),
        torch.zeros(3, 2).int(),
        torch.ones(3, 2),
        torch.ones(3, 1),
    )
    bound, counts, rows = torch.ones(1).int(), torch.zeros(4).int(), bf16(4, 4, 16)
    for request in (
        DispatchSend(x, ids, weights, scale, bound),
        DispatchReceive(counts, rows, torch.ones(4, 4, 1), torch.zeros(4).int()),
        CombineSend(rows, weights, bound),
        CombineReceive(x, ids, weights, bound),
    ):
        getattr(transport, request.half)(request)
        fields = [getattr(request, field.name) for field in dataclasses.fields(request)]
        assert [*map(id, found[-1])] == [*map(id, fields[: len(found[-1])])]
        assert len(fields) - len(found[-1]) == isinstance(request, DispatchReceive | CombineReceive)
