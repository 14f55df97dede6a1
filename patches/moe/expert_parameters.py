"""What the overlapped path, which never calls the experts' modules, reads from them: parameters,
activation, and why they cannot be bypassed.

    SequentialMLP    experts.local_experts.{i}.linear_fc1.weight    El parameters [F1, H]
    TEGroupedMLP     experts.linear_fc1.weight{i}                   El parameters [F1, H]
    packed           experts.linear_fc1.weight                      one parameter [El, F1, H]

F1 = 2F for gated activations, gate first.

Packed is what moe_single_grouped_weight makes of a TEGroupedMLP, and moe_single_grouped_bias of its
biases: a GroupedTensor of Transformer Engine, which has no memory itself. Its values lie in its
attribute `rowwise_data`. Megatron's DistributedDataParallel re-points that, not `param.data`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import activations, fp8_utils
from megatron.core.fusions import fused_bias_geglu
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_fluid.moe.activations import Activation, Variant, resolve_activation
from megatron_fluid.moe.expert_weights import ExpertWeights, GivenWeights, KeptLayout, Packed
from megatron_fluid.patches.engine.module_hooks import ModuleHooks, is_foreign

__all__ = [
    "ExpertParameters",
    "Looked",
    "activation_name",
    "expert_gemm",
    "expert_modules_reason",
    "resolve",
]

type Parameters = tuple[torch.nn.Parameter, ...]

# (config.activation_func, config.gated_linear_unit): our name. Megatron compares the function
# object, and so does this.
_ACTIVATIONS: dict[tuple[Callable[..., Any], bool], str] = {
    (F.silu, True): "swiglu",
    (F.gelu, True): "geglu",
    (F.silu, False): "silu",
    (F.gelu, False): "gelu",
    (F.relu, False): "relu",
    (activations.squared_relu, False): "relu2",
}
_QUICK_GELU = (activations.quick_gelu, fused_bias_geglu.quick_gelu)  # Megatron has it twice


def activation_name(config: TransformerConfig) -> str | None:
    """Name of the activation that `config` asks for, or None where the overlapped path has none."""
    if config.activation_func in _QUICK_GELU:
        return "quick_geglu" if config.gated_linear_unit else "quick_gelu"
    return _ACTIVATIONS.get((config.activation_func, bool(config.gated_linear_unit)))


def resolve(config: TransformerConfig, grouped: bool = False) -> Activation:
    """The activation that `config` asks for; activation_name must know it.

    Args:
        grouped: of a TEGroupedMLP, which alone reads moe_mlp_glu_interleave_size.
    """
    name = activation_name(config)
    assert name is not None
    if not config.gated_linear_unit:
        return resolve_activation(name)
    interleave = (config.moe_mlp_glu_interleave_size or 0) if grouped else 0
    limit, offset = config.activation_func_clamp_value, float(config.glu_linear_offset)
    return resolve_activation(name, variant=Variant(limit, offset, interleave))


def _te_linear_types() -> tuple[type, ...]:
    """Transformer Engine's expert linears, where it is installed: their weights are plain
    parameters too."""
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        return ()
    names = [
        f"TE{kind}Parallel{grouped}Linear"
        for kind in ("Column", "Row")
        for grouped in ("", "Grouped")
    ]
    found = (getattr(extension, name, None) for name in names)
    return tuple(kind for kind in found if isinstance(kind, type))


def _linears(experts: torch.nn.Module) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The modules that hold fc1 and fc2: El of each in SequentialMLP, one of each in
    TEGroupedMLP."""
    if isinstance(experts, SequentialMLP):
        locals_ = list(experts.local_experts)
        return [e.linear_fc1 for e in locals_], [e.linear_fc2 for e in locals_]
    return [experts.linear_fc1], [experts.linear_fc2]  # type: ignore[list-item]


