"""The weights of one rank's experts, in whichever layout they live, and the rows they multiply.

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
from megatron_fluid.kernels.grouped_gemm.launch import grouped_matmul, host_ends
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
    "in_dtype",
    "params_and_values",
]

# El matrices [in, out]: stacked [El, in, out] in any stride, such a stack in reverse, or a list
# where they lie apart.
type Matrices = Tensor | Sequence[Tensor]

# As a caller has them: stacked, or one for each expert.
type GivenWeights = Tensor | Packed | Sequence[Tensor]

# Biases of fc1 and of fc2: stacked [El, D], or one for each expert.
type GivenBiases = tuple[GivenWeights, GivenWeights]

# Of a hundred parameters in every call: map, whose loop is in C.
_requires_grad, _version, _main_grad, _is_leaf = map(
    operator.attrgetter, ("requires_grad", "_version", "main_grad", "is_leaf")
)


class Packed(NamedTuple):
    """One parameter of all experts that holds no memory itself, as Transformer Engine's
    GroupedTensor: autograd, main_grad and the optimizer know the parameter, and a view of the
    memory is read.

    Attributes:
        param: the parameter, a leaf. [El, ...]
        values: where its values lie, a plain tensor without gradient. [El, ...]
    """

    param: Tensor
    values: Tensor


class _KernelGrads(NamedTuple):
    """Where gradient buffers begin: for each parameter on the host, for each expert as a kernel
    takes it (int64 [El]); and whether the kernel takes them."""

    on_host: list[int]
    addresses: Tensor
    fit: bool


@dataclass(slots=True)
class KeptLayout:
    """What a layer keeps of a projection's weights from call to call: where they lie. It holds none
    of them, so that their memory can be given back between two calls.

    Attributes:
        memory: address, shape and strides of each tensor that was given.
        stack: shape, strides and offset of the view of all experts' matrices, if there is one.
        reverse: whether that view has them in reverse.
        shape: of a matrix. [out, in]
        main_grads: where the gradient buffers begin.
        cast: the weights in fp8, a WeightCast of moe/fp8_experts.py.
    """

    memory: list[tuple[object, ...]]
    stack: tuple[tuple[int, ...], tuple[int, ...], int] | None
    shape: tuple[int, int]
    reverse: bool = False
    main_grads: _KernelGrads | None = None
    cast: Any = None

    def fits(self, weights: Tensor | Sequence[Tensor]) -> bool:
        """Whether these weights lie where those lay that this was made of."""
        return [_memory_of(values) for values in params_and_values(weights)[1]] == self.memory


class ExpertWeights:
    """One projection's weights of all local experts, in whichever layout they live. Never copied.
    Made for one call, since it holds views of them.

    Args:
        weights: a stacked tensor, a Packed one, or one matrix for each expert (Megatron's
            parameters).
        num_experts: El.
        layout: "out_in" is nn.Linear's and Megatron's: [El, out, in], or El times [out, in].
            "in_out" is the transposed one: [El, in, out], also folded into two dimensions ([in, El
            * out] or [El * in, out], as GroupedMLP had it, whose memory is [El, in, out]).
        name: for errors.
        kept: of an earlier call, which these weights fit: what it knows is not looked at again.
        leaves: whether the caller has seen that all weights are leaves, all of them trained or
            none.

    Attributes:
        params: what was given: what the gradients are of. One stacked, or El
        kept: for the next call.
        stack: a view of all experts' matrices, without gradient, if they lie in memory at equal
            distances, else None. [El, out, in]
        reverse: such a view of the matrices in reverse, if they lie so, else None.
        out_width, in_width: of a matrix.

    Raises:
        ConfigError: the number of experts, or the shape, does not fit.
    """

    stack: Tensor | None
    reverse: Tensor | None

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
                self.reverse = _neighbours(self.matrices[::-1])
            kept = self._layout_to_keep()
        else:
            found = kept.stack
            view = None if found is None else self._stored[0].detach().as_strided(*found)
            self.stack, self.reverse = (None, view) if kept.reverse else (view, None)
        self.kept = kept
        self.out_width, self.in_width = kept.shape

    def _find_stack(self, name: str, in_width: int | None) -> Tensor | None:
        """The view of all experts' matrices, if there is one; raises where weights do not fit."""
        layout, num_experts, turned = self.layout, self.num_experts, self.layout == "in_out"
        if layout not in ("out_in", "in_out"):
            raise ConfigError.of("layout", layout, "out_in, in_out")
        if not self.stacked:
            found = [list(param.shape) for param in self.params]
            alike = all(len(shape) == 2 and shape == found[0] for shape in found)
            if len(found) != num_experts or not alike:
                allowed = f"{num_experts} matrices of one shape, one for each local expert"
                raise ConfigError.of(name, found, allowed)
            return _neighbours(self.matrices)
        stack = self._stored[0].detach()
        shape = list(stack.shape)
        if stack.dim() == 2 and turned and in_width is not None:
            if not stack.is_contiguous() or stack.numel() % (num_experts * in_width):
                allowed = f"a contiguous [{in_width}, experts * out] of {num_experts} experts"
                raise ConfigError.of(name, shape, allowed)
            stack = stack.view(num_experts, in_width, -1)
        if stack.dim() != 3 or stack.shape[0] != num_experts:
            allowed = f"three dimensions, the first being {num_experts} local experts"
            raise ConfigError.of(name, shape, allowed)
        return stack.transpose(1, 2) if turned else stack

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
        """Views of each expert's matrix, without gradient. El times [out, in]"""
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
        """Matrices [in, out] of x @ w.T."""
        found = self._forward_matrices
        if found is None:
            if self.stack is not None:
                found = self.stack.transpose(1, 2)
            elif self.reverse is not None:
                found = ReversedStack(self.reverse.transpose(1, 2))
            else:
                found = [m.t() for m in self.matrices]
            self._forward_matrices = found
        return found

    @property
    def backward_matrices(self) -> Matrices:
        """Matrices [out, in] of dy @ w."""
        if self.stack is not None:
            return self.stack
        return self.matrices if self.reverse is None else ReversedStack(self.reverse)

    @property
    def given(self) -> GivenWeights:
        """What this object was made of."""
        if not self.stacked:
            return self.params
        param, values = self.params[0], self._stored[0]
        return param if param is values else Packed(param, values)

    def requires_grad(self) -> bool:
        return any(map(_requires_grad, self.params))

    def deferrable(self) -> bool:
        """Whether the gradients may bypass autograd's graph: leaves, all of them trained or
        none."""
        if self._leaves:
            return True
        trained = [*map(_requires_grad, self.params)].count(True)
        return all(map(_is_leaf, self.params)) and trained in (0, len(self.params))

    def versions(self) -> list[int]:
        """Counts of the parameters' changes in place. Not of a packed one's values, which share
        their count with the buffer that they lie in."""
        return list(map(_version, self.params))

    def main_grads(self) -> Tensor | list[Tensor]:
        """Megatron's gradient buffers, a matrix for each expert, in the weights' layout: stacked
        where the weights are. [El, ...]"""
        if self.stacked:
            main_grad: Tensor = self.params[0].main_grad  # type: ignore[attr-defined]
            shape = (self.out_width, self.in_width)
            shape = shape[::-1] if self.layout == "in_out" else shape
            return main_grad.view(self.num_experts, *shape)
        return list(map(_main_grad, self.params))

    def kernel_grads(
        self, fits: Callable[[Sequence[Tensor]], bool]
    ) -> tuple[Tensor | list[Tensor], _KernelGrads]:
        """main_grads(), and how a kernel takes them, looked at again only when one has moved.

        fits: whether the kernel takes them, asked once.
        """
        grads, known = self.main_grads(), self.kept.main_grads
        begins = [grads] if isinstance(grads, Tensor) else grads
        on_host = list(map(Tensor.data_ptr, begins))
        if known is None or on_host != known.on_host:
            matrices = list(grads)
            addresses = list(map(Tensor.data_ptr, matrices))
            table = torch.tensor(addresses, dtype=torch.int64, device=matrices[0].device)
            known = self.kept.main_grads = _KernelGrads(on_host, table, fits(matrices))
        return grads, known

    def overwrites_main_grads(self) -> bool:
        """Whether a call is to overwrite all of main_grads() instead of adding to them, as Megatron
        asks by `overwrite_main_grad`. Where it asks for some of them only, those are zeroed."""
        asked = list(map(getattr, self.params, repeat("overwrite_main_grad"), repeat(False)))
        if all(asked):
            return True
        for param in itertools.compress(self.params, asked):
            param.main_grad.zero_()  # type: ignore[attr-defined]
        return False

    def as_gradients(self, gradient: Tensor) -> list[Tensor]:
        """A stacked gradient as one tensor for each of params, in its shape, and sharded as it."""
        if not self.stacked:
            return list(gradient.unbind(0))
        param: Any = self.params[0]
        sharded = hasattr(param, "_local_tensor")
        shape = self._stored[0].shape if sharded else param.shape
        gradient = gradient if gradient.shape == shape else gradient.view(shape)
        if sharded:  # by DTensor's constructor, which does not take the time of from_local
            gradient = type(param)(gradient, param._spec, requires_grad=False)
        return [gradient]


