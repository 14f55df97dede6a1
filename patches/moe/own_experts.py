"""The experts of a Megatron layer where this package computes them: reads their parameters, and
checks them for changes in every call. Megatron's modules, never called, hold the parameters:

    SequentialMLP    experts.local_experts.{i}.linear_fc1.weight    El parameters [F1, H]
    TEGroupedMLP     experts.linear_fc1.weight{i}                   El parameters [F1, H]
    packed           experts.linear_fc1.weight                      one parameter [El, F1, H]

F1 = 2F for gated activations, gate first.

moe_single_grouped_weight packs the weights of a TEGroupedMLP, moe_single_grouped_bias its biases.
A packed parameter is a GroupedTensor of Transformer Engine and has no storage. Its values are in
`rowwise_data`, which Megatron's DistributedDataParallel re-points in place of `param.data`.

Shapes: N expert rows of this rank, El local experts, H hidden, F1 / F widths of an expert.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from megatron_fluid.backward.weight_grads import WeightGradScheduler
from megatron_fluid.config import FluidConfig
from megatron_fluid.moe.call import ExpertCall, Offload
from megatron_fluid.moe.expert_weights import ExpertWeights, GivenWeights, KeptLayout, Packed
from megatron_fluid.patches import versions
from megatron_fluid.patches.engine.module_hooks import ModuleHooks, is_foreign
from megatron_fluid.patches.moe.fp8 import computes_in_fp8, expire_casts
from megatron_fluid.patches.moe.limits import DISPATCHER_STEPS, PHASES, batch_invariant
from megatron_fluid.patches.overlap_decision import RELEASED, refuse_change
from megatron_fluid.topology import real_group

if TYPE_CHECKING:
    from megatron.core.transformer.moe.moe_layer import MoELayer

__all__ = ["FEATURE", "ExpertParameters", "Looked", "OwnExperts", "routes_as_megatron"]

type Parameters = tuple[nn.Parameter, ...]
type Projections = tuple[ExpertWeights, ExpertWeights]

_phases_of, _mlp_of = operator.attrgetter(*PHASES), operator.itemgetter("activation_func", "config")
_TRAINED = operator.attrgetter("requires_grad")


class Looked(NamedTuple):
    """A layer's parameters as one call has read them. Not kept after that call.

    Attributes:
        w1, w2: as returned by ExpertParameters.current().
        addresses: where they lie, to compare with an earlier look.
        leaves: whether all have one class, and all or none require gradients.
        state: a list to compare with that of an earlier look: class, address and requires_grad of
            each parameter, and which other parameters exist (a bias). Object identity is left out:
            a replaced parameter is allowed, since each call reads them again.
    """

    w1: Parameters
    w2: Parameters
    addresses: list[object]
    leaves: bool
    state: list[Any]


class ExpertParameters:
    """The current parameters of a layer's experts, in the order in which one grouped GEMM can read
    them.

    They are read at every call: the distributed optimizer re-points `param.data`, and loading may
    replace parameters. Only the order of the experts is fixed. A grouped GEMM needs its matrices in
    one storage at equal, positive strides. Megatron's parameter buffers (distributed optimizer)
    store the experts in reverse, so the order is reversed for them. Parameters that each own a
    storage are moved into a common one. Packed parameters are already in order.

    Args:
        experts: a SequentialMLP or TEGroupedMLP.

    Attributes:
        biased: whether the linears have biases.
        packed: (weights, biases): whether a linear has one parameter for all its experts.
        order: local expert numbers in the order of `current()`, ascending or descending. [El]
    """

    def __init__(self, experts: nn.Module) -> None:
        from megatron_fluid.patches.moe.expert_modules import linears_of  # imports Megatron

        fc1, fc2 = linears_of(experts)
        # The dictionaries live as long as the modules; a lookup in them is cheaper than a module's
        # attribute.
        held1, held2 = ([linear._parameters for linear in fc] for fc in (fc1, fc2))
        self._held, count = [*held1, *held2], len(fc1)
        grouped = not hasattr(experts, "local_experts")
        if grouped:
            count = int(experts.num_local_experts)  # type: ignore[arg-type]
        self.order = list(range(count))
        self.packed: tuple[bool, bool] = tuple(  # type: ignore[assignment]
            grouped and any(held.get(kind) is not None for held in self._held)
            for kind in ("weight", "bias")
        )

        def keys(kind: str, packed: bool) -> tuple[list[Any], list[Any], list[str]]:
            """For each parameter: the dictionaries of fc1 and of fc2 that hold it, and its key in
            both."""
            if not grouped or packed:
                return [*held1], [*held2], [kind] * len(fc1)
            return held1 * count, held2 * count, [f"{kind}{i}" for i in range(count)]

        self._weights, self._biases = map(keys, ("weight", "bias"), self.packed)
        self._set_getter()
        self._kept: tuple[KeptLayout | None, KeptLayout | None] = None, None  # at _addresses
        self._addresses: list[object] = []
        fc1_biases, fc2_biases, names = self._biases
        pair = fc1_biases[-1].get(names[-1]), fc2_biases[-1].get(names[-1])
        self.biased = None not in pair

    def _set_getter(self) -> None:
        """Read all parameters with a single look-up if one dictionary of each linear holds them."""
        fc1, fc2, names = self._weights
        alone = len(names) > 1 and all(held is found[0] for found in (fc1, fc2) for held in found)
        self._getter: Callable[[Any], Parameters] | None = None
        if alone:
            self._getter = operator.itemgetter(*names)

    def current(self) -> tuple[Parameters, Parameters]:
        """(w1, w2): El parameters [F1, H] and El parameters [H, F]; packed, one [El, F1, H] and one
        [El, H, F]."""
        fc1, fc2, names = self._weights
        if self._getter is not None:
            return self._getter(fc1[0]), self._getter(fc2[0])
        w1 = tuple(map(operator.getitem, fc1, names))
        w2 = tuple(map(operator.getitem, fc2, names))
        return w1, w2

    def matrices(self, looked: Looked | None = None) -> tuple[ExpertWeights, ExpertWeights]:
        """`current()` as operands of grouped GEMMs, for one call. The layout is determined again
        only if a parameter has moved. looked: this call's parameters; None reads them."""
        w1, w2, addresses, leaves, _ = self.look() if looked is None else looked
        kept1, kept2 = self._kept if addresses == self._addresses else (None, None)
        experts, packed = len(self.order), self.packed[0]
        first = ExpertWeights(
            self._given(w1, packed), experts, name="w1", kept=kept1, leaves=leaves
        )
        second = ExpertWeights(
            self._given(w2, packed), experts, name="w2", kept=kept2, leaves=leaves
        )
        self._kept, self._addresses = (first.kept, second.kept), addresses
        return first, second

    def _addresses_of(self, w1: Parameters, w2: Parameters) -> list[object]:
        """Data pointers of the weights, and storage, shape and strides of each projection's first
        and last: in other storages the same addresses have other offsets."""
        weights: tuple[Tensor, ...] = (*w1, *w2)
        if self.packed[0]:
            weights = tuple(map(_values, weights))
        ends = weights[0], weights[len(w1) - 1], weights[len(w1)], weights[-1]
        # Runs in every call for about a hundred parameters: map loops in C.
        pointers = map(Tensor.data_ptr, weights)
        layouts = ((end.untyped_storage().data_ptr(), end.shape, end.stride()) for end in ends)
        return [*pointers, *layouts]

    def _given(self, parameters: Parameters, packed: bool) -> GivenWeights:
        """Weights or biases of one linear: a parameter per expert, or one Packed for all."""
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
        addresses = self._addresses_of(w1, w2)
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

    def every(self) -> tuple[nn.Parameter, ...]:
        """All parameters, biases too."""
        (w1, w2), (b1, b2) = self.current(), self._bias_parameters() if self.biased else ((), ())
        return w1 + w2 + b1 + b2

    def arrange(self, ordered: bool = True) -> bool:
        """Put the parameters into an order that a grouped GEMM can read. On a GPU the parameters of
        each projection get a common storage. Needed before the first call, and after a move.

        Args:
            ordered: whether the order may be reversed.

        Returns:
            Whether the order was reversed: before the first call, whether it is now descending.
            Every rank of the group has to know this about every other rank.
        """
        from megatron_fluid.patches.moe.expert_modules import descends, share_storage

        for projection in () if self.packed[0] else self.current():
            if projection[0].is_cuda:
                share_storage(projection)
        if not ordered or any(self.packed) or not all(map(descends, self.current())):
            return False
        for sequence in (*self._weights, *self._biases, self.order):
            sequence.reverse()
        self._set_getter()
        return True