def expert_modules_reason(experts: torch.nn.Module) -> str | None:
    """Why these expert modules cannot be bypassed, or None.

    A class that Megatron does not build itself (a LoRA wrapper, a quantised linear, a subclass) may
    compute something else than a plain linear, so that only the classes known here are taken over.
    """
    if type(experts) not in (SequentialMLP, TEGroupedMLP):
        name = type(experts).__name__
        return f"experts are a {name}; SequentialMLP and TEGroupedMLP can be taken over"
    if isinstance(experts, SequentialMLP):
        for index, expert in enumerate(experts.local_experts):
            if type(expert) is not MLP:
                return f"local_experts.{index} is a {type(expert).__name__}, not Megatron's MLP"
            if expert.activation_func is not expert.config.activation_func:
                return f"local_experts.{index}.activation_func was replaced"
    known = (ColumnParallelLinear, RowParallelLinear, *_te_linear_types())
    for linear in (linear for linears in _linears(experts) for linear in linears):
        if type(linear) not in known:
            name = type(linear).__name__
            return f"an expert's linear is a {name}, which may compute more than a linear"
        if getattr(linear, "te_quant_params", None) is not None:
            return "an expert's linear has its own quantisation recipe"
    config: Any = experts.config
    fused = config.bias_activation_fusion and isinstance(experts, SequentialMLP)
    if fused and config.add_bias_linear and config.activation_func_clamp_value is not None:
        return "SequentialMLP's fused activation clamps before it adds the bias"
    modules = ModuleHooks(experts=experts)
    if (reason := modules.replaced() or modules.overridden() or modules.foreign()) is not None:
        return reason
    if is_foreign(expert_gemm()):
        return "the GEMM of Megatron's linears was replaced (by a quantiser, say)"
    parameters = ExpertParameters(experts)
    try:
        parameters.current()
    except KeyError as error:
        return f"an expert's linear has no parameter {error}"
    if parameters.has_bias() != [bool(config.add_bias_linear)]:
        return f"biases of the experts' linears, with add_bias_linear={config.add_bias_linear}"
    for name, parameter in experts.named_parameters():
        if (reason := _unreadable(parameter)) is not None:
            return f"experts.{name} is a {reason}"
        if hasattr(parameter, "__fsdp_param__"):
            return f"experts.{name} is Megatron-FSDP's, whose gradient buffers come and go"
    if len({parameter.requires_grad for parameter in experts.parameters()}) > 1:
        return "some expert weights are frozen and some are not"
    return None


def _unreadable(parameter: Any) -> str | None:
    """What a parameter is whose values cannot be read where they lie, or None."""
    kind = type(parameter)
    if not fp8_utils.is_grouped_tensor(parameter):
        if kind is torch.nn.Parameter and type(parameter.data) is torch.Tensor:
            return None
        return f"{type(parameter.data).__name__}, not a plain tensor"
    values: Any = getattr(parameter, "rowwise_data", None)
    if kind is not fp8_utils.GroupedTensor or type(values) is not torch.Tensor:
        return f"{kind.__name__} without rowwise_data of its own"
    if parameter.quantizer is not None or values.dtype != parameter.dtype:
        return f"{kind.__name__} of quantised values"
    if values.numel() != parameter.numel() or not values.is_contiguous():
        return f"{kind.__name__} of parts that do not lie one after the other"
    return None


def expert_gemm() -> Callable[..., Any]:
    """The function that multiplies in Megatron's own linears, as it is now."""
    return layers.linear_with_grad_accumulation_and_async_allreduce


class Looked(NamedTuple):
    """A layer's parameters as one call has found them. Not kept beyond it.

    Attributes:
        w1, w2: as of ExpertParameters.current().
        addresses: where they lie.
        leaves: whether they are parameters of one class, all of them trained or none.
        state: numbers and classes to be compared in one go with those of another look: of which
            classes the parameters are, where they lie, which are trained, and whether there are
            others (a bias). Whether an object is the same does not matter, as each call reads it.
    """

    w1: Parameters
    w2: Parameters
    addresses: list[int]
    leaves: bool
    state: list[Any]


