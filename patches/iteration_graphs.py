"""Letting go of the CUDA graphs of whole iterations that Megatron keeps.

NCCL waits for graphs that hold its kernels when a communicator is destroyed, so that
`destroy_process_group` never returns while Megatron keeps an iteration of several ranks.
"""

from __future__ import annotations

import gc
import sys

import torch

__all__ = ["drop_iteration_graphs"]


def drop_iteration_graphs() -> None:
    """Let go of the graphs of `--cuda-graph-impl full_iteration` and of their results; nothing
    without one. Call it before `torch.distributed.destroy_process_group`."""
    graphs = sys.modules.get("megatron.core.full_cuda_graph")
    if graphs is None or not any(graphs.FullCudaGraphWrapper.cuda_graph.values()):
        return
    torch.cuda.synchronize()
    for kept in (graphs.FullCudaGraphWrapper.cuda_graph, graphs.FullCudaGraphWrapper.result):
        kept.update(dict.fromkeys(kept))
    gc.collect()
