"""Overlapped and plain context-parallel attention against a one-process reference: outputs and
every gradient in float64 on the same (rounded) numbers. Every rank draws the whole sequence and the
weights from one seed. tests/gpu/test_attention.py runs the same on GPUs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.attention.layer import SelfAttention, sum_gradients
from megatron_fluid.attention.layouts import SequenceLayout
from megatron_fluid.attention.packed import Rotary
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.errors import ConfigError
from tests.support.attention_reference import reference_attention
from tests.support.launch import on_ranks, run_ranks, world_group


@dataclass(frozen=True)
class Case:
    """One comparison. ``layers``: with residuals; ``length``: of the whole sequence."""

    length: int = 24
    batch: int = 2
    hidden: int = 24
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 6
    layers: int = 1
    layout: str = "contiguous"
    causal: bool = True
    window: int | None = None
    rotary: Rotary | None = dataclasses.field(default_factory=lambda: Rotary(6))
    qk_norm: bool = False
    bias: bool = False
    groups: int = 1
    chunks: int = 1
    scheduler: bool = False
    overlap: bool = True
    dtype: torch.dtype = torch.float64
    kernel: str = "auto"
    microbatches: int = 1
    exchange: str = "auto"
    transport: str = "auto"


SAME_NAMES = (
    "head_dim", "qk_norm", "rotary", "causal", "window", "exchange", "overlap", "kernel", "dtype",
)  # fmt: skip


def _layers(
    case: Case, group: dist.ProcessGroup | None, device: torch.device
) -> list[SelfAttention]:
    generator = torch.Generator().manual_seed(5)
    layers = []
    for index in range(case.layers):
        layer = SelfAttention(
            case.hidden, case.heads, **{name: getattr(case, name) for name in SAME_NAMES},
            group=group, num_kv_heads=case.kv_heads, qkv_bias=case.bias, output_bias=case.bias,
            sequence_layout=case.layout, head_groups=case.groups, dx_chunks=case.chunks,
            device=device, name=f"attention {index}",
        )  # fmt: skip
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                # Projections keep the size of what they project, so that scores are of order one at
                # every size: larger ones saturate the softmax, which turns roundings into other
                # winners, and no 16-bit arithmetic agrees with the reference.
                scale = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.5
                parameter.copy_(noise * scale + (1.0 if "layernorm" in name else 0.0))
        if layer.head_buffers is not None:
            layer.head_buffers.transport = case.transport
        layers.append(layer)
    return layers


def _data(case: Case, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + microbatch)
    shape = (case.length, case.batch, case.hidden)
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x.to(case.dtype), g.to(case.dtype)


def run_steps(
    case: Case, rank: int, world: int, attend: Callable[[int, Tensor], Tensor],
    scheduler: WeightGradScheduler, device: str = "cpu", dtype: torch.dtype | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Outputs and input gradients of every microbatch, of this rank's rows, and which these are.
    ``attend``: the layer of an index, without its residual. ``dtype``: if not the case's."""
    rows = SequenceLayout(case.length, world, case.layout).positions(rank)
    ys, dxs = [], []
    for microbatch in range(case.microbatches):
        x, g = (t[rows].to(device, dtype) for t in _data(case, microbatch))
        h = x.requires_grad_()
        for index in range(case.layers):
            h = h + attend(index, h)
        h.backward(g)
        scheduler.finish_batch()
        assert x.grad is not None
        ys.append(h.detach().cpu())
        dxs.append(x.grad.cpu())
    return {"y": ys, "dx": dxs, "rows": rows}


def _body(rank: int, world: int, case: Case) -> dict[str, Any]:
    group = dist.group.WORLD if world > 1 else None
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    layers = _layers(case, group, torch.device(device))
    scheduler = get_backward_scheduler()
    scheduler.enabled = case.scheduler

    def attend(index: int, h: Tensor) -> Tensor:
        y: Tensor = layers[index](h, case.length)
        return y

    found = run_steps(case, rank, world, attend, scheduler, device)
    parameters = [p for layer in layers for p in layer.parameters()]
    sum_gradients(parameters, group)
    return found | {"grads": [p.grad.cpu() for p in parameters if p.grad is not None]}


