"""Gradients that the first microbatch writes, through Megatron's own DistributedDataParallel and
distributed optimizer: the bits of gradients that are zeroed and added to.

What is not zeroed is filled with NaNs, so that whoever reads it shows. One world of two ranks
trains every case twice and hands the numbers back.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from tests.support import tiny_gpt

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a GPU"
)

ITERATIONS, MICROBATCHES = 4, 3
STRANGE = 2  # the iteration in which a case does what it is about


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings, and what happens in iteration STRANGE: before the buffers are zeroed, after that,
    and in place of each microbatch's backward; whether gradients are reduced.

    spared: of which share of the experts' parameters gradients are not zeroed, by iteration.
    """

    before: Callable[[Any], None] | None = None
    after: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None
    backward: Callable[[Any, Tensor, int], None] | None = None
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    fluid: dict[str, Any] = dataclasses.field(default_factory=dict)
    overlap: bool = False
    reduced: bool = True
    spared: tuple[float, ...] = (0, 1, 1, 1)


def _layers(ddp: Any) -> list[Any]:
    return [m for m in ddp.modules() if isinstance(m, tiny_gpt.MoELayer)]


@contextlib.contextmanager
def _skip_a_layer(ddp: Any) -> Iterator[None]:
    mlp = _layers(ddp)[0]
    mlp.forward = lambda hidden, **kwargs: (hidden * 0.5, None)
    yield
    del mlp.forward


def _zero_twice(ddp: Any) -> contextlib.AbstractContextManager[None]:
    ddp.zero_grad_buffer()
    return contextlib.nullcontext()


def _evaluate(ddp: Any) -> contextlib.AbstractContextManager[None]:
    ddp.eval()
    with torch.no_grad():
        _forward(ddp, 0, 17)
    ddp.train()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _replace_experts_forward(ddp: Any) -> Iterator[None]:
    """Our watch sees it, and Megatron's experts run."""
    experts = _layers(ddp)[0].experts
    experts.forward = functools.partial(type(experts).forward, experts)
    yield
    del experts.forward


@contextlib.contextmanager
def _call_the_experts_elsewhere(ddp: Any) -> Iterator[None]:
    """Nothing of ours is called."""
    layer = _layers(ddp)[0]
    kind = type(layer)
    for name in ("forward", "routed_experts_compute"):
        original = getattr(kind, name)
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
        setattr(layer, name, functools.partial(original, layer))
    yield
    for name in ("forward", "routed_experts_compute"):
        delattr(layer, name)


def _bare_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Other modules with the same parameters, without hooks."""
    bare = copy.copy(module)
    bare._forward_pre_hooks = collections.OrderedDict()
    bare._modules = {name: child and _bare_copy(child) for name, child in module._modules.items()}
    return bare


@contextlib.contextmanager
def _replace_the_experts_modules(ddp: Any) -> Iterator[None]:
    """By others, which own the same parameters and have no hook of ours; our watch sees them."""
    layer = _layers(ddp)[0]
    own = layer.experts
    layer.experts = bare = _bare_copy(own)
    bare.forward = functools.partial(type(own).forward, bare)  # type: ignore[method-assign]
    yield
    layer.experts = own


def _forward_early(ddp: Any) -> None:
    """A loss of fused experts that are not ours, made before the buffers are zeroed."""
    with _call_the_experts_elsewhere(ddp):
        ddp.early_loss = _forward(ddp, STRANGE, 7)


def _with_the_early_loss(ddp: Any, loss: Tensor, microbatch: int) -> None:
    if microbatch == 0:
        loss = loss + ddp.early_loss
        del ddp.early_loss
    loss.backward()


def _with_a_loss_of_weights(ddp: Any, loss: Tensor, microbatch: int) -> None:
    """Autograd has a gradient of the experts' weights, too, in its own time."""
    if microbatch == 0:
        for layer in _layers(ddp):
            loss = loss + sum(weight.square().sum() for weight in layer.experts.parameters())
    loss.backward()


