"""What Megatron's DistributedDataParallel is asked of all experts' parameters at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.backward.main_grad import set_ready_report

pytest.importorskip("megatron.core")


class _Ddp:
    """Stands for a DistributedDataParallel with three parameters in two bucket groups."""

    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
        self.groups = [
            SimpleNamespace(
                param_gather_dispatched=False, param_gather_handle=None, is_last_microbatch=True
            )
            for _ in range(2)
        ]
        self.ready: list[tuple[int, Any]] = []
        for number, group in enumerate(self.groups):
            group.register_grad_ready = lambda param, force, n=number: self.ready.append((n, force))
        pairs = zip(self.params, (0, 0, 1), strict=True)
        self.param_to_bucket_group = {param: self.groups[n] for param, n in pairs}
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        self.force_all_reduce = False


def _reported() -> tuple[_Ddp, Any]:
    from megatron_fluid.patches.gradient_readiness import _Report

    ddp = _Ddp()
    report = _Report(ddp)
    for param in ddp.params:
        set_ready_report(param, report)
    return ddp, report


def test_parameters_are_gathered_once_every_group_has_waited() -> None:
    from megatron_fluid.patches.gradient_readiness import ParameterGathers

    ddp, _ = _reported()
    gathers, asked = ParameterGathers(), []

    def finished() -> bool:
        return gathers.finished(ddp.params[0], lambda: asked.append(1) or ddp.params)  # type: ignore[func-returns-value]

    assert not finished()
    for group in ddp.groups:
        group.param_gather_dispatched, group.param_gather_handle = True, object()
    assert not finished()
    ddp.groups[0].param_gather_handle = None
    assert not finished()
    ddp.groups[1].param_gather_handle = None
    assert finished() and len(asked) == 1
    ddp.groups[1].param_gather_dispatched = False  # the next iteration
    assert not finished()


def test_parameters_of_nobody_are_never_taken_for_gathered() -> None:
    from megatron_fluid.patches.gradient_readiness import ParameterGathers

    param = torch.nn.Parameter(torch.zeros(1))
    gathers = ParameterGathers()
    assert not gathers.finished(param, lambda: [param])
    ddp, report = _reported()
    set_ready_report(param, report)  # of the report, but in no group
    assert not gathers.finished(param, lambda: [param])
    for group in ddp.groups:
        group.param_gather_dispatched = True
    assert not gathers.finished(param, lambda: [param])
    assert gathers.finished(ddp.params[0], lambda: ddp.params) is False  # what was found is kept
    assert ParameterGathers().finished(ddp.params[0], lambda: ddp.params)


@pytest.mark.parametrize("last", [True, False])
def test_a_group_counts_in_the_last_microbatch_alone(last: bool) -> None:
    ddp, report = _reported()
    ddp.groups[1].is_last_microbatch = last
    report(ddp.params)
    assert ddp.ready == [(0, False), (0, False)] + [(1, False)] * last


def _bucket_groups(params: list[torch.nn.Parameter], started: list[int]) -> list[Any]:
    """Megatron's own bucket groups, of the first four parameters and of the rest, as far as they
    count."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    class Counting(_ParamAndGradBucketGroup):
        def __init__(self, number: int, members: list[torch.nn.Parameter]) -> None:
            self.number, self.params = number, set(members)
            self.param_to_bucket = dict.fromkeys(members)  # type: ignore[assignment]
            self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)  # type: ignore[assignment]
            self.golden_per_param_grad_ready_counts: dict[Any, int] = {}
            self.per_param_grad_ready_counts: dict[Any, int] = {}
            self.is_last_microbatch = self.is_first_batch = True

        def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
            started.append(self.number)

    return [Counting(0, params[:4]), Counting(1, params[4:])]


def test_reported_parameters_are_counted_as_megatrons_hooks_count_them() -> None:
    """Over iterations, with another parameter in the group and one that is used twice."""
    from megatron_fluid.patches.gradient_readiness import _Report

    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(8)]
    layer, alone = params[1:7], [params[0], params[7]]
    found: list[tuple[list[int], list[list[int]]]] = []
    for together in (True, False):
        started: list[int] = []
        groups = _bucket_groups(params, started)
        ddp = _Ddp()
        ddp.param_to_bucket_group = {p: groups[int(n > 3)] for n, p in enumerate(params)}
        report, counts = _Report(ddp), []
        for _ in range(3):
            for uses in (layer, layer[:2]):  # the first two are used twice
                if together:
                    report(tuple(uses))
                else:
                    for param in uses:
                        ddp.param_to_bucket_group[param].register_grad_ready(param, False)
            for param in alone:
                ddp.param_to_bucket_group[param].register_grad_ready(param, False)
            counts += [[group.per_param_grad_ready_counts[p] for p in params if p in group.params]
                       for group in groups]  # fmt: skip
            for group in groups:
                group.reset()
            started.append(-1)
        found.append((started, counts))
    assert found[0] == found[1]
    assert found[0][0] == [-1, 0, 1, -1, 0, 1, -1] and [1, 2, 2, 1] in found[0][1]


def test_parameters_that_take_anothers_place_are_looked_up_anew() -> None:
    ddp, report = _reported()
    report(ddp.params[:2])
    report([ddp.params[0], ddp.params[2]])
    assert [number for number, _ in ddp.ready] == [0, 0, 0, 1]
