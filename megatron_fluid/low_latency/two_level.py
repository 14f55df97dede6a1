"""The two-level exchange: one transport inside an NVLink domain, another between domains.

N domains have G consecutive ranks each. Ranks with the same index in their domains form a rail. A
token crosses its rail once for each domain that has one of its experts, and the rank that receives
it there forwards it inside the domain:

    dispatch   send: rail          receive: rail, then domain
    combine    send: domain, then rail          receive: rail

Both levels are ordinary exchanges of this package. On the rails the "experts" are the domains, and
a row is the token's payload, scales, expert ids and weights. Inside a domain a rank sends what it
received from its rail. Nothing is read on the host.

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

from megatron_fluid.cuda.streams import synchronize
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.transport import CombineRequest, DispatchRequest, Transport

__all__ = ["TwoLevel", "TwoLevelLayout"]


class TwoLevelLayout:
    """The layouts of the two levels: `rail`, `domain`, and `weights`, which carries weights along
    the rails where combine takes them.

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
        self.weights = replace(self.rail, hidden_dim=8, hidden_dim_bytes=round_up(4 * k, 16))
        self.domain = replace(
            layout, max_num_tokens=layout.max_num_tokens * self.domains,
            num_experts=self.domain_experts, world_size=domain_size,
        )  # fmt: skip