def _nothing_at_all(ddp: Any, loss: Tensor, microbatch: int) -> None:
    """No gradient reaches a parameter."""


_DEFERRED = {"defer_weight_grads": True}
_FUSED = {"gradient_accumulation_fusion": True}
_SKEWED = {"num_moe_experts": 8, "moe_router_force_biased": 6.0}
_HALF_LATER = (0, 1, 1, 0.5)  # of two layers
CASES = {
    "plain": Case(),
    "overlapped reduction": Case(overlap=True),
    "an expert without rows": Case(model=_SKEWED),
    "deferred": Case(fluid=_DEFERRED, overlap=True),
    "recomputed": Case(
        model={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    ),
    "zeroed twice": Case(after=_zero_twice, overlap=True),
    "evaluated between": Case(after=_evaluate, overlap=True),
    "a layer left out": Case(after=_skip_a_layer, spared=_HALF_LATER),
    "a layer left out, no reduction": Case(after=_skip_a_layer, reduced=False, spared=(0, 1, 1, 0)),
    "no backward": Case(backward=_nothing_at_all, spared=(0, 1, 1, 0)),
    "a loss of weights": Case(backward=_with_a_loss_of_weights),
    "another forward of the experts": Case(after=_replace_experts_forward, spared=_HALF_LATER),
    "another forward of fused experts": Case(
        after=_replace_experts_forward, model=_FUSED, spared=_HALF_LATER
    ),
    "fused experts called elsewhere": Case(
        after=_call_the_experts_elsewhere, model=_FUSED, spared=_HALF_LATER
    ),
    "fused experts in other modules": Case(
        after=_replace_the_experts_modules, model=_FUSED, spared=_HALF_LATER
    ),
    "a setting for graphs of whole layers": Case(
        model={"cuda_graph_impl": "local"}, spared=(0, 0, 0, 0)
    ),
    "fused experts called before": Case(
        before=_forward_early, backward=_with_the_early_loss, model=_FUSED, spared=(0, 1, 0.5, 1)
    ),
}


def _forward(ddp: Any, iteration: int, microbatch: int) -> Tensor:
    rank = torch.distributed.get_rank()
    tokens, labels, positions = tiny_gpt.batch(rank, iteration, microbatch)
    size = tiny_gpt.SEQUENCE
    mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), 1)
    loss: Tensor = ddp(tokens, positions, mask, labels=labels).float().mean()
    return loss / MICROBATCHES


def _spoil(ddp: Any) -> int:
    """Fill what is not zeroed; how many parameters' gradients that were."""
    from megatron_fluid.backward import fresh_grads

    spared = 0
    for param in ddp.params_with_grad:
        group = fresh_grads.group_with(param)
        if group is not None and group.fresh:
            param.main_grad.fill_(float("nan"))
            spared += 1
        else:
            assert not param.main_grad.any()
    return spared


@dataclasses.dataclass
class Run:
    """Of every iteration: all gradients after their reduction and after the step, weights, and how
    many parameters' gradients were not zeroed."""

    gradients: list[list[Tensor]] = dataclasses.field(default_factory=list)
    weights: list[list[Tensor]] = dataclasses.field(default_factory=list)
    spared: list[int] = dataclasses.field(default_factory=list)
    experts: int = 0


