"""The norms of queries and keys, in modules that Megatron builds.

Two RMSNorms of one epsilon are computed where heads arrive, in the kernel that puts them in order
(attention.packed.Norm). Any other pair is a part of the attention kernel's graph, before the
rotation.

Legend: D head dim.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.patches.linears import normalised

__all__ = ["HeadNorms", "norm_reason", "of_transformer_engine"]

_PARAMETERS = ("weight", "bias")


@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """The norms of one module's queries and keys; each may be None."""

    query: Any
    key: Any

    @property
    def any(self) -> bool:
        return self.query is not None or self.key is not None

    @property
    def on_arrival(self) -> bool:
        """Whether they are RMSNorms that the exchange computes."""
        if not _kind(self.query) == _kind(self.key) == "rms":
            return False
        return bool(self.query.eps is not None and self.query.eps == self.key.eps)

    @property
    def in_graph(self) -> bool:
        """Whether the attention kernel's graph has them."""
        return self.any and not self.on_arrival

    def weights(self, like: Tensor, dim: int) -> tuple[Tensor | None, Tensor | None]:
        """The weights [D] of two RMSNorms on arrival; None and None of any others."""
        if not self.on_arrival:
            return None, None
        return _rms_weight(self.query, like, dim), _rms_weight(self.key, like, dim)

    def tensors(self) -> tuple[Tensor, ...]:
        """What the kernel's graph reads: the parameters of norms in it."""
        if not self.in_graph:
            return ()
        found = (getattr(n, name, None) for n in (self.query, self.key) for name in _PARAMETERS)
        return tuple(t for t in found if t is not None)

    def apply(self, q: Tensor, k: Tensor, tensors: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys [..., D] in the graph, with ``tensors`` for the parameters."""
        return _normalised(self.query, q, tensors), _normalised(self.key, k, tensors)


def norm_reason(q_norm: Any, k_norm: Any) -> str | None:
    """Why the norms of queries and keys cannot be computed here, or None."""
    for name, norm in (("q_layernorm", q_norm), ("k_layernorm", k_norm)):
        if norm is not None and _kind(norm) is None:
            kind = type(norm).__name__
            return f"{name} is a {kind}; queries and keys are normalised by RMSNorm or LayerNorm"
    return None


def of_transformer_engine(*names: str) -> tuple[type, ...]:
    """Transformer Engine's norms that Megatron builds, by name; none where it is not installed."""
    from megatron.core.extensions import transformer_engine as extension

    te = sys.modules.get("transformer_engine.pytorch")
    return tuple(getattr(te, name) for name in names if te is not None and extension.HAVE_TE)


def _kind(norm: Any) -> str | None:
    """ "rms" or "layer" of a norm that is computed here, else None."""
    from megatron.core.transformer.torch_norm import L2Norm

    if type(norm) in (torch.nn.RMSNorm, L2Norm, *of_transformer_engine("RMSNorm")):
        return "rms"
    layer_norms = (torch.nn.LayerNorm, *of_transformer_engine("LayerNorm"))
    return "layer" if type(norm) in layer_norms else None


def _rms_weight(norm: Any, like: Tensor, dim: int) -> Tensor:
    """Wide where it is stored less one, as 16 bits would lose its digits; ones for Megatron's
    L2Norm, which has none."""
    weight: Tensor | None = getattr(norm, "weight", None)
    if weight is None:
        return like.new_ones(dim)
    return weight.float() + 1 if getattr(norm, "zero_centered_gamma", False) else weight


def _normalised(norm: Any, heads: Tensor, tensors: Iterator[Tensor]) -> Tensor:
    if norm is None:
        return heads
    weight, bias = (
        next(tensors) if getattr(norm, name, None) is not None else None for name in _PARAMETERS
    )
    centered = bool(getattr(norm, "zero_centered_gamma", False))
    return normalised(str(_kind(norm)), heads, weight, bias, norm.eps, centered)
