"""`all_gather_matmul` and `matmul_reduce_scatter`, with gradients.

Each is the other's backward, by the backend that is chosen for its own shape. The weight gradient
is overlapped with an exchange. The backward of AllGather-GEMM computes it during the ReduceScatter
of dA and gathers A again while dA is multiplied, so forward keeps only the shard. The backward of
GEMM-ReduceScatter computes it from the gathered dC, which the AllGather-GEMM of dA yields anyway.

Shapes: as in `Backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.backward.autograd import once_differentiable
from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.comm.groups import group_resource
from megatron_fluid.comm.layers import compare_shapes
from megatron_fluid.errors import ConfigError
from megatron_fluid.tensor_parallel.choice import Backend, backend_for
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["WeightGrad", "all_gather_matmul", "matmul_reduce_scatter"]

WeightGrad = Callable[[Tensor, Tensor], Tensor | None]


def _without_autocast[Compute: Callable[..., Any]](compute: Compute) -> Compute:
    """Run `compute` without autocast, which would change the dtype of some of the products that one
    result is made of."""

    @functools.wraps(compute)
    def run(*arguments: Any, **named: Any) -> Any:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return compute(*arguments, **named)
        kind = next(t for t in (*arguments, *named.values()) if isinstance(t, Tensor)).device.type
        with torch.autocast(kind, enabled=False):
            return compute(*arguments, **named)

    return cast(Compute, run)


@tells_peers
@_without_autocast
def all_gather_matmul(
    a_shard: Tensor,
    b: Tensor,
    group: dist.ProcessGroup,
    *,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    backend: str = "auto",
    weight_grad: WeightGrad | None = None,
) -> Tensor:
    """Gather the rows of A from all ranks and multiply them by B, the gather overlapped with the
    multiplication.

    Args:
        a_shard: ``[m, K]`` bf16, fp16, fp32 or fp64, the same m on every rank. Multiplied in this
            dtype also under autocast.
        b: ``[K, N]``, or ``[N, K]`` with ``transpose_b`` (as ``nn.Linear.weight``), this rank's
            columns; the same N on every rank.
        group: the tensor-parallel ranks; row block r of C is from rank r.
        bias: ``[N]`` in A's dtype.
        backend: "auto" (measurements or a rule decide, for forward and backward separately),
            "copy_engine", "fused", "collective".
        weight_grad: computes the gradient of B from (the whole A, dC) in place of autograd's, and
            returns what autograd gets, or None. It enqueues its work on the current stream before
            it returns: the whole of what was gathered is lent to it until the group's next gather.

    Returns:
        C ``[W m, N]`` in A's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit; no group; a backend that
            this group cannot have; on every rank, before anything is sent: A differs in shape or
            dtype between ranks.
        FluidError: on GPUs in place of that ConfigError, where some ranks bring another shape than
            in their last call and some do not. The waits of all end by name within the timeout.
            Where each rank's shape has followed its last one before, differences go unseen: with
            lengths that vary, pad A to one shape.
    """
    calls = _calls_of(group)
    if a_shard.dim() != 2:
        raise ConfigError(f"a_shard: found {a_shard.dim()} dimensions, allowed: 2, [m, K]")
    rows = calls.ranks * a_shard.shape[0]
    gemm = Gemm(b, transpose_b, bias)
    gemm.check(a_shard)
    calls.compare("all_gather_matmul", "a_shard [m, K]", tuple(a_shard.shape), a_shard)
    chosen = backend_for(backend, group, "gather", gemm, rows, a_shard)
    if _differentiable(a_shard, b, bias):
        call = _Call(gemm, backend, group, chosen, weight_grad)
        return _AllGatherMatmul.apply(a_shard, b, bias, call)
    return chosen.gather_matmul(a_shard, gemm)[0]


@tells_peers
@_without_autocast
def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    group: dist.ProcessGroup,
    *,
    transpose_b: bool = False,
    bias: Tensor | None = None,
    backend: str = "auto",
    weight_grad: WeightGrad | None = None,
) -> Tensor:
    """Multiply A by B, sum over ranks and keep this rank's rows, the sum hidden behind the
    multiplication.

    Args:
        a: ``[M, K]``, M divisible by the number of ranks.
        b: ``[K, N]``, or ``[N, K]`` with ``transpose_b``: this rank's part of the contracted
            dimension.
        bias: ``[N]``, added once, after the sum.
        The others as in `all_gather_matmul`.

    Returns:
        C ``[M / W, N]``: rows ``[rank M / W, (rank + 1) M / W)`` of the sum.

    Raises:
        ConfigError: as `all_gather_matmul`, and M not divisible by the number of ranks; on every
            rank: C differs in shape or dtype between ranks.
    """
    rows, calls = a.shape[0], _calls_of(group)
    gemm = Gemm(b, transpose_b, bias)
    gemm.check(a)
    calls.compare("matmul_reduce_scatter", "C [M, N]", (rows, gemm.n), a)
    if rows % calls.ranks:
        allowed = f"multiples of the {calls.ranks} ranks of the group"
        raise ConfigError(f"M (rows of a): found {rows}, allowed: {allowed}")
    chosen = backend_for(backend, group, "scatter", gemm, rows, a)
    if _differentiable(a, b, bias):
        call = _Call(gemm, backend, group, chosen, weight_grad)
        return _MatmulReduceScatter.apply(a, b, bias, call)
    return chosen.matmul_scatter(a, gemm)


class _Calls:
    """What the operations of one group keep between calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        agreement(group)  # through which a call that this rank refuses is reported to the others
        self.group, self.ranks = group, group.size()
        # By operation: what its last call on a GPU sent, and how many calls in a row have sent it.
        self._sent: dict[str, tuple[object, int]] = {}

    def compare(self, operation: str, what: str, shape: tuple[int, ...], a: Tensor) -> None:
        """As `compare_shapes`, which has nothing to do from the third call of a shape on."""
        if not a.is_cuda:
            compare_shapes(operation, self.group, what, shape, a)
            return
        mine = shape, a.dtype
        last, times = self._sent.get(operation, (None, 0))
        if last == mine and times >= 2:
            return
        compare_shapes(operation, self.group, what, shape, a)
        self._sent[operation] = mine, times + 1 if last == mine else 1