def _train(case: Case) -> Run:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = tiny_gpt.config_of(**{k: v for k, v in case.model.items() if k != "cuda_graph_impl"})
    model = tiny_gpt.gpt(config)
    config.cuda_graph_impl = case.model.get("cuda_graph_impl", "none")
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=case.overlap, bucket_size=2000
    )
    ddp = DistributedDataParallel(config, settings, model)
    config.cuda_graph_impl = "none"  # there is no graph on a CPU
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=5e-3, use_distributed_optimizer=True, clip_grad=1.0,
            params_dtype=config.params_dtype,
        ),
        [ddp],
    )  # fmt: skip
    ddp.train()
    run = Run(experts=sum(len(list(layer.experts.parameters())) for layer in _layers(ddp)))
    for iteration in range(ITERATIONS):
        strange = iteration == STRANGE
        with contextlib.ExitStack() as stack:
            if strange and case.before is not None:
                case.before(ddp)
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            run.spared.append(_spoil(ddp))
            if strange and case.after is not None:
                stack.enter_context(case.after(ddp))
            for microbatch in range(MICROBATCHES):
                last = microbatch == MICROBATCHES - 1
                with contextlib.nullcontext() if last else ddp.no_sync():
                    loss = _forward(ddp, iteration, microbatch)
                    if strange and case.backward is not None:
                        case.backward(ddp, loss, microbatch)
                    else:
                        loss.backward()
            found = list[Tensor]()
            if case.reduced or not strange:
                finalize_model_grads([ddp])
                found += [p.main_grad.clone() for p in ddp.params_with_grad]
            optimizer.step()
            run.gradients.append(found + [p.main_grad.clone() for p in ddp.params_with_grad])
            run.weights.append([p.detach().clone() for p in ddp.params_with_grad])
    return run


@contextlib.contextmanager
def _fused_kernel() -> Iterator[None]:
    """Megatron's kernel (apex) exists on GPUs only: a stand-in does the same sums."""
    from megatron.core.tensor_parallel import layers

    def accumulate(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(dy.t(), x)

    kernel = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_grad_accum_fusion_available", True)
        patch.setattr(layers, "fused_weight_gradient_mlp_cuda", kernel, raising=False)
        yield


def _same(a: list[list[Tensor]], b: list[list[Tensor]]) -> list[bool]:
    return [all(map(torch.equal, *each)) for each in zip(a, b, strict=True)]


def _both(case: Case) -> dict[str, Any]:
    from megatron_fluid import patches

    with _fused_kernel():
        with tiny_gpt.plug_in(True, **case.fluid):
            ours = _train(case)
        patches.revert("gradient-zeroing")
        try:
            with tiny_gpt.plug_in(True, **case.fluid):
                plain = _train(case)
        finally:
            patches.apply_all("gradient-zeroing")
    assert plain.spared == [0] * ITERATIONS
    return {
        "gradients": _same(ours.gradients, plain.gradients),
        "weights": _same(ours.weights, plain.weights),
        "finite": all(g.isfinite().all() for each in plain.gradients for g in each),
        "spared": ours.spared,
        "experts": ours.experts,
        "zeros": [sum(not g.any() for g in each) for each in plain.gradients],
    }


def _world(rank: int, world_size: int) -> dict[str, Any]:
    from megatron_fluid import patches

    logging.getLogger("megatron").setLevel(logging.WARNING)
    patches.apply_all()
    tiny_gpt.parallel(expert_model_parallel_size=world_size)
    return {name: tiny_gpt.guarded(functools.partial(_both, case)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(_world, 2, timeout_s=300)


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_bits_of_those_that_are_zeroed_first(
    results: list[dict[str, Any]], name: str
) -> None:
    for result in results:
        assert "error" not in result[name], result[name]["error"]
        assert result[name]["finite"]
        assert result[name]["gradients"] == [True] * ITERATIONS
        assert result[name]["weights"] == [True] * ITERATIONS


@pytest.mark.parametrize("name", CASES)
def test_the_experts_gradients_are_not_zeroed_once_they_were_written(
    results: list[dict[str, Any]], name: str
) -> None:
    """Not after an iteration in which something else was seen, and never where a graph may hold
    layers with experts."""
    for result in results:
        share = [found / result[name]["experts"] for found in result[name]["spared"]]
        assert share == list(CASES[name].spared)


def test_an_expert_without_rows_and_a_layer_left_out_have_zeros(
    results: list[dict[str, Any]],
) -> None:
    assert all(any(result["an expert without rows"]["zeros"]) for result in results)
    zeros = [result["a layer left out"]["zeros"] for result in results]
    assert all(found[STRANGE] >= 4 > found[0] for found in zeros)