def _values(parameter: Any) -> Tensor:
    """Return the tensor that holds the values of a packed parameter.

    Raises:
        RuntimeError: it has none.
    """
    if type(parameter) is nn.Parameter:
        return parameter
    values: Tensor | None = parameter.rowwise_data
    if values is None:
        raise RuntimeError("a packed expert parameter has no rowwise_data")
    return values


def _released(parameter: Any) -> bool:
    # Storages are resized to 0 bytes, which changes no shape.
    return parameter.numel() > 0 and _values(parameter).untyped_storage().nbytes() == 0


FEATURE = "overlapped MoE layer"

_SURROUNDINGS = (
    "experts was replaced",
    "the token dispatcher was replaced",
    "a method of the token dispatcher was replaced",
    "a phase of the layer's class was replaced",
    "a phase of the layer was replaced",
    "the GEMM of Megatron's linears was replaced",
    "activation_func or the config of an expert was replaced",
    "config.fp8 was changed",
    "activation or moe_apply_probs_on_input was changed in the experts' config",
    "_forward_impl of the class of an expert's linear was replaced",
    "_forward_impl of an expert's linear was replaced",
)
# What Megatron's experts read of their config in each call.
_settings_of = operator.attrgetter(
    *("activation_func", "gated_linear_unit", "activation_func_clamp_value", "glu_linear_offset"),
    *("moe_mlp_glu_interleave_size", "moe_apply_probs_on_input"),
)


