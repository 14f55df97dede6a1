"""Every way to overlap a tensor-parallel GEMM with its communication, behind one signature; each is
used if it is installed.

A backend is a function of a `Problem` that returns a call without arguments, or raises `Absent`
with the reason. Whatever a backend prepares (buffers, kernels, a weight in another layout) is
prepared before the first call.

AllGather-GEMM: A ``[M / W, K]``, B ``[N, K]`` or ``[K, N]``; GEMM-ReduceScatter: A ``[M, K]``, B
likewise. M, N, K are those of the GEMM that one rank runs.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter

__all__ = ["BACKENDS", "FAMILIES", "Absent", "Problem", "is_rival"]


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

    @property
    def rows(self) -> int:
        """M of the GEMM that one rank runs."""
        return self.a.shape[0] * (self.group.size() if self.operation == "ag" else 1)

    def product(self, a: Tensor) -> Tensor:
        """A B with the bias."""
        return torch.mm(a, self.b_kn) if self.bias is None else torch.addmm(self.bias, a, self.b_kn)

    def biased(self, c: Tensor) -> Tensor:
        """C with the bias, for backends whose own bias means something else."""
        return c if self.bias is None else c + self.bias


Call = Callable[[], Tensor]


def gemm_only(problem: Problem) -> Call:
    """The GEMM alone on data that is already here: the floor."""
    a = problem.a
    if problem.operation == "ag":
        a = torch.randn(problem.rows, a.shape[1], device=a.device, dtype=a.dtype)
    return lambda: problem.product(a)


def torch_nccl(problem: Problem) -> Call:
    """The collective, then the GEMM, or the GEMM, then the collective."""
    a, group = problem.a, problem.group
    if problem.operation == "ag":
        full = a.new_empty(problem.rows, a.shape[1])

        def gather() -> Tensor:
            dist.all_gather_into_tensor(full, a, group=group)
            return problem.product(full)

        return gather
    out = a.new_empty(a.shape[0] // group.size(), problem.b_kn.shape[1])

    def scatter() -> Tensor:
        dist.reduce_scatter_tensor(out, torch.mm(a, problem.b_kn), group=group)
        return problem.biased(out)

    return scatter


def torch_symm_mem(problem: Problem) -> Call:
    """torch's async TP over symmetric memory (return_A=True, so that small M does not take a
    multicast path)."""
    _needs_cuda(problem, "torch's symmetric memory")
    importlib.import_module("torch.distributed._symmetric_memory")  # which registers them
    ops, name = torch.ops.symm_mem, problem.group.group_name
    if problem.operation == "ag":
        return lambda: problem.biased(
            ops.fused_all_gather_matmul(problem.a, [problem.b_kn], 0, name, return_A=True)[1][0]
        )
    return lambda: problem.biased(
        ops.fused_matmul_reduce_scatter(problem.a, problem.b_kn, "sum", 0, name)
    )


def _fluid(backend: str) -> Callable[[Problem], Call]:
    def build(problem: Problem) -> Call:
        if backend in ("copy_engine", "fused"):
            _needs_cuda(problem, f"the {backend} backend")
        operation: Any = all_gather_matmul if problem.operation == "ag" else matmul_reduce_scatter
        return lambda: operation(
            problem.a,
            problem.b,
            problem.group,
            transpose_b=problem.transpose_b,
            bias=problem.bias,
            backend=backend,
        )

    return build


def _te(method: str) -> Callable[[Problem], Call]:
    """Transformer Engine's userbuffers by the interface of its 2.20
    (tests/pytorch/distributed/run_gemm_with_overlap.py there)."""

    def build(problem: Problem) -> Call:
        _needs_cuda(problem, "Transformer Engine's userbuffers")
        if problem.operation == "ag" and method == "pipeline":
            raise Absent("userbuffers gather by ring exchange only")
        base, tex, helper = _te_modules()
        a, group, ranks = problem.a, problem.group, problem.group.size()
        weight = problem.b if problem.transpose_b else problem.b.t().contiguous()
        n = weight.shape[0]
        gathers = problem.operation == "ag"
        kind = tex.CommOverlapType.AG if gathers else tex.CommOverlapType.RS
        shape = [problem.rows, a.shape[1] if gathers else n]
        if method == "ring":
            buffer = tex.CommOverlapP2P(
                shape,
                a.dtype,
                helper,
                ranks,
                kind,
                num_comm_sm=1,
                set_sm_margin=not gathers,
                use_ce=True,
            )
        else:
            buffer = tex.CommOverlap(
                shape,
                a.dtype,
                helper,
                ranks,
                comm_type=kind,
                num_splits=4,
                num_comm_sm=16,
                set_sm_margin=True,
            )
        if gathers:

            def gather() -> Tensor:
                full, _ = base.fill_userbuffers_buffer_for_all_gather(buffer, a, None, group)
                return tex.general_gemm(
                    weight, full, out_dtype=a.dtype, bias=problem.bias, ub=buffer, ub_type=kind
                )[0]

            return gather
        out = a.new_empty(problem.rows // ranks, n)

        def scatter() -> Tensor:
            tex.general_gemm(
                weight, a, out_dtype=a.dtype, ub=buffer, ub_type=kind, extra_output=out
            )
            return problem.biased(out)

        return scatter

    return build


@functools.cache
def _te_modules() -> tuple[Any, Any, Any]:
    """transformer_engine.pytorch.module.base, its C++ extensions, and the bootstrap of userbuffers.
    Collective the first time."""
    os.environ.setdefault("UB_SKIPMC", "1")  # CUDA IPC in the place of multicast
    try:
        base = importlib.import_module("transformer_engine.pytorch.module.base")
        tex = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    except ImportError as error:
        raise Absent(f"Transformer Engine cannot be imported ({error})") from None
    if tex.ubuf_built_with_mpi():
        raise Absent(
            "this Transformer Engine starts userbuffers by MPI (built with NVTE_UB_WITH_MPI)"
        )
    world = dist.new_group(backend="gloo")
    return base, tex, tex.CommOverlapHelper(world, world)


def flux(problem: Problem) -> Call:
    """ByteDance's Flux, by the interface of its test/python/ag_gemm and gemm_rs."""
    _needs_cuda(problem, "Flux")
    module = _flux_module(problem.group)
    a, group = problem.a, problem.group
    n, k = problem.b_kn.shape[1], problem.b_kn.shape[0]
    nodes = int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    stored_kn = not problem.transpose_b
    if problem.operation == "ag":
        kernel = module.AGKernel(group, nodes, problem.rows, n, k, a.dtype, output_dtype=a.dtype)
        return lambda: problem.biased(kernel.forward(a, problem.b, transpose_weight=stored_kn))
    capacity = -(-problem.rows // 1024) * 1024
    scatter = module.GemmRS(
        group,
        nodes,
        capacity,
        n,
        a.dtype,
        a.dtype,
        transpose_weight=stored_kn,
        fuse_reduction=False,
    )
    return lambda: problem.biased(scatter.forward(a, problem.b))


@functools.cache
def _flux_module(group: dist.ProcessGroup) -> Any:
    try:
        module = importlib.import_module("flux")
    except ImportError as error:
        raise Absent(f"the package flux cannot be imported ({error})") from None
    module.init_flux_shm(group)
    return module


def _needs_cuda(problem: Problem, what: str) -> None:
    if problem.a.device.type != "cuda":
        raise Absent(f"{what}: needs CUDA")


BACKENDS: dict[str, Callable[[Problem], Call]] = {
    "gemm_only": gemm_only,
    "torch": torch_nccl,
    "torch_symm_mem": torch_symm_mem,
    "te_userbuffers_ring": _te("ring"),
    "te_userbuffers_pipeline": _te("pipeline"),
    "flux": flux,
    "fluid": _fluid("auto"),  # what its table or rule chooses
    "fluid_collective": _fluid("collective"),
    "fluid_copy_engine": _fluid("copy_engine"),
    "fluid_fused": _fluid("fused"),
}

# One word for several backends on the command line.
FAMILIES = {"te_userbuffers": ("te_userbuffers_ring", "te_userbuffers_pipeline")}


def is_rival(name: str) -> bool:
    """Somebody else's: where it fails it is listed with the reason, and the others are measured."""
    return name not in ("gemm_only", "torch") and not name.startswith("fluid")
