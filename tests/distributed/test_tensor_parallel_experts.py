"""A mixture of experts split over tensor-parallel ranks, against the same layer in one process:
values and every gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.tensor_parallel import (
    all_gather_grouped_matmul,
    grouped_matmul_reduce_scatter,
    plan_rows,
)
from megatron_fluid.tensor_parallel.expert_gemm import TokenRows
from tests.support.launch import run_ranks

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


def _close(found: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.shape == wanted.shape, what
    error = (found.double().cpu() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def check_layer(
    m: int,
    hidden: int,
    ffn: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    backend: str,
    device: str,
    one_expert: bool,
) -> None:
    """This rank's outputs and gradients against the whole layer in fp64; ffn is one rank's
    slice."""
    group = dist.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).double()

    tokens, grads = random(ranks * m, hidden), random(ranks * m, hidden)
    w1, w2 = random(ranks, experts, ffn, hidden) / 4, random(ranks, experts, hidden, ffn) / 4
    ids = torch.rand(ranks * m, experts, generator=generator).topk(k, -1).indices
    if one_expert:
        ids = torch.arange(k).expand_as(ids).contiguous()
    probs = torch.rand(ranks * m, k, generator=generator).double()

    # In one process: every token through its experts, whose slices side by side are the whole
    # expert.
    x = tokens.clone().requires_grad_()
    whole1 = w1.transpose(0, 1).flatten(1, 2).clone().requires_grad_()
    whole2 = w2.permute(1, 2, 0, 3).flatten(2).clone().requires_grad_()
    p = probs.clone().requires_grad_()
    inner = torch.tanh(torch.einsum("mh,mkfh->mkf", x, whole1[ids]))
    y = torch.einsum("mk,mkf,mkhf->mh", p, inner, whole2[ids])
    y.backward(grads)

    own = slice(rank * m, (rank + 1) * m)

    def local(t: Tensor) -> Tensor:
        return t.to(dtype).to(device).requires_grad_()

    x_here, w1_here, w2_here = local(tokens[own]), local(w1[rank]), local(w2[rank])
    p_here = (
        probs[own]
        .to(torch.float64 if dtype == torch.float64 else torch.float32)
        .to(device)
        .requires_grad_()
    )
    if backend == "blocks":  # cut by rank like the copy engines' rows, moved by collectives
        routed = plan_rows(ids[own].to(device), experts, group, "collective")
        routed = dataclasses.replace(routed, rows=TokenRows.plan(ids.to(device), experts, ranks))
    else:
        routed = plan_rows(ids[own].to(device), experts, group, backend)
    h = torch.tanh(all_gather_grouped_matmul(x_here, w1_here, routed))
    out = grouped_matmul_reduce_scatter(h, w2_here, routed, p_here)
    _close(out.detach(), y.detach()[own], dtype, "output")
    out.backward(grads[own].to(dtype).to(device))
    assert (
        x.grad is not None
        and whole1.grad is not None
        and whole2.grad is not None
        and p.grad is not None
    )
    columns = slice(rank * ffn, (rank + 1) * ffn)
    for name, found, wanted in (
        ("dx", x_here.grad, x.grad[own]),
        ("dw1", w1_here.grad, whole1.grad[:, columns]),
        ("dw2", w2_here.grad, whole2.grad[:, :, columns]),
        ("dprobs", p_here.grad, p.grad[own]),
    ):
        assert found is not None
        _close(found, wanted, dtype, name)


def _cases(rank: int, ranks: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_layer(7, 12, 6, 5, 2, dtype, "auto", "cpu", False)
        check_layer(4, 8, 5, 6, 3, dtype, "collective", "cpu", True)  # experts without a row
        check_layer(7, 12, 6, 5, 2, dtype, "blocks", "cpu", False)
        check_layer(4, 8, 5, 6, 3, dtype, "blocks", "cpu", True)
    check_layer(1, 4, 3, 2, 1, torch.float64, "auto", "cpu", False)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_outputs_and_gradients_equal_one_process(ranks: int) -> None:
    run_ranks(_cases, ranks)


def _errors(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="its operands are on a CPU"):
        plan_rows(ids, 4, group, "copy_engine")
    with pytest.raises(
        ConfigError, match="found 'flagged', allowed: auto, copy_engine, collective"
    ):
        plan_rows(ids, 4, group, "flagged")
    routed = plan_rows(ids, 4, group)
    with pytest.raises(ConfigError, match="found 2 rows, 4 experts; allowed: 3, 4"):
        all_gather_grouped_matmul(torch.ones(2, 5), torch.ones(4, 6, 5), routed)
    with pytest.raises(ConfigError, match=r"allowed: \[rows, K\] and \[E, N, K\]"):
        grouped_matmul_reduce_scatter(torch.ones(12, 6), torch.ones(4, 5, 7), routed)
    for probs in (torch.ones(3, 1), torch.ones(3, 4), torch.ones(4, 2), torch.ones(6)):
        with pytest.raises(ConfigError, match=r"probs: found shape \(.*\), allowed: \(3, 2\)"):
            grouped_matmul_reduce_scatter(torch.ones(12, 7), torch.ones(4, 5, 7), routed, probs)
    with pytest.raises(
        ConfigError, match=r"ids: found shape \(3,\), allowed: two dimensions, \[m, K\]"
    ):
        plan_rows(ids[:, 0], 4, group)
    x = torch.randn(3, 5, requires_grad=True)
    all_gather_grouped_matmul(x, torch.randn(4, 6, 5), routed).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_what_does_not_fit_is_refused_by_name() -> None:
    run_ranks(_errors, 2)