def params_and_values(given: GivenWeights) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What the gradients are of, and the tensors in which the values lie."""
    if isinstance(given, Packed):
        return (given.param,), (given.values,)
    if isinstance(given, Tensor):  # of a DTensor its local part
        return (given,), (getattr(given, "_local_tensor", given),)
    params = tuple(given)
    return params, params


def computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a call with tokens x is computed: autocast's where that is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def in_dtype(given: Any, dtype: torch.dtype) -> Any:
    """GivenWeights (biases, too) cast for one call, as autocast does, also those of an
    ExpertWeights; what has the dtype is returned as it is."""
    if isinstance(given, ExpertWeights):
        if all(param.dtype == dtype for param in given.params):
            return given
        # Cast with the layout that it has now: a Packed one's parameter is the tensor.
        given = given.given
    if isinstance(given, Packed):
        return given if given.param.dtype == dtype else given.param.to(dtype)
    return given.to(dtype) if isinstance(given, Tensor) else [each.to(dtype) for each in given]


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _neighbours(matrices: Sequence[Tensor]) -> Tensor | None:
    """One view of matrices that lie in one storage at equal distances (as after
    DistributedDataParallel), else None."""
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
        raise ConfigError.of(f"{name}: hidden size of the weights", found, f"{hidden} as tokens")
    if fc2.in_width != width:
        allowed = f"{width} ({activation.name} of {fc1.out_width})"
        raise ConfigError.of(f"{name}: width of weight2", fc2.in_width, allowed)
    dtypes = fc1.params[0].dtype, fc2.params[0].dtype
    if not dtypes[0] == dtypes[1] == tokens.dtype:
        allowed = f"{tokens.dtype} as tokens"
        raise ConfigError.of(f"{name}: dtype of the weights", dtypes[0], allowed)
    return fc1, fc2


@dataclass(slots=True)
class RowGroups:
    """How rows sorted by expert are divided among the experts.

    Attributes:
        offsets: end of each expert's rows, on the rows' device. int32 [El]
        ends: the offsets on the host, or None where the host does not know them. The rows may then
            be fewer than the tensors that hold them.
        likely_ends: offsets of an earlier call, for choices that only speed depends on.
        count: number of rows, on the device, for transports whose rows Triton kernels serve. int32
            [1]
        filled: whether all rows of the tensors are used, but for choices that were dropped.
        experts: what experts_of has made, or None.
    """

    offsets: Tensor
    ends: Sequence[int] | None = None
    likely_ends: Sequence[int] | None = None
    count: Tensor | None = None
    filled: bool = False
    experts: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_counts(cls, counts: Sequence[int], offsets: Tensor | None = None) -> RowGroups:
        """From the rows of each expert, and the offsets if a tensor holds them already."""
        ends = list(itertools.accumulate(counts))
        return cls(torch.tensor(ends, dtype=torch.int32) if offsets is None else offsets, ends)

    @property
    def num_rows(self) -> int:
        return host_ends(self.offsets, self.ends)[-1]

    def counts(self) -> list[int]:
        """Rows of each expert, which the host knows. [El]"""
        return [end - start for start, end in itertools.pairwise([0, *(self.ends or ())])]

    def experts_of(self, rows: int) -> Tensor:
        """The expert of each of so many rows of the tensors, made once; El for rows behind the last
        expert's. int32 [rows]"""
        if self.experts is None or self.experts.shape[0] != rows:
            each = torch.arange(rows, device=self.offsets.device, dtype=torch.int32)
            self.experts = torch.searchsorted(self.offsets, each, right=True, out_int32=True)
        return self.experts

    def part(self, begin: int, end: int) -> RowGroups:
        """The division of rows begin .. end - 1 alone. The host knows the ends."""
        assert self.ends is not None
        if (begin, end) == (0, self.ends[-1]):
            return self
        ends = [min(max(e, begin), end) - begin for e in self.ends]
        return RowGroups((self.offsets - begin).clamp(0, end - begin), ends)


def grouped_product(x: Tensor | Fp8Rows, matrices: Matrices, groups: RowGroups) -> Tensor:
    """x[rows of e] @ matrices[e]: x [N, in], El matrices [in, out] -> [N, out]; of fp8 rows with
    their Fp8Matrices in bf16."""
    if isinstance(x, Fp8Rows):
        assert isinstance(matrices, Fp8Matrices)
        return fp8_grouped_matmul(x, matrices, groups.offsets, groups.ends)
    if not x.shape[0]:
        return x.new_empty((0, matrices[0].shape[-1]))
    return grouped_matmul(x, matrices, groups.offsets, groups.ends)