class ExpertParameters:
    """The current parameters of a layer's experts, in the order in which one grouped GEMM can read
    them.

    They are read at every call: the distributed optimizer re-points `param.data`, and loading may
    replace parameters, so that nothing derived from them is kept. Only the order is fixed. A
    grouped GEMM reads matrices that lie in one storage at equal, positive distances. Megatron's
    parameter buffers (distributed optimizer) hold them at equal distances in reverse, so that the
    reversed order serves; parameters with a storage each are moved into a common one. Packed
    parameters lie in order.

    Args:
        experts: a SequentialMLP or TEGroupedMLP.

    Attributes:
        biased: whether the linears have biases.
        packed: whether all experts' weights, and whether their biases, are one parameter a linear.
        order: local expert numbers in the order of `current()`, ascending or descending. [El]
    """

    def __init__(self, experts: torch.nn.Module) -> None:
        fc1, fc2 = _linears(experts)
        # The dictionaries live as long as the modules; a lookup in them is cheaper than a module's
        # attribute.
        held1, held2 = ([linear._parameters for linear in fc] for fc in (fc1, fc2))
        self._held, count = [*held1, *held2], len(fc1)
        grouped = not isinstance(experts, SequentialMLP)
        if grouped:
            count = int(experts.num_local_experts)  # type: ignore[arg-type]
        self.order = list(range(count))
        self.packed: tuple[bool, bool] = tuple(  # type: ignore[assignment]
            grouped and any(held.get(kind) is not None for held in self._held)
            for kind in ("weight", "bias")
        )

        def keys(kind: str, packed: bool) -> tuple[list[Any], list[Any], list[str]]:
            """Of each parameter: the dictionary of fc1 and of fc2 that holds it, its key in
            both."""
            if not grouped or packed:
                return [*held1], [*held2], [kind] * len(fc1)
            return held1 * count, held2 * count, [f"{kind}{i}" for i in range(count)]

        self._weights, self._biases = map(keys, ("weight", "bias"), self.packed)
        self._name()
        self._kept: tuple[KeptLayout | None, KeptLayout | None] = None, None  # at these addresses:
        self._addresses: list[int] = []
        self.biased = None not in self._found_biases()[-1]

    def _name(self) -> None:
        """Of several parameters in one dictionary a single look-up gives all."""
        fc1, fc2, names = self._weights
        alone = len(names) > 1 and all(held is found[0] for found in (fc1, fc2) for held in found)
        self._named: Callable[[Any], Parameters] | None = None
        if alone:
            self._named = operator.itemgetter(*names)

    def current(self) -> tuple[Parameters, Parameters]:
        """(w1, w2): El parameters [F1, H] and El parameters [H, F]; packed, one [El, F1, H] and one
        [El, H, F]."""
        fc1, fc2, names = self._weights
        if self._named is not None:
            return self._named(fc1[0]), self._named(fc2[0])
        w1 = tuple(map(operator.getitem, fc1, names))
        w2 = tuple(map(operator.getitem, fc2, names))
        return w1, w2

    def matrices(self, looked: Looked | None = None) -> tuple[ExpertWeights, ExpertWeights]:
        """`current()` as grouped GEMMs take it, for one call. Where the parameters lie is looked at
        again only when one has moved. looked: of this call, if there is one."""
        w1, w2, addresses, leaves, _ = self.look() if looked is None else looked
        kept1, kept2 = self._kept if addresses == self._addresses else (None, None)
        given, packed = (len(self.order), leaves), self.packed[0]
        first = _weights(self._given(w1, packed), *given, "w1", kept1)
        second = _weights(self._given(w2, packed), *given, "w2", kept2)
        self._kept, self._addresses = (first.kept, second.kept), addresses
        return first, second

    def _addresses_of(self, weights: Parameters) -> list[int]:
        """Where weights lie."""
        if self.packed[0]:
            return [_values(weight).data_ptr() for weight in weights]
        # Of a hundred parameters in every call: map, whose loop is in C.
        return [*map(torch.Tensor.data_ptr, weights)]

    def _given(self, parameters: Parameters, packed: bool) -> GivenWeights:
        """Weights or biases of one linear, as its experts read them."""
        if not packed:
            return parameters
        (parameter,) = parameters
        shape = len(self.order), *parameter.shape[1:]
        return Packed(parameter, _values(parameter).detach().view(shape))

    def look(self) -> Looked:
        """The parameters as they are now.

        Raises:
            AttributeError, KeyError, RuntimeError: a parameter is missing or has no memory.
        """
        w1, w2 = self.current()
        both = (*w1, *w2)
        addresses = self._addresses_of(both)
        kinds, trained = [*map(type, both)], [*map(_TRAINED, both)]
        state: list[Any] = [*addresses, *kinds, *trained]
        if self.packed[0]:
            state += [(_values(weight).dtype, weight.shape) for weight in both]
        state += map(type, map(dict.get, self._held, itertools.repeat("bias")))
        state += map(len, self._held)
        alike = trained.count(trained[0]) == len(both) == kinds.count(kinds[0])
        return Looked(w1, w2, addresses, alike, state)

    def biases(self) -> tuple[GivenWeights, GivenWeights] | None:
        """(b1, b2): El parameters [F1] and El parameters [H], in the order of `current()`, or two
        packed ones [El, F1] and [El, H]; None without biases."""
        if not self.biased:
            return None
        b1, b2 = self._bias_parameters()
        return self._given(b1, self.packed[1]), self._given(b2, self.packed[1])

    def _bias_parameters(self) -> tuple[Parameters, Parameters]:
        fc1, fc2, names = self._biases
        return tuple(map(operator.getitem, fc1, names)), tuple(map(operator.getitem, fc2, names))

    def _found_biases(self) -> list[tuple[Any, Any]]:
        fc1, fc2, names = self._biases
        return [*zip(map(dict.get, fc1, names), map(dict.get, fc2, names), strict=True)]

    def has_bias(self) -> list[bool]:
        """Whether a linear has a bias; both values where some have and some have not."""
        return sorted({bias is not None for pair in self._found_biases() for bias in pair})

    def first(self) -> torch.nn.Parameter:
        """One of the parameters."""
        fc1, _, names = self._weights
        first: torch.nn.Parameter = fc1[0][names[0]]
        return first

    def every(self) -> tuple[torch.nn.Parameter, ...]:
        """All parameters, biases too."""
        (w1, w2), (b1, b2) = self.current(), self._bias_parameters() if self.biased else ((), ())
        return w1 + w2 + b1 + b2

    def reverse(self) -> None:
        """Turn the order of `current()` and `order` round."""
        for sequence in (*self._weights, *self._biases, self.order):
            sequence.reverse()
        self._name()

    def arrange(self, ordered: bool = True) -> bool:
        """Bring about the order that a grouped GEMM can read, before the first call, and again when
        parameters have moved.

        Args:
            ordered: whether the order may be turned round.

        Returns:
            Whether the order was turned round: before the first call, whether it is descending.
            Every rank of the group has to know it of every other.
        """
        self.share_storages()
        if ordered and self.lies_reversed():
            self.reverse()
            return True
        return False

    def share_storages(self) -> None:
        """On a GPU, move the parameters of each projection into a common storage."""
        if self.packed[0]:
            return
        for projection in self.current():
            if projection[0].is_cuda:
                share_storage(projection)

    def lies_reversed(self) -> bool:
        """Whether the parameters lie in memory in the reverse of `order`, and can be turned."""
        return not any(self.packed) and all(_descends(each) for each in self.current())


