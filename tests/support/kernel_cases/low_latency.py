"""Kernels of the decode-time all-to-all over peer pointers, as PeerMemory launches them on an
H200."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron_fluid.low_latency import AllToAll
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.peer_memory import PeerMemory
from tests.support.all_to_all_calls import receive, receive_back, send, send_back
from tests.support.kernel_cases import WIDE, KernelCase, recorded
from tests.support.simulated_workspace import SimulatedWorkspace

_PROCESSORS = 132
_SHAPES = {"r1": (256, 8, 7168), "v2-lite": (64, 6, 2048)}  # experts, top-k, hidden


def _calls(ata: AllToAll, dtype: torch.dtype, *, early: bool, bound: bool, packed: bool) -> None:
    """One dispatch and one combine by halves, on tensors of the layout's full size."""
    layout = ata.layout
    m, k = layout.max_num_tokens, layout.experts_per_token
    bound_m = torch.zeros(1, dtype=torch.int32) if bound else None
    x, weights = torch.zeros(m, layout.hidden_dim, dtype=dtype), torch.zeros(m, k)
    x_scale = torch.zeros(m, layout.scale_words) if layout.scale_words else None
    ids = torch.zeros(m, k, dtype=torch.int64 if packed else torch.uint32)
    send(ata, x, ids, weights if early else None, scale=x_scale, bound_m=bound_m)
    more: dict[str, Any] = {}
    if packed:
        offsets = torch.zeros(layout.local_experts, dtype=torch.int32)
        rows = torch.empty(ata.packed_rows(128), layout.hidden_dim, dtype=dtype)
        more = {"out": rows, "out_expert_offsets": offsets, "alignment": 128}
    _, out_x, _ = receive(ata, dtype, **more)
    late = None if early else weights
    send_back(ata, torch.empty(out_x.shape, dtype=torch.bfloat16), late)
    out = torch.empty(m, layout.hidden_dim, dtype=torch.bfloat16)
    receive_back(ata, out, ids, late, bound_m=bound_m, accumulate=packed)


def uses(
    transport: type[PeerMemory], *chosen: tuple[str, int, torch.dtype, str]
) -> Iterator[tuple[int, list[KernelCase]]]:
    """Of each use (shape, tokens, dtype, options): its tokens, and the cases of its four halves."""
    for shape, tokens, dtype, options in chosen:
        experts, k, hidden = _SHAPES[shape]
        scales = hidden // 32 if dtype == torch.float8_e4m3fn else 0
        layout = Layout(tokens, experts, k, 4, 1, hidden, hidden * dtype.itemsize, scales)
        rank = SimulatedWorkspace(layout.world_size, timeout_s=5.0).rank(1)
        made = transport(layout, rank, _PROCESSORS)
        ata = AllToAll(layout, made, torch.device("cpu"))
        on = {name: name in options for name in ("early", "bound", "packed")}
        label = f"{shape}-{tokens} {str(dtype).removeprefix('torch.')} {options}"
        yield tokens, recorded(label, lambda ata=ata, dtype=dtype, on=on: _calls(ata, dtype, **on))


def _instructions(half: str, tokens: int, late: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(wanted, unwanted) texts of the PTX. Data moves 16 bytes a lane; only few tokens are summed
    in small blocks. Weights given to the combine, `late`, are multiplied without an fma."""
    vote = "barrier.cta.red.and.pred"
    if half.endswith("send"):
        return ("st.global.v4.b32", "fence.acq_rel.sys", "st.relaxed.sys.global.b32", vote), ()
    polls = ("ld.relaxed.sys.global.b32", "ld.acquire.sys.global.b32", vote)
    if half == "combine receive" and tokens <= 16:
        return (*polls, *["mul.rn.f32"][:late]), ("fence.", *["fma.rn.f32"][:late])
    return (*polls, *WIDE), ("fence.",)


def _cases() -> Iterator[KernelCase]:
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    chosen = (
        ("r1", 128, fp8, "early, bound"),
        ("r1", 1, fp8, ""),
        ("r1", 128, bf16, "packed"),
        ("v2-lite", 128, bf16, "early"),
        ("v2-lite", 128, fp8, "early, bound, packed"),
        ("v2-lite", 1, fp8, "early"),
    )
    halves = ("dispatch send", "dispatch receive", "combine send", "combine receive")
    for tokens, cases in uses(PeerMemory, *chosen):
        for half, case in zip(halves, cases, strict=True):
            wanted, unwanted = _instructions(half, tokens, "early" not in case.name)
            yield replace(case, name=f"{half}, {case.name}", wanted=wanted, unwanted=unwanted)


CASES = list(_cases())
