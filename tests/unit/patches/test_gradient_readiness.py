"""What Megatron is told, and asked, of all experts' parameters at once."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fluid.backward.autograd import gradient_owner, set_gradient_owner
from megatron_fluid.errors import FluidError
from megatron_fluid.patches.engine.module_hooks import ModuleHooks

pytest.importorskip("megatron.core")

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_fluid.patches.gradient_readiness import _Owner, register_grad_ready


class _Ddp(torch.nn.Module):
    """Stands for a DistributedDataParallel with parameters in two bucket groups."""

    def __init__(self, count: int = 3, first: int = 2) -> None:
        super().__init__()
        self.module = torch.nn.ParameterList(torch.zeros(1) for _ in range(count))
        self.params = list(self.module)
        self.groups = [
            SimpleNamespace(
                param_gather_dispatched=False, param_gather_handle=None, is_last_microbatch=True
            )
            for _ in range(2)
        ]
        self.param_to_bucket_group: dict[Any, Any] = {
            param: self.groups[number >= first] for number, param in enumerate(self.params)
        }
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        self.config = SimpleNamespace(cuda_graph_impl="none")
        self.force_all_reduce = False


def _owned(ddp: _Ddp | None = None) -> tuple[_Ddp, Any]:
    ddp = _Ddp() if ddp is None else ddp
    owner = _Owner(ddp)
    for param in ddp.params:
        set_gradient_owner(param, owner)
    return ddp, owner


def _gathers(hooks: ModuleHooks, ran: list[int]) -> bool:
    ran.clear()
    hooks.run_parameter_gather()
    return bool(ran)


def test_parameters_are_gathered_once_every_group_has_waited() -> None:
    ddp, _ = _owned()
    module, ran = torch.nn.Module(), list[int]()
    module.params = ddp.module
    module.register_forward_pre_hook(lambda *_: ran.append(1))  # as Megatron's, which gathers
    hooks = ModuleHooks(module=module)
    assert _gathers(hooks, ran)
    for group in ddp.groups:
        group.param_gather_dispatched, group.param_gather_handle = True, object()
    assert _gathers(hooks, ran)
    ddp.groups[0].param_gather_handle = None
    assert _gathers(hooks, ran)
    ddp.groups[1].param_gather_handle = None
    assert not _gathers(hooks, ran)
    ddp.groups[1].param_gather_dispatched = False  # the next iteration
    assert _gathers(hooks, ran)


def _bucket_group(params: list[torch.nn.Parameter], starts: list[int], number: int = 0) -> Any:
    """Megatron's own bucket group, as far as it counts."""

    class Counting(_ParamAndGradBucketGroup):
        def __init__(self) -> None:
            self.params = set(params)
            self.param_to_bucket = dict.fromkeys(params)  # type: ignore[assignment]
            self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)  # type: ignore[assignment]
            self.golden_per_param_grad_ready_counts: dict[Any, int] = {}
            self.per_param_grad_ready_counts: dict[Any, int] = {}
            self.is_last_microbatch = self.is_first_batch = True

        def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
            starts.append(number)

    return Counting()


def test_a_gate_counts_its_parameters_as_megatron_counts_them() -> None:
    """Over iterations, with another parameter in each group, and one that autograd reports."""
    found: list[tuple[list[int], list[list[int]]]] = []
    for together in (True, False):
        starts: list[int] = []
        ddp, owner = _owned(_Ddp(8, 4))
        params = ddp.params
        groups = [_bucket_group(params[:4], starts, 0), _bucket_group(params[4:], starts, 1)]
        ddp.param_to_bucket_group = {p: groups[n > 3] for n, p in enumerate(params)}
        counts = []
        for pending in (set[int](), {id(params[2])}, set[int]()):
            if together:
                owner.gate_of(params[1:7]).report(lambda pending=pending: pending)
            singles = params[1:7] if not together else [p for p in params if id(p) in pending]
            for param in (*singles, params[0], params[7]):
                ddp.param_to_bucket_group[param].register_grad_ready(param, False)
            counts += [[group.per_param_grad_ready_counts[p] for p in params if p in group.params]
                       for group in groups]  # fmt: skip
            for group in groups:
                group.reset()
            starts.append(-1)
        found.append((starts, counts))
    assert found[0] == found[1]
    assert found[0][0] == [-1, 0, 1, -1, 0, 1, -1]


def test_a_gradient_behind_the_start_of_its_reduction_is_an_error() -> None:
    ddp, _ = _owned()
    group = _bucket_group(ddp.params, starts := [])
    register = register_grad_ready(type(group).register_grad_ready)
    for _ in range(2):
        for param in ddp.params:
            register(group, param, False)
        group.reset()
    for param in ddp.params:
        register(group, param)
    assert len(starts) == 2
    with pytest.raises(FluidError, match=r"^1: 2 backward passes .* and 1 in the first iteration"):
        register(group, ddp.params[1])


@pytest.mark.parametrize(
    ("impl", "overlap", "accepted"),
    [
        ("local", True, True),
        ("local", False, True),
        ("transformer_engine", False, True),
        ("transformer_engine", True, False),  # whose hooks refuse a parameter without .grad
    ],
)
def test_which_graphs_may_add_to_main_grad(impl: str, overlap: bool, accepted: bool) -> None:
    ddp, owner = _owned()
    ddp.config.cuda_graph_impl, ddp.ddp_config.overlap_grad_reduce = impl, overlap
    assert owner.accepts_in_graphs() is accepted


def test_a_model_and_its_owner_are_left_behind_by_copies_and_pickles_of_a_parameter() -> None:
    ddp, owner = _owned()
    owner.gate_of(ddp.params)
    assert copy.deepcopy(owner) is None and pickle.loads(pickle.dumps(owner)) is None
    assert gradient_owner(copy.deepcopy(ddp.params[0])) is None
