"""The halves of the decode-time all-to-all as tests call them, all ranks in one process."""

from typing import Any

import torch
from torch import Tensor

from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.reference import dispatch_reference
from tests.support.fake_nvshmem import FakeNvshmem
from tests.support.simulated_workspace import SimulatedWorkspace

BF16_ROUNDINGS = 8e-3  # of two roundings to bf16


def build(
    layout: Layout, nvshmem: FakeNvshmem | None = None
) -> tuple[SimulatedWorkspace, list[AllToAll]]:
    """All ranks over simulated peer memory, or over a fake NVSHMEM."""
    from megatron_fluid.low_latency.nvshmem import Nvshmem
    from megatron_fluid.low_latency.peer_memory import PeerMemory

    simulated, device = SimulatedWorkspace(layout.world_size), torch.device("cpu")
    spaces = [simulated.rank(r) for r in range(layout.world_size)]
    if nvshmem is not None:
        nvshmem.ranks = [*spaces]
    kind = PeerMemory if nvshmem is None else Nvshmem
    return simulated, [AllToAll(layout, kind(layout, space), device) for space in spaces]


def bf16(*shape: int) -> Tensor:
    """Random values."""
    return torch.randn(*shape).to(torch.bfloat16)


def tensor_of(layout: Layout, width: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros [L, R, width]."""
    return torch.zeros(layout.local_experts, layout.max_rows, width).to(dtype)


def send(ata: AllToAll, x: Tensor, ids: Tensor, weights: Tensor | None = None, **more: Any) -> None:
    """Enqueue the send half of a dispatch; `more` may hold scale and bound_m."""
    scale = more.pop("scale", None)
    ata.dispatch(None, None, None, x, scale, ids, do_recv=False, weights=weights, **more)


def receive(
    ata: AllToAll, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None, **more: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Enqueue the receive half, into new tensors: counts, rows, scales or None."""
    layout = ata.layout
    width = layout.hidden_dim_bytes // dtype.itemsize
    counts = torch.full((layout.local_experts,), -7, dtype=torch.int32)
    out = tensor_of(layout, width, dtype) if out is None else out
    words = layout.scale_words
    scale = torch.zeros(*out.shape[:-1], words) if words else None
    ata.dispatch(counts, out, scale, None, None, None, do_send=False, **more)
    return counts, out, scale


def send_back(ata: AllToAll, y: Tensor, weights: Tensor | None = None, **more: Any) -> None:
    """Enqueue the send half of a combine."""
    ata.combine(None, None, weights, y, do_recv=False, **more)


def receive_back(
    ata: AllToAll, out: Tensor, ids: Tensor, weights: Tensor | None = None, **more: Any
) -> Tensor:
    """Enqueue the receive half of a combine; returns `out`."""
    ata.combine(out, ids, weights, None, do_send=False, **more)
    return out


def pack(padded: Tensor, counts: Tensor, rows: int, alignment: int) -> tuple[Tensor, list[int]]:
    """[L, R, n] as [rows, n], each expert at a multiple of `alignment`; and the ends of experts."""
    out, ends = padded.new_zeros(rows, padded.shape[-1]), [0]
    for expert, n in enumerate(counts.tolist()):
        out[ends[-1] : ends[-1] + n] = padded[expert, :n]
        ends.append(ends[-1] + round_up(n, alignment))
    return out, ends[1:]


def unpack(rows: Tensor, counts: Tensor, ends: list[int], alignment: int) -> list[Tensor]:
    """The rows of each expert out of [rows, n], as `pack` lays them out."""
    sizes = counts.tolist()
    starts = [end - round_up(n, alignment) for end, n in zip(ends, sizes, strict=True)]
    return [rows[start : start + n] for start, n in zip(starts, sizes, strict=True)]


def check_received(
    received: tuple[Tensor, Tensor | list[Tensor], Tensor | list[Tensor] | None], rank: int,
    ids: list[Tensor], x: list[Tensor], scale: list[Tensor] | None = None,
) -> None:  # fmt: skip
    """Hold what `receive` returned, as [L, R, ...] or by expert, to the reference bit by bit."""
    counts, out, out_scale = received
    expected = dispatch_reference(ids, rank, len(counts))
    assert torch.equal(counts, expected.counts)
    for expert, n in enumerate(counts.tolist()):
        rows = expected.gather(expert, x).view(torch.uint8)
        assert torch.equal(out[expert][:n].view(torch.uint8), rows)
        if out_scale is not None and scale is not None:
            assert torch.equal(out_scale[expert][:n], expected.gather(expert, scale))


def check_close(found: Tensor, wanted: Tensor, tolerance: float = BF16_ROUNDINGS) -> None:
    """Relative Frobenius error below the tolerance; equal where all is zero."""
    if wanted.numel() and wanted.norm() > 0:
        assert (found.float() - wanted).norm() / wanted.norm() < tolerance
    else:
        assert torch.equal(found.float(), wanted)
