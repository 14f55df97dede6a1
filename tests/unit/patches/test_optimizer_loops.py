"""Megatron's loops around an optimizer's step, for a few parameters in place of all: the same lists
and the same training, and nothing stale."""

from __future__ import annotations

import functools
import inspect
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.launch import run_ranks

PATCHES = ("optimizer-gradient-norm", "local-tensors", "gathered-parameters")


def _trained(dtype: torch.dtype) -> tuple[list[float], list[float], list[torch.Tensor]]:
    from tests.support import tiny_gpt

    half = dtype == torch.bfloat16
    with tiny_gpt.plug_in(False):
        config = tiny_gpt.config_of(params_dtype=dtype, **({"bf16": True} if half else {}))
        model = tiny_gpt.gpt(config, spec=tiny_gpt.grouped_spec(config), seed=3)
        run = tiny_gpt.train(
            model,
            iterations=4,
            distributed_optimizer=True,
            overlap_grad_reduce=half,
            overlap_param_gather=half,
        )
    return run.losses, run.gradient_norms, [p.detach().clone() for p in model.parameters()]


def _world(rank: int, world_size: int, sizes: dict[str, int]) -> dict[str, Any]:
    logging.getLogger("megatron").setLevel(logging.WARNING)
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from megatron_fluid import patches
    from tests.support import tiny_gpt

    tiny_gpt.parallel(**sizes)
    patches.revert(*PATCHES)
    asked: list[int] = []
    filter_grads = MegatronOptimizer._filter_grads_for_norm

    @functools.wraps(filter_grads)
    def counted(self: Any, params: list[torch.Tensor], param_filter: Any = None) -> Any:
        asked.append(len(params))
        return filter_grads(self, params, param_filter)

    found: dict[str, Any] = {}
    with mock.patch.object(MegatronOptimizer, "_filter_grads_for_norm", counted):
        for dtype in (torch.float32, torch.bfloat16):
            losses, norms, parameters = _trained(dtype)
            theirs = sum(asked)
            asked.clear()
            with patches.patched(*PATCHES):
                ours = _trained(dtype)
            found[str(dtype)] = {
                "losses": losses == ours[0],
                "norms": norms == ours[1],
                "bits": all(map(torch.equal, parameters, ours[2])),
                "asked": (sum(asked), theirs),
            }
            asked.clear()
    return found


@pytest.mark.parametrize("sizes", [{}, {"tensor_model_parallel_size": 2}])
def test_training_has_megatrons_bits_and_few_parameters_are_asked(sizes: dict[str, int]) -> None:
    for rank in run_ranks(_world, 2, sizes):
        for found in rank.values():
            assert found["losses"] and found["norms"] and found["bits"], found
            ours, theirs = found["asked"]
            assert 0 < ours < theirs / 2, found


class _Rank:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"shared": True},
    {"shared": False},
    {"tensor_model_parallel": True},
    {"allreduce": False},
    {"allreduce": False, "tensor_model_parallel": True},
    {"grad_norm_group": "mtp"},
    {"grad_norm_group": "mtp", "shared": True},
    {"is_gtp_weight_remat": True},
    {"grad_norm_group": "mtp", "tensor_model_parallel": True},
)


def _optimizer(tensor_rank: int = 1, expert_rank: int = 0) -> Any:
    """Three parameters of every kind, each with a gradient."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    made = FP32Optimizer.__new__(FP32Optimizer)
    made.config = SimpleNamespace(
        use_precision_aware_optimizer=False, use_precision_aware_optimizer_no_fp8_or_ds_fp8=False
    )
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3 * len(_KINDS))]
    for number, param in enumerate(params):
        param.__dict__.update(_KINDS[number % len(_KINDS)])
        param.grad = torch.full((2,), float(number))
    made.optimizer = SimpleNamespace(
        param_groups=[{"params": params[:10]}, {"params": params[10:]}]
    )
    made.tp_group, made.expert_tp_group = _Rank(tensor_rank), _Rank(expert_rank)
    return made


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.optimizer.param_groups for p in group["params"]]


def _numbers(grads: list[torch.Tensor]) -> list[float]:
    return [float(grad[0]) for grad in grads]


@pytest.fixture
def both() -> tuple[Any, Any]:
    """Megatron's own list of gradients, and ours."""
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from megatron_fluid.patches import optimizer_loops

    original = inspect.unwrap(MegatronOptimizer.get_grads_for_grad_norm)
    return original, optimizer_loops.grads_for_norm(original)


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("group", [None, "mtp"])
def test_every_kind_of_parameter_counts_as_in_megatron(
    both: Any, ranks: tuple[int, int], group: str | None
) -> None:
    theirs, ours = both
    optimizer = _optimizer(*ranks)
    for _ in range(2):
        expected = theirs(optimizer, group)
        given = ours(optimizer, group)
        assert expected and len(expected) < len(_parameters(optimizer))
        assert [id(grad) for grad in given] == [id(grad) for grad in expected]