class OwnExperts:
    """The experts of one layer, used by every call. It holds no state of a call, and no reference
    to the layer or to a parameter.

    The overlapped path never calls the experts' modules. Adapters and quantisers replace modules,
    classes or forwards, register hooks, or add parameters. After the first forward such a change
    would have no effect on the result, so `look` detects it and it becomes an error
    (overlap_decision.py). Weights may be moved, replaced by others of the same kind, frozen or
    unfrozen: every call reads them again.

    Args:
        layer: an MoELayer whose experts megatron_fluid computes.
        config: the settings that the layer keeps.
        ordered: whether the experts may be computed in descending order, if stored that way.

    Attributes:
        weights: the experts' parameters.
        hooks: the hooks of the experts' modules.
        fp8: whether they compute in fp8.
        recompute, offload, batch_invariant: as in ExpertCall.
    """

    recompute: Collection[str] = ()
    offload: Offload | None = None
    batch_invariant = False

    def __init__(self, layer: MoELayer, config: FluidConfig, ordered: bool = True) -> None:
        from megatron.core.tensor_parallel import layers

        from megatron_fluid.patches.moe.expert_modules import linears_of, resolve

        self.config = config
        # SequentialMLP may have its own copy of the layer's config.
        settings = layer.experts.config
        self.activation = resolve(settings, hasattr(layer.experts, "linear_fc1"))
        self.weights = ExpertParameters(layer.experts)
        self.weights.arrange(ordered)
        self.hooks = ModuleHooks(experts=layer.experts)
        self._linears, modules = layers, self.hooks.modules
        self._attributes = [module.__dict__ for module in modules]
        self._mlps = [held for held in self._attributes if "activation_func" in held]
        self._linears_held = [*map(vars, itertools.chain(*linears_of(layer.experts)))]
        self._children = [module._modules for module in modules if module._modules]
        self._classes: list[Any] = [*dict.fromkeys(map(type, modules))]
        self._known = self._surroundings(layer)
        self._state = self.weights.look().state
        self._inference_active = versions.inference_mode()
        self.fused_main_grad = bool(layer.config.gradient_accumulation_fusion)
        self.fp8 = computes_in_fp8(layer)
        self.name = versions.layer_name(layer)
        self.batch_invariant = batch_invariant(layer.config, config)
        self._probs_on_input = bool(settings.moe_apply_probs_on_input)

    def _surroundings(self, layer: MoELayer) -> tuple[Any, ...]:
        """What affects the result besides the experts' parameters, the entries of _SURROUNDINGS
        first. Comparing the items reads no tensor values."""
        kind, held, dispatcher = type(layer), vars(layer), layer.token_dispatcher
        return (
            layer._modules["experts"],
            type(dispatcher),
            [getattr(getattr(dispatcher, n, None), "__func__", None) for n in DISPATCHER_STEPS],
            _phases_of(kind),
            held.keys().isdisjoint(PHASES),
            self._linears.linear_with_grad_accumulation_and_async_allreduce,
            [*map(_mlp_of, self._mlps)],
            layer.config.fp8,
            _settings_of(self._attributes[0]["config"]),
            [getattr(kind, "_forward_impl", None) for kind in self._classes],
            any(map(operator.contains, self._linears_held, itertools.repeat("_forward_impl"))),
            # What self.hooks.replaced() names. Some hundred modules: map loops in C.
            [*map(type, self.hooks.modules)],
            [*itertools.chain.from_iterable(map(dict.values, self._children))],
            [kind.forward for kind in self._classes],
            any(map(operator.contains, self._attributes, itertools.repeat("forward"))),
        )

    def look(self, layer: MoELayer) -> Looked | None:
        """Return the current parameters, or None if this call is Megatron's own: the inference
        engine's, or one of an iteration that saves activations. Runs in every call, so it is cheap
        if nothing has changed.

        Raises:
            ConfigError: a change that is not supported after the first forward.
        """
        if self._inference_active():
            return None
        hooked, changed = any(self.hooks.registered), None
        if (hooked or self.hooks.was_logged) and self.hooks.logged():
            return None
        if (now := self._surroundings(layer)) != self._known:
            found = zip(_SURROUNDINGS, now, self._known, strict=False)
            changed = next((what for what, item, known in found if item != known), None)
            changed = changed or self.hooks.replaced()
        if changed is None and hooked:
            changed = self.hooks.foreign()
        looked = self._look_at_weights(layer) if changed is None else changed
        if isinstance(looked, str):
            refuse_change(FEATURE, layer, real_group(layer.ep_group), looked)
        return looked

    def _look_at_weights(self, layer: MoELayer) -> Looked | str:
        """The current parameters, or what makes them unreadable."""
        try:
            looked = self.weights.look()
            if looked.state == self._state:
                return looked
        except (AttributeError, KeyError, RuntimeError, TypeError):  # missing, or without memory
            pass
        from megatron_fluid.patches.moe.expert_modules import expert_modules_reason

        if (reason := expert_modules_reason(layer.experts)) is not None:
            return reason
        if any(map(_released, self.weights.every())):
            return RELEASED
        now = ExpertParameters(layer.experts)
        if (now.biased, now.packed) != (self.weights.biased, self.weights.packed):
            return "biases of the experts were added or taken away, or their parameters packed"
        self.weights.arrange(ordered=False)
        looked = self.weights.look()
        self._state = looked.state
        return looked

    def gather_parameters(self) -> None:
        """Wait for the all-gather of the parameters, as the forwards of the modules would."""
        if any(self.hooks.registered):  # `look` has already dealt with replaced parameters
            self.hooks.run_parameter_gather()

    def projections(self, layer: MoELayer, looked: Looked | None = None) -> Projections:
        """Return fc1's and fc2's weights for one call. looked: its parameters; None reads them."""
        fcs = self.weights.matrices(looked)
        if self.fp8:
            expire_casts(layer, fcs)
        return fcs

    def call(
        self, x: Tensor, probs: Tensor, fcs: Projections,
        scheduler: WeightGradScheduler | None = None,
    ) -> ExpertCall:  # fmt: skip
        """Return one call of these experts. x and probs are in its transport's layout: [T, H] with
        [T, K], or [N, H] with [N]."""
        scale: Tensor | None = probs
        if self._probs_on_input:  # K = 1: Megatron requires it
            x, scale = (probs.view(-1, 1) * x).to(x.dtype), None
        w1, w2 = fcs
        return ExpertCall(
            x=x, probs=scale, w1=w1, w2=w2, num_experts=w1.num_experts, activation=self.activation,
            biases=self.weights.biases(), fp8=self.fp8,
            fp8_weight_grads=self.config.moe_fp8_weight_grads == "fp8",
            fused_main_grad=self.fused_main_grad, recompute=self.recompute, offload=self.offload,
            batch_invariant=self.batch_invariant, scheduler=scheduler, name=self.name,
        )  # fmt: skip


def routes_as_megatron(router: Any) -> bool:
    """Whether a router is Megatron's TopKRouter with its own methods. Others patch them, to replay
    the experts of a rollout or to count tokens; their methods read and return dense maps."""
    kind, names, current = _router_methods()
    if type(router) is not kind or not router.__dict__.keys().isdisjoint(names):
        return False
    return _all_megatrons(current())


@functools.cache
def _router_methods() -> tuple[type, frozenset[str], Callable[[], tuple[Any, ...]]]:
    """TopKRouter, the names of its methods, and a function that gives what routes now: these
    methods, their caller and the function that they call."""
    from megatron.core.transformer.moe import moe_layer, router

    kind, route = router.TopKRouter, lambda: moe_layer.MoELayer.route
    found = {**vars(router.Router), **vars(kind)}
    names = frozenset(n for n, x in found.items() if callable(x) and not n.startswith("__"))
    methods = operator.attrgetter(*sorted(names))
    return kind, names, lambda: (*methods(kind), route(), router.topk_routing_with_score_function)


@functools.lru_cache(maxsize=64)
def _all_megatrons(methods: tuple[Any, ...]) -> bool:
    return not any(map(is_foreign, methods))
