"""Who moves a standalone layer's tokens, and how its buffers are sized."""

import contextlib
import copy
import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm import symmetric
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe import backends, choose, layer
from megatron_fluid.moe.backends import choose_backend
from megatron_fluid.moe.choose import choose_transport, nvlink_layer_reason
from megatron_fluid.moe.nvlink import shared as nvlink_buffers
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.transport import NvlinkBackend
from megatron_fluid.moe.transport import LayerShape
from tests.support.launch import on_ranks, world_group

GPU = torch.device("cuda")


def layer_on(ranks: int, domains: int = 1) -> mock.Mock:
    names = [str(rank % domains) for rank in range(ranks)]
    rounds = mock.Mock(group=mock.Mock(size=lambda: ranks), domains=names)
    return mock.Mock(rounds=rounds, weight1=mock.Mock(device=GPU), batch_invariant=False)


def on_gpus(layer: str | None, machine: str | None) -> contextlib.ExitStack:
    """Where symmetric memory is ruled out by the layer, or by the machine."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(backends, "nvlink_layer_reason", return_value=layer))
    stack.enter_context(
        mock.patch.object(symmetric, "symmetric_unsupported_reason", return_value=machine)
    )
    return stack


FP32, APART = "it is in float32", "no peer access"
BY_PHASE = "moe_latent_size=8: projections"


@pytest.mark.parametrize(("wanted", "ranks", "domains", "layer", "machine", "plain", "megatrons"), [
    ("auto", 1, 1, None, None, "local", "local"),
    ("auto", 2, 1, None, None, "nvlink", "nvlink"),
    ("auto", 2, 1, None, APART, "rounds", "do not pay"),
    ("auto", 2, 1, FP32, None, "rounds", "do not pay"),
    ("auto", 2, 2, None, APART, "hierarchical", "hierarchical"),
    ("local", 1, 1, FP32, APART, "local", "local"),
    ("nvlink", 2, 1, None, None, "nvlink", "nvlink"),
    ("rounds", 1, 1, None, None, "rounds", "rounds"),
    ("rounds", 2, 1, None, APART, "rounds", "rounds"),
])  # fmt: skip
def test_the_first_transport_that_layer_and_machine_allow(
    wanted: str,
    ranks: int,
    domains: int,
    layer: str | None,
    machine: str | None,
    plain: str,
    megatrons: str,
) -> None:
    """On plain torch, and under Megatron, whose all-to-all is an alternative to rounds."""
    with on_gpus(layer, machine):
        assert choose_backend(layer_on(ranks, domains), wanted).name == plain
        case = exchange_case(ranks, domains, layer, megatron=True)
        transport, reason = choose_transport(wanted, case)
        assert transport == megatrons if transport else megatrons in str(reason)
        assert transport or str(layer or machine) in str(reason)


def exchange_case(
    ranks: int, domains: int, layer: str | None, **settings: Any
) -> choose.ExchangeCase:
    rounds = layer_on(ranks, domains).rounds
    where = {"group": rounds.group, "domains": lambda: rounds.domains}
    return choose.ExchangeCase(**where, on_gpu=True, nvlink_reason=layer, **settings)


@pytest.mark.parametrize(("domains", "gpu", "phased", "expected"), [
    (2, True, ("hierarchical",), "rounds"),
    (2, True, ("hierarchical", "rounds"), None),
    (2, False, ("hierarchical", "rounds"), "rounds"),
    (1, False, ("rounds",), "rounds"),
])  # fmt: skip
def test_what_runs_phase_by_phase_is_exchanged_by_megatron_between_hosts(
    domains: int, gpu: bool, phased: tuple[str, ...], expected: str | None
) -> None:
    with on_gpus(None, APART):
        by_phase = {"by_phase": lambda name: BY_PHASE if name in phased else None}
        case = exchange_case(2, domains, None, megatron=True, **by_phase)
        case = dataclasses.replace(case, on_gpu=gpu)
        transport, reason = choose_transport("auto", case)
        assert transport == expected and (transport or BY_PHASE in str(reason))
        if domains == 2:
            with pytest.raises(ConfigError, match="megatron, because moe_latent_size=8"):
                choose_transport("hierarchical", case)


@pytest.mark.parametrize("domains", [1, 2])
def test_auto_takes_rounds_where_sums_must_have_one_order(domains: int) -> None:
    with on_gpus(None, APART):
        case = exchange_case(2, domains, None, megatron=True, batch_invariant=True)
        assert choose_transport("auto", case).transport == "rounds"


def test_auto_says_that_it_takes_rounds_on_gpus(caplog: pytest.LogCaptureFixture) -> None:
    why = "no peer access, for once"
    with on_gpus(None, why):
        for _ in range(2):
            choose_backend(layer_on(2), "auto")
        choose_backend(layer_on(2), "rounds")
    assert [record.getMessage() for record in caplog.records] == [
        f"moe_backend=auto takes round-robin P2P exchanges: no symmetric memory ({why})"
    ]


@pytest.mark.parametrize(("wanted", "layer", "machine", "named"), [
    ("nvlink", FP32, None, FP32),
    ("nvlink", None, APART, APART),
    ("local", None, None, "the group has 2"),
    ("hierarchical", None, None, "the group's are on one"),
    ("megatron", None, None, "auto, local, nvlink, hierarchical, rounds"),
    ("experts", None, None, "auto, local, nvlink, hierarchical, rounds"),
])  # fmt: skip
@pytest.mark.parametrize("megatron", [False, True])
def test_a_transport_by_name_is_met_or_refused(
    wanted: str, layer: str | None, machine: str | None, named: str, megatron: bool
) -> None:
    with on_gpus(layer, machine), pytest.raises(ConfigError) as caught:
        choose_transport(wanted, exchange_case(2, 1, layer, megatron=megatron))
    assert str(caught.value).startswith(f"moe_backend: found '{wanted}', allowed: auto")
    assert named in str(caught.value)
    with on_gpus(layer, machine), pytest.raises(ConfigError, match=f"^backend: found.*{named}"):
        choose_backend(layer_on(2), wanted)


def test_capacity_is_refused_over_rounds() -> None:
    asked = layer_on(2)
    asked.config = mock.Mock(backend="rounds", capacity_factor=2.0)
    refused = pytest.raises(ConfigError, match="capacity_factor: found 2.0, allowed: None over r")
    with on_gpus(None, None), refused:
        layer.MoELayer._choose(asked)


@pytest.mark.parametrize(("hidden", "activation", "dtype", "device", "named"), [
    (64, "swiglu", torch.bfloat16, GPU, None),
    (64, "swiglu", torch.bfloat16, torch.device("cpu"), "cpu"),
    (64, "swiglu", torch.float32, GPU, None),
    (64, "swiglu", torch.float64, GPU, "float64"),
    (64, "quick_geglu", torch.bfloat16, GPU, None),
    (64, "sigmoid", torch.bfloat16, GPU, "sigmoid"),
    (60, "swiglu", torch.bfloat16, GPU, "hidden_size 60"),
])  # fmt: skip
def test_what_rules_the_path_out_is_named(
    hidden: int, activation: str, dtype: torch.dtype, device: torch.device, named: str | None
) -> None:
    reason = nvlink_layer_reason(hidden, activation, dtype, device)
    assert reason is None if named is None else reason is not None and named in reason


def gelu(h: torch.Tensor) -> torch.Tensor:
    """Not the one that bears this name."""
    return torch.nn.functional.elu(h)


@on_ranks(1)
def test_a_callable_that_bears_the_name_of_a_kernel_is_not_taken_for_it(
    rank: int, world: int
) -> None:
    config = {"hidden_size": 8, "ffn_hidden_size": 8, "num_experts": 2, "top_k": 2}
    for activation, named in (
        ("gelu", "gelu"),
        (torch.nn.functional.gelu, "gelu"),
        (gelu, "gelu, the caller's own"),
    ):
        one = layer.MoELayer({**config, "activation": activation}, dist.group.WORLD)
        for each in (one, copy.deepcopy(one)):
            with mock.patch.object(backends, "nvlink_layer_reason", return_value="no") as asked:
                choose_backend(each, "auto")
            assert asked.call_args.args[1] == named


@pytest.mark.parametrize("room", [1, 3])
def test_buffers_are_sized_by_the_rank_with_most_tokens_and_grow_for_all_copies(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    others, made = 9, list[int]()

    def make(group: object, *shape: int, dtype: torch.dtype, by_choice: bool) -> SimpleNamespace:
        made.append(shape[0])
        return SimpleNamespace(max_tokens=shape[0], hidden=shape[1], dtype=dtype)

    talk = SimpleNamespace(gather=lambda operation, mine: [mine, others])
    monkeypatch.setattr(nvlink_buffers, "agreement", lambda group: talk)
    monkeypatch.setattr(nvlink_buffers, "shared_buffers", make)
    group = mock.Mock(size=lambda: 2)
    shape = LayerShape(group=group, num_experts=8, top_k=2, ffn=32, name="moe", room=room)
    backend: Any = NvlinkBackend(shape, mock.Mock())
    for tokens in (4, 9):
        x, ids = torch.zeros(tokens, 64).bfloat16(), torch.zeros(tokens, 2)
        backend.plan(x, ids, ids, experts=None, again=False)
    assert made == [9 * room]
    others = 50  # another rank has more tokens than fit, this one fewer
    grown = backend.grow(5)
    assert made[1:] == [grown.max_tokens] and grown.max_tokens >= 50
    assert copy.deepcopy(backend).buffers is grown


def test_single_rows_are_sent_where_sums_must_have_the_order_of_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever schedule the group's first rank chose."""
    monkeypatch.setattr(nvlink_buffers, "group_resource", lambda _, key, make, close=None: make())
    monkeypatch.setattr(nvlink_buffers, "_choose", lambda *_: Schedule(stream=True))
    monkeypatch.setattr(nvlink_buffers, "wait_timeout_s", lambda group: 9.0)
    monkeypatch.setattr(nvlink_buffers, "SymmetricWorkspace", mock.Mock())
    monkeypatch.setattr(nvlink_buffers, "NvlinkBuffers", lambda *_, schedule: schedule)
    shape = (mock.Mock(), 4096, 4096, 14336, 2, 8)
    assert not nvlink_buffers.shared_buffers(*shape).sent_rows
    single = nvlink_buffers.shared_buffers(*shape, by_choice=True)
    assert single == Schedule(stream=True, sent_rows=True)


@on_ranks(1)
def test_a_machine_without_gpus_is_refused_by_name(rank: int, world: int) -> None:
    with pytest.raises(ConfigError, match=r"symmetric memory: found .*CUDA is not available"):
        nvlink_buffers.shared_buffers(world_group(), 8, 64, 32, 2, 4)