def _weights(
    given: GivenWeights, experts: int, leaves: bool, name: str, kept: KeptLayout | None
) -> ExpertWeights:
    return ExpertWeights(given, experts, name=name, kept=kept, leaves=leaves)


def _values(parameter: Any) -> torch.Tensor:
    """Where the values of a packed parameter lie.

    Raises:
        RuntimeError: nowhere.
    """
    if type(parameter) is torch.nn.Parameter:
        return parameter
    values: torch.Tensor | None = parameter.rowwise_data
    if values is None:
        raise RuntimeError("a packed parameter without values")
    return values


_TRAINED = operator.attrgetter("requires_grad")


def _descends(weights: tuple[torch.nn.Parameter, ...]) -> bool:
    """Whether matrices of one storage lie in it in reverse."""
    first, last = weights[0], weights[-1]
    same = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    return same and last.storage_offset() < first.storage_offset()


def share_storage(weights: tuple[torch.nn.Parameter, ...]) -> None:
    """Move parameters that have a storage each into a common one; those that lie in someone's
    buffer stay there."""
    kinds = {(weight.shape, weight.dtype, weight.is_contiguous()) for weight in weights}
    owned = all(weight.untyped_storage().nbytes() == weight.nbytes for weight in weights)
    if len(weights) == 1 or len(kinds) != 1 or not weights[0].is_contiguous() or not owned:
        return
    # In an evaluation, too, parameters stay tensors that can be trained.
    with torch.inference_mode(False), torch.no_grad():
        stack = weights[0].new_empty((len(weights), *weights[0].shape))
        for place, weight in zip(stack, weights, strict=True):
            place.copy_(weight)
            weight.data = place
