"""The two-level exchange: one transport inside an NVLink domain, another between domains; made of
the other transports.

Ranks stand in N domains of G consecutive ranks. Ranks with the same place in their domains form a
rail. A token crosses to each domain that has one of its experts once, along its rail, and the rank
where it lands hands it on inside the domain:

    dispatch   send: rail          receive: rail, then domain
    combine    send: domain, then rail          receive: rail

Both levels are ordinary exchanges of this package. On the rails the "experts" are the domains, and
a row is the token's payload, scales, expert ids and weights; inside a domain a source brings what
its rail brought. Nothing is read on the host.

An expert's slots are in (place in the domain, domain, token) order. Combine sums a rank's experts,
then the ranks of a domain, then the domains, in fp32, with a rounding to combine_dtype after each
of the first two.

Shapes: C token capacity of a rank, K top-k, L experts of a rank, N domains, G ranks of a domain, H
hidden, S scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid.cuda.streams import synchronize
from megatron_fluid.errors import ConfigError, PeerTimeoutError
from megatron_fluid.low_latency.layout import Layout, round_up
from megatron_fluid.low_latency.reference import quantize_rows
from megatron_fluid.low_latency.requests import CombineRequest, DispatchRequest, Transport

__all__ = ["TwoLevel", "TwoLevelLayout"]


class TwoLevelLayout:
    """The layouts of the two levels, and of the weights' own trip along the rails where they come
    with the combine.

    Raises ConfigError where domains do not divide the ranks, with tensor-parallel replicas, or with
    more experts per token than a domain has.
    """

    def __init__(self, layout: Layout, domain_size: int) -> None:
        if domain_size < 1 or layout.world_size % domain_size:
            raise ConfigError.of(
                "domain_size", domain_size, f"a divisor of world_size ({layout.world_size})"
            )
        if layout.dp_size != 1:
            raise ConfigError.of("dp_size over two levels", layout.dp_size, "1")
        self.layout, self.domain_size = layout, domain_size
        self.domains = layout.world_size // domain_size
        self.domain_experts = layout.local_experts * domain_size
        k, tokens = layout.experts_per_token, layout.max_num_tokens
        if k > self.domain_experts:
            raise ConfigError.of(
                "experts_per_token over two levels",
                k,
                f"1 to the {self.domain_experts} of a domain",
            )
        self.ids_at = layout.hidden_dim_bytes + layout.hidden_dim_scale_bytes
        self.row_bytes = round_up(self.ids_at + 8 * k, 16)
        # Where there are few domains a column is a domain, else it is one of the token's experts.
        self.rail_k = min(self.domains, k)
        self.rail = self._rail_layout(layout.hidden_dim, self.row_bytes)
        self.weights = self._rail_layout(8, round_up(4 * k, 16))
        self.domain = Layout(
            tokens * self.domains,
            self.domain_experts,
            k,
            domain_size,
            1,
            layout.hidden_dim,
            layout.hidden_dim_bytes,
            layout.hidden_dim_scale_bytes,
            layout.combine_bytes,
        )

    def _rail_layout(self, hidden: int, row_bytes: int) -> Layout:
        layout = self.layout
        return Layout(
            layout.max_num_tokens,
            self.domains,
            self.rail_k,
            self.domains,
            1,
            hidden,
            row_bytes,
            0,
            layout.combine_bytes,
        )


class TwoLevel:
    """Dispatch and combine of one rank over two levels.

    `domain`, `rail` and `weights_rail` are transports built for the three layouts of `sizes`, which
    this object owns, and so it does `groups`, theirs.
    """

    def __init__(
        self,
        sizes: TwoLevelLayout,
        rank: int,
        domain: Transport,
        rail: Transport,
        weights_rail: Transport,
        device: torch.device,
        combine_dtype: torch.dtype = torch.bfloat16,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.sizes, self.rank, self._groups = sizes, rank, tuple(groups)
        self.domain, self.rail, self.weights_rail = domain, rail, weights_rail
        self.name = f"{domain.name}+{rail.name}"
        layout, k = sizes.layout, sizes.layout.experts_per_token
        tokens, landed = layout.max_num_tokens, layout.max_num_tokens * sizes.domains
        self._first_expert = rank // sizes.domain_size * sizes.domain_experts
        self._row = torch.zeros(tokens, sizes.row_bytes, dtype=torch.uint8, device=device)
        self._rail_ids = torch.full((tokens, sizes.rail_k), -1, dtype=torch.int32, device=device)
        self._ones = torch.ones(tokens, sizes.rail_k, dtype=torch.float32, device=device)
        self._count = torch.zeros(1, dtype=torch.int32, device=device)
        self._landed = torch.zeros(1, landed, sizes.row_bytes, dtype=torch.uint8, device=device)
        self._ids = torch.full((landed, k), -1, dtype=torch.int32, device=device)
        self._weights = torch.zeros(landed, k, dtype=torch.float32, device=device)
        self._weight_row = torch.zeros(
            tokens, sizes.weights.hidden_dim_bytes // 4, dtype=torch.float32, device=device
        )
        self._landed_weights = torch.zeros(
            1, landed, self._weight_row.shape[1], dtype=torch.float32, device=device
        )
        self._weights_count = torch.zeros_like(self._count)
        self._partial = torch.zeros(landed, layout.hidden_dim, dtype=combine_dtype, device=device)
        synchronize(device)

    # ---- dispatch
    def dispatch(self, request: DispatchRequest) -> None:
        """Enqueue the halves that are wanted."""
        if request.send:
            self.send_along_rail(request)
        if request.receive:
            self.hand_on(request)
            self.receive_in_domain(request)

    def send_along_rail(self, q: DispatchRequest) -> None:
        """Every token to the domains of its experts."""
        sizes, layout = self.sizes, self.sizes.layout
        assert q.x is not None and q.indices is not None
        m, k = q.x.shape[0], layout.experts_per_token
        x, scale = quantize_rows(q.x) if q.quantize else (q.x, q.x_scale)
        row = self._row[:m]
        row[:, : layout.hidden_dim_bytes] = x.view(torch.uint8)
        if scale is not None:
            row[:, layout.hidden_dim_bytes : sizes.ids_at].view(torch.float32).copy_(scale)
        words = row[:, sizes.ids_at : sizes.ids_at + 8 * k].view(torch.int32)
        ids = q.indices.view(torch.int32) if q.indices.dtype == torch.uint32 else q.indices
        valid = (ids >= 0) & (ids < layout.num_experts)
        if q.bound_m is not None:
            # As masks and not only as a bound: weights that come with the combine find the same
            # slots by them.
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
        domain = torch.where(
            ids >= 0, torch.div(ids, sizes.domain_experts, rounding_mode="floor"), -1
        )
        if sizes.rail_k == sizes.domains:
            every = torch.arange(sizes.domains, device=ids.device)
            named = (domain[:, :, None] == every).any(1)
            return torch.where(named, every, -1).to(torch.int32)
        earlier = (domain[:, :, None] == domain[:, None, :]).tril(-1).any(-1)
        return torch.where(earlier, -1, domain).to(torch.int32)

    def hand_on(self, q: DispatchRequest) -> None:
        """What the rail brought goes to the ranks of this domain."""
        sizes, layout, k = self.sizes, self.sizes.layout, self.sizes.layout.experts_per_token
        self._run(
            self.rail.dispatch,
            DispatchRequest(out_counts=self._count, out_x=self._landed, receive=True),
        )
        row = self._landed[0]
        words = row[:, sizes.ids_at : sizes.ids_at + 8 * k].view(torch.int32)
        local = words[:, :k] - self._first_expert
        self._ids.copy_(torch.where((local >= 0) & (local < sizes.domain_experts), local, -1))
        self._weights.copy_(words[:, k:].view(torch.float32))
        scale = None
        if layout.scale_words:
            scale = row[:, layout.hidden_dim_bytes : sizes.ids_at].view(torch.float32)
        request = DispatchRequest(
            x=row[:, : layout.hidden_dim_bytes],
            x_scale=scale,
            indices=self._ids,
            weights=self._weights,
            bound_m=self._count,
            send=True,
        )
        self._run(self.domain.dispatch, request)

    def receive_in_domain(self, q: DispatchRequest) -> None:
        """Lay out what the ranks of this domain handed on."""
        request = DispatchRequest(
            q.out_counts,
            q.out_x,
            q.out_scale,
            q.out_offsets,
            receive=True,
            packed=q.packed,
            alignment=q.alignment,
        )
        self._run(self.domain.dispatch, request)

    # ---- combine
    def combine(self, request: CombineRequest) -> None:
        """Enqueue the halves that are wanted."""
        if request.send:
            if request.exchange:
                self.bring_weights(request)
            self.sum_in_domain(request, send=True)
            self.sum_in_domain(request, send=False)
            self.send_home(request)
        if request.receive:
            self.receive_home(request)

    def bring_weights(self, q: CombineRequest) -> None:
        """The weights follow their tokens along the rails."""
        assert q.weights is not None
        m, k = q.weights.shape[0], self.sizes.layout.experts_per_token
        self._weight_row[:m, :k] = q.weights
        request = DispatchRequest(x=self._weight_row[:m], indices=self._rail_ids[:m], send=True)
        self._run(self.weights_rail.dispatch, request)
        request = DispatchRequest(self._weights_count, self._landed_weights, receive=True)
        self._run(self.weights_rail.dispatch, request)
        self._weights.copy_(self._landed_weights[0, :, :k])

    def sum_in_domain(self, q: CombineRequest, send: bool) -> None:
        """One row for every token that this rank handed on: the half that sends, or the one that
        receives."""
        weights = self._weights if q.exchange else None
        request = CombineRequest(
            None if send else self._partial,
            None if send else self._ids,
            weights,
            q.expert_y if send else None,
            self._count,
            send,
            not send,
            exchange=q.exchange,
        )
        self._run(self.domain.combine, request)

    def send_home(self, q: CombineRequest) -> None:
        """Those rows go back along the rail."""
        y = self._partial[None]
        self._run(self.rail.combine, CombineRequest(expert_y=y, send=True))

    def receive_home(self, q: CombineRequest) -> None:
        """The sum over domains."""
        assert q.out is not None
        rail_ids = self._rail_ids[: q.out.shape[0]]
        request = CombineRequest(
            q.out, rail_ids, bound_m=q.bound_m, receive=True, accumulate=q.accumulate
        )
        self._run(self.rail.combine, request)

    # ---- state
    def _run(self, call: Callable[[Any], None], request: DispatchRequest | CombineRequest) -> None:
        try:
            call(request)
        except PeerTimeoutError as error:
            self._rename(error, call.__self__)  # type: ignore[attr-defined]

    def check_errors(self) -> None:
        """Raise PeerTimeoutError, with ranks and experts of the whole group, if a wait of this rank
        has given up."""
        for transport in (self.rail, self.weights_rail, self.domain):
            try:
                transport.check_errors()
            except PeerTimeoutError as error:
                self._rename(error, transport)

    def _rename(self, error: PeerTimeoutError, transport: Transport) -> NoReturn:
        sizes, local = self.sizes, self.sizes.layout.local_experts
        inside = transport is self.domain
        domain, place = divmod(self.rank, sizes.domain_size)
        peer = error.peer
        if peer is not None:
            peer = domain * sizes.domain_size + peer if inside else peer * sizes.domain_size + place
        operation = error.operation
        if transport is self.weights_rail:  # to that transport a dispatch
            operation = operation.replace("dispatch", "combine weights")
            first, count, what = (
                domain * sizes.domain_experts,
                sizes.domain_experts,
                "wait for weights",
            )
        elif "dispatch" in operation:
            first, count, what = self.rank * local, local, "wait for tokens"
        elif inside or peer is None:
            first, count, what = (peer or 0) * local, local, "owe their rows"
        else:
            first, count, what = (
                peer // sizes.domain_size * sizes.domain_experts,
                sizes.domain_experts,
                "owe their rows",
            )
        level = "inside the domain" if inside else "between domains"
        detail = f"{level}; experts {first} to {first + count - 1} {what}"
        raise PeerTimeoutError(self.rank, peer, operation, None, error.timeout_s, detail) from error

    def close(self) -> None:
        """Close both levels. Collective where they are."""
        for transport in (self.rail, self.weights_rail, self.domain):
            transport.close()
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups = ()
