"""Which of Megatron's tensor-parallel linears are overlapped, and what is said of the others."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch import Tensor

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches import features as recorded
from megatron_fluid.patches import linears


def _linear(
    ranks: int = 2, offloading: object = None, invariant: bool = False, expert: bool = False
) -> Any:
    return SimpleNamespace(
        explicit_expert_comm=expert,
        tp_group=SimpleNamespace(size=lambda: ranks),
        config=SimpleNamespace(_cpu_offloading_context=offloading, batch_invariant_mode=invariant),
    )


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Linears of two ranks as they are served, with GEMMs of this rank alone; gives the reasons of
    those that are not."""

    def gather(a: Tensor, b: Tensor, group: Any, **_: Any) -> Tensor:
        return torch.cat([a, a]) @ b.t()

    def scatter(a: Tensor, b: Tensor, group: Any, **_: Any) -> Tensor:
        return (a @ b.t()).chunk(2)[0]

    monkeypatch.setattr(linears, "all_gather_matmul", gather)
    monkeypatch.setattr(linears, "matmul_reduce_scatter", scatter)
    collective = SimpleNamespace(name="collective")
    monkeypatch.setattr(linears, "backend_for", lambda *_: collective)
    reasons: list[str] = []
    monkeypatch.setattr(
        linears, "note", lambda linear, on, reason: None if on else reasons.append(reason)
    )
    set_config(FluidConfig(tp_overlap="on"))
    return reasons


def _row_linear(**changes: Any) -> Any:
    class Row(SimpleNamespace):
        _forward_impl = RowParallelLinear._forward_impl

    fields: dict[str, Any] = {
        "explicit_expert_comm": False, "input_is_parallel": True, "sequence_parallel": True,
        "skip_bias_add": False, "bias": None, "gradient_accumulation_fusion": False,
        "weight": torch.nn.Parameter(torch.zeros(6, 4)),
    }  # fmt: skip
    return Row(**{**vars(_linear()), **fields, **changes})


MEGATRONS = torch.zeros(())


def _call_column(
    a: Tensor, *args: Any, linear: Any = None, frozen: Any = False, **named: Any
) -> Tensor:
    linear, weight = linear or _linear(), torch.nn.Parameter(torch.zeros(6, 4), not frozen)
    forward = linears.column_forward_impl(lambda *_, **__: MEGATRONS)
    return forward(linear, a, weight, *args, **{"sequence_parallel": True, **named})


def _call_row(a: Tensor, **changes: Any) -> Tensor:
    output = linears.row_forward(lambda *_: (MEGATRONS, None))(_row_linear(**changes), a)[0]
    assert isinstance(output, Tensor)
    return output


def _autocast(a: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return _call_column(a)


@pytest.mark.parametrize(("sequence", "batch"), [(4, 2), (4, 0), (0, 2), (0, 0)])
def test_an_output_has_the_inputs_sequence_and_batch_where_they_are_nought_too(
    serving: list[str], sequence: int, batch: int
) -> None:
    a = torch.zeros(sequence, batch, 4)
    assert _call_column(a).shape == (2 * sequence, batch, 6)
    assert _call_row(a).shape == (sequence // 2, batch, 6)
    assert serving == []


def test_what_on_leaves_out_is_never_left_out_without_a_word(serving: list[str]) -> None:
    a, flat = torch.zeros(4, 2, 4), torch.zeros(4, 4)
    left = {
        "2 dimensions": [lambda: _call_column(flat), lambda: _call_row(flat)],
        "--defer-embedding-wgrad-compute": [lambda: _call_column(a, grad_output_buffer=[])],
        "gathered for each use": [
            lambda: _call_column(a, gtp_remat_size=2),
            lambda: _call_row(a, gtp_remat_size=2),
        ],
        "other arguments": [lambda: _call_column(a, None)],
        "_forward_impl is not Megatron's": [lambda: _call_row(a, _forward_impl=print)],
        "without --sequence-parallel": [
            lambda: _call_row(a, input_is_parallel=False, sequence_parallel=False),
            lambda: _call_column(a, sequence_parallel=False),
        ],
        "its weight is frozen": [lambda: _call_column(a, frozen=True)],
        "its input is torch.bfloat16, its weight torch.float32": [lambda: _call_row(a.bfloat16())],
        "autocast decides its dtypes": [lambda: _autocast(a)],
        "offloaded": [lambda: _call_column(a, linear=_linear(offloading=object()))],
        "--batch-invariant-mode": [lambda: _call_column(a, linear=_linear(invariant=True))],
    }
    for reason, calls in left.items():
        for call in calls:
            assert call() is MEGATRONS and len(serving) == 1 and reason in serving.pop(), reason


def test_where_there_is_nothing_to_overlap_nothing_is_said(serving: list[str]) -> None:
    """Experts' linears were reported as linears without --sequence-parallel."""
    a = torch.zeros(4, 2, 4)
    assert _call_column(a, linear=_linear(ranks=1)) is MEGATRONS
    experts = _linear(expert=True)
    assert _call_column(a, linear=experts, sequence_parallel=False) is MEGATRONS
    assert _call_row(a, explicit_expert_comm=True) is MEGATRONS
    set_config(FluidConfig(tp_overlap="off"))
    assert _call_row(a) is MEGATRONS
    assert serving == []


def test_a_linear_of_several_parameters_keeps_transformer_engines_path(serving: list[str]) -> None:
    """parameters_split gives each part of the output a weight and a bias of its own."""

    class Split:
        __module__ = "transformer_engine.pytorch"

    linear: Any = Split()
    vars(linear).update(
        **vars(_linear()), _tp_group=_linear().tp_group, parallel_mode="column",
        sequence_parallel=True, use_bias=True, te_return_bias=False, te_quant_params=None,
        fuse_wgrad_accumulation=False, query_weight=MEGATRONS, query_bias=MEGATRONS,
    )  # fmt: skip
    linear.config.tp_comm_overlap = linear.config.fp8 = linear.config.fp4 = False
    for wrap in (linears.te_linear_forward, linears.te_layer_norm_column_forward):
        forward = wrap(lambda *_: (MEGATRONS, None))
        assert forward(linear, torch.zeros(4, 2, 4))[0] is MEGATRONS
        assert serving.pop().endswith("in several parameters") and not serving


def test_a_linear_is_counted_once_with_what_was_last_true_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded, "_features", {})
    first, second = torch.nn.Identity(), torch.nn.Identity()
    for _ in range(5):
        linears.note(first, True, "collective")
        linears.note(second, True, "collective")
        linears.note(first, False, "its weight is frozen")
    named = linears.REPORT.feature, "Identity: "
    assert recorded.features() == [
        (named[0], True, named[1] + "collective", 1),
        (named[0], False, named[1] + "its weight is frozen", 1),
    ]


def test_a_quantisers_gemm_is_known_whenever_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "linear_with_grad_accumulation_and_async_allreduce"
    own = getattr(layers, name)
    during = linears._watch_gemm()
    assert during()

    @functools.wraps(own)
    def quantised(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    monkeypatch.setattr(layers, name, quantised)
    before = linears._watch_gemm()  # as when this package is imported after the quantiser
    assert not during() and not before()
    monkeypatch.setattr(layers, name, own)
    assert during() and not before()
