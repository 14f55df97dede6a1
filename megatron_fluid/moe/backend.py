"""Who moves the tokens of an MoE layer on plain torch: symmetric memory where it can be had, else
peer rounds.

Triton is imported only where tensors are on a GPU: the rounds need torch alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_fluid.config import MOE_BACKENDS
from megatron_fluid.errors import ConfigError

if TYPE_CHECKING:
    from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers

__all__ = ["SizedBuffers", "choose_backend", "nvlink_unsupported_reason"]


def nvlink_unsupported_reason(
    hidden: int, activation: str, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why the NVLink path cannot serve a layer of this shape, whatever the machine; None if it
    can."""
    if device.type != "cuda":
        return f"its tensors are on the {device.type}"
    from megatron_fluid.kernels.activation import ACTIVATIONS

    if dtype != torch.bfloat16:
        return f"it is in {dtype}, and that path is bfloat16 only"
    if activation not in ACTIVATIONS:
        return f"activation {activation}: it has {', '.join(ACTIVATIONS)}"
    return f"hidden_size {hidden} is no multiple of 8" if hidden % 8 else None


def choose_backend(group: dist.ProcessGroup, wanted: str, why_not: str | None) -> str:
    """ "nvlink" or "rounds". Collective over the group the first time, where `why_not` is None.

    Args:
        group: the expert-parallel group.
        wanted: a name of config.MOE_BACKENDS; "megatron" has no path of its own here, and is
            "rounds".
        why_not: what nvlink_unsupported_reason says, the same on all ranks.

    Raises:
        ConfigError: an unknown name, or "nvlink" where it cannot be had.
    """
    if wanted not in MOE_BACKENDS:
        raise ConfigError.of("moe_backend", wanted, ", ".join(MOE_BACKENDS))
    if wanted in ("rounds", "megatron"):
        return "rounds"
    if why_not is None:
        from megatron_fluid.comm.symmetric import symmetric_unsupported_reason

        why_not = symmetric_unsupported_reason(group)
    if why_not is not None and wanted == "nvlink":
        raise ConfigError.of("moe_backend", wanted, f"auto or rounds: {why_not}")
    return "rounds" if why_not is not None else "nvlink"


class SizedBuffers:
    """The NVLink buffers of one layer, sized by its first forward: by the rank that then has most
    tokens.

    Args:
        group: the expert-parallel group.
        name: the layer's, for errors.
        ffn, top_k, experts: F, K and E of the layer.
        room: how many times the tokens of the first forward a later one may bring.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, ffn: int, top_k: int, experts: int, room: int = 1
    ) -> None:
        self._group, self._name, self._shape, self._room = group, name, (ffn, top_k, experts), room
        self._domain: NvlinkBuffers | None = None

    def of(self, tokens: int, hidden: int, dtype: torch.dtype) -> NvlinkBuffers:
        """The buffers for `tokens` of this rank. Collective the first time.

        Raises:
            ConfigError: more tokens than any rank had in the first forward. On this rank alone: its
                peers time out.
        """
        if self._domain is None:
            from megatron_fluid.moe.nvlink.shared import shared_buffers

            sizes = [0] * self._group.size()
            dist.all_gather_object(sizes, tokens, group=self._group)
            tokens_of_rank = max(*sizes, 1) * self._room
            self._domain = shared_buffers(
                self._group, tokens_of_rank, hidden, *self._shape, dtype=dtype
            )
        if tokens > self._domain.max_tokens:
            raise ConfigError.of(
                f"{self._name}: tokens of a rank",
                tokens,
                f"at most {self._domain.max_tokens}, for the most of any rank in the layer's first "
                "forward; or moe_backend "
                "rounds (peers with fewer tokens wait for this rank until they time out)",
            )
        return self._domain
