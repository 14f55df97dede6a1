"""What Megatron is told, and asked, of all experts' parameters at once."""

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from megatron_fluid.backward.autograd import gradient_owner, set_gradient_owner
from megatron_fluid.errors import FluidError
from megatron_fluid.patches.engine.module_hooks import ModuleHooks
from megatron_fluid.patches.gradient_readiness import _Owner, register_grad_ready


class _Ddp(torch.nn.Module):
    """Stands for a DistributedDataParallel with parameters in two bucket groups."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.ParameterList(torch.zeros(1) for _ in range(3))
        self.params = list(self.module)
        self.groups = [
            SimpleNamespace(
                param_gather_dispatched=False, param_gather_handle=None, is_last_microbatch=True
            )
            for _ in range(2)
        ]
        self.param_to_bucket_group: dict[Any, Any] = {
            param: self.groups[number >= 2] for number, param in enumerate(self.params)
        }
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        self.config = SimpleNamespace(cuda_graph_impl="none")
        self.force_all_reduce = False


def _owned() -> tuple[_Ddp, Any]:
    ddp = _Ddp()
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


class _BucketGroup(_ParamAndGradBucketGroup):
    """Megatron's own, as far as it counts."""

    def __init__(self, params: list[torch.nn.Parameter], starts: list[int]) -> None:
        self.params, self.param_to_bucket = set(params), dict.fromkeys(params)
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=True)
        self.golden_per_param_grad_ready_counts: dict[Any, int] = {}
        self.per_param_grad_ready_counts: dict[Any, int] = {}
        self.is_last_microbatch = self.is_first_batch = True
        self.starts = starts

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.starts.append(1)


def test_a_gradient_behind_the_start_of_its_reduction_is_an_error() -> None:
    ddp, _ = _owned()
    group = _BucketGroup(ddp.params, starts := [])
    register = register_grad_ready(type(group).register_grad_ready)
    for _ in range(2):
        for param in ddp.params:
            register(group, param, False)
        group.reset()
    for param in ddp.params:
        register(group, param)
    assert len(starts) == 2
    ddp.groups[0].grad_reduce_finished = True  # another group's gradients are still awaited
    with pytest.raises(FluidError, match=r"^1: 2 backward passes .* and 1 in the first iteration"):
        register(group, ddp.params[1])
    ddp.groups[1].grad_reduce_finished = True  # a backward between two steps
    register(group, ddp.params[1])


@pytest.mark.parametrize(("impl", "overlap", "accepted"), [
    ("local", True, True),
    ("local", False, True),
    ("transformer_engine", False, True),
    ("transformer_engine", True, False),  # whose hooks refuse a parameter without .grad
])  # fmt: skip
def test_which_graphs_may_add_to_main_grad(impl: str, overlap: bool, accepted: bool) -> None:
    ddp, owner = _owned()
    ddp.config.cuda_graph_impl, ddp.ddp_config.overlap_grad_reduce = impl, overlap
    assert owner.accepts_in_graphs() is accepted


def test_a_model_and_its_owner_are_left_behind_by_copies_and_pickles_of_a_parameter() -> None:
    ddp, owner = _owned()
    owner.gate_of(ddp.params)
    assert copy.deepcopy(owner) is None and pickle.loads(pickle.dumps(owner)) is None
    assert gradient_owner(copy.deepcopy(ddp.params[0])) is None