@pytest.mark.parametrize("name", ["shared", "tensor_model_parallel", "grad_norm_group"])
def test_a_mark_that_changes_between_steps_is_seen(both: Any, name: str) -> None:
    theirs, ours = both
    optimizer = _optimizer(tensor_rank=0 if name != "tensor_model_parallel" else 1)
    before = _numbers(ours(optimizer))
    setattr(
        _parameters(optimizer)[2 * len(_KINDS)], name, "mtp" if name == "grad_norm_group" else True
    )
    assert _numbers(ours(optimizer)) == _numbers(theirs(optimizer)) != before


def test_new_gradients_parameters_and_ranks_are_seen(both: Any) -> None:
    theirs, ours = both
    optimizer = _optimizer()
    ours(optimizer)
    params = _parameters(optimizer)
    params[3].grad = torch.full((2,), 100.0)
    assert _numbers(ours(optimizer)) == _numbers(theirs(optimizer))
    params[13].grad = None  # of a kind that counts, whose others have theirs
    assert _numbers(ours(optimizer)) == _numbers(theirs(optimizer))
    params[13].grad = torch.full((2,), 200.0)
    optimizer.tp_group = _Rank(0)
    assert _numbers(ours(optimizer)) == _numbers(theirs(optimizer))
    del optimizer.optimizer.param_groups[1]["params"][-2:]
    assert _numbers(ours(optimizer)) == _numbers(theirs(optimizer))


def test_gradients_under_another_name_are_left_to_megatron(both: Any) -> None:
    theirs, ours = both
    optimizer = _optimizer()
    optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    for param in _parameters(optimizer)[len(_KINDS) :]:  # the first of each kind has none
        param.decoupled_grad = param.grad.clone()  # type: ignore[attr-defined, union-attr]
    assert _numbers(ours(optimizer)) == _numbers(theirs(optimizer)) != []


def test_shards_of_megatron_fsdp_are_left_to_megatron(both: Any) -> None:
    theirs, ours = both
    optimizer = _optimizer(tensor_rank=0)
    for param in _parameters(optimizer)[:: len(_KINDS)]:
        param.__dict__["__fsdp_param__"] = True
        param.grad._local_tensor = 10 + param.grad  # type: ignore[attr-defined, union-attr]
    given, expected = ours(optimizer), theirs(optimizer)
    assert [id(grad) for grad in given] == [id(grad) for grad in expected]
    assert max(_numbers(given)) >= 2 * len(_KINDS) + 10


def test_a_filter_of_someone_else_is_asked_for_every_parameter(both: Any) -> None:
    _, ours = both
    optimizer = _optimizer()
    seen: list[int] = []
    optimizer._filter_grads_for_norm = lambda params, param_filter: seen.append(len(params)) or []
    assert ours(optimizer) == [] and seen == [len(_parameters(optimizer))]


def test_an_unknown_group_is_megatrons_error(both: Any) -> None:
    _, ours = both
    with pytest.raises(ValueError, match="nothing of the kind"):
        ours(_optimizer(), "nothing of the kind")


class _Other(torch.Tensor):
    pass


def test_tensors_of_other_classes_are_left_to_megatron() -> None:
    from megatron_fluid.patches import optimizer_loops

    asked: list[Any] = []
    local = optimizer_loops.local_tensor(lambda tensor: asked.append(tensor) or "local")
    plain, parameter = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    assert local(plain) is plain and local(parameter) is parameter and not asked
    other = torch.zeros(2).as_subclass(_Other)
    assert local(other) == "local" and asked[0] is other


def _bucket_group(parameters: set[torch.Tensor], reuse: bool = False) -> Any:
    buckets = [SimpleNamespace(params={torch.nn.Parameter(torch.zeros(2))})]
    buckets.append(SimpleNamespace(params=parameters))
    settings = SimpleNamespace(reuse_grad_buf_for_mxfp8_param_ag=reuse)
    return SimpleNamespace(buckets=buckets, ddp_config=settings)


def test_gathered_parameters_that_may_be_quantised_are_left_to_megatron() -> None:
    from megatron_fluid.patches import optimizer_loops

    asked: list[Any] = []
    after = optimizer_loops.post_param_sync(asked.append)
    parameter = torch.nn.Parameter(torch.zeros(2))
    after(_bucket_group({parameter}))
    assert not asked
    after(_bucket_group({parameter}, reuse=True))
    after(_bucket_group({parameter, torch.zeros(2).as_subclass(_Other)}))
    assert len(asked) == 2
