"""Which transport moves the tokens of an MoE layer: one table of reasons and one policy, for layers
on plain torch and for Megatron's.

A transport that is asked for by name and cannot serve the layer is an error. `auto` takes the first
of TRANSPORTS that can; rounds inside one NVLink domain only where nothing else can serve. There a
single all-to-all is faster: Megatron's layers have one (ExchangeCase.megatron) and keep it. Layers
on plain torch have none: they take rounds, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fluid.errors import ConfigError

__all__ = [
    "TRANSPORTS",
    "Choice",
    "ExchangeCase",
    "choose_transport",
    "local_unsupported_reason",
    "nvlink_layer_reason",
]

# Of 32 bits the experts' products are torch's, one for each expert.
NVLINK_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def nvlink_layer_reason(
    hidden: int, activation: str | None, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why the NVLink path cannot serve a layer of this shape, whatever the machine, or None
    if it can. activation: None where the path does not compute it."""
    if device.type != "cuda":
        return f"its tensors are on the {device.type}"
    from megatron_fluid.kernels.activation.kernel import ACTIVATIONS

    if dtype not in NVLINK_DTYPES:
        return f"parameters of {dtype}: the NVLink path has {', '.join(map(str, NVLINK_DTYPES))}"
    if activation is not None and activation not in ACTIVATIONS:
        return f"activation {activation}: the NVLink path has {', '.join(ACTIVATIONS)}"
    return f"hidden_size {hidden} is no multiple of 8" if hidden % 8 else None


def local_unsupported_reason(group: dist.ProcessGroup) -> str | None:
    """Return why the local transport cannot serve `group`, or None if it can."""
    ranks = group.size()
    return None if ranks == 1 else f"it is for one rank, and the group has {ranks}"


def _fused_everywhere(transport: str) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class ExchangeCase:
    """What decides about the transport of a layer. All ranks of the group have the same.

    Attributes:
        group: the expert-parallel group.
        domains: gives the NVLink domain of each rank of the group, [W]. Collective.
        on_gpu: whether the layer computes on a GPU.
        nvlink_reason: why symmetric memory cannot serve this layer on any machine, or None.
        by_phase: gives for a transport why exchange and experts run one after the other over it,
            so that nothing overlaps within the layer; None where they are fused.
        batch_invariant: whether a token's sum must not depend on the ranks.
        megatron: whether Megatron's own all-to-all is an alternative, as for a layer of Megatron.
    """

    group: dist.ProcessGroup
    domains: Callable[[], Sequence[int]]
    on_gpu: bool
    nvlink_reason: str | None = None
    by_phase: Callable[[str], str | None] = _fused_everywhere
    batch_invariant: bool = False
    megatron: bool = False

    def several_domains(self) -> bool:
        return len(set(self.domains())) > 1


class Choice(NamedTuple):
    """A transport, or None where Megatron's all-to-all is kept; and why it is not symmetric memory,
    where that was tried."""

    transport: str | None
    reason: str | None


def _nvlink(case: ExchangeCase) -> str | None:
    if case.nvlink_reason is not None or not case.on_gpu:
        return case.nvlink_reason or "it needs GPUs"
    from megatron_fluid.comm import symmetric

    return symmetric.symmetric_unsupported_reason(case.group)


def _hierarchical(case: ExchangeCase) -> str | None:
    if case.batch_invariant:
        return "batch_invariant is on, and it sums a token's rows on each host first"
    if not case.several_domains():
        return "it is for ranks on several hosts, and the group's are on one"
    reason = case.by_phase("hierarchical")
    return reason and f"{reason}; and layers between two levels are fused"


# In the order in which auto takes them: why each cannot serve a case, or None. Collective.
TRANSPORTS: dict[str, Callable[[ExchangeCase], str | None]] = {
    "local": lambda case: local_unsupported_reason(case.group),
    "nvlink": _nvlink,
    "hierarchical": _hierarchical,
    "rounds": lambda case: None,
}


def _slower_rounds(case: ExchangeCase, no_nvlink: str | None) -> str | None:
    """Why auto keeps Megatron's all-to-all and does not take rounds, or None. On CPUs every form
    that can overlap is taken. With batch_invariant Megatron's sums would have another order."""
    if case.batch_invariant or not (case.megatron and case.on_gpu):
        return None
    if not case.several_domains():
        return f"no symmetric memory ({no_nvlink}), and rounds do not pay inside one NVLink domain"
    reason = case.by_phase("rounds")
    return reason and f"{reason}; and nothing overlaps phase by phase between hosts"


def choose_transport(wanted: str, case: ExchangeCase, setting: str = "moe_backend") -> Choice:
    """The transport of a layer. Collective over its group.

    Args:
        wanted: "auto" or a name of TRANSPORTS.
        setting: the name of the user's setting that holds `wanted`, for errors.

    Raises:
        ConfigError: an unknown name, or a transport that was asked for by name and is unavailable.
    """
    if wanted == "auto":
        reasons: dict[str, str | None] = {}
        for name, unavailable in TRANSPORTS.items():
            reasons[name] = unavailable(case)
            if name == "rounds":
                reasons[name] = _slower_rounds(case, reasons["nvlink"])
            if reasons[name] is None:
                return Choice(name, reasons.get("nvlink"))
        return Choice(None, reasons["rounds"])
    if wanted not in TRANSPORTS:
        raise ConfigError.of(setting, wanted, ", ".join(("auto", *TRANSPORTS)))
    if (reason := TRANSPORTS[wanted](case)) is not None:
        others = "auto, rounds or megatron" if case.megatron else "auto or rounds"
        raise ConfigError.of(setting, wanted, f"{others}, because {reason}")
    return Choice(wanted, None)