def _reference(case: Case) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    layers = _layers(dataclasses.replace(case, groups=1, kernel="auto"), None, torch.device("cpu"))
    layers = [layer.double() for layer in layers]
    masks: dict[str, Any] = {"causal": case.causal, "window": case.window, "rotary": case.rotary}

    def attend(index: int, h: Tensor) -> Tensor:
        weights, eps = layers[index].weights(), layers[index].config.norm_eps
        return reference_attention(h, weights, case.heads, case.kv_heads, norm_eps=eps, **masks)

    found = run_steps(case, 0, 1, attend, WeightGradScheduler(), dtype=torch.float64)
    named = torch.nn.ModuleList(layers).named_parameters(prefix="layer")
    return found["y"], found["dx"], {name: p.grad for name, p in named if p.grad is not None}


# Of `_error`; for float32 and float64 for each layer.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}


def _rms(t: Tensor, dim: int | None = None) -> Tensor:
    return t.square().mean(dim).sqrt()


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value; in 16 bits, where single values may
    be off by many roundings: the root mean square of all, or half that of the worst row if that is
    more, as a share of the values' root mean square."""
    difference = found.double() - expected
    if found.dtype.itemsize != 2:
        return (difference.abs().max() / expected.abs().max()).item()
    whole = _rms(expected)
    rows = _rms(difference, -1) / _rms(expected, -1).clamp_min(whole)
    return max((_rms(difference) / whole).item(), 0.5 * rows.max().item())


def _close(found: Tensor, expected: Tensor, dtype: torch.dtype, layers: int, what: str) -> None:
    assert found.dtype == dtype, f"{what}: {found.dtype}"
    assert expected.abs().max() > 1e-3, f"{what}: the reference is all but zero, so nothing is seen"
    allowed = TOLERANCE[dtype] * (layers if dtype.itemsize > 2 else 1)
    error = _error(found, expected)
    size = f"of values of {_rms(expected):.3e}"
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.1e}, {size}"


def _bodies(
    rank: int, world: int, body: Callable[..., dict[str, Any]], cases: list[Any]
) -> list[dict[str, Any]]:
    return [body(rank, world, case) for case in cases]


def check(
    world: int, *cases: Case, backend: str = "gloo", env: dict[str, str] | None = None
) -> None:
    """Run the cases on ``world`` ranks, in one launch, and compare all with the reference."""
    check_cases(_body, _compare, world, cases, backend=backend, env=env)


def check_cases(
    body: Callable[..., dict[str, Any]], compare: Callable[[Any, int, list[dict[str, Any]]], None],
    world: int, cases: Sequence[Any], **launch: Any,
) -> None:  # fmt: skip
    """compare(case, world, what body(rank, world, case) returned on each rank) for every case."""
    ranks = run_ranks(_bodies, world, body, list(cases), **launch)
    for index, case in enumerate(cases):
        try:
            compare(case, world, [results[index] for results in ranks])
        except AssertionError as error:
            raise AssertionError(f"{case} on {world} ranks: {error}") from None


def _compare(case: Case, world: int, results: list[dict[str, Any]]) -> None:
    ys, dxs, grads = _reference(case)
    order = torch.cat([r["rows"] for r in results])
    assert sorted(order.tolist()) == list(range(case.length))
    for microbatch in range(case.microbatches):
        for name, expected in (("y", ys[microbatch]), ("dx", dxs[microbatch])):
            found = torch.empty_like(expected, dtype=case.dtype)
            found[order] = torch.cat([r[name][microbatch] for r in results])
            _close(found, expected, case.dtype, case.layers, f"{name} of microbatch {microbatch}")
    assert len(grads) == len(results[0]["grads"])
    for rank in range(world):
        for (name, expected), found in zip(grads.items(), results[rank]["grads"], strict=True):
            _close(found, expected, case.dtype, case.layers, f"rank {rank} {name}")


OVERLAP = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])


