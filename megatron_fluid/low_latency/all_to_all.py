"""AllToAll: dispatch and combine for MoE inference, in pplx-kernels' signature and layouts.

    ata = AllToAll.intranode(max_num_tokens=128, num_experts=256, experts_per_token=8, rank=rank,
                             world_size=world, dp_size=1, hidden_dim=7168, hidden_dim_bytes=7168,
                             hidden_dim_scale_bytes=224)
    ata.dispatch(out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices,
                 bound_m)
    ...                                                 # the experts: [L, R, H] -> [L, R, H]
    ata.combine(out_tokens, indices, weights, expert_y, bound_m)
    ata.destroy()

A router knows the weights at dispatch: give them there and None to combine, which saves one
exchange.

Slots are in (source, token, k) order. Sums are in a fixed order, a rank's experts by k, then ranks,
so results repeat bitwise. Nothing is read on the host: a CUDA graph can capture the calls and
replay them with other routings and other token counts (`bound_m`).

Shapes: m tokens of this rank's data-parallel group, at most C = max_num_tokens; K =
experts_per_token; W ranks; D = W / dp_size groups; L = num_experts / W; R = C * D; H = hidden_dim;
S = hidden_dim_scale_bytes / 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.comm.layers import compare_settings
from megatron_fluid.config import shows_fields_of
from megatron_fluid.errors import ConfigError, FluidError
from megatron_fluid.low_latency.checks import Checks, refuse_unaligned, same_forms
from megatron_fluid.low_latency.layout import AllToAllConfig, Layout, check_setting
from megatron_fluid.low_latency.open_transport import choose_transport, open_transport
from megatron_fluid.low_latency.transport import (
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
    Transport,
)

__all__ = ["AllToAll"]

_MOST_SHAPES, _MOST_FORMS = 1024, 8  # that are known, and of tensors of one shape
_ARRIVE = ("out_expert_num_tokens", "out_expert_x", "out_expert_x_scale", "out_expert_offsets")
_RETURN = ("out_tokens", "indices", "weights")


class AllToAll:
    """One rank's end of the all-to-all. `intranode` and `internode` build it; every rank of the
    group must.

    One object serves one stream order: its dispatches and combines never overlap, so two
    microbatches in flight take two objects. Calls of each operation alternate send, receive, send,
    receive. Any other kernel may run between the halves, and no SM is held. A receive half that
    waits holds SMs. So all objects of a process are called on one stream, in the same order on all
    ranks: on two streams a waiting half can keep the other object's send from starting, until a
    wait times out.
    """

    def __init__(self, layout: Layout, transport: Transport, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.rank = transport.rank
        self.transport_reason = ""
        self._transport = transport
        self._checks = Checks(layout, device)
        self._known: dict[tuple[object, ...], list[list[Callable[..., Any]]]] = {}
        self._sent = {"dispatch": False, "combine": False}
        self._received = False  # any dispatch
        self._sent_type: torch.dtype | None = None
        self._weights_came_with_dispatch = False
        self._sent_tokens = 0
        self._packed_rows: int | None = None  # of the last received dispatch, if it was packed
        self._closed = False

    # ---- construction
    @classmethod
    @shows_fields_of(AllToAllConfig, leave_out=("domain_size", "internode"))
    def intranode(cls, *arguments: Any, **named: Any) -> AllToAll:
        """An all-to-all inside one NVLink domain. Collective. Arguments and errors:
        `AllToAllConfig`. "auto" takes nvlink where the GPUs can map each other's memory, else the
        group's collectives."""
        return cls.from_config(AllToAllConfig(*arguments, **named))

    @classmethod
    @shows_fields_of(AllToAllConfig, leave_out=("internode",))
    def internode(cls, *arguments: Any, **named: Any) -> AllToAll:
        """An all-to-all between nodes. Collective. Arguments and errors: `AllToAllConfig`.

        "auto" takes nvlink where the whole group is one domain, nvlink+nccl where it is several
        domains of one size, else the group's collectives. Two names, such as nvlink+nvshmem, are
        the transport inside a domain and the transport between domains: see
        megatron_fluid.low_latency.two_level, also for the order of slots. "nvshmem" is used only
        where it is asked for by name; NVSHMEM's own settings choose P2P, IBGDA, IBRC or libfabric.
        """
        return cls.from_config(AllToAllConfig(*arguments, **named, internode=True))

    @classmethod
    def from_config(cls, config: AllToAllConfig) -> AllToAll:
        """An all-to-all of these settings. Collective."""
        layout, group, size = config.layout, config.process_group, config.domain_size
        asked = {"transport": config.transport, "domain_size": size, "internode": config.internode}
        asked["multiprocessors"] = _multiprocessors()  # receivers count the senders' flags by them
        compare_settings(group, cls.__name__, vars(layout) | asked)
        chosen, reason = choose_transport(config.transport, group, layout, size, config.internode)
        transport, device = open_transport(chosen, layout, group, config.wait_limit_s, size)
        result = cls(layout, transport, device)
        result.transport_reason = reason
        return result

    @property
    def transport(self) -> str:
        """The transport in use: nvlink, nvshmem, nccl, gloo, or two of them as in nvlink+nccl."""
        return self._transport.name

    @property
    def ranks_of_calls(self) -> int:
        """How many ranks come to a call."""
        return self.layout.world_size

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={value}" for name, value in vars(self.layout).items())
        return f"AllToAll({sizes}, rank={self.rank}, transport={self.transport}, {self.device})"

    def transport_report(self) -> str:
        """One line: the transport, why, and the symmetric memory it takes."""
        reason = f" ({self.transport_reason})" if self.transport_reason else ""
        return f"all-to-all over {self.transport}{self._transport.size()}{reason}"

    def packed_rows(self, alignment: int = 1) -> int:
        """Rows of a packed out_expert_x that hold whatever arrives."""
        check_setting("alignment", alignment, 1)
        return self.layout.packed_rows(alignment)

    # ---- dispatch
    @tells_peers
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
    ) -> None:
        """Send tokens to their experts' ranks and lay out by expert what arrives.

        Args:
            out_expert_num_tokens: int32 [L], rows of each local expert.
            out_expert_x: [L, R, H], where rows past an expert's count keep what they had. Or packed
                [rows, H] with at least packed_rows(alignment) rows: one expert after another, each
                at a multiple of `alignment` rows, for a grouped GEMM. Has the dtype that is sent,
                or an integer dtype for its bytes.
            out_expert_x_scale: fp32 [L, R, S] or [rows, S]; None without scales.
            dp_x: [m, H], rows of hidden_dim_bytes, of any dtype of that size. Ranks are not
                compared: one whose peer sends another dtype reads its bytes as its own.
            dp_x_scale: fp32 [m, S]; None without scales.
            indices: uint32, int32 or int64 [m, K]; an id outside the experts (-1) masks the entry.
            bound_m: uint32 or int32 [1] on the device; only the first bound_m tokens count.
            do_send, do_recv: which half to enqueue. A half ignores the other half's tensors, which
                may be None.
            weights: fp32 [m, K]; if given here, combine needs none. All ranks give them here, or
                all at combine, also those without tokens ([0, K]).
            out_expert_offsets: int32 [L], packed layout only: the row after each expert's last,
                padding counted, as torch._grouped_mm's offs.
            alignment: rows, packed layout only.

        Every tensor but bound_m begins at a multiple of 16 bytes.

        Raises:
            ConfigError: a tensor that does not fit.
            PeerTimeoutError: an earlier wait timed out.
            FluidError: halves out of order, or after destroy().
        """
        self._ready("dispatch", do_send, do_recv)
        check_setting("alignment", alignment, 1)  # before it is looked up among equal values
        # Each half gets its own tensors and no others, whatever was passed: a launch is prepared
        # for what it gets. Both are checked before one starts; addresses are no part of a form.
        if do_send:
            sent = dp_x, indices, weights, dp_x_scale, bound_m
            shape = None if dp_x is None else dp_x.shape
            send = self._half(DispatchSend, sent, shape)
        sent_type = dp_x.dtype if do_send else self._sent_type  # type: ignore[union-attr]
        if do_recv:
            received = out_expert_num_tokens, out_expert_x, out_expert_x_scale, out_expert_offsets
            receive = self._half(DispatchReceive, received, None, (alignment,), (sent_type,))
            if do_send:
                refuse_unaligned(_ARRIVE, received)
            packed = out_expert_offsets is not None
            self._packed_rows = self.layout.packed_rows(alignment) if packed else None
        if do_send:
            self._weights_came_with_dispatch = weights is not None
            self._sent_type, self._sent_tokens = sent_type, shape[0]  # type: ignore[index]
            send(sent)
            self._sent["dispatch"] = True
        if do_recv:
            receive(received)
            self._sent["dispatch"], self._received = False, True

    @shows_fields_of(dispatch, leave_out=("self", "do_send", "do_recv"))
    def dispatch_with_hook(self, *arguments: Any, **keywords: Any) -> Callable[[], None]:
        """Enqueue the send half of `dispatch`; calling the result enqueues the receive half. The
        tensors must not change until then."""
        self.dispatch(*arguments, **{**keywords, "do_send": True, "do_recv": False})
        return lambda: self.dispatch(*arguments, **{**keywords, "do_send": False, "do_recv": True})

    # ---- combine
    @tells_peers
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
        """Return the expert rows of the last received dispatch to their tokens, weighted and summed
        in fp32.

        Each rank sums its rows of a token and rounds once to combine_dtype before it sends, except
        to a source of at most 16 tokens that gives its weights here, and with batch_invariant to
        all: they receive rows unsummed.

        Args:
            out_tokens: bf16, fp16 or fp32 [m, H], m at most that of the dispatch; rows from bound_m
                on keep what they had. The sum of a row that dispatch's bound_m left
                out is 0.
            indices: as at dispatch.
            weights: fp32 [m, K], or None if dispatch took them. Both halves take the same.
            expert_y: combine_dtype, [L, R, H] or packed [rows, H], as dispatch laid it out.
            accumulate: add to out_tokens instead of overwriting it.
        bound_m and errors: as at dispatch.
        """
        self._ready("combine", do_send, do_recv)
        check_setting("accumulate", accumulate)
        late = not self._weights_came_with_dispatch
        if do_send:
            sent = expert_y, weights, bound_m
            shape = None if weights is None else weights.shape
            send = self._half(CombineSend, sent, shape, (), (self._packed_rows, late))
        if do_recv:
            received = out_tokens, indices, weights, bound_m
            shape = None if out_tokens is None else out_tokens.shape
            known = self._sent_tokens, late
            receive = self._half(CombineReceive, received, shape, (accumulate,), known)
            if do_send:
                refuse_unaligned(_RETURN, received[:3])
        if do_send:
            send(sent)
            self._sent["combine"] = True
        if do_recv:
            receive(received)
            self._sent["combine"] = False

    # ---- both
    def _half(
        self, request: Any, tensors: Sequence[Tensor | None], shape: object,
        settings: tuple[object, ...] = (), known: tuple[object, ...] = (),
    ) -> Callable[[Sequence[Tensor | None]], None]:  # fmt: skip
        """Return what starts the half of `request`, a class, with `tensors` and `settings`. Tensors
        of new forms are checked. `shape`, of the one whose rows vary, finds known forms fast."""
        given, absent = [], 0  # which are None, by bits
        for tensor in tensors:
            absent += absent
            if tensor is None:
                absent += 1
            else:
                given.append(tensor)
        key = request, shape, settings, known, absent
        forms = self._known.get(key, ())
        for same, start in forms:
            if same(*given):
                return start
        getattr(self._checks, request.half)(request(*tensors, *settings), *known)
        enqueue = getattr(self._transport, request.half)

        def begin(now: Sequence[Tensor | None]) -> None:
            if (again := enqueue(request(*now, *settings))) is not None:
                entry[1] = again()

        entry = [same_forms(given), begin]
        if len(self._known) > _MOST_SHAPES:
            self._known.clear()
        self._known[key] = [entry, *forms][:_MOST_FORMS]
        return begin

    # ---- state
    def check_errors(self) -> None:
        """Raise PeerTimeoutError if a wait of this rank has timed out. Reads host memory only;
        every call does it first."""
        self._transport.check_errors()

    def destroy(self) -> None:
        """Free the memory. Collective where memory is shared. May be called again; nothing else
        may be called after it."""
        if not self._closed:
            self._closed = True
            self._known.clear()
            self._transport.close()

    def _ready(self, operation: str, do_send: bool, do_recv: bool) -> None:
        if self._closed:
            raise FluidError(f"{operation} after destroy()")
        self._transport.check_errors()
        if not (do_send or do_recv):
            both = "do_send and do_recv are both False, allowed: at least one True"
            raise ConfigError(f"{operation}: {both}")
        if do_send and self._sent[operation]:
            raise FluidError(f"{operation}: do_send again before the last send's receive half")
        if do_recv and not do_send and not self._sent[operation]:
            raise FluidError(f"{operation}: do_recv without a send half before it")
        other = "combine" if operation == "dispatch" else "dispatch"
        if self._sent[other]:
            order = f"between the halves of a {other}: two in flight take two objects"
            raise FluidError(f"{operation} {order}")
        if operation == "combine" and not self._received:
            raise FluidError("combine was called before any dispatch was received")


def _multiprocessors() -> int:
    """Of this rank's GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
