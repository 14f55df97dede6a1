"""The calls of the Flux backend, against a stand-in that has the public signatures of Flux 1.1.2
(`python/flux/cpp_mod.pyi`) and computes what they promise on one rank."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.suites import tp_backends
from benchmarks.suites.tp_backends import BACKENDS, Absent, Problem


class AGKernel:
    """`weight` is ``[K, N]`` if `transpose_weight`, else ``[N, K]``."""

    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        nnodes: int,
        full_m: int,
        n_dim: int,
        k_dim: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        assert nnodes == 2
        self.shape, self.dtype, self.output_dtype = (
            (full_m, n_dim, k_dim),
            input_dtype,
            output_dtype,
        )

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        output: Tensor | None = None,
        input_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        output_scale: Tensor | None = None,
        fast_accum: bool = False,
        transpose_weight: bool = False,
        all_gather_option: object = None,
        gathered_input: Tensor | None = None,
    ) -> Tensor:
        assert input.dtype == self.dtype == self.output_dtype
        assert weight.is_contiguous()
        product = input @ (weight if transpose_weight else weight.t())
        assert (*product.shape, input.shape[1]) == self.shape
        return product


class GemmRS:
    """`max_m` bounds the rows of `input`; `transpose_weight` as for AGKernel, at construction."""

    def __init__(
        self,
        tp_group: dist.ProcessGroup,
        nnodes: int,
        max_m: int,
        n_dim: int,
        input_dtype: torch.dtype,
        output_dtype: torch.dtype | None = None,
        transpose_weight: bool = False,
        fuse_reduction: bool = False,
        ring_reduction: bool = False,
    ) -> None:
        assert nnodes == 2
        self.max_m, self.n, self.dtype, self.output_dtype = max_m, n_dim, input_dtype, output_dtype
        self.transpose_weight = transpose_weight

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        input_scale: Tensor | None = None,
        weight_scale: Tensor | None = None,
        output_scale: Tensor | None = None,
        fast_accum: bool = False,
        reduce_scatter_option: object = None,
    ) -> Tensor:
        assert input.shape[0] <= self.max_m
        assert input.dtype == self.dtype == self.output_dtype
        assert weight.is_contiguous()
        product = input @ (weight if self.transpose_weight else weight.t())
        assert product.shape[1] == self.n
        return product


class _Group:
    """What a Problem asks of a process group of one rank."""

    def size(self) -> int:
        return 1


@pytest.fixture
def flux(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The stand-in as the package `flux`; the groups that its symmetric memory was started for."""
    started: list[object] = []

    def init_flux_shm(pg: dist.ProcessGroup) -> None:
        started.append(pg)

    module = types.ModuleType("flux")
    vars(module).update(AGKernel=AGKernel, GemmRS=GemmRS, init_flux_shm=init_flux_shm)
    monkeypatch.setitem(sys.modules, "flux", module)
    monkeypatch.setattr(tp_backends, "_needs_cuda", lambda problem, what: None)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    tp_backends._flux_module.cache_clear()
    yield started
    tp_backends._flux_module.cache_clear()


def problem(operation: str, transpose_b: bool, bias: bool) -> Problem:
    g = torch.Generator().manual_seed(3)
    a, b = torch.randn(6, 4, generator=g), torch.randn(4, 10, generator=g)
    b = b.t().contiguous() if transpose_b else b
    added = torch.randn(10, generator=g) if bias else None
    return Problem(operation, _Group(), a, b, transpose_b, added)  # type: ignore[arg-type]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("transpose_b", [False, True], ids=["kn", "nk"])
@pytest.mark.parametrize("operation", ["ag", "rs"])
def test_flux_is_called_by_its_public_interface(
    flux: list[object], operation: str, transpose_b: bool, bias: bool
) -> None:
    wanted = problem(operation, transpose_b, bias)
    call = BACKENDS["flux"](wanted)
    torch.testing.assert_close(call(), wanted.product(wanted.a))
    assert flux == [wanted.group]


def test_flux_that_is_not_installed_is_absent_by_name(
    flux: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flux", None)
    with pytest.raises(Absent, match="the package flux cannot be imported"):
        BACKENDS["flux"](problem("ag", False, False))
