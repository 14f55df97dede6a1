"""The weights of one rank's experts, in any memory layout, and how rows are grouped by expert.

Legend: El experts, H hidden, F1 width of fc1's output, F width of fc2's input.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Matrices, Fp8Rows, fp8_grouped_matmul
from megatron_fluid.kernels.grouped_gemm.launch import fixed_tiles, grouped_matmul, host_ends
from megatron_fluid.kernels.grouped_gemm.stacks import ReversedStack
from megatron_fluid.moe.activations import Activation

__all__ = [
    "ExpertWeights",
    "GivenBiases",
    "GivenWeights",
    "KeptLayout",
    "Matrices",
    "Packed",
    "RowGroups",
    "computed_dtype",
    "expert_projections",
    "grouped_product",
    "params_and_values",
]

# El matrices [in, out]: one tensor [El, in, out] with any strides, a ReversedStack, a list if they
# are not evenly spaced in memory, or FixedTiles of these.
type Matrices = Tensor | Sequence[Tensor]

# Weights as a caller passes them: one stacked tensor, or one tensor for each expert.
type GivenWeights = Tensor | Packed | Sequence[Tensor]

# Biases of fc1 and of fc2: stacked [El, D], or one for each expert.
type GivenBiases = tuple[GivenWeights, GivenWeights]

# Every call reads these of up to hundreds of parameters, by `map`, because it loops in C.
_requires_grad, _version, _main_grad, _is_leaf = map(
    operator.attrgetter, ("requires_grad", "_version", "main_grad", "is_leaf")
)


class Packed(NamedTuple):
    """One parameter for all experts that holds no memory itself, like Transformer Engine's
    GroupedTensor. Autograd, main_grad and the optimizer use `param`; kernels read `values`, a view
    of the memory.

    Attributes:
        param: the parameter, a leaf. [El, ...]
        values: its values, a plain tensor without gradient. [El, ...]
    """

    param: Tensor
    values: Tensor


class _KernelGrads(NamedTuple):
    """Addresses of gradient buffers: on the host those of the parameters, after the first's dtype,
    and on the device one for each expert (int64 [El]). fit: whether a kernel can use these."""

    on_host: list[object]
    addresses: Tensor
    fit: bool


@dataclass(slots=True)
class KeptLayout:
    """The memory layout of a projection's weights, which a layer keeps between calls. It holds no
    reference to the weights, so that their memory can be freed between two calls.

    Attributes:
        memory: address, storage's address, dtype, shape and strides of each weight tensor.
        stack: shape, strides and offset of one view of all experts' matrices, if there is one.
        reverse: whether that view has the experts in reverse order.
        shape: of one expert's matrix. [out, in]
        main_grads: addresses of the gradient buffers.
        cast: the weights in fp8, a WeightCast of moe/fp8_experts.py.
    """

    memory: list[tuple[object, ...]]
    stack: tuple[tuple[int, ...], tuple[int, ...], int] | None
    shape: tuple[int, int]
    reverse: bool = False
    main_grads: _KernelGrads | None = None
    cast: Any = None

    def fits(self, weights: Tensor | Sequence[Tensor]) -> bool:
        """Whether these weights have the `memory` of the kept ones."""
        return [_memory_of(values) for values in params_and_values(weights)[1]] == self.memory


class ExpertWeights:
    """One projection's weights of all local experts, in any memory layout, without a copy. Each
    call makes its own object, because the object holds views of the weights.

    Args:
        weights: a stacked tensor, a Packed one, or one matrix for each expert (Megatron's
            parameters).
        num_experts: El.
        layout: "out_in" is nn.Linear's and Megatron's: [El, out, in], or El times [out, in].
            "in_out" is the transposed one: [El, in, out], also folded into two dimensions ([in, El
            * out] or [El * in, out], as GroupedMLP had it, whose memory is [El, in, out]).
        name: for errors.
        kept: the layout from an earlier call, if it `fits` these weights. It saves checking them.
        leaves: whether the caller knows that `deferrable` holds, which then checks nothing.

    Attributes:
        params: the parameters that get gradients: one stacked, or El.
        kept: the layout, to pass to the next call.
        stack: a detached view of all experts' matrices if they are evenly spaced in memory, else
            None. [El, out, in]
        reverse: such a view with the experts in reverse order, if they lie so, else None.
        out_width, in_width: of one expert's matrix.
        fixed_tiles: whether forward products of a row have the same bits whatever the others are.

    Raises:
        ConfigError: the number of experts, or the shape, does not fit.
    """

    stack: Tensor | None
    reverse: Tensor | None
    fixed_tiles = False
    _trained: bool | None = None  # what requires_grad found first

    def __init__(
        self,
        weights: GivenWeights,
        num_experts: int,
        layout: str = "out_in",
        name: str = "weight",
        in_width: int | None = None,
        kept: KeptLayout | None = None,
        leaves: bool = False,
    ) -> None:
        self._leaves = leaves
        self.layout, self.num_experts = layout, num_experts
        self.stacked = isinstance(weights, Tensor | Packed)
        self.params, self._stored = params_and_values(weights)
        self._views: list[Tensor] | None = None
        self._forward_matrices: Matrices | None = None
        self.reverse = None
        if kept is None:
            self.stack = self._find_stack(name, in_width)
            if self.stack is None:
                self.reverse = _strided_view(self.matrices[::-1])
            kept = self._layout_to_keep()
        else:
            found = kept.stack
            view = None if found is None else self._stored[0].detach().as_strided(*found)
            self.stack, self.reverse = (None, view) if kept.reverse else (view, None)
        self.kept = kept
        self.out_width, self.in_width = kept.shape

    def _find_stack(self, name: str, in_width: int | None) -> Tensor | None:
        """Return `stack`, or None. Raises ConfigError if the number or shape is wrong."""
        layout, num_experts, transposed = self.layout, self.num_experts, self.layout == "in_out"
        if layout not in ("out_in", "in_out"):
            raise ConfigError.of("layout", layout, "out_in, in_out")
        if not self.stacked:
            found = [list(param.shape) for param in self.params]
            alike = all(len(shape) == 2 and shape == found[0] for shape in found)
            if len(found) != num_experts or not alike:
                allowed = f"{num_experts} matrices of one shape, one for each local expert"
                raise ConfigError.of(name, found, allowed)
            return _strided_view(self.matrices)
        stack = self._stored[0].detach()
        shape = list(stack.shape)
        if stack.dim() == 2 and transposed and in_width is not None:
            if not stack.is_contiguous() or stack.numel() % (num_experts * in_width):
                allowed = f"a contiguous [{in_width}, experts * out] of {num_experts} experts"
                raise ConfigError.of(name, shape, allowed)
            stack = stack.view(num_experts, in_width, -1)
        if stack.dim() != 3 or stack.shape[0] != num_experts:
            allowed = f"three dimensions, the first being {num_experts} local experts"
            raise ConfigError.of(name, shape, allowed)
        return stack.transpose(1, 2) if transposed else stack

    def _layout_to_keep(self) -> KeptLayout:
        stack = self.reverse if self.stack is None else self.stack
        view = None
        if stack is not None:
            view = tuple(stack.shape), stack.stride(), int(stack.storage_offset())
        rows, columns = (self.matrices[0] if stack is None else stack[0]).shape
        memory, reverse = [_memory_of(found) for found in self._stored], self.reverse is not None
        return KeptLayout(memory, view, (rows, columns), reverse)

    @property
    def matrices(self) -> list[Tensor]:
        """Detached views, one for each expert's matrix. El times [out, in]"""
        if self._views is None:
            if self.stacked:
                assert self.stack is not None
                self._views = list(self.stack.unbind(0))
            else:
                found = [matrix.detach() for matrix in self._stored]
                self._views = [m.t() for m in found] if self.layout == "in_out" else found
        return self._views

    @property
    def forward_matrices(self) -> Matrices:
        """Matrices [in, out] for the forward: x @ w.T."""
        found = self._forward_matrices
        if found is None:
            if self.stack is not None:
                found = self.stack.transpose(1, 2)
            elif self.reverse is not None:
                found = ReversedStack(self.reverse.transpose(1, 2))
            else:
                found = [m.t() for m in self.matrices]
            self._forward_matrices = found = fixed_tiles(found) if self.fixed_tiles else found
        return found

    @property
    def backward_matrices(self) -> Matrices:
        """Matrices [out, in] for dgrad: dy @ w."""
        if self.stack is not None:
            return self.stack
        return self.matrices if self.reverse is None else ReversedStack(self.reverse)

    @property
    def given(self) -> GivenWeights:
        """The weights that this object was made from."""
        if not self.stacked:
            return self.params
        param, values = self.params[0], self._stored[0]
        return param if param is values else Packed(param, values)

    def requires_grad(self) -> bool:
        """Whether gradients are wanted: in the forward, which asks first, and still, as autograd
        gives none to weights that one of the two finds frozen."""
        now = any(map(_requires_grad, self.params))
        self._trained = now if self._trained is None else self._trained
        return now and self._trained

    def deferrable(self) -> bool:
        """Whether the gradients may bypass autograd's graph. All params must be leaves, and all or
        none of them require gradients."""
        if self._leaves:
            return True
        trained = [*map(_requires_grad, self.params)].count(True)
        return all(map(_is_leaf, self.params)) and trained in (0, len(self.params))

    def versions(self) -> list[int]:
        """Autograd's version counters of `params`. The counter of Packed.values is not used: all
        views of one buffer share one counter."""
        return list(map(_version, self.params))

    def main_grads(self) -> Tensor | list[Tensor]:
        """Megatron's gradient buffers, a matrix for each expert, in the weights' layout: stacked
        if the weights are. [El, ...]"""
        if self.stacked:
            main_grad: Tensor = self.params[0].main_grad  # type: ignore[attr-defined]
            shape = (self.out_width, self.in_width)
            shape = shape[::-1] if self.layout == "in_out" else shape
            return main_grad.view(self.num_experts, *shape)
        return list(map(_main_grad, self.params))

    def kernel_grads(
        self, fits: Callable[[Sequence[Tensor]], bool]
    ) -> tuple[Tensor | list[Tensor], _KernelGrads]:
        """main_grads() and their addresses for a kernel, read again only if a buffer has moved.

        fits: whether the kernel can use the buffers; called only if they are read again.
        """
        grads, known = self.main_grads(), self.kept.main_grads
        begins = [grads] if isinstance(grads, Tensor) else grads
        on_host = [begins[0].dtype, *map(Tensor.data_ptr, begins)]
        if known is None or on_host != known.on_host:
            matrices = list(grads)
            addresses = list(map(Tensor.data_ptr, matrices))
            table = torch.tensor(addresses, dtype=torch.int64, device=matrices[0].device)
            known = self.kept.main_grads = _KernelGrads(on_host, table, fits(matrices))
        return grads, known

    def overwrites_main_grads(self) -> bool:
        """Whether a call must overwrite main_grads() instead of adding to them: Megatron has set
        `overwrite_main_grad` on all params. If only some have it, their main_grad is zeroed."""
        asked = list(map(getattr, self.params, repeat("overwrite_main_grad"), repeat(False)))
        if all(asked):
            return True
        for param in itertools.compress(self.params, asked):
            param.main_grad.zero_()  # type: ignore[attr-defined]
        return False

    def as_gradients(self, gradient: Tensor) -> list[Tensor]:
        """Split a stacked gradient into one tensor for each param, shaped and sharded like it."""
        if not self.stacked:
            return list(gradient.unbind(0))
        param: Any = self.params[0]
        sharded = hasattr(param, "_local_tensor")
        shape = self._stored[0].shape if sharded else param.shape
        gradient = gradient if gradient.shape == shape else gradient.view(shape)
        if sharded:  # DTensor's constructor is faster than from_local
            gradient = type(param)(gradient, param._spec, requires_grad=False)
        return [gradient]


