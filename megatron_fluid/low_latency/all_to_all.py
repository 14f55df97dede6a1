"""AllToAll: dispatch and combine for MoE inference, in pplx-kernels' signature and layouts.

    ata = AllToAll.intranode(max_num_tokens=128, num_experts=256, experts_per_token=8, rank=rank,
                             world_size=world, dp_size=1, hidden_dim=7168, hidden_dim_bytes=7168,
                             hidden_dim_scale_bytes=224)
    ata.dispatch(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices,
    bound_m) ...                                      # the experts: [L, R, H] -> [L, R, H]
    ata.combine(out_tokens, indices, weights, expert_y, bound_m) ata.destroy()

Give `weights` to dispatch already (a router knows them then) and None to combine: one exchange
less.

Slots are in (source, token, k) order and sums in a fixed order (a rank's experts by k, then ranks),
so results repeat bitwise. Nothing is read on the host: calls can be captured in a CUDA graph and
replayed with other routings and other token counts (`bound_m`).

Shapes: m tokens of this rank's data-parallel group, at most C = max_num_tokens; K =
experts_per_token; W ranks; D = W / dp_size groups; L = num_experts / W; R = C * D; H = hidden_dim;
S = hidden_dim_scale_bytes / 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.low_latency.checks import Checks, form
from megatron_fluid.low_latency.layout import Layout
from megatron_fluid.low_latency.requests import CombineRequest, DispatchRequest, Transport

__all__ = ["TRANSPORTS", "TWO_LEVEL_TRANSPORTS", "AllToAll", "estimate_bytes"]

TRANSPORTS = ("auto", "nvlink", "nvshmem", "nccl", "gloo")
# Inside a domain, and between domains (internode only).
TWO_LEVEL_TRANSPORTS = ("nvlink+nvshmem", "nvlink+nccl", "nccl+nccl", "gloo+gloo")


def estimate_bytes(
    max_num_tokens: int,
    num_experts: int,
    experts_per_token: int,
    world_size: int,
    dp_size: int,
    hidden_dim: int,
    hidden_dim_bytes: int,
    hidden_dim_scale_bytes: int,
    combine_dtype: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """Bytes that an AllToAll over NVLink takes on one rank: {"symmetric", "scratch", "total"}.
    Allocates nothing."""
    layout = Layout(
        max_num_tokens,
        num_experts,
        experts_per_token,
        world_size,
        dp_size,
        hidden_dim,
        hidden_dim_bytes,
        hidden_dim_scale_bytes,
        combine_dtype.itemsize,
    )
    symmetric, scratch = layout.symmetric_bytes(), layout.scratch_bytes()
    return {"symmetric": symmetric, "scratch": scratch, "total": symmetric + scratch}


class AllToAll:
    """One rank's end of the all-to-all. Build it with `intranode` or `internode`; every rank of the
    group must.

    One object serves one stream order: a dispatch and a combine of the same object never overlap,
    so two microbatches in flight take two objects. Calls alternate send, receive, send, receive for
    each operation; between the halves any other kernel may run, and no SM is held.
    """

    def __init__(
        self,
        layout: Layout,
        transport: Transport,
        device: torch.device,
        combine_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.layout = layout
        self.device = device
        self.combine_dtype = combine_dtype
        self._transport = transport
        self._checks = Checks(layout, device, combine_dtype)
        self._checked: set[tuple[object, ...]] = set()
        self._sent = {"dispatch": False, "combine": False}
        self._received = False  # any dispatch
        self._sent_type: torch.dtype | None = None
        self._weights_came_with_dispatch = False
        self._packed = False
        self._closed = False

    # ---- construction
    @classmethod
    def intranode(
        cls,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        group_name: str = "default",
        *,
        group: dist.ProcessGroup | None = None,
        transport: str = "auto",
        combine_dtype: torch.dtype = torch.bfloat16,
        timeout_s: float | None = None,
    ) -> AllToAll:
        """An all-to-all inside one NVLink domain. Collective.

        Args:
            rank, world_size: must be those of the group.
            dp_size: ranks that hold the same tokens (tensor-parallel replicas), consecutive; each
                sends every dp_size-th token, and each receives the combined result of all.
            hidden_dim_bytes, hidden_dim_scale_bytes: bytes of a dispatched row and of its scales (0
                without).
            group_name: name of a torch process group, "default" for the world; `group` gives the
                group itself.
            transport: "auto" takes nvlink where the GPUs can map each other's memory, else the
                group's collectives (`transport_report` says why). Any other value is met or
                refused.
            combine_dtype: type of `expert_y`, bf16 or fp16.
            timeout_s: bound on every wait for a peer; the configured one where None.

        Raises:
            ConfigError: a size or transport that cannot be met.
        """
        return cls._build(
            max_num_tokens,
            num_experts,
            experts_per_token,
            rank,
            world_size,
            dp_size,
            hidden_dim,
            hidden_dim_bytes,
            hidden_dim_scale_bytes,
            _resolve(group, group_name),
            transport,
            combine_dtype,
            timeout_s,
        )

    @classmethod
    def internode(
        cls,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        *,
        group: dist.ProcessGroup | None = None,
        transport: str = "auto",
        combine_dtype: torch.dtype = torch.bfloat16,
        timeout_s: float | None = None,
        domain_size: int | None = None,
    ) -> AllToAll:
        """The same between nodes. "auto" takes nvlink where the whole group is one domain,
        nvlink+nccl where it is several domains of one size, else the group's collectives.

        Two levels, "nvlink+nvshmem" and the like: the first transport inside a domain, the second
        between domains; see megatron_fluid.low_latency.two_level, also for the order of slots. A
        domain is `domain_size` consecutive ranks, the ranks of one host where None. "nvshmem" puts
        from the device, over what NVSHMEM's own settings choose (P2P, IBGDA, IBRC, libfabric). It
        is taken only where it is asked for by name.
        """
        return cls._build(
            max_num_tokens,
            num_experts,
            experts_per_token,
            rank,
            world_size,
            dp_size,
            hidden_dim,
            hidden_dim_bytes,
            hidden_dim_scale_bytes,
            _resolve(group, "default"),
            transport,
            combine_dtype,
            timeout_s,
            domain_size,
            True,
        )

    @classmethod
    def _build(
        cls,
        max_num_tokens: int,
        num_experts: int,
        experts_per_token: int,
        rank: int,
        world_size: int,
        dp_size: int,
        hidden_dim: int,
        hidden_dim_bytes: int,
        hidden_dim_scale_bytes: int,
        group: dist.ProcessGroup,
        transport: str,
        combine_dtype: torch.dtype,
        timeout_s: float | None,
        domain_size: int | None = None,
        internode: bool = False,
    ) -> AllToAll:
        allowed = (*TRANSPORTS, *TWO_LEVEL_TRANSPORTS) if internode else TRANSPORTS
        if transport not in allowed:
            raise ConfigError.of("transport", transport, ", ".join(allowed))
        if combine_dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError.of("combine_dtype", combine_dtype, "torch.bfloat16, torch.float16")
        actual = (dist.get_rank(group), dist.get_world_size(group))
        if (rank, world_size) != actual:
            raise ConfigError.of(
                "rank and world_size", (rank, world_size), f"those of the group, {actual}"
            )
        layout = Layout(
            max_num_tokens,
            num_experts,
            experts_per_token,
            world_size,
            dp_size,
            hidden_dim,
            hidden_dim_bytes,
            hidden_dim_scale_bytes,
            combine_dtype.itemsize,
        )
        if timeout_s is None:
            from megatron_fluid.config import current_config

            timeout_s = current_config().timeout_s
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ConfigError.of("timeout_s", timeout_s, "more than 0 seconds, and finite")
        from megatron_fluid.low_latency.open_transport import choose_transport, open_transport

        chosen, reason = choose_transport(transport, group, layout, domain_size, internode)
        built, device = open_transport(chosen, layout, group, combine_dtype, timeout_s, domain_size)
        result = cls(layout, built, device, combine_dtype)
        result.transport_reason = reason
        return result

    transport_reason: str = ""

    @property
    def transport(self) -> str:
        """The transport in use: nvlink, nvshmem, nccl, gloo, or two of them as in nvlink+nccl."""
        return self._transport.name

    def transport_report(self) -> str:
        """One line: the transport, why, and the memory it takes."""
        total = sum((self.layout.symmetric_bytes(), self.layout.scratch_bytes()))
        memory = f", {total / 2**20:.1f} MiB" if self.transport == "nvlink" else ""
        sizes = getattr(self._transport, "sizes", None)
        if sizes is not None:
            memory = f", {sizes.domains} domains of {sizes.domain_size} ranks"
        reason = f" ({self.transport_reason})" if self.transport_reason else ""
        return f"all-to-all over {self.transport}{memory}{reason}"

    def packed_rows(self, alignment: int = 1) -> int:
        """Rows of a packed out_expert_x that hold whatever arrives."""
        return self.layout.packed_rows(alignment)

    # ---- dispatch
    def dispatch(
        self,
        out_expert_num_tokens: Tensor | None,
        out_expert_x: Tensor | None,
        out_expert_x_scale: Tensor | None,
        dp_x: Tensor | None,
        dp_x_scale: Tensor | None,
        indices: Tensor | None,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        *,
        weights: Tensor | None = None,
        out_expert_offsets: Tensor | None = None,
        alignment: int = 1,
        quantize: bool = False,
    ) -> None:
        """Send tokens to their experts' ranks and lay what arrives out by expert.

        Args:
            out_expert_num_tokens: int32 [L], rows of each local expert.
            out_expert_x: [L, R, H] (rows past an expert's count keep what they had), or packed
                [rows, H] with at least packed_rows(alignment) rows: experts one after another, each
                at a multiple of `alignment` rows, for a grouped GEMM. Type of what is sent, or an
                integer type for its bytes.
            out_expert_x_scale: fp32 [L, R, S] or [rows, S]; None without scales.
            dp_x: [m, H], rows of hidden_dim_bytes, fp8 e4m3, bf16, fp16 or any other type of that
                size.
            dp_x_scale: fp32 [m, S]; None without scales.
            indices: uint32, int32 or int64 [m, K]; an id outside the experts (-1) masks the entry.
            bound_m: uint32 or int32 [1] on the device: only the first bound_m tokens count.
            do_send, do_recv: which half to enqueue. A half ignores (and may get None for) the other
                half's tensors.
            weights: fp32 [m, K]; if given here, combine needs none.
            out_expert_offsets: int32 [L], packed layout only: the row after each expert's last,
                padding counted, as torch._grouped_mm's offs.
            alignment: rows, packed layout only.
            quantize: dp_x is bf16 or fp16 [m, H]; it is sent as fp8 e4m3 with one fp32 scale per
                128 elements.

        Raises:
            ConfigError: a tensor that does not fit. PeerTimeoutError: an earlier wait gave up.
                FluidError: halves out of
            order, or after destroy().
        """
        if torch.compiler.is_compiling():  # run as written, outside the compiled graph
            _uncompiled_dispatch(
                self,
                out_expert_num_tokens,
                out_expert_x,
                out_expert_x_scale,
                dp_x,
                dp_x_scale,
                indices,
                bound_m,
                do_send,
                do_recv,
                weights=weights,
                out_expert_offsets=out_expert_offsets,
                alignment=alignment,
                quantize=quantize,
            )
            return
        self._ready("dispatch", do_send, do_recv)
        packed = out_expert_x is not None and out_expert_x.dim() == 2
        sent_type = self._sent_type
        if do_send and dp_x is not None:
            sent_type = torch.float8_e4m3fn if quantize else dp_x.dtype
        key = (
            "dispatch",
            do_send,
            do_recv,
            alignment,
            quantize,
            sent_type,
            form(out_expert_num_tokens),
            form(out_expert_x),
            form(out_expert_x_scale),
            form(out_expert_offsets),
            form(dp_x),
            form(dp_x_scale),
            form(indices),
            form(bound_m),
            form(weights),
        )
        if key not in self._checked:
            if do_send:
                self._checks.dispatch_send(dp_x, dp_x_scale, indices, weights, bound_m, quantize)
            if do_recv:
                self._checks.dispatch_receive(
                    out_expert_num_tokens,
                    out_expert_x,
                    out_expert_x_scale,
                    out_expert_offsets,
                    alignment,
                    sent_type,
                )
            self._checked.add(key)
        if do_send:
            self._weights_came_with_dispatch = weights is not None
            self._sent_type = sent_type
        if do_recv:
            self._packed = packed
        # Each half gets its own tensors and no others, whatever was passed: a launch is prepared
        # for what it gets.
        if do_send:
            self._transport.dispatch(
                DispatchRequest(
                    x=dp_x,
                    x_scale=dp_x_scale,
                    indices=indices,
                    weights=weights,
                    bound_m=bound_m,
                    send=True,
                    quantize=quantize,
                )
            )
        if do_recv:
            self._transport.dispatch(
                DispatchRequest(
                    out_expert_num_tokens,
                    out_expert_x,
                    out_expert_x_scale,
                    out_expert_offsets,
                    receive=True,
                    packed=packed,
                    alignment=alignment,
                )
            )
            self._received = True
        self._sent["dispatch"] = not do_recv

    def dispatch_with_hook(self, *arguments: Any, **keywords: Any) -> Callable[[], None]:
        """`dispatch` of which only the send half is enqueued; calling the result enqueues the
        receive half.

        The tensors must stay as they are until then.
        """
        self.dispatch(*arguments, **{**keywords, "do_send": True, "do_recv": False})
        return lambda: self.dispatch(*arguments, **{**keywords, "do_send": False, "do_recv": True})

    # ---- combine
    def combine(
        self,
        out_tokens: Tensor | None,
        indices: Tensor | None,
        weights: Tensor | None,
        expert_y: Tensor | None,
        bound_m: Tensor | None = None,
        do_send: bool = True,
        do_recv: bool = True,
        *,
        accumulate: bool = False,
    ) -> None:
        """Bring the rows of the last received dispatch home, weighted and summed in fp32.

        A rank's rows of one token are summed before they are sent, and rounded once to
        combine_dtype. (Of sources of at most 16 tokens whose weights come here, every expert's row
        is sent as it is.)

        Args:
            out_tokens: bf16, fp16 or fp32 [m, H]; rows from bound_m on keep what they had.
            indices: as at dispatch.
            weights: fp32 [m, K], or None where they went with the dispatch. Both halves take the
                same.
            expert_y: combine_dtype, [L, R, H] or packed [rows, H], as dispatch laid it out.
            bound_m: as at dispatch.
            accumulate: add to out_tokens instead of overwriting it.

        Raises:
            As dispatch.
        """
        if torch.compiler.is_compiling():
            _uncompiled_combine(
                self,
                out_tokens,
                indices,
                weights,
                expert_y,
                bound_m,
                do_send,
                do_recv,
                accumulate=accumulate,
            )
            return
        self._ready("combine", do_send, do_recv)
        key = (
            "combine",
            do_send,
            do_recv,
            accumulate,
            form(out_tokens),
            form(indices),
            form(weights),
            form(expert_y),
            form(bound_m),
            self._packed,
            self._weights_came_with_dispatch,
        )
        if key not in self._checked:
            self._checks.combine(
                out_tokens,
                indices,
                weights,
                expert_y,
                bound_m,
                do_send,
                do_recv,
                self._packed,
                self._weights_came_with_dispatch,
            )
            self._checked.add(key)
        exchange = not self._weights_came_with_dispatch
        if do_send:
            self._transport.combine(
                CombineRequest(
                    weights=weights,
                    expert_y=expert_y,
                    bound_m=bound_m,
                    send=True,
                    exchange=exchange,
                )
            )
        if do_recv:
            self._transport.combine(
                CombineRequest(
                    out_tokens,
                    indices,
                    weights,
                    bound_m=bound_m,
                    receive=True,
                    accumulate=accumulate,
                    exchange=exchange,
                )
            )
        self._sent["combine"] = not do_recv

    def combine_with_hook(self, *arguments: Any, **keywords: Any) -> Callable[[], None]:
        """`combine` of which only the send half is enqueued; calling the result enqueues the
        receive half."""
        self.combine(*arguments, **{**keywords, "do_send": True, "do_recv": False})
        return lambda: self.combine(*arguments, **{**keywords, "do_send": False, "do_recv": True})

    # ---- state
    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a wait of this rank has given up. Host memory only; every call
        does it first."""
        self._transport.check_errors()

    def destroy(self) -> None:
        """Give the memory back. Collective where memory is shared. Idempotent; nothing else may be
        called after."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    def _ready(self, operation: str, do_send: bool, do_recv: bool) -> None:
        if self._closed:
            raise FluidError(f"{operation} after destroy()")
        self._transport.check_errors()
        if not (do_send or do_recv):
            raise ConfigError(
                f"{operation}: do_send and do_recv are both False; at least one must be True"
            )
        if do_send and self._sent[operation]:
            raise FluidError(
                f"{operation}: do_send again before the receive half of the last send was enqueued"
            )
        if do_recv and not do_send and not self._sent[operation]:
            raise FluidError(f"{operation}: do_recv without a send half before it")
        other = "combine" if operation == "dispatch" else "dispatch"
        if self._sent[other]:
            raise FluidError(
                f"{operation} between the halves of a {other}: two in flight take two objects"
            )
        if operation == "combine" and not self._received:
            raise FluidError("combine was called before any dispatch was received")


@torch.compiler.disable
def _uncompiled_dispatch(all_to_all: AllToAll, *arguments: Any, **keywords: Any) -> None:
    all_to_all.dispatch(*arguments, **keywords)


@torch.compiler.disable
def _uncompiled_combine(all_to_all: AllToAll, *arguments: Any, **keywords: Any) -> None:
    all_to_all.combine(*arguments, **keywords)


def _resolve(group: dist.ProcessGroup | None, name: str) -> dist.ProcessGroup:
    if group is not None:
        return group
    if name == "default":
        world = dist.group.WORLD
        if world is None:
            raise ConfigError(
                "group: torch.distributed is not initialised; call init_process_group first"
            )
        return world
    try:
        return dist.distributed_c10d._resolve_process_group(dist.distributed_c10d.GroupName(name))
    except Exception as error:
        raise ConfigError.of(
            "group_name", name, "'default' or the name of a torch process group"
        ) from error
