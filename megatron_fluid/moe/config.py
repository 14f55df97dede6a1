"""The shape and the settings of the standalone MoE layers."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Required, TypedDict

from torch import Tensor

from megatron_fluid.config import CHOICES, FieldsConfig
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe.activations import Activation

__all__ = ["MoEConfig", "MoEConfigDict"]


class MoEConfigDict(TypedDict, total=False):
    """MoEConfig as a dictionary, for type checkers. `MoEConfig.of` takes any mapping."""

    hidden_size: Required[int]
    ffn_hidden_size: Required[int]
    num_experts: Required[int]
    top_k: Required[int]
    activation: str | Activation | Callable[[Tensor], Tensor]
    score_function: str
    pre_softmax: bool
    scaling: float | None
    aux_loss_coefficient: float
    shared_ffn_hidden_size: int
    dx_chunks: int | None
    backend: str | None
    capacity_factor: float | None
    graph: bool
    recompute: Collection[str] | None
    fp8_recipe: str | None
    fp8_weight_grads: str | None
    init_std: float
    router_dtype: str | None
    batch_invariant: bool | None


@dataclass(frozen=True)
class MoEConfig(FieldsConfig):
    """The shape and the settings of an MoE layer.

    Attributes:
        hidden_size: H.
        ffn_hidden_size: F, of each expert.
        num_experts: E, a multiple of the number of ranks.
        top_k: K.
        activation: a name in moe.activations.ACTIVATIONS, or a callable without parameters, called
            again in the backward.
        score_function, pre_softmax, scaling: the router's, see moe.router.route. With top_k 1,
            softmax needs pre_softmax.
        aux_loss_coefficient: weight of the load-balancing loss; 0 for none. Where the main loss is
            scaled, so is this by moe.router.set_aux_loss_scale.
        shared_ffn_hidden_size: width of an expert that every token passes; 0 for none.
        dx_chunks: pieces in which each peer's dX is computed and sent back, over rounds; None takes
            FluidConfig's.
        backend: who moves MoELayer's tokens, "local", "nvlink", "hierarchical", "rounds" or "auto";
            None takes FluidConfig's; "experts" and "megatron" there are for Megatron's layers.
        capacity_factor: bounded mode of MoELayer: a rank has room for that many times the rows of a
            balanced routing, the most tokens of a rank * top_k. None for exact mode: room for all.
        graph: MoELayer's calls can be captured in CUDA graphs under any routing, with room for what
            its eager calls received: see moe.room.graph_room.
        recompute: what MoELayer's backward computes again in place of keeping it: "rows", the
            dispatched tokens (another dispatch), "hidden", fc1's output (another GEMM). None takes
            FluidConfig's.
        fp8_recipe: "blockwise" computes forward and dgrad of MoELayer's experts in fp8 e4m3, with a
            scale for 1 x 128 of activations and gradients and for 128 x 128 of weights. For Hopper
            GPUs, bf16 parameters, swiglu, widths that are multiples of 128, see docs/fp8.md. None
            computes them in the parameters' precision.
        fp8_weight_grads: with fp8_recipe: the precision of the experts' weight gradients: "fp8"
            with a scale for 128 rows of each feature, or "bf16". None takes FluidConfig's.
        init_std: standard deviation of the initial weights.
        router_dtype: "fp32" or "fp64" computes the router's logits and probabilities in it; None in
            the dtype of its weight, which `layer.router.float()` keeps in fp32 in a bf16 model.
        batch_invariant: the forward gives a token the same bits whatever other tokens are in the
            batch, and whatever the number of ranks and the backend; not over "hierarchical". A
            callable `activation` must compute each row alone. None takes FluidConfig's.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    activation: str | Activation | Callable[[Tensor], Tensor] = "swiglu"
    score_function: str = "softmax"
    pre_softmax: bool = False
    scaling: float | None = None
    aux_loss_coefficient: float = 0.0
    shared_ffn_hidden_size: int = 0
    dx_chunks: int | None = None
    backend: str | None = None
    capacity_factor: float | None = None
    graph: bool = False
    recompute: Collection[str] | None = None
    fp8_recipe: str | None = None
    fp8_weight_grads: str | None = None
    init_std: float = 0.02
    router_dtype: str | None = None
    batch_invariant: bool | None = None

    def __post_init__(self) -> None:
        self.check_fields()
        if self.dx_chunks is not None and self.dx_chunks > 1024:
            raise ConfigError.of("dx_chunks", self.dx_chunks, "1 to 1024, or None")
        if self.scaling is not None and not self.scaling > 0.0:
            raise ConfigError.of("scaling", self.scaling, "a number above 0, or None")
        least = dict.fromkeys(("hidden_size", "ffn_hidden_size", "num_experts", "top_k"), 1)
        if self.dx_chunks is not None:
            least["dx_chunks"] = 1
        for name, smallest in {**least, "shared_ffn_hidden_size": 0}.items():
            value = getattr(self, name)
            if value < smallest:
                none = ", or None" if name == "dx_chunks" else ""
                raise ConfigError.of(name, value, f"an integer of at least {smallest}{none}")
        backends = [n for n in CHOICES["moe_backend"] if n not in ("experts", "megatron")]
        known: dict[str, Collection[object]] = {
            "backend": backends,
            "fp8_recipe": ["blockwise"],
            "fp8_weight_grads": CHOICES["moe_fp8_weight_grads"],
            "batch_invariant": [True, False],
        }
        for name, values in known.items():
            if getattr(self, name) not in (None, *values):
                allowed = f"{', '.join(map(str, values))}, or None"
                raise ConfigError.of(name, getattr(self, name), allowed)
        factor = self.capacity_factor
        if factor is not None and not 0.0 < factor < math.inf:
            raise ConfigError.of("capacity_factor", factor, "a number above 0, or None")
        if factor is not None and self.graph:
            raise ConfigError.of("capacity_factor", factor, "None with graph=True")
        if self.recompute is not None and (
            isinstance(self.recompute, str)
            or not isinstance(self.recompute, Collection)
            or any(name not in ("rows", "hidden") for name in self.recompute)
        ):
            raise ConfigError.of("recompute", self.recompute, "some of rows, hidden, or None")
        for name in ("aux_loss_coefficient", "init_std"):
            if not getattr(self, name) >= 0.0:
                raise ConfigError.of(name, getattr(self, name), "0 or more")