def _calls_of(group: dist.ProcessGroup | None) -> _Calls:
    if group is None:
        raise ConfigError.of("group", None, "the process group of the tensor-parallel ranks")
    return group_resource(group, "tensor parallel calls", lambda: _Calls(group))


def _differentiable(*tensors: Tensor | None) -> bool:
    wanted = any(t is not None and t.requires_grad for t in tensors)
    return wanted and torch.is_grad_enabled()


class _Call(NamedTuple):
    """What forward was asked for and chose; backward chooses from it for its own shapes."""

    gemm: Gemm
    asked: str
    group: dist.ProcessGroup
    forward: Backend
    weight_grad: WeightGrad | None

    def choose(self, operation: str, gemm: Gemm, m: int, a: Tensor) -> Backend:
        if self.asked != "auto":
            return self.forward
        return backend_for("auto", self.group, operation, gemm, m, a)

    def gradient_of_b(self, a: Tensor, dc: Tensor) -> Tensor | None:
        if self.weight_grad is not None:
            return self.weight_grad(a, dc)
        return dc.t() @ a if self.gemm.transpose_b else a.t() @ dc


def _dense(gradient: Tensor) -> Tensor:
    """Contiguous and aligned, as every backend takes it: one that was asked for by name has no
    alternative."""
    gradient = gradient.contiguous()
    return gradient.clone() if gradient.data_ptr() % 16 else gradient


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_shard: Tensor, b: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(a_shard, b)
        ctx.call = call
        return call.forward.gather_matmul(a_shard, call.gemm)[0]

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, ...]:
        (a_shard, b), call = ctx.saved_tensors, ctx.call
        need_a, need_b, need_bias = ctx.needs_input_grad[:3]
        dbias = dc.sum(0) if need_bias else None
        dc = _dense(dc)
        db: list[Tensor | None] = []
        to_a = Gemm(b, transpose_b=not call.gemm.transpose_b)
        backend = call.choose("scatter", to_a, dc.shape[0], dc)
        gathered = backend.start_gather(a_shard) if need_b else None

        def weight_grad() -> None:
            if gathered is not None:
                db.append(call.gradient_of_b(gathered(), dc))

        da = None
        if need_a:
            da = backend.matmul_scatter(dc, to_a, overlapped=weight_grad)
        else:
            weight_grad()
        return da, (db[0] if need_b else None), dbias, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.call = call
        return call.forward.matmul_scatter(a, call.gemm)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, dc_shard: Tensor) -> tuple[Tensor | None, ...]:
        (a, b), call = ctx.saved_tensors, ctx.call
        need_a, need_b, need_bias = ctx.needs_input_grad[:3]
        dbias = dc_shard.sum(0) if need_bias else None
        dc_shard = _dense(dc_shard)
        to_a = Gemm(b, transpose_b=not call.gemm.transpose_b)
        backend = call.choose("gather", to_a, a.shape[0], dc_shard)
        if need_a:
            da, dc = backend.gather_matmul(dc_shard, to_a, keep=need_b)
        elif need_b:
            da, dc = None, backend.start_gather(dc_shard)()
        else:
            da = dc = None
        db = None if dc is None else call.gradient_of_b(a, dc)
        # The bias was added to this rank's rows only, so its gradient is theirs. The caller sums it
        # over ranks, as for any replicated parameter.
        return da, db, dbias, None
