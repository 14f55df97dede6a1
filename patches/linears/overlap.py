"""A linear and the collective of its sequence in one: what Megatron's own linears (megatron.py) and
Transformer Engine's (transformer_engine.py) share.

`--fluid-tp-overlap`: "off"; "on" sends every linear that fits through `all_gather_matmul` and
`matmul_reduce_scatter`; "auto" only those whose size and group a faster form than the collective
serves.

Legend: S whole sequence, s = S / W a rank's part, B batch, K and N the linear's widths on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron_fluid.config import current_config
from megatron_fluid.patches.features import FeatureReport
from megatron_fluid.patches.weight_gradients import into_main_grad
from megatron_fluid.tensor_parallel import all_gather_matmul, matmul_reduce_scatter
from megatron_fluid.tensor_parallel.choice import backend_for
from megatron_fluid.tensor_parallel.gemm import Gemm

__all__ = ["REPORT", "LinearCall", "backend_of", "note"]

REPORT = FeatureReport("tensor-parallel overlap", by_class=True)


def note(linear: Any, on: bool, reason: str) -> None:
    """Record what became of a linear; rank 0 prints each finding once, since sizes are known only
    after the start-up table."""
    REPORT.note(linear, on, reason, ranks=(0,))


class LinearCall(NamedTuple):
    """A call of one of Megatron's linears: the module, its weight [N, K], the tensor-parallel
    group, the bias [N] that is added to the output, and whether gradient accumulation fusion is
    on."""

    module: Any
    weight: Tensor
    group: dist.ProcessGroup
    bias: Tensor | None
    fused: bool

    def gather(
        self, x: Tensor, prepare: Callable[[Any, Tensor], Tensor] | None = None
    ) -> Tensor | None:
        """Gather x [s, B, K] over the group and multiply: [S, B, N]; None where Megatron's own path
        serves as well. ``prepare(module, x)`` is done to the own rows before they are gathered."""
        sequence = x.shape[0] * self.group.size()
        backend = backend_of(self.module, self.group, "gather", sequence, self.weight, x)
        if backend is None:
            return None
        rows = x if prepare is None else prepare(self.module, x)
        output = all_gather_matmul(
            rows.flatten(0, 1), self.weight, self.group, **self._rest(backend)
        )
        return output.view(sequence, x.shape[1], output.shape[-1])

    def scatter(self, x: Tensor) -> Tensor | None:
        """Multiply x [S, B, K] and reduce-scatter over the group: [s, B, N]; None where Megatron's
        own path serves as well."""
        ranks = self.group.size()
        if x.shape[0] % ranks:
            return None  # Megatron refuses it by name
        backend = backend_of(self.module, self.group, "scatter", x.shape[0], self.weight, x)
        if backend is None:
            return None
        output = matmul_reduce_scatter(
            x.flatten(0, 1), self.weight, self.group, **self._rest(backend)
        )
        return output.view(x.shape[0] // ranks, x.shape[1], output.shape[-1])

    def _rest(self, backend: str) -> dict[str, Any]:
        gradient = into_main_grad(self.weight, self.fused)
        return {
            "transpose_b": True, "bias": self.bias, "backend": backend, "weight_grad": gradient
        }  # fmt: skip


def backend_of(
    linear: Any, group: dist.ProcessGroup, operation: str, sequence: int, weight: Tensor, x: Tensor
) -> str | None:
    """The backend to ask for, "auto", or None where Megatron's own path serves as well.
    ``sequence``: rows of the whole [S, B, K] input; x is this rank's."""
    if x.dim() != 3:
        found = f"its input has {x.dim()} dimensions instead of 3, [sequence, batch, hidden]"
        note(linear, False, found)
        return None
    gemm, rows = Gemm(weight, transpose_b=True), sequence * x.shape[1]
    chosen = backend_for("auto", group, operation, gemm, rows, x.flatten(0, 1)).name
    if chosen == "collective" and current_config().tp_overlap != "on":
        note(linear, False, "nothing faster than NCCL and the GEMM for its size")
        return None
    note(linear, True, chosen)
    return "auto"
