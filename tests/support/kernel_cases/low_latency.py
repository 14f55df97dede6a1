"""Kernels of the decode-time all-to-all over peer pointers, as PeerMemory launches them on an H200:
every case is recorded from a call of AllToAll, so that its types and constants are those of that
call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_fluid.low_latency import AllToAll, peer_memory
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.peer_memory import PeerMemory, Tuning, choose_tuning
from tests.support.all_to_all_calls import receive, receive_back, send, send_back
from tests.support.kernel_cases import KernelCase
from tests.support.simulated_workspace import SimulatedWorkspace

__all__ = ["CASES", "PROCESSORS", "SHAPES", "Recorder", "calls", "layout_of", "recorded"]

PROCESSORS = 132
SHAPES = {"r1": (256, 8, 7168), "v2-lite": (64, 6, 2048)}  # experts, top-k, hidden
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint32: "*u32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands in for Launch: keeps what it would compile."""

    found: ClassVar[
        list[tuple[Any, Mapping[str, object], int, tuple[str, ...], tuple[str, ...]]]
    ] = []

    def __init__(
        self,
        kernel: Any,
        num_warps: int,
        constants: Mapping[str, object],
        fixed: Sequence[Tensor],
        words: Sequence[str] = (),
        unaligned: Sequence[str] = (),
    ) -> None:
        self.kernel, self.constants, self.num_warps = kernel, dict(constants), num_warps
        self.fixed, self.words, self.unaligned = fixed, words, unaligned

    def start_aligned(
        self, programs: int, tensors: Sequence[Tensor | None], integers: Sequence[int]
    ) -> None:
        kinds: list[str] = []
        absent: list[str] = []
        names = getattr(self.kernel, "jit_func", self.kernel).arg_names
        for name, tensor in zip(names, [*tensors, *self.fixed], strict=False):
            if tensor is None:
                absent.append(name)
            else:
                kind = "*i32" if name in self.words else _TYPES[tensor.dtype]
                kinds.append(kind + ("" if name in self.unaligned else ":16"))
        kinds += ["i64" if value >= 1 << 31 else "i32" for value in integers]
        self.found.append(
            (self.kernel, self.constants, self.num_warps, tuple(kinds), tuple(absent))
        )


@contextmanager
def recorded(*modules: Any) -> Iterator[type[Recorder]]:
    """Launches of `modules` are recorded, not started."""
    Recorder.found.clear()
    patches = [patch.object(module, "Launch", Recorder) for module in modules]
    for one in patches:
        one.start()
    yield Recorder
    for one in patches:
        one.stop()


def calls(ata: AllToAll, dtype: torch.dtype, *, early: bool, bound: bool, packed: bool) -> None:
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


def layout_of(shape: str, tokens: int, dtype: torch.dtype) -> Layout:
    experts, k, hidden = SHAPES[shape]
    scales = hidden // 32 if dtype == torch.float8_e4m3fn else 0
    return Layout(tokens, experts, k, 4, 1, hidden, hidden * dtype.itemsize, scales)


def _cases() -> Iterator[KernelCase]:
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    uses = (
        # shape, tokens, type, options
        ("r1", 128, fp8, ("early", "bound")),
        ("r1", 1, fp8, ()),
        ("r1", 128, bf16, ("packed",)),
        ("v2-lite", 128, bf16, ("early",)),
        ("v2-lite", 128, fp8, ("early", "bound", "packed")),
        ("v2-lite", 1, fp8, ("early",)),
    )
    halves = ("dispatch send", "dispatch receive", "combine send", "combine receive")
    for shape, tokens, dtype, chosen in uses:
        title = " ".join((f"{shape}-{tokens}", str(dtype).removeprefix("torch."), *chosen))
        options = {name: name in chosen for name in ("early", "bound", "packed")}
        layout = layout_of(shape, tokens, dtype)
        with recorded(peer_memory) as recorder:
            calls(_open(layout, choose_tuning(layout, PROCESSORS)), dtype, **options)
            found = list(recorder.found)
        for half, (kernel, constants, warps, kinds, absent) in zip(halves, found, strict=True):
            wanted, unwanted = _instructions(half, tokens)
            yield KernelCase(
                f"{half}, {title}",
                kernel,
                kinds,
                {**constants, **dict.fromkeys(absent)},
                warps,
                wanted,
                unwanted,
            )


def _open(layout: Layout, tuning: Tuning) -> AllToAll:
    workspace = SimulatedWorkspace(layout.world_size, timeout_s=5.0)
    return AllToAll(
        layout, PeerMemory(layout, workspace.rank(1), tuning=tuning), torch.device("cpu")
    )


def _instructions(half: str, tokens: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(wanted, unwanted) texts of the PTX. Data moves 16 bytes a lane; only few tokens are summed
    in small blocks."""
    if half.endswith("send"):
        return ("st.global.v4.b32", "fence.acq_rel.sys", "st.relaxed.sys.global.b32"), ()
    polls = ("ld.relaxed.sys.global.b32", "ld.acquire.sys.global.b32")
    if half == "combine receive" and tokens <= 16:
        return polls, ("fence.",)
    return (*polls, "ld.global.v4.b32", "st.global.v4.b32"), ("fence.",)


CASES = list(_cases())