@OVERLAP
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_the_reference_at_every_size(world: int, overlap: bool) -> None:
    base = Case(heads=24, kv_heads=24, overlap=overlap)
    single = dataclasses.replace(base, dtype=torch.float32, kv_heads=12, layers=2, layout="zigzag")
    check(world, base, single)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_do_not_depend_on_the_number_of_chunks(world: int) -> None:
    # 64 chunks are more than there are rows: some are empty.
    cases = (
        Case(heads=12, kv_heads=12, length=12 * world, chunks=chunks, layers=2)
        for chunks in (2, 3, 5, 7, 64)
    )
    check(world, *cases)


@OVERLAP
@pytest.mark.parametrize(
    ("world", "heads"),
    [(2, [(8, 4), (8, 1)]), (3, [(9, 3), (6, 1)]), (4, [(8, 4), (8, 1), (8, 2), (12, 2)])],
)
def test_grouped_and_multi_query(world: int, heads: list[tuple[int, int]], overlap: bool) -> None:
    base = Case(overlap=overlap, bias=True, qk_norm=True)
    check(world, *(dataclasses.replace(base, heads=q, kv_heads=kv) for q, kv in heads))


@OVERLAP
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_layouts_and_lengths_that_ranks_do_not_divide(layout: str, overlap: bool) -> None:
    # Lengths below the number of chunks leave ranks without rows; the rotation makes a wrong
    # position visible.
    base = Case(layout=layout, overlap=overlap, chunks=2 if overlap else 1, bias=True)
    check(4, *(dataclasses.replace(base, length=length) for length in (24, 23, 13, 3, 1)))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_head_groups(layout: str) -> None:
    base = Case(heads=16, kv_heads=8, layout=layout, chunks=3, qk_norm=True, bias=True)
    check(2, *(dataclasses.replace(base, groups=groups) for groups in (1, 2, 3, 4)))


@OVERLAP
def test_masks(overlap: bool) -> None:
    masks = itertools.product((True, False), (None, 1, 5), (4, 2))
    check(2, *(Case(causal=c, window=w, kv_heads=n, overlap=overlap) for c, w, n in masks))


def test_rotation_and_norm() -> None:
    rotaries = [None, Rotary(6), Rotary(4), Rotary(6, 500.0, True), Rotary(2, 7.0, True)]
    check(2, *(Case(rotary=rotary, qk_norm=norm) for rotary in rotaries for norm in (False, True)))


@pytest.mark.parametrize("scheduler", [False, True], ids=["own", "deferred"])
def test_depth_and_microbatches_with_and_without_deferred_weight_gradients(scheduler: bool) -> None:
    base = Case(scheduler=scheduler, bias=True, qk_norm=True, kv_heads=2, chunks=2)
    deep = (dataclasses.replace(base, layers=layers) for layers in (1, 2, 12))
    check(2, *deep, dataclasses.replace(base, layers=2, microbatches=3, kv_heads=1))


@on_ranks(2)
def test_the_gradient_of_the_input_alone_leaves_deferred_weights_as_they_are(
    rank: int, world: int
) -> None:
    torch.manual_seed(rank)
    layer = SelfAttention(16, 4, group=dist.group.WORLD, rotary=Rotary(4), dtype=torch.float64)
    x = torch.randn(4, 2, 16, dtype=torch.float64).requires_grad_()
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    layer.scheduler.enable()
    y = layer(x).square().sum()
    (dx,) = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(dx, expected)
    assert all(parameter.grad is None for parameter in layer.parameters())
    y.backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@on_ranks(2)
@pytest.mark.parametrize("sizes", [[(5, 2), (4, 2)], [(4, 1), (2, 2)]])
def test_ranks_with_other_lengths_or_batches_are_named(
    rank: int, world: int, sizes: list[tuple[int, int]]
) -> None:
    """Else a rank would read rows that no other has sent."""
    layer = SelfAttention(16, 2, group=world_group())
    with pytest.raises(ConfigError, match="sequence_length, batch: found .* on rank 1"):
        layer(torch.zeros(*sizes[rank], 16))
