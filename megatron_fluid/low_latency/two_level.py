"""The two-level exchange: one transport inside an NVLink domain, another between domains.

N domains have G consecutive ranks each. Ranks with the same index in their domains form a rail. A
token crosses its rail once for each domain that has one of its experts, and the rank that receives
it there forwards it inside the domain:

    dispatch   send: rail          receive: rail, then domain
    combine    send: domain, then rail          receive: rail

Both levels are ordinary exchanges of this package. On the rails the "experts" are the domains, and
a row is the token's payload, scales, expert ids and weights. Inside a domain a rank sends what it
received from its rail. Weights that combine takes follow along the rails by an all-gather: the rows
carry their tokens' numbers in it. Nothing is read on the host.

An expert's slots are in (index in the domain, domain, token) order. Combine sums a rank's experts,
then the ranks of a domain, then the domains, in fp32, and rounds to combine_dtype after each of the
first two.

Shapes: C token capacity of a rank, K top-k, L experts of a rank, N domains, G ranks of a domain, H
hidden, S scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.comm.waits import group_waits
from megatron_fluid.cuda.devices import synchronize
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.transport import (
    CombineReceive,
    CombineSend,
    DispatchReceive,
    DispatchSend,
    Transport,
)

__all__ = ["TwoLevel", "TwoLevelLayout"]


class TwoLevelLayout:
    """The layouts of the two levels: `rail` and `domain`.

    Raises:
        ConfigError: domains that do not divide the ranks, tensor-parallel replicas, or more experts
            per token than a domain has.
    """

    def __init__(self, layout: Layout, domain_size: int) -> None:
        world, k = layout.world_size, layout.experts_per_token
        if domain_size < 1 or world % domain_size:
            raise ConfigError.of("domain_size", domain_size, f"a divisor of world_size ({world})")
        if layout.dp_size != 1:
            raise ConfigError.of("dp_size over two levels", layout.dp_size, "1")
        self.layout, self.domain_size = layout, domain_size
        self.domains = world // domain_size
        self.domain_experts = layout.local_experts * domain_size
        if k > self.domain_experts:
            allowed = f"1 to the {self.domain_experts} of a domain"
            raise ConfigError.of("experts_per_token over two levels", k, allowed)
        self.ids_at = layout.hidden_dim_bytes + layout.hidden_dim_scale_bytes
        self.row_bytes = round_up(self.ids_at + 8 * k, 16)
        # A column of rail ids is a domain if there are at most K domains, else one of the token's
        # experts.
        self.rail_k = min(self.domains, k)
        self.rail = replace(
            layout, num_experts=self.domains, experts_per_token=self.rail_k,
            world_size=self.domains, hidden_dim_bytes=self.row_bytes, hidden_dim_scale_bytes=0,
        )  # fmt: skip
        self.domain = replace(
            layout, max_num_tokens=layout.max_num_tokens * self.domains,
            num_experts=self.domain_experts, world_size=domain_size,
        )  # fmt: skip


class TwoLevel:
    """Dispatch and combine of one rank over two levels.

    Args:
        domain, rail: transports of the two layouts of `sizes`; this object owns them.
        groups: their process groups, domain and rail; `close` destroys them.
        timeout_s: bound on the all-gather of weights.
    """

    def __init__(
        self,
        sizes: TwoLevelLayout,
        rank: int,
        domain: Transport,
        rail: Transport,
        device: torch.device,
        groups: Sequence[dist.ProcessGroup] = (),
        timeout_s: float | None = None,
    ) -> None:
        self.sizes, self.rank, self._groups = sizes, rank, tuple(groups)
        self._timeout_s = timeout_s
        self.domain, self.rail = domain, rail
        self.name = f"{domain.name}+{rail.name}"
        layout, k = sizes.layout, sizes.layout.experts_per_token
        tokens, received = layout.max_num_tokens, layout.max_num_tokens * sizes.domains

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._first_expert = rank // sizes.domain_size * sizes.domain_experts
        self._row = zeros(tokens, sizes.row_bytes, dtype=torch.uint8)
        self._rail_ids = zeros(tokens, sizes.rail_k, dtype=torch.int32).sub_(1)
        self._ones = zeros(tokens, sizes.rail_k).add_(1)
        self._count = zeros(1, dtype=torch.int32)
        self._received = zeros(1, received, sizes.row_bytes, dtype=torch.uint8)
        self._ids = zeros(received, k, dtype=torch.int32).sub_(1)
        self._weights = zeros(received, k)
        self._numbers = torch.arange(tokens, dtype=torch.int32, device=device)
        self._late = zeros(tokens, k)
        self._all_late = zeros(received, k)
        self._partial = zeros(received, layout.hidden_dim, dtype=layout.combine_dtype)
        self._failure: PeerTimeoutError | None = None  # of the all-gather of weights
        synchronize(device)

    # ---- dispatch
    def dispatch_send(self, q: DispatchSend) -> None:
        """Send every token along the rail, to the domains of its experts."""
        sizes, layout = self.sizes, self.sizes.layout
        m, k = q.x.shape[0], layout.experts_per_token
        row = self._row[:m]
        row[:, : layout.hidden_dim_bytes] = q.x.view(torch.uint8)
        if q.x_scale is not None:
            row[:, layout.hidden_dim_bytes : sizes.ids_at].view(torch.float32).copy_(q.x_scale)
        words = row[:, sizes.ids_at : sizes.ids_at + 8 * k].view(torch.int32)
        ids = q.indices.view(torch.int32) if q.indices.dtype == torch.uint32 else q.indices
        valid = (ids >= 0) & (ids < layout.num_experts)
        if q.bound_m is not None:
            valid &= (self._numbers[:m] < q.bound_m.to(torch.int64))[:, None]
        ids = torch.where(valid, ids, -1)
        words[:, :k] = ids
        if q.weights is None:  # the token's number among those of the rail
            words[:, k] = self._numbers[:m] + self.rank // sizes.domain_size * len(self._row)
        else:
            words[:, k:].view(torch.float32).copy_(q.weights)
        self._rail_ids[:m] = self._domains_of(ids)
        sent = DispatchSend(row, self._rail_ids[:m], self._ones[:m], bound_m=q.bound_m)
        self._run(self.rail.dispatch_send, sent)

    def _domains_of(self, ids: Tensor) -> Tensor:
        """[m, rail_k]: each domain that has an expert of the token once, else -1. `ids` holds
        experts and -1."""
        sizes = self.sizes
        domain = torch.div(ids, sizes.domain_experts, rounding_mode="floor")
        domain = torch.where(ids >= 0, domain, -1)
        if sizes.rail_k == sizes.domains:
            every = torch.arange(sizes.domains, device=ids.device)
            named = (domain[:, :, None] == every).any(1)
            return torch.where(named, every, -1).to(torch.int32)
        earlier = (domain[:, :, None] == domain[:, None, :]).tril(-1).any(-1)
        return torch.where(earlier, -1, domain).to(torch.int32)

    def dispatch_receive(self, q: DispatchReceive) -> None:
        self.forward_in_domain()
        self.receive_in_domain(q)

    def forward_in_domain(self) -> None:
        """Receive from the rail, and send on to the ranks of this domain."""
        sizes, layout, k = self.sizes, self.sizes.layout, self.sizes.layout.experts_per_token
        self._run(self.rail.dispatch_receive, DispatchReceive(self._count, self._received))
        row = self._received[0]
        words = row[:, sizes.ids_at : sizes.ids_at + 8 * k].view(torch.int32)
        local = words[:, :k] - self._first_expert
        self._ids.copy_(torch.where((local >= 0) & (local < sizes.domain_experts), local, -1))
        self._weights.copy_(words[:, k:].view(torch.float32))
        x, scale = row[:, : layout.hidden_dim_bytes], None
        if layout.scale_words:
            scale = row[:, layout.hidden_dim_bytes : sizes.ids_at].view(torch.float32)
        sent = DispatchSend(x, self._ids, self._weights, scale, self._count)
        self._run(self.domain.dispatch_send, sent)

    def receive_in_domain(self, q: DispatchReceive) -> None:
        """Lay out what the ranks of this domain forwarded."""
        self._run(self.domain.dispatch_receive, q)

    # ---- combine
    def combine_send(self, q: CombineSend) -> None:
        if q.weights is not None:
            self.exchange_weights(q.weights)
        weights = None if q.weights is None else self._weights
        self.send_in_domain(CombineSend(q.expert_y, weights, self._count))
        self.send_back(weights)

    def exchange_weights(self, weights: Tensor) -> None:
        """Gather the weights of all tokens of the rail, and pick those of the received rows."""
        at, every = self.sizes.ids_at + 4 * weights.shape[1], self._all_late
        self._late[: len(weights)] = weights
        try:
            group_waits(self._groups[1]).start(
                "low_latency.combine weights",
                lambda: dist.all_gather_into_tensor(
                    every, self._late, group=self._groups[1], async_op=True
                ),
                self._timeout_s,
            )()
        except PeerTimeoutError as error:
            self._failure = error
            self._rename(error, self.rail)
        numbers = self._received[0, :, at : at + 4].view(torch.int32)[:, 0]
        # Rows behind the received ones hold anything.
        self._weights.copy_(every[numbers.clamp(0, len(every) - 1)])

    def send_in_domain(self, q: CombineSend) -> None:
        """Send this rank's sums to the ranks of this domain that forwarded the tokens."""
        self._run(self.domain.combine_send, q)

    def send_back(self, weights: Tensor | None) -> None:
        """Sum over the ranks of this domain, one row for every token that this rank forwarded, and
        return the rows along the rail."""
        summed = CombineReceive(self._partial, self._ids, weights, self._count)
        self._run(self.domain.combine_receive, summed)
        self._run(self.rail.combine_send, CombineSend(self._partial[None]))

    def combine_receive(self, q: CombineReceive) -> None:
        """Sum over the domains."""
        ids = self._rail_ids[: q.out.shape[0]]
        received = CombineReceive(q.out, ids, None, q.bound_m, q.accumulate)
        self._run(self.rail.combine_receive, received)

    # ---- state
    def _run(self, call: Callable[[Any], object], q: object) -> None:
        try:
            call(q)
        except PeerTimeoutError as error:
            self._rename(error, call.__self__)  # type: ignore[attr-defined]

    def size(self) -> str:
        return f", {self.sizes.domains} domains of {self.sizes.domain_size} ranks"

    def check_errors(self) -> None:
        if self._failure is not None:  # ranks no longer know what others have sent
            self._rename(self._failure.with_traceback(None), self.rail)
        for transport in (self.rail, self.domain):
            try:
                transport.check_errors()
            except PeerTimeoutError as error:
                self._rename(error, transport)

    def _rename(self, error: PeerTimeoutError, transport: Transport) -> NoReturn:
        """Raise `error` with the peer's rank in the whole group."""
        size, peer = self.sizes.domain_size, error.peer
        domain, index = divmod(self.rank, size)
        inside = transport is self.domain
        if peer is not None:
            peer = domain * size + peer if inside else peer * size + index
        level = "inside the domain" if inside else "between domains"
        named = self.rank, peer, error.operation, None, error.timeout_s, level
        raise PeerTimeoutError(*named) from error

    def close(self) -> None:
        for transport in (self.rail, self.domain):
            transport.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = ()