class TwoLevel:
    """Dispatch and combine of one rank over two levels.

    Args:
        domain, rail, weights_rail: transports of the three layouts of `sizes`; this object owns
            them.
        groups: their process groups; `close` destroys them.
    """

    def __init__(
        self,
        sizes: TwoLevelLayout,
        rank: int,
        domain: Transport,
        rail: Transport,
        weights_rail: Transport,
        device: torch.device,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.sizes, self.rank, self._groups = sizes, rank, tuple(groups)
        self.domain, self.rail, self.weights_rail = domain, rail, weights_rail
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
        self._weight_row = zeros(tokens, sizes.weights.hidden_dim_bytes // 4)
        self._received_weights = zeros(1, received, self._weight_row.shape[1])
        self._weights_count = zeros(1, dtype=torch.int32)
        self._partial = zeros(received, layout.hidden_dim, dtype=layout.combine_dtype)
        synchronize(device)

    # ---- dispatch
    def dispatch(self, request: DispatchRequest) -> None:
        if request.send:
            self.send_along_rail(request)
        else:
            self.forward_in_domain()
            self.receive_in_domain(request)

    def send_along_rail(self, q: DispatchRequest) -> None:
        """Send every token to the domains of its experts."""
        sizes, layout = self.sizes, self.sizes.layout
        assert q.x is not None and q.indices is not None
        m, k = q.x.shape[0], layout.experts_per_token
        row = self._row[:m]
        row[:, : layout.hidden_dim_bytes] = q.x.view(torch.uint8)
        if q.x_scale is not None:
            row[:, layout.hidden_dim_bytes : sizes.ids_at].view(torch.float32).copy_(q.x_scale)
        words = row[:, sizes.ids_at : sizes.ids_at + 8 * k].view(torch.int32)
        ids = q.indices.view(torch.int32) if q.indices.dtype == torch.uint32 else q.indices
        valid = (ids >= 0) & (ids < layout.num_experts)
        if q.bound_m is not None:
            # The masks, and not only the rail's bound, exclude the other tokens: weights that are
            # combine takes follow the same masks into the same slots.
            valid &= (torch.arange(m, device=ids.device) < q.bound_m.to(torch.int64))[:, None]
        ids = torch.where(valid, ids, -1)
        words[:, :k] = ids
        if q.weights is not None:
            words[:, k:].view(torch.float32).copy_(q.weights)
        self._rail_ids[:m] = self._domains_of(ids)
        request = DispatchRequest(
            x=row, indices=self._rail_ids[:m], weights=self._ones[:m], bound_m=q.bound_m, send=True
        )
        self._run(self.rail.dispatch, request)

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

    def forward_in_domain(self) -> None:
        """Receive from the rail, and send on to the ranks of this domain."""
        sizes, layout, k = self.sizes, self.sizes.layout, self.sizes.layout.experts_per_token
        received = DispatchRequest(out_counts=self._count, out_x=self._received)
        self._run(self.rail.dispatch, received)
        row = self._received[0]
        words = row[:, sizes.ids_at : sizes.ids_at + 8 * k].view(torch.int32)
        local = words[:, :k] - self._first_expert
        self._ids.copy_(torch.where((local >= 0) & (local < sizes.domain_experts), local, -1))
        self._weights.copy_(words[:, k:].view(torch.float32))
        x, scale = row[:, : layout.hidden_dim_bytes], None
        if layout.scale_words:
            scale = row[:, layout.hidden_dim_bytes : sizes.ids_at].view(torch.float32)
        request = DispatchRequest(
            x=x, x_scale=scale, indices=self._ids, weights=self._weights, bound_m=self._count,
            send=True,
        )  # fmt: skip
        self._run(self.domain.dispatch, request)

    def receive_in_domain(self, q: DispatchRequest) -> None:
        """Lay out what the ranks of this domain forwarded."""
        self._run(self.domain.dispatch, q)

    # ---- combine
    def combine(self, request: CombineRequest) -> None:
        if request.send:
            if request.exchange:
                self.exchange_weights(request)
            self.sum_in_domain(request, send=True)
            self.sum_in_domain(request, send=False)
            self.send_back()
        else:
            self.receive_back(request)

    def exchange_weights(self, q: CombineRequest) -> None:
        """The weights follow their tokens along the rails."""
        assert q.weights is not None
        m, k = q.weights.shape[0], self.sizes.layout.experts_per_token
        self._weight_row[:m, :k] = q.weights
        request = DispatchRequest(x=self._weight_row[:m], indices=self._rail_ids[:m], send=True)
        self._run(self.weights_rail.dispatch, request)
        request = DispatchRequest(self._weights_count, self._received_weights)
        self._run(self.weights_rail.dispatch, request)
        self._weights.copy_(self._received_weights[0, :, :k])

    def sum_in_domain(self, q: CombineRequest, send: bool) -> None:
        """Enqueue the sending half, or the receiving half, which yields one row for every token
        that this rank forwarded."""
        weights = self._weights if q.exchange else None
        request = CombineRequest(weights=weights, bound_m=self._count, exchange=q.exchange)
        if send:
            request.expert_y, request.send = q.expert_y, True
        else:
            request.out, request.indices = self._partial, self._ids
        self._run(self.domain.combine, request)

    def send_back(self) -> None:
        """Return those rows along the rail."""
        self._run(self.rail.combine, CombineRequest(expert_y=self._partial[None], send=True))

    def receive_back(self, q: CombineRequest) -> None:
        """Sum over the domains."""
        assert q.out is not None
        rail_ids = self._rail_ids[: q.out.shape[0]]
        request = CombineRequest(q.out, rail_ids, bound_m=q.bound_m, accumulate=q.accumulate)
        self._run(self.rail.combine, request)

    # ---- state
    def _run(self, call: Callable[[Any], None], request: DispatchRequest | CombineRequest) -> None:
        try:
            call(request)
        except PeerTimeoutError as error:
            self._rename(error, call.__self__)  # type: ignore[attr-defined]

    def check_errors(self) -> None:
        for transport in (self.rail, self.weights_rail, self.domain):
            try:
                transport.check_errors()
            except PeerTimeoutError as error:
                self._rename(error, transport)

    def _rename(self, error: PeerTimeoutError, transport: Transport) -> NoReturn:
        """Raise `error` with the peer's rank in the whole group."""
        size, peer, operation = self.sizes.domain_size, error.peer, error.operation
        domain, index = divmod(self.rank, size)
        inside = transport is self.domain
        if peer is not None:
            peer = domain * size + peer if inside else peer * size + index
        if transport is self.weights_rail:  # to that transport a dispatch
            operation = operation.replace("dispatch", "combine weights")
        level = "inside the domain" if inside else "between domains"
        raise PeerTimeoutError(self.rank, peer, operation, None, error.timeout_s, level) from error

    def close(self) -> None:
        for transport in (self.rail, self.weights_rail, self.domain):
            transport.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = ()
