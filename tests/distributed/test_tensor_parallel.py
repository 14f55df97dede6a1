"""AllGather-GEMM and GEMM-ReduceScatter against the same mathematics in one process: values, every
gradient, errors.

`check_case` also serves tests/gpu/test_tensor_parallel.py, where the copy engines move the shards.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fluid.comm import layers
from megatron_fluid.comm.agreement import Agreement
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter, ops
from megatron_fluid.tensor_parallel.choice import backend_for
from tests.support.launch import on_ranks, run_ranks, world_group

# Relative Frobenius error allowed against a float64 reference.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def _close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    assert found.shape == wanted.shape, what
    error = (found.double() - wanted).norm() / wanted.norm()
    # One row lost would be an error of about 1 / sqrt(rows): a tolerance near it could not fail.
    assert TOLERANCE[dtype] < 0.5 / wanted.shape[0] ** 0.5, (
        f"{what}: the tolerance could not notice a lost row"
    )
    assert error < TOLERANCE[dtype], f"{what}: relative error {error:.2e}"


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_case(
    m: int, n: int, k: int, dtype: torch.dtype, transpose_b: bool, bias: bool, backend: str,
    device: str = "cpu",
) -> None:  # fmt: skip
    """Both operations and all their gradients on this rank, m rows a rank; the same random data on
    every rank of the reference."""
    group = world_group()
    rank, ranks = group.rank(), group.size()
    each, own = range(ranks), slice(rank * m, (rank + 1) * m)

    def every(seed: int, *shape: int) -> list[torch.Tensor]:
        """What each rank has, as it is after rounding."""
        return [_random(seed + r, *shape).to(dtype).double() for r in each]

    def check(
        operation: Callable[..., torch.Tensor], operands: list[torch.Tensor], dc: torch.Tensor,
        wanted: list[torch.Tensor],
    ) -> None:  # fmt: skip
        """C and the gradients of A, B [K, N] and the bias."""
        stored = [
            x.t().contiguous() if transpose_b and i == 1 else x for i, x in enumerate(operands)
        ]
        a, b, beta = (x.to(device, dtype, copy=True).requires_grad_() for x in stored)
        named = {"transpose_b": transpose_b, "bias": beta if bias else None, "backend": backend}
        c = operation(a, b, group, **named)
        c.backward(dc.to(device, dtype))
        names = ("C", "dA", "dB", "dbias")[: 3 + bias]
        for name, found, right in zip(
            names, (c.detach(), a.grad, b.grad, beta.grad), wanted, strict=False
        ):
            assert found is not None
            found = found.cpu().t() if transpose_b and name == "dB" else found.cpu()
            what = f"{name} of {operation.__name__}"
            _close(torch.atleast_2d(found), torch.atleast_2d(right), dtype, what)

    # AllGather-GEMM: A [W m, K] in row blocks, B [K, N] of each rank its own.
    a, b, beta = every(10, m, k), every(100, k, n), every(200, n)[rank]
    dc, whole = every(300, ranks * m, n), torch.cat(a)
    da = torch.stack([dc[r] @ b[r].t() for r in each]).sum(0)[own]
    c = whole @ b[rank] + (beta if bias else 0)
    wanted = [c, da, whole.t() @ dc[rank], dc[rank].sum(0)]
    check(all_gather_matmul, [a[rank], b[rank], beta], dc[rank], wanted)

    # GEMM-ReduceScatter: A [W m, K] and B [K, N] of each rank its own part of the contracted
    # dimension.
    parts, dc = every(400, ranks * m, k), every(500, m, n)
    beta, whole = every(600, n)[0], torch.cat(dc)
    c = torch.stack([parts[r] @ b[r] for r in each]).sum(0)[own] + (beta if bias else 0)
    wanted = [c, whole @ b[rank].t(), parts[rank].t() @ whole, dc[rank].sum(0)]
    check(matmul_reduce_scatter, [parts[rank], b[rank], beta], dc[rank], wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks()
def test_values_and_gradients_equal_one_process(rank: int, ranks: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for transpose_b in (False, True):
            for bias in (False, True):
                check_case(5, 12, 7, dtype, transpose_b, bias, "auto")
    check_case(1, 3, 2, torch.float64, True, True, "collective")


@on_ranks(2)
def test_a_gradient_is_computed_only_where_asked_for(rank: int, ranks: int) -> None:
    for operation, rows in ((all_gather_matmul, 4), (matmul_reduce_scatter, 2 * ranks)):
        shapes = {"a": (rows, 6), "b": (6, 5), "bias": (5,)}
        whole: dict[str, torch.Tensor] = {}
        for asked in (("a", "b", "bias"), ("a",), ("b",), ("bias",), ("b", "bias"), ()):
            a, b, bias = (
                _random(7, *s).requires_grad_(name in asked) for name, s in shapes.items()
            )
            y = operation(a, b, world_group(), bias=bias)
            assert y.requires_grad == bool(asked)
            if asked:
                y.sum().backward()
            named = {"a": a.grad, "b": b.grad, "bias": bias.grad}
            found = {name: grad for name, grad in named.items() if grad is not None}
            assert found.keys() == set(asked)
            whole = whole or found
            torch.testing.assert_close(found, {name: whole[name] for name in found})


@pytest.mark.parametrize("name", ["auto", "collective"])
@on_ranks(2)
def test_a_backward_is_chosen_for_its_own_shape_where_the_form_was_not_named(
    rank: int, ranks: int, name: str
) -> None:
    a, b, b2 = (torch.randn(shape, requires_grad=True) for shape in ((4, 6), (6, 5), (5, 7)))
    with mock.patch.object(ops, "backend_for", wraps=backend_for) as choose:
        c = all_gather_matmul(a, b, world_group(), backend=name)
        matmul_reduce_scatter(c, b2, world_group(), backend=name).sum().backward()
    asked = []
    for call in choose.call_args_list:
        wanted, _, operation, gemm, m, _ = call.args
        assert m == 4 * ranks
        asked.append((wanted, operation, (gemm.k, gemm.n)))
    backward = [("auto", "gather", (7, 5)), ("auto", "scatter", (5, 6))]
    forward = [(name, "gather", (6, 5)), (name, "scatter", (5, 7))]
    assert asked == forward + (backward if name == "auto" else [])


@on_ranks(2)
def test_what_does_not_fit_is_refused_by_name(rank: int, ranks: int) -> None:
    group, half = dist.group.WORLD, torch.float8_e4m3fn
    a, b = torch.randn(4, 6), torch.randn(6, 5)
    gather, scatter = all_gather_matmul, matmul_reduce_scatter
    for operation, operands, more, said in (
        (
            scatter,
            (a.new_ones(5, 6), b),
            {},
            r"M \(rows of a\): found 5, allowed: multiples of the 2",
        ),
        (gather, (a.new_ones(4, 7), b), {}, r"the second 6 \(K of b\)"),
        (gather, (a, b), {"bias": a[:, 0]}, r"bias: found shape \(4,\), allowed: \(5,\)"),
        (scatter, (a, b), {"bias": b[0].double()}, "found torch.float64, allowed: torch.float32"),
        (gather, (a, b.double()), {}, "the same floating dtype"),
        (gather, (a.to(half), b.to(half)), {}, "found torch.float8_e4m3fn and torch.float8_e4m3fn"),
        (gather, (a, b), {"backend": "magic"}, "found 'magic', allowed: auto"),
        (gather, (a, b), {"backend": "copy_engine"}, "its operands are on a CPU"),
    ):
        with pytest.raises(ConfigError, match=said):
            operation(*operands, group, **more)  # type: ignore[arg-type]


@on_ranks(2)
def test_autocast_and_other_dtypes_of_the_result(rank: int, ranks: int) -> None:
    """Autocast changes nothing."""
    group = world_group()
    for dtype in (torch.float32, torch.bfloat16):
        for operation, rows in ((all_gather_matmul, 4), (matmul_reduce_scatter, 8)):
            made: list[list[torch.Tensor]] = []
            for autocast in (False, True):
                a, b, bias = (
                    _random(seed, *shape).to(dtype).requires_grad_()
                    for seed, shape in ((rank, (rows, 16)), (5, (16, 8)), (6, (8,)))
                )
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    c = operation(a, b, group, bias=bias)
                    assert c.dtype == dtype
                    c.float().square().sum().backward()
                assert a.grad is not None and b.grad is not None and bias.grad is not None
                assert a.grad.dtype == b.grad.dtype == bias.grad.dtype == dtype
                made.append([c.detach(), a.grad, b.grad, bias.grad])
            assert all(torch.equal(found, wanted) for found, wanted in zip(*made, strict=True))


@on_ranks(2)
def test_no_rows_give_no_rows(rank: int, ranks: int) -> None:
    group = world_group()
    for operation in (all_gather_matmul, matmul_reduce_scatter):
        a, b = torch.zeros(0, 6, requires_grad=True), torch.ones(6, 4, requires_grad=True)
        c = operation(a, b, group, bias=torch.ones(4))
        assert c.shape == (0, 4)
        c.sum().backward()
        assert a.grad is not None and a.grad.shape == (0, 6)
        assert b.grad is not None and not b.grad.any()


def _as_on_a_gpu() -> Any:
    """Ranks compare as they do on GPUs: where a shape follows one that it has not followed yet."""
    return mock.patch.object(layers, "_compares_each_call", return_value=False)


@contextlib.contextmanager
def _comparisons() -> Iterator[list[str]]:
    """A list that grows with every comparison of shapes between ranks."""
    compared: list[str] = []
    gather = Agreement.gather

    def counted(self: Agreement, operation: str, *rest: Any, **named: Any) -> Any:
        if operation.startswith("compare the shapes"):
            compared.append(operation)
        return gather(self, operation, *rest, **named)

    with mock.patch.object(Agreement, "gather", counted):
        yield compared


@pytest.mark.parametrize("on_gpu", [False, True])
@on_ranks(2)
def test_shapes_that_differ_between_ranks_are_refused_on_every_rank(
    rank: int, ranks: int, on_gpu: bool
) -> None:
    group, b = world_group(), torch.randn(6, 8)
    told: list[str] = []

    def refused(operation: Callable[..., object], a: torch.Tensor, b: torch.Tensor = b) -> None:
        with pytest.raises(ConfigError) as caught:
            operation(a, b, group)
        told.append(str(caught.value))

    kind = torch.float64 if rank else torch.float32
    with _as_on_a_gpu() if on_gpu else contextlib.nullcontext():
        refused(all_gather_matmul, torch.ones(3 + rank, 6))
        refused(all_gather_matmul, torch.ones(3, 6 + rank), torch.ones(6 + rank, 8))
        refused(all_gather_matmul, torch.ones(3, 6, dtype=kind), b.to(kind))
        # One is a multiple of the ranks, the other is not.
        refused(matmul_reduce_scatter, torch.ones(4 + rank, 6))
        refused(matmul_reduce_scatter, torch.ones(4 * (1 + rank), 6))
        # Nothing was sent: the next calls are served, and ask nobody about shapes that they know.
        with _comparisons() as compared:
            for _ in range(3):
                c = all_gather_matmul(torch.ones(3, 6), b, group)
                torch.testing.assert_close(c, torch.ones(3 * ranks, 6) @ b)
                total = matmul_reduce_scatter(torch.ones(4, 6), b, group)
                torch.testing.assert_close(total, ranks * torch.ones(4 // ranks, 6) @ b)
        # A shape after none, and after itself.
        assert len(compared) == (4 if on_gpu else 0), compared
        # In a later call, too: of a new shape on all ranks, and where one alone changes its rows.
        refused(all_gather_matmul, torch.ones(5 + rank, 6))
        refused(matmul_reduce_scatter, torch.ones(6 + 2 * rank, 6))
        if not on_gpu:
            refused(all_gather_matmul, torch.ones(3 + rank, 6))
            refused(matmul_reduce_scatter, torch.ones(4 + 2 * rank, 6))
    both: list[Any] = [None] * ranks
    dist.all_gather_object(both, told)
    assert both[0] == both[1]
    assert "a_shard [m, K]: found (3, 6) torch.float32 on rank 0, (4, 6)" in told[0]
    assert "(3, 6) torch.float64 on rank 1" in told[2]
    assert "C [M, N]: found (4, 8) torch.float32 on rank 0, (5, 8)" in told[3]


@on_ranks(2)
def test_lengths_that_vary_are_compared_once_each(rank: int, ranks: int) -> None:
    """And not for each of the 25 ways in which one follows another."""
    b = torch.randn(6, 8)
    few = mock.patch.object(layers, "_MANY_STEPS", 10)
    with _as_on_a_gpu(), few, _comparisons() as compared:
        for seed in range(150):
            rows = int(torch.randint(1, 6, (), generator=torch.Generator().manual_seed(seed)))
            all_gather_matmul(torch.ones(rows, 6), b, world_group())
    assert 10 < len(compared) <= 15


def _one_rank_changes(rank: int, ranks: int) -> str:
    group = world_group()
    b = torch.randn(6, 8)
    with _as_on_a_gpu():
        for rows in (4, 3, 3):
            all_gather_matmul(torch.ones(rows, 6), b, group)
        set_config(FluidConfig(timeout_s=2.0))
        with pytest.raises(FluidError) as caught:
            all_gather_matmul(torch.ones(4 if rank else 3, 6), b, group)
    return " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def test_a_wait_for_a_rank_that_alone_changes_its_rows_ends_by_name() -> None:
    steady, changed = run_ranks(_one_rank_changes, 2)
    assert "compare the shapes of all_gather_matmul" in changed
    assert "a_shard [m, K] of this rank is ((4, 6), torch.float32), and was ((3, 6)" in changed
    assert "all-gather of a linear's rows" in steady
