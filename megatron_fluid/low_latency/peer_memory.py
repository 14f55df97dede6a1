"""The NVLink transport: Triton kernels that store straight into symmetric memory of every rank.

Shapes: see megatron_fluid.kernels.low_latency.dispatch.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import FlagRegion, Workspace
from megatron_fluid.cuda.devices import synchronize
from megatron_fluid.cuda.triton_launch import Launch, power_of_two
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.low_latency.combine import combine_kernel
from megatron_fluid.kernels.low_latency.dispatch import dispatch_kernel
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.transport import (
    Again,
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
)

__all__ = ["PeerMemory", "Tuning", "flag_words", "whole_rows"]

_MOST_ELEMENTS = 1 << 20  # of one Triton tensor
_MOST_SENDERS = 128  # 512 flags on 4 ranks


class Tuning:
    """How the work for `layout` is cut into programs on a device of `processors` multiprocessors.
    All ranks must agree on the numbers of senders, because receivers count their flags.

    Every sender sets a flag at every rank and every receiver reads all of them, so a program sends
    only if it has work. The two halves of a call are always two launches. One kernel for both would
    need all its programs resident at once, which another kernel that holds SMs can prevent forever.
    """

    rows = 4  # that a program copies at once
    receive_warps, combine_receive_warps = 8, 4

    def __init__(self, layout: Layout, processors: int) -> None:
        senders = min(processors, _MOST_SENDERS)
        hidden = power_of_two(layout.hidden_dim)
        # At once: words of a dispatched row, elements of an expert's row, tokens that are read.
        self.dispatch_block = min(2048, power_of_two(layout.row_words))
        self.combine_block = min(4096, hidden)
        self.scan = min(512, power_of_two(layout.max_rows))
        # With few tokens, small blocks let different warps load expert rows at the same time.
        few = layout.max_num_tokens <= layout.small
        self.combine_receive_block = min(256 if few else 1024, hidden)
        pieces = layout.max_rows * -(-layout.hidden_dim // self.combine_block)
        self.dispatch_senders = min(senders, -(-layout.max_num_tokens // layout.dp_size))
        self.combine_senders = max(layout.world_size, min(senders, pieces))
        # Programs that share one expert's rows as they receive.
        self.split = max(1, min(32, -(-processors // layout.local_experts)))
        self.send_warps = max(1, min(8, self.dispatch_block // 128))
        self.combine_send_warps = max(4, self.combine_block // 256)


def flag_words(layout: Layout, stride: int) -> int:
    """Words of 32 bits that the flags of one object take of its workspace, whatever the GPU.
    stride: words from a flag to the next."""
    tuning, world = Tuning(layout, _MOST_SENDERS), layout.world_size
    flags = (world * tuning.dispatch_senders, world * tuning.combine_senders, world)
    return sum(round_up(power_of_two(each) * stride, 32) for each in flags)


def whole_rows(x: Tensor) -> Tensor:
    """`x` with whole rows as strides of dimensions of one entry. Torch keeps any stride there, and
    views as words only some."""
    if 1 not in x.shape[:-1]:
        return x
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.as_strided(x.shape, [*(x.shape[-1] if n == 1 else step for n, step in pairs), 1])


class PeerMemory:
    """Dispatch and combine of one rank over a symmetric workspace.

    Args:
        processors: multiprocessors to cut the work for; 0 means those of the device.
    """

    name = "nvlink"
    flag_stride = 1  # 4-byte words between flags
    _prefix = "low_latency"  # of the names of buffers and flags

    def __init__(self, layout: Layout, workspace: Workspace, processors: int = 0) -> None:
        self.layout = layout
        self.workspace = workspace
        self.rank = workspace.rank
        device = workspace.device
        if not processors:
            on_gpu = device.type == "cuda"
            properties = torch.cuda.get_device_properties(device) if on_gpu else None
            processors = 4 if properties is None else properties.multi_processor_count
        self.tuning = tuning = Tuning(layout, processors)
        self._small = layout.small
        world, k = layout.world_size, layout.experts_per_token
        dispatch_words = power_of_two(world * tuning.dispatch_senders)
        combine_words = power_of_two(world * tuning.combine_senders)

        def flags_of(part: str, words: int) -> FlagRegion:
            return workspace.flags(f"{self._prefix}.{part}", words * self.flag_stride)

        # Two of each: double buffers.
        dtype, tokens = layout.combine_dtype, 2 * world * layout.max_num_tokens
        single_rows = 2 * layout.small * k * layout.hidden_dim
        self._region, region_addresses = self._shared("region", 2 * layout.parity_words)
        self._sums, sum_addresses = self._shared("sums", tokens * layout.hidden_dim, dtype)
        rows, row_addresses = self._shared("rows", single_rows, dtype)
        self._weights, weight_addresses = self._shared("weights", tokens * k, torch.float32)
        self._dispatch_flags = flags_of("dispatch", dispatch_words)
        self._combine_flags = flags_of("combine", combine_words)
        self._weight_flags = flags_of("weights", power_of_two(world))
        entries = layout.max_rows * k
        self.counters = torch.zeros(8, dtype=torch.int32, device=device)
        self.entry_row = torch.full((entries,), -1, dtype=torch.int32, device=device)
        self._launches: dict[tuple[object, ...], Launch] = {}
        self._timeout_ns = workspace.timeout_ns
        self.check_errors = workspace.errors.check  # of Transport, asked before every call
        errors = (self.counters, workspace.errors.words, workspace.errors.abort)
        flags, weight_flags = self._dispatch_flags, self._weight_flags
        # By kernel: the arguments that are the same in every call, and the constants.
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
        common: dict[str, object] = {
            "C": layout.max_num_tokens, "D": layout.num_sources, "P": layout.dp_size,
            "K": k, "KP": power_of_two(k), "L": layout.local_experts, "R": layout.max_rows,
            "PITCH": layout.pitch, "PARITY_WORDS": layout.parity_words,
            "FLAG_STRIDE": self.flag_stride,
        }  # fmt: skip
        self._constants = {
            "dispatch": common | {
                "HW": layout.row_words, "SW": layout.scale_words,
                "SWP": power_of_two(layout.scale_words), "SCALE_AT": layout.scale_at,
                "F": tuning.dispatch_senders, "WORDS": dispatch_words,
                "BLOCK": tuning.dispatch_block, "SPLIT": tuning.split, "ROWS": tuning.rows,
                "SCAN": tuning.scan, "LP": power_of_two(layout.local_experts),
            },
            "combine": common | {
                # With batch_invariant no weights are exchanged.
                "CK": 1 if layout.batch_invariant else power_of_two(layout.max_num_tokens * k),
                "H": layout.hidden_dim, "F": tuning.combine_senders, "WORDS": combine_words,
                "WEIGHT_WORDS": power_of_two(world),
            },
        }  # fmt: skip
        synchronize(device)

    def _shared(
        self, part: str, numel: int, dtype: torch.dtype = torch.int32
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of a symmetric buffer, and its address on every rank."""
        name = f"{self._prefix}.{part}"
        return self.workspace.buffer(name, (numel,), dtype), self.workspace.peer_pointers(name)

    def _prepare(
        self, key: tuple[object, ...], kernel: Any, warps: int, operation: str, **more: object
    ) -> Launch:
        """The launch of `kernel` for calls of the form `key`, whose first entry is the key of
        `_fixed`. `more`: constants that differ between the calls of an operation."""
        if key in self._launches:
            return self._launches[key]
        known = self._constants[operation] | {"SMALL": self._small} | more
        if known.get("EXCHANGE") and known["CK"] > _MOST_ELEMENTS:  # type: ignore[operator]
            entries = self.layout.max_num_tokens * self.layout.experts_per_token
            allowed = f"at most {_MOST_ELEMENTS} over {self.name}, or weights given to dispatch"
            raise ConfigError.of("max_num_tokens * experts_per_token", entries, allowed)
        # A launch passes the constants' values in the order of the kernel's parameters.
        parameters = inspect.signature(getattr(kernel, "jit_func", kernel).fn).parameters
        constants = {name: known[name] for name in parameters if name in known}
        words = ["x", "x_scale", "out_x", "out_scale"]
        fixed = self._fixed[str(key[0])]
        launch = Launch(kernel, warps, constants, fixed, words=words, unaligned=("bound_m",))
        self._launches[key] = launch
        return launch

    def dispatch_send(self, q: DispatchSend) -> Again:
        key = "dispatch", q.x_scale is None, q.weights is None, q.bound_m is None, q.indices.dtype
        launch = self._prepare(
            key, dispatch_kernel, self.tuning.send_warps, "dispatch", SEND=True, PACKED=False,
            HAS_WEIGHTS=q.weights is not None, HAS_BOUND=q.bound_m is not None,
        )  # fmt: skip
        x = whole_rows(q.x)
        tensors = (x, q.x_scale, q.indices, q.weights, q.bound_m, None, None, None, None)
        x_stride = x.stride(0) * x.element_size() // 16
        scale_stride = 0 if q.x_scale is None else q.x_scale.stride(0)
        integers = (
            x.shape[0], self.rank, self._timeout_ns, self._dispatch_flags.operation, x_stride,
            scale_stride, 0, 0, 0, 0, 1,
        )  # fmt: skip
        senders = self.tuning.dispatch_senders
        return launch.start_aligned(senders, tensors, integers, (0, 2, 3, 1, 4))

    def dispatch_receive(self, q: DispatchReceive) -> Again:
        packed, scale = q.packed, q.scale
        key = ("dispatch", packed, scale is None)
        launch = self._prepare(
            key, dispatch_kernel, self.tuning.receive_warps, "dispatch", SEND=False, PACKED=packed,
            HAS_WEIGHTS=False, HAS_BOUND=False,
        )  # fmt: skip
        x = whole_rows(q.x)
        unit = 16 // x.element_size()
        expert_stride = 0 if packed else x.stride(0) // unit
        scale_expert_stride = scale_row_stride = 0
        if scale is not None:
            scale_row_stride = scale.stride(-2)
            scale_expert_stride = 0 if packed else scale.stride(0)
        tensors = (None, None, None, None, None, q.counts, x, scale, q.offsets)
        integers = (
            0, self.rank, self._timeout_ns, self._dispatch_flags.operation, 0, 0, expert_stride,
            x.stride(-2) // unit, scale_expert_stride, scale_row_stride, q.alignment,
        )  # fmt: skip
        programs = self.layout.local_experts * self.tuning.split
        return launch.start_aligned(programs, tensors, integers, (5, 6, 7, 8))

    def _strides_of(self, y: Tensor) -> tuple[int, int]:
        """Units of 16 bytes from one expert to the next, and from one row to the next."""
        row = y.stride(-2) // 8
        return self.layout.max_rows * row if y.dim() == 2 else y.stride(0) // 8, row

    def combine_send(self, q: CombineSend) -> Again:
        exchange = q.weights is not None
        key = ("combine", exchange, q.bound_m is None)
        launch = self._prepare(
            key, combine_kernel, self.tuning.combine_send_warps, "combine", SEND=True,
            BLOCK=self.tuning.combine_block, EXCHANGE=exchange, ACCUMULATE=False,
            HAS_BOUND=q.bound_m is not None,
        )  # fmt: skip
        integers = (
            0 if q.weights is None else q.weights.shape[0], self.rank, self._timeout_ns,
            self._combine_flags.operation, self._weight_flags.operation, 0,
            *self._strides_of(q.expert_y),
        )  # fmt: skip
        tensors = (None, None, q.weights, q.expert_y, q.bound_m)
        return launch.start_aligned(self.tuning.combine_senders, tensors, integers, (3, 2, 4))

    def combine_receive(self, q: CombineReceive) -> Again:
        exchange, block = q.weights is not None, self.tuning.combine_receive_block
        key = ("combine", exchange, q.accumulate, q.bound_m is None, q.out.dtype, q.indices.dtype)
        launch = self._prepare(
            key, combine_kernel, self.tuning.combine_receive_warps, "combine", SEND=False,
            BLOCK=block, EXCHANGE=exchange, ACCUMULATE=q.accumulate, HAS_BOUND=q.bound_m is not None
        )  # fmt: skip
        tokens = q.out.shape[0]
        # In the place of expert_y, of which receiving reads only the dtype.
        tensors = (q.out, q.indices, q.weights, self._sums, q.bound_m)
        integers = (
            tokens, self.rank, self._timeout_ns, self._combine_flags.operation,
            self._weight_flags.operation, q.out.stride(0) * q.out.element_size() // 16, 0, 0,
        )  # fmt: skip
        programs = max(1, tokens * -(-self.layout.hidden_dim // block))
        return launch.start_aligned(programs, tensors, integers, (0, 1, 2, 4))

    def size(self) -> str:
        return f", {self.workspace.allocated_bytes() / 2**20:.1f} MiB"

    def close(self) -> None:
        self.workspace.close()
        # Views keep memory alive, and the caller may keep this object.
        for name, value in [*vars(self).items()]:
            if isinstance(value, Tensor | FlagRegion):
                delattr(self, name)
        self._fixed.clear()
        self._launches.clear()
