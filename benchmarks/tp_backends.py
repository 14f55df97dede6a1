"""Every way to overlap a tensor-parallel GEMM with its communication, behind one signature; each is used if it is installed.

A backend is a function of (operation, group, A, B, bias) that returns a call without arguments, or raises `Absent` with the reason.
AllGather-GEMM: A ``[M / W, K]``, B ``[N, K]`` or ``[K, N]``; GEMM-ReduceScatter: A ``[M, K]``, B likewise. M, N, K are those of the
GEMM that one rank runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter

__all__ = ["BACKENDS", "Absent", "Problem"]


class Absent(RuntimeError):
    """A backend that cannot run here, and why."""


@dataclass(frozen=True)
class Problem:
    """One tensor-parallel GEMM on this rank."""

    operation: str  # "ag" or "rs"
    group: dist.ProcessGroup
    a: Tensor
    b: Tensor
    transpose_b: bool
    bias: Tensor | None

    @property
    def b_kn(self) -> Tensor:
        """B as ``[K, N]``, a view."""
        return self.b.t() if self.transpose_b else self.b

    def product(self, a: Tensor) -> Tensor:
        """A B with the bias."""
        return torch.mm(a, self.b_kn) if self.bias is None else torch.addmm(self.bias, a, self.b_kn)


Call = Callable[[], Tensor]


def gemm_only(problem: Problem) -> Call:
    """The GEMM alone on data that is already here: the floor."""
    a = problem.a
    if problem.operation == "ag":
        a = torch.randn(a.shape[0] * problem.group.size(), a.shape[1], device=a.device).to(a.dtype)
    return lambda: problem.product(a)


def torch_nccl(problem: Problem) -> Call:
    """The collective, then the GEMM, or the GEMM, then the collective."""
    a, group, ranks = problem.a, problem.group, problem.group.size()
    if problem.operation == "ag":
        full = a.new_empty(a.shape[0] * ranks, a.shape[1])

        def gather() -> Tensor:
            dist.all_gather_into_tensor(full, a, group=group)
            return problem.product(full)

        return gather
    out = a.new_empty(a.shape[0] // ranks, problem.b_kn.shape[1])

    def scatter() -> Tensor:
        dist.reduce_scatter_tensor(out, torch.mm(a, problem.b_kn), group=group)
        return out if problem.bias is None else out + problem.bias

    return scatter


def torch_symm_mem(problem: Problem) -> Call:
    """torch's async TP over symmetric memory (return_A=True, so that small M does not take a multicast path)."""
    if problem.a.device.type != "cuda":
        raise Absent("torch's symmetric memory needs CUDA")
    ops, name = torch.ops.symm_mem, problem.group.group_name
    if problem.operation == "ag":

        def gather() -> Tensor:
            out = ops.fused_all_gather_matmul(problem.a, [problem.b_kn], 0, name, return_A=True)[1][0]
            return out if problem.bias is None else out + problem.bias

        return gather

    def scatter() -> Tensor:
        out = ops.fused_matmul_reduce_scatter(problem.a, problem.b_kn, "sum", 0, name)
        return out if problem.bias is None else out + problem.bias

    return scatter


def _fluid(problem: Problem, backend: str) -> Call:
    if problem.operation == "ag":
        return lambda: all_gather_matmul(  # type: ignore[return-value]
            problem.a, problem.b, problem.group, transpose_b=problem.transpose_b, bias=problem.bias, backend=backend
        )
    return lambda: matmul_reduce_scatter(
        problem.a, problem.b, problem.group, transpose_b=problem.transpose_b, bias=problem.bias, backend=backend
    )


def fluid(problem: Problem) -> Call:
    """megatron_fluid with the backend that its table chooses."""
    return _fluid(problem, "auto")


def fluid_copy_engine(problem: Problem) -> Call:
    """megatron_fluid's copy-engine form, wherever the table would send the shape."""
    if problem.a.device.type != "cuda":
        raise Absent("copy engines need CUDA")
    return _fluid(problem, "copy_engine")


def flux(problem: Problem) -> Call:
    """ByteDance's Flux kernels."""
    try:
        module = importlib.import_module("flux")
    except ImportError as error:
        raise Absent(f"the package flux cannot be imported ({error})") from None
    a, group, ranks = problem.a, problem.group, problem.group.size()
    n, k = problem.b_kn.shape[1], problem.b_kn.shape[0]
    weight = problem.b if problem.transpose_b else problem.b.t().contiguous()
    if problem.operation == "ag":
        kernel = module.AGKernel(
            group, ranks // ranks, a.shape[0] * ranks, n, k, a.dtype, a.dtype, transpose_weight=False, local_copy=False
        )
        return lambda: kernel.forward(a, weight, bias=problem.bias)
    scatter = module.GemmRS(group, 1, a.shape[0], n, a.dtype, a.dtype, transpose_weight=False, fuse_reduction=False)
    return lambda: scatter.forward(a, weight, bias=problem.bias)


BACKENDS: dict[str, Callable[[Problem], Call]] = {
    "gemm_only": gemm_only,
    "torch": torch_nccl,
    "torch_symm_mem": torch_symm_mem,
    "flux": flux,
    "fluid": fluid,
    "fluid_copy_engine": fluid_copy_engine,
}