def params_and_values(given: GivenWeights) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the parameters that get gradients, and the tensors that hold their values."""
    if isinstance(given, Packed):
        return (given.param,), (given.values,)
    if isinstance(given, Tensor):  # a DTensor's values are its local part
        return (given,), (getattr(given, "_local_tensor", given),)
    params = tuple(given)
    return params, params


def computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a call with tokens x is computed: autocast's if that is on, which leaves
    fp64 alone."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else x.dtype


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    # A tensor may come back to its address in another storage, where its offset is another one.
    where = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    return *where, tensor.dtype, tensor.shape, tensor.stride()  # of a dtype each offset is another


def _strided_view(matrices: Sequence[Tensor]) -> Tensor | None:
    """Return one view of matrices that are evenly spaced in one storage (as Megatron's
    DistributedDataParallel lays them out), else None."""
    first = matrices[0]
    if len(matrices) == 1:
        return first.unsqueeze(0)
    step = matrices[1].storage_offset() - first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for i, matrix in enumerate(matrices):
        if matrix.untyped_storage().data_ptr() != storage or matrix.stride() != first.stride():
            return None
        if step <= 0 or matrix.storage_offset() != first.storage_offset() + i * step:
            return None
    shape = (len(matrices), *first.shape)
    return first.as_strided(shape, (step, *first.stride()), first.storage_offset())


def expert_projections(
    w1: GivenWeights | ExpertWeights,
    w2: GivenWeights | ExpertWeights,
    experts: int,
    tokens: Tensor,
    activation: Activation,
    name: str,
    layout: str = "out_in",
) -> tuple[ExpertWeights, ExpertWeights]:
    """fc1 and fc2 of a layer, checked against tokens [T, H] and the activation.

    Raises:
        ConfigError: a number of experts, a width or a dtype does not fit.
    """
    hidden, given = tokens.shape[1], (experts, layout)
    fc1 = w1
    if not isinstance(fc1, ExpertWeights):
        fc1 = ExpertWeights(fc1, *given, f"{name}: weight1", hidden)
    width, fc2 = fc1.out_width // activation.gates, w2
    if not isinstance(fc2, ExpertWeights):
        fc2 = ExpertWeights(fc2, *given, f"{name}: weight2", width)
    if fc1.in_width != hidden or fc2.out_width != hidden:
        found = [fc1.in_width, fc2.out_width]
        raise ConfigError.of(f"{name}: hidden size of the weights", found, f"{hidden}, as tokens")
    if fc2.in_width != width:
        allowed = f"{width} ({activation.name} of {fc1.out_width})"
        raise ConfigError.of(f"{name}: width of weight2", fc2.in_width, allowed)
    dtypes = fc1.params[0].dtype, fc2.params[0].dtype
    if not dtypes[0] == dtypes[1] == tokens.dtype:
        allowed = f"{tokens.dtype}, as tokens"
        raise ConfigError.of(f"{name}: dtype of the weights", dtypes[0], allowed)
    return fc1, fc2


@dataclass(slots=True)
class RowGroups:
    """Which of the rows, sorted by expert, belong to each expert.

    Attributes:
        offsets: end of each expert's rows, on the rows' device. int32 [El]
        ends: the offsets on the host, or None if the host does not know them. The tensors may then
            have more rows than the last offset.
        likely_ends: estimated offsets, used only for choices that affect speed, not results.
        count: number of rows, on the device, from transports that use Triton kernels. int32 [1]
        filled: whether the tensors have no unused rows, except for dropped choices.
        experts: the cached result of experts_of, or None.
    """

    offsets: Tensor
    ends: Sequence[int] | None = None
    likely_ends: Sequence[int] | None = None
    count: Tensor | None = None
    filled: bool = False
    experts: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_counts(cls, counts: Sequence[int], offsets: Tensor | None = None) -> RowGroups:
        """Make from each expert's number of rows. offsets: the attribute, if a tensor exists."""
        ends = list(itertools.accumulate(counts))
        if offsets is None:
            offsets = torch.tensor(ends, dtype=torch.int32, device="cpu")
        return cls(offsets, ends)

    @property
    def num_rows(self) -> int:
        return host_ends(self.offsets, self.ends)[-1]

    def counts(self) -> list[int]:
        """Number of rows of each expert, from `ends`. [El]"""
        return [end - start for start, end in itertools.pairwise([0, *(self.ends or ())])]

    def experts_of(self, rows: int) -> Tensor:
        """The expert of each of the first `rows` rows, cached. It is El for rows after the last
        expert's. int32 [rows]"""
        if self.experts is None or self.experts.shape[0] != rows:
            each = torch.arange(rows, device=self.offsets.device, dtype=torch.int32)
            self.experts = torch.searchsorted(self.offsets, each, right=True, out_int32=True)
        return self.experts

    def part(self, begin: int, end: int) -> RowGroups:
        """The groups of rows begin .. end - 1, counted from `begin`. Needs `ends`."""
        assert self.ends is not None
        if (begin, end) == (0, self.ends[-1]):
            return self
        ends = [min(max(e, begin), end) - begin for e in self.ends]
        return RowGroups((self.offsets - begin).clamp(0, end - begin), ends)


def grouped_product(x: Tensor | Fp8Rows, matrices: Matrices, groups: RowGroups) -> Tensor:
    """x[rows of e] @ matrices[e]: x [N, in], El matrices [in, out] -> [N, out]. Fp8Rows need
    Fp8Matrices and give bf16."""
    if isinstance(x, Fp8Rows):
        assert isinstance(matrices, Fp8Matrices)
        return fp8_grouped_matmul(x, matrices, groups.offsets)
    if not x.shape[0]:
        return x.new_empty((0, matrices[0].shape[-1]))
    return grouped_matmul(x, matrices, groups.offsets, groups.ends)
