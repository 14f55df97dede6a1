"""A small layer on one rank's simulated memory for tests of the NVLink path, and its reference."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, Schedule
from tests.support.moe_reference import moe_reference
from tests.support.simulated_workspace import SimulatedWorkspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T, K, E, H, F = 10, 2, 4, 32, 24
SENT = Schedule(stream=True, sent_rows=True)


def make(
    seed: int = 1, gated: bool = True, schedule: Schedule = NO_OVERLAP
) -> tuple[NvlinkBuffers, Tensor, list[Tensor], Tensor]:
    """Buffers of one rank, ids [T, K] with dropped choices and an empty expert, leaves (x, probs,
    w1, w2), grad [T, H].
    """
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(T, E - 1, generator=g).topk(K, -1).indices  # nothing goes to the last expert
    ids[0, 1] = -1
    ids[3] = -1
    shapes = [(T, H), (T, K), (E, 2 * F if gated else F, H), (E, H, F), (T, H)]
    *leaves, grad = (torch.randn(*shape, generator=g).to(DEVICE) * 0.5 for shape in shapes)
    buffers = NvlinkBuffers(
        SimulatedWorkspace(1, DEVICE).rank(0), T, H, K, E, torch.float32, schedule=schedule
    )
    return buffers, ids.to(DEVICE), [leaf.requires_grad_() for leaf in leaves], grad


def reference(ids: Tensor, leaves: list[Tensor], activation: str) -> Tensor:
    x, probs, w1, w2 = leaves
    return moe_reference(x, ids, probs, w1, w2, activation)


def gradients(y: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]
