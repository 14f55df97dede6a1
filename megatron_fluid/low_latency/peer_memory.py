"""The NVLink transport: Triton kernels that store straight into symmetric memory of every rank.

Shapes: see megatron_fluid.kernels.low_latency.dispatch.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import FlagRegion, Workspace
from megatron_fluid.cuda.streams import synchronize
from megatron_fluid.cuda.triton_launch import Launch, power_of_two
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.low_latency.combine import combine_kernel
from megatron_fluid.kernels.low_latency.dispatch import dispatch_kernel
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.transport import CombineRequest, DispatchRequest

__all__ = ["PeerMemory", "Tuning", "choose_tuning", "flag_words"]

_MOST_ELEMENTS = 1 << 20  # of one Triton tensor
_MOST_SENDERS = 128  # 512 flags on 4 ranks


@dataclass(frozen=True)
class Tuning:
    """How the work is cut into programs. All ranks must agree on the numbers of senders, because
    receivers count their flags.

    The two halves of a call are always two launches. One kernel for both would need all its
    programs resident at once, which another kernel that holds SMs can prevent forever.

    Attributes:
        dispatch_senders, combine_senders: programs that send.
        split: programs that share one expert's rows as they receive.
        rows: rows that a program copies at once.
        scan: tokens that a program reads at once.
        *_block: words (dispatch) or elements (combine) at once.
        *_warps: warps of a program.
    """

    dispatch_senders: int
    combine_senders: int
    split: int
    rows: int = 4
    dispatch_block: int = 2048
    scan: int = 512
    send_warps: int = 8
    receive_warps: int = 8
    combine_block: int = 4096
    combine_receive_block: int = 1024
    combine_send_warps: int = 16
    combine_receive_warps: int = 4


def choose_tuning(layout: Layout, processors: int) -> Tuning:
    """The defaults for `layout` on a device of `processors` multiprocessors.

    Every sender sets a flag at every rank and every receiver reads all of them, so a program sends
    only if it has work.
    """
    senders = min(processors, _MOST_SENDERS)
    combine_block = min(4096, power_of_two(layout.hidden_dim))
    combine_pieces = layout.max_rows * -(-layout.hidden_dim // combine_block)
    dispatch_block = min(2048, power_of_two(layout.row_words))
    return Tuning(
        dispatch_senders=min(senders, -(-layout.max_num_tokens // layout.dp_size)),
        combine_senders=max(layout.world_size, min(senders, combine_pieces)),
        split=max(1, min(32, -(-processors // layout.local_experts))),
        dispatch_block=dispatch_block,
        send_warps=max(1, min(8, dispatch_block // 128)),
        scan=min(512, power_of_two(layout.max_rows)),
        combine_block=combine_block,
        combine_send_warps=max(4, combine_block // 256),
        # With few tokens, small blocks let different warps load expert rows at the same time.
        combine_receive_block=min(
            256 if layout.max_num_tokens <= layout.small else 1024, power_of_two(layout.hidden_dim)
        ),
    )


def flag_words(layout: Layout, stride: int) -> int:
    """Words of 32 bits that the flags of one object take of its workspace, whatever the GPU.
    stride: words from a flag to the next."""
    tuning, world = choose_tuning(layout, _MOST_SENDERS), layout.world_size
    flags = (world * tuning.dispatch_senders, world * tuning.combine_senders, world)
    return sum(round_up(power_of_two(each) * stride, 32) for each in flags)


class PeerMemory:
    """Dispatch and combine of one rank over a symmetric workspace."""

    name = "nvlink"
    flag_stride = 1  # 4-byte words between flags

    def __init__(
        self,
        layout: Layout,
        workspace: Workspace,
        tuning: Tuning | None = None,
        prefix: str = "low_latency",
    ) -> None:
        self.layout = layout
        self.workspace = workspace
        self.rank = workspace.rank
        device, processors = workspace.device, 4
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.tuning = tuning or choose_tuning(layout, processors)
        self._small = layout.small
        world = layout.world_size

        def shared(part: str, numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            """This rank's part of a symmetric buffer, and its address on every rank."""
            name = f"{prefix}.{part}"
            return workspace.buffer(name, (numel,), dtype), workspace.peer_pointers(name)

        dtype, words = layout.combine_dtype, 2 * layout.parity_words
        self._region, region_addresses = shared("region", words, torch.int32)
        self._sums, sum_addresses = shared("sums", layout.combine_elements, dtype)
        rows, row_addresses = shared("rows", layout.single_row_elements, dtype)
        weights = shared("weights", layout.weight_elements, torch.float32)
        self._weights, weight_addresses = weights
        self._dispatch_words = power_of_two(world * self.tuning.dispatch_senders)
        self._combine_words = power_of_two(world * self.tuning.combine_senders)

        def flags_of(part: str, words: int) -> FlagRegion:
            return workspace.flags(f"{prefix}.{part}", words * self.flag_stride)

        self._dispatch_flags = flags_of("dispatch", self._dispatch_words)
        self._combine_flags = flags_of("combine", self._combine_words)
        self._weight_flags = flags_of("weights", power_of_two(world))
        entries = layout.max_rows * layout.experts_per_token
        self.counters = torch.zeros(8, dtype=torch.int32, device=device)
        self.entry_row = torch.full((entries,), -1, dtype=torch.int32, device=device)
        self._launches: dict[tuple[object, ...], Launch] = {}
        self._timeout_ns = workspace.timeout_ns
        self._error_words = workspace.errors.words.numpy()
        errors = (self.counters, workspace.errors.words, workspace.errors.abort)
        flags, weight_flags = self._dispatch_flags, self._weight_flags
        # By kernel: the arguments that are the same in every call.
        self._fixed: dict[str, tuple[Tensor, ...]] = {}
        self._fixed["dispatch"] = (
            self.entry_row, self._region, region_addresses, flags.flags, flags.addresses, *errors
        )  # fmt: skip
        flags = self._combine_flags
        self._fixed["combine"] = (
            self.entry_row, self._region, self._sums, sum_addresses, self._weights,
            weight_addresses, rows, row_addresses, flags.flags, flags.addresses,
            weight_flags.flags, weight_flags.addresses, *errors,
        )  # fmt: skip
        synchronize(device)

    def _constants(self, q: DispatchRequest | CombineRequest) -> dict[str, object]:
        layout, tuning, k = self.layout, self.tuning, self.layout.experts_per_token
        common: dict[str, object] = {
            "C": layout.max_num_tokens, "D": layout.num_sources, "P": layout.dp_size,
            "K": k, "KP": power_of_two(k), "L": layout.local_experts, "R": layout.max_rows,
            "PITCH": layout.pitch, "PARITY_WORDS": layout.parity_words,
            "FLAG_STRIDE": self.flag_stride, "HAS_BOUND": q.bound_m is not None, "SEND": q.send,
        }  # fmt: skip
        if isinstance(q, DispatchRequest):
            return common | {
                "HW": layout.row_words, "SW": layout.scale_words,
                "SWP": power_of_two(layout.scale_words), "SCALE_AT": layout.scale_at,
                "F": tuning.dispatch_senders, "WORDS": self._dispatch_words,
                "BLOCK": tuning.dispatch_block, "SPLIT": tuning.split, "ROWS": tuning.rows,
                "SCAN": tuning.scan, "LP": power_of_two(layout.local_experts),
                "PACKED": q.packed, "HAS_WEIGHTS": q.weights is not None,
            }  # fmt: skip
        entries = layout.max_num_tokens * k
        if layout.batch_invariant:  # no weights are exchanged
            entries = 1
        elif q.exchange and power_of_two(entries) > _MOST_ELEMENTS:
            allowed = f"at most {_MOST_ELEMENTS} over {self.name}, or weights given to dispatch"
            raise ConfigError.of("max_num_tokens * experts_per_token", entries, allowed)
        return common | {
            "CK": power_of_two(entries), "H": layout.hidden_dim,
            "F": tuning.combine_senders, "WORDS": self._combine_words,
            "WEIGHT_WORDS": power_of_two(layout.world_size),
            "BLOCK": tuning.combine_block if q.send else tuning.combine_receive_block,
            "SMALL": self._small, "EXCHANGE": q.exchange, "ACCUMULATE": q.accumulate,
        }  # fmt: skip

    def _prepare(
        self, key: tuple[object, ...], kernel: Any, warps: int, q: DispatchRequest | CombineRequest
    ) -> Launch:
        """The launch of `kernel` for requests of the form `key`, whose first entry is the
        key of `_fixed`."""
        # A launch passes the constants' values in the order of the kernel's parameters.
        known = self._constants(q)
        parameters = inspect.signature(getattr(kernel, "jit_func", kernel).fn).parameters
        constants = {name: known[name] for name in parameters if name in known}
        words = ["x", "x_scale", "out_x", "out_scale"]
        fixed = self._fixed[str(key[0])]
        launch = Launch(kernel, warps, constants, fixed, words=words, unaligned=("bound_m",))
        self._launches[key] = launch
        return launch

    def dispatch(self, request: DispatchRequest) -> None:
        q, tuning = request, self.tuning
        x, out_x, out_scale = q.x, q.out_x, q.out_scale
        programs = tuning.dispatch_senders if q.send else self.layout.local_experts * tuning.split
        key = (
            "dispatch", q.send, q.packed, q.x_scale is None, out_scale is None,
            q.weights is None, q.bound_m is None, None if q.indices is None else q.indices.dtype,
        )  # fmt: skip
        launch = self._launches.get(key)
        if launch is None:
            warps = tuning.send_warps if q.send else tuning.receive_warps
            launch = self._prepare(key, dispatch_kernel, warps, q)
        m = x_stride = x_scale_stride = expert_stride = row_stride = 0
        scale_expert_stride = scale_row_stride = 0
        if q.send:
            assert x is not None
            m = x.shape[0]
            x_stride = x.stride(0) * x.element_size() // 16
            if q.x_scale is not None:
                x_scale_stride = q.x_scale.stride(0)
        else:
            assert out_x is not None
            unit = 16 // out_x.element_size()
            row_stride = out_x.stride(-2) // unit
            if not q.packed:
                expert_stride = out_x.stride(0) // unit
            if out_scale is not None:
                scale_row_stride = out_scale.stride(-2)
                scale_expert_stride = 0 if q.packed else out_scale.stride(0)
        tensors = (
            x, q.x_scale, q.indices, q.weights, q.bound_m, q.out_counts, out_x, out_scale,
            q.out_offsets,
        )  # fmt: skip
        integers = (
            m, self.rank, self._timeout_ns, self._dispatch_flags.operation, x_stride,
            x_scale_stride, expert_stride, row_stride, scale_expert_stride, scale_row_stride,
            q.alignment,
        )  # fmt: skip
        launch.start_aligned(programs, tensors, integers)

    def combine(self, request: CombineRequest) -> None:
        q, layout, tuning = request, self.layout, self.tuning
        tokens = 0
        if q.out is not None:
            tokens = q.out.shape[0]
        elif q.weights is not None:
            tokens = q.weights.shape[0]
        programs = tuning.combine_senders
        if not q.send:
            programs = max(1, tokens * -(-layout.hidden_dim // tuning.combine_receive_block))
        key = (
            "combine", q.send, q.exchange, q.accumulate, q.bound_m is None,
            None if q.out is None else q.out.dtype, None if q.indices is None else q.indices.dtype,
            None if q.weights is None else True,
        )  # fmt: skip
        launch = self._launches.get(key)
        if launch is None:
            warps = tuning.combine_send_warps if q.send else tuning.combine_receive_warps
            launch = self._prepare(key, combine_kernel, warps, q)
        y = self._sums if q.expert_y is None else q.expert_y  # receiving reads only its dtype
        expert_stride = row_stride = 0
        if q.expert_y is not None:
            row_stride, packed = y.stride(-2) // 8, y.dim() == 2
            expert_stride = layout.max_rows * row_stride if packed else y.stride(0) // 8
        tensors = (q.out, q.indices, q.weights, y, q.bound_m)
        integers = (
            tokens, self.rank, self._timeout_ns, self._combine_flags.operation,
            self._weight_flags.operation, 0 if q.out is None else q.out.stride(0) // 8,
            expert_stride, row_stride,
        )  # fmt: skip
        launch.start_aligned(programs, tensors, integers)

    def check_errors(self) -> None:
        if self._error_words.any():
            self.workspace.check_errors()

    def close(self) -> None:
        self.workspace.close()
        # Views keep memory alive, and the caller may keep this object.
        for name, value in [*vars(self).items()]:
            if isinstance(value, Tensor | FlagRegion):
                delattr(self, name)
        self._fixed.clear()
        self._launches.clear()
