"""A step that is captured in a CUDA graph, beside the same step run eagerly."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor


def capture(step: Callable[[], Sequence[Tensor]]) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """A graph of `step`, which has run once before, and what its replays write."""
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        return graph, step()


def replayed(
    step: Callable[[], Sequence[Tensor]], x: Tensor
) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Capture `step`, which reads the leaf `x`, and replay it three times, each with new values in
    `x`: what the replay made, and what the step makes of the same values eagerly."""
    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        yield captured, step()
