"""An MoE layer for decoding: dispatch -> grouped GEMM -> activation -> grouped GEMM -> combine,
without a host read.

    layer = InferenceMoELayer.of(training_layer, max_num_tokens=128, group=group)
    y = layer(tokens)                                   # [m, H] -> [m, H], m <= 128
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):                       # after one call like it
        y = layer(tokens, bound_m=count)                # replays read `count` and `tokens` again

Rows arrive packed, one expert after another, and stay packed. The dispatch carries the routing
weights and the combine applies them in fp32. A shared expert runs between the dispatch's halves.

Shapes: m tokens of this rank's data-parallel group, H hidden, F ffn, F1 = 2F for gated activations
else F, El experts of this rank, K top-k.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron_fluid.comm.failed_waits import tells_peers
from megatron_fluid.config import current_config, shows_fields_of
from megatron_fluid.cuda.devices import synchronize
from megatron_fluid.cuda.triton_launch import aligned
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fixed_tiles.launch import row_by_row
from megatron_fluid.kernels.grouped_gemm.launch import fixed_tiles, grouped_matmul
from megatron_fluid.low_latency.all_to_all import AllToAll
from megatron_fluid.low_latency.checks import Checks, form, same_forms
from megatron_fluid.low_latency.layout import check_setting

__all__ = ["InferenceMoELayer"]

Router = Callable[[Tensor], Any]


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda h: functional.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "geglu": lambda h: functional.gelu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "relu2": lambda h: functional.relu(h).square(),
}
_PLAIN: tuple[float | None, float, int] = (None, 0.0, 0)  # no variant of a gated activation

# Arguments that `of` takes from the layer or declares itself.
_OF_THE_LAYER = (
    *("self", "weight1", "weight2", "router", "experts_per_token", "shared_expert", "activation"),
    *("max_num_tokens", "group"),
)


class InferenceMoELayer(nn.Module):
    """One rank's part of the layer. Construction is collective; so is every call.

    Args:
        weight1, weight2: [El, F1, H] and [El, H, F], the training layer's own tensors, or DTensors
            of which these are the local parts; not copied.
        router: tokens [m, H] -> an object with `ids` and `probs` [m, K], or a pair of them. None if
            every call passes its routing.
        max_num_tokens: the most tokens of one call.
        experts_per_token: K.
        group: the expert-parallel group, None for the world.
        dp_size, transport, timeout_s: as in `AllToAllConfig`.
        activation: a name, or a callable [rows, F1] -> [rows, F].
        shared_expert: tokens [m, H] -> [m, H] of their dtype, added to the result.
        batch_invariant: a token has the same bits whatever other tokens are in the batch, and
            whatever the ranks and the transport: those that the forward of a training layer with
            batch_invariant gives it. Router and shared expert must do their part, as that layer's
            do. None takes FluidConfig's.

    Raises:
        ConfigError: weights that do not fit each other or the activation, DTensors sharded
            otherwise than over the group, an unknown activation, a dtype other than bf16 (on a CPU:
            or fp16). A call raises it for an argument that does not fit, and for such an output of
            the shared expert.
    """

    def __init__(
        self,
        weight1: Tensor,
        weight2: Tensor,
        router: Router | None,
        *,
        max_num_tokens: int,
        experts_per_token: int,
        group: dist.ProcessGroup | None = None,
        dp_size: int = 1,
        activation: str | Callable[[Tensor], Tensor] = "swiglu",
        shared_expert: Callable[[Tensor], Tensor] | None = None,
        transport: str = "auto",
        timeout_s: float | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__()
        if batch_invariant is None:
            batch_invariant = current_config().batch_invariant
        _check(weight1, weight2, activation)
        local, _, hidden = _local(weight1).shape
        dtype, device = weight1.dtype, weight1.device
        group = dist.group.WORLD if group is None else group
        world = dist.get_world_size(group)
        if hasattr(weight1, "device_mesh"):
            _check_share(weight1, weight1.shape[0], group)
        check_setting("experts_per_token", experts_per_token, 1)
        # With batch_invariant a token's scales are its choices and their weights, see _experts.
        scales = 8 * experts_per_token if batch_invariant else 0
        self.all_to_all = AllToAll.intranode(
            max_num_tokens, local * world, experts_per_token, dist.get_rank(group), world, dp_size,
            hidden, hidden * dtype.itemsize, scales, group=group, transport=transport,
            combine_dtype=dtype, timeout_s=timeout_s, batch_invariant=batch_invariant,
        )  # fmt: skip
        self._checks = Checks(self.all_to_all.layout, self.all_to_all.device)
        self._known: dict[object, Callable[..., bool]] = {}  # forms of arguments that fit
        self._unreceived: list[Callable[[], None]] = []  # the receive half that a dispatch lacks
        self.weight1, self.weight2 = weight1, weight2
        self._of: Callable[[], Any] = lambda: None  # the training layer
        self.router, self.shared_expert = router, shared_expert
        self._followed: list[Any] = [router]  # in a list, it is no second submodule
        self.activation = activation
        self.batch_invariant = batch_invariant
        # Name and variant for kernels/activation; None for a callable.
        self._kernel = (activation, _PLAIN) if isinstance(activation, str) else None
        self._routing: Tensor | None = None
        rows = self.all_to_all.packed_rows()
        with torch.inference_mode(False):  # written by calls outside that mode, too
            self._rows = torch.zeros(rows, hidden, dtype=dtype, device=device)
            self._counts = torch.zeros(local, dtype=torch.int32, device=device)
            self._offsets = torch.zeros(local, dtype=torch.int32, device=device)
            self._ones = torch.ones(rows, dtype=torch.float32, device=device)
            if batch_invariant:
                self._routing = torch.zeros(rows, scales // 4, dtype=torch.float32, device=device)
                self._row_numbers = torch.arange(rows, dtype=torch.int32, device=device)
        synchronize(device)

    def train(self, mode: bool = True) -> InferenceMoELayer:
        """As of any module, but for a router that is the training layer's, which has its mode."""
        if self._of() is None:
            return super().train(mode)
        self.training = mode
        return self

    @property
    def ranks_of_calls(self) -> int:
        """How many ranks come to a call."""
        return self.all_to_all.ranks_of_calls

    def extra_repr(self) -> str:
        layout, local = self.all_to_all.layout, _local(self.weight1).shape[0]
        sizes = f"hidden_size={layout.hidden_dim}, ffn_hidden_size={self.weight2.shape[2]}"
        experts = f"num_experts={layout.num_experts} ({local} here)"
        where = f"top_k={layout.experts_per_token}, max_num_tokens={layout.max_num_tokens}"
        ranks = f"ranks={layout.world_size}, rank={self.all_to_all.rank}"
        transport = f"transport={self.all_to_all.transport}"
        return f"{sizes}, {experts}, {where}, {ranks}, {transport}, {self.weight1.dtype}"

    @classmethod
    @shows_fields_of(__init__, leave_out=_OF_THE_LAYER)
    def of(
        cls,
        layer: Any,
        *,
        max_num_tokens: int,
        group: dist.ProcessGroup | None = None,
        **named: Any,
    ) -> InferenceMoELayer:
        """The layer for decoding with the parameters of `layer`, a megatron_fluid.MoELayer. It
        computes in their type, bf16, also where `layer` trains in fp8.

        Args:
            group: the expert-parallel group, None for that of `layer`.

        Raises:
            ConfigError: also where this rank does not hold its share of the experts over the group:
                for another group than the layer's, or for experts that FSDP2 has sharded further;
                and for batch_invariant with an fp8_recipe, whose bits this layer does not have.
        """
        group = layer.rounds.group if group is None else group
        _check_share(layer.weight1, layer.config.num_experts, group)
        shared = layer.shared_expert if layer.shared_weight1 is not None else None
        name = layer.activation.name
        known = name in _ACTIVATIONS and layer.activation.plain
        invariant = named.setdefault("batch_invariant", layer.batch_invariant)
        invariant = current_config().batch_invariant if invariant is None else invariant
        if invariant and layer.config.fp8_recipe is not None:
            allowed = "None, since decoding computes in bf16; or pass batch_invariant=False here"
            raise ConfigError.of(
                "fp8_recipe of the training layer with batch_invariant",
                layer.config.fp8_recipe, allowed,
            )  # fmt: skip
        made = cls(
            layer.weight1, layer.weight2, layer.router, max_num_tokens=max_num_tokens, group=group,
            experts_per_token=layer.config.top_k, shared_expert=shared,
            activation=name if known else layer.activation.forward, **named,
        )  # fmt: skip
        if layer.activation.built_in:
            made._kernel = name, layer.activation.variant
        made._of = weakref.ref(layer)
        return made

    def _follow(self, layer: Any) -> None:
        """Take the weights and the router that the training layer has now: load_state_dict(
        assign=True) and others give it new parameters, and a parametrization computes them."""
        if layer.router is not self._followed[0]:  # one set on this layer stays till then
            self.router, self._followed = layer.router, [layer.router]
        for name in ("weight1", "weight2"):
            mine: Any = self._parameters.get(name, self.__dict__.get(name))
            now: Any = layer._parameters.get(name)
            now = getattr(layer, name, None) if now is None else now
            if mine is None or now is None or mine is now:
                continue
            found = now.dtype, tuple(_local(now).shape), now.device
            wanted = mine.dtype, tuple(_local(mine).shape), mine.device
            if found != wanted:
                raise ConfigError.of(f"{name} of the training layer", found, wanted)
            self._parameters.pop(name, None)  # a computed tensor cannot take its place
            setattr(self, name, now)

    @tells_peers
    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        routing: tuple[Tensor, Tensor] | None = None,
        bound_m: Tensor | None = None,
    ) -> Tensor:
        """tokens [m, H] -> [m, H].

        Args:
            routing: ids [m, K] (uint32, int32 or int64; -1 masks) and probs [m, K] (of a floating
                type; used in fp32); the router's where None.
            bound_m: int32 [1] on the device; only the first bound_m tokens count. The other rows
                are undefined.

        An error of the shared expert goes on after the exchange: the other ranks get their results,
        and the next call works. So it does after an error of router or experts on all ranks; one on
        a single rank ends the calls of the others in errors.
        """
        if (layer := self._of()) is not None:
            self._follow(layer)
        self._check_call(tokens, routing, bound_m)
        ids, probs = self._route(tokens) if routing is None else routing
        ids, probs = aligned(ids), aligned(probs.float())
        invariant = self.batch_invariant
        scales = late = None
        if invariant:
            wide = ids.to(torch.int64)
            scales = torch.cat([wide.float(), probs], 1)
            # An expert that a token names twice has one row, which has both probabilities.
            late = (~(wide[:, :, None] == wide[:, None, :]).tril(-1).any(-1)).float()
        out = torch.empty_like(tokens)
        # The combine adds to the shared expert's output. With batch_invariant that is added last,
        # and rows one by one: activations were multiplied with their probabilities.
        adds = self.shared_expert is not None and not invariant
        self._receive()
        receive = self.all_to_all.dispatch_with_hook(
            self._counts, self._rows, self._routing, tokens, scales, ids, bound_m,
            weights=None if invariant else probs, out_expert_offsets=self._offsets,
        )  # fmt: skip
        self._unreceived.append(receive)
        shared = None
        try:
            if self.shared_expert is not None:
                shared = self.shared_expert(tokens)
                _check_shared(shared, tokens)
                if adds:
                    out.copy_(shared)
        finally:  # after an error, too: the other ranks are in this exchange
            self._receive()
            self.all_to_all.combine(out, ids, late, self._experts(), bound_m, accumulate=adds)
        return out if shared is None or adds else out + shared

    def _check_call(self, tokens: Tensor, routing: Any, bound_m: Tensor | None) -> None:
        """Raise ConfigError for arguments that do not fit. Those of a known form do."""
        given = (tokens,) if bound_m is None else (tokens, bound_m)
        if routing is not None and isinstance(routing, tuple | list):
            given = (*given, *routing)
        key = getattr(tokens, "shape", None), routing is None, bound_m is None, len(given)
        same = self._known.get(key)
        if same is None or not same(*given):
            self._checks.layer_call(tokens, routing, bound_m, self.weight1.dtype)
            self._known[key] = same_forms(given)

    def _receive(self) -> None:
        """Enqueue the receive half of the last dispatch, unless it was: where it raised, the next
        call does it."""
        while self._unreceived:
            self._unreceived[-1]()
            self._unreceived.pop()

    def _row_probs(self) -> Tensor:
        """The probability of each packed row: that of its token's choice of the row's expert."""
        assert self._routing is not None
        local = torch.searchsorted(self._offsets, self._row_numbers, right=True)
        expert = local + self.all_to_all.rank * len(self._offsets)
        ids, probs = self._routing.chunk(2, dim=1)
        return torch.where(ids == expert[:, None], probs, 0.0).sum(1)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.router is None:
            raise ConfigError("routing: found None, needed for a layer without a router")
        routing = self.router(tokens)
        return routing if isinstance(routing, tuple) else (routing.ids, routing.probs)

    def _experts(self) -> Tensor:
        """Expert outputs in the packed layout. Rows past the last expert's are undefined. With
        batch_invariant the steps and the bits are the training layer's."""
        local = [_local(weight).transpose(1, 2) for weight in (self.weight1, self.weight2)]
        fixed = self.batch_invariant
        weight1, weight2 = (fixed_tiles(weight) if fixed else weight for weight in local)
        probs = self._row_probs() if fixed else None
        h = grouped_matmul(self._rows, weight1, self._offsets)
        return grouped_matmul(self._activate(h, probs), weight2, self._offsets)

    def _activate(self, h: Tensor, probs: Tensor | None) -> Tensor:
        """fc1's output [rows, F1] -> [rows, F], multiplied with the rows' probabilities if any."""
        if h.is_cuda and self._kernel is not None:
            from megatron_fluid.kernels.activation import kernel as activation

            name, variant = self._kernel
            if name in activation.ACTIVATIONS:
                # The packed output is as long as all that can arrive; only the rows that did are
                # computed.
                count, weights = self._offsets[-1:], self._ones if probs is None else probs
                return activation.fused_activation_forward(name, h, weights, count, variant)
        function = self.activation
        if isinstance(function, str):
            function = _ACTIVATIONS[function]
        if probs is None:
            return function(h)
        return (row_by_row(function, h.float()) * probs[:, None]).to(h.dtype)

    def destroy(self) -> None:
        """Free the exchange's memory. Collective where it is shared."""
        self.all_to_all.destroy()


def _local(weight: Tensor) -> Tensor:
    """The experts of this rank: the local part of a DTensor, else the tensor."""
    local: Tensor = getattr(weight, "_local_tensor", weight)
    return local


def _check_shared(shared: Any, tokens: Tensor) -> None:
    """Raise ConfigError unless the shared expert's output is like `tokens`."""
    like = isinstance(shared, Tensor) and shared.shape == tokens.shape
    if not like or shared.dtype != tokens.dtype or shared.device != tokens.device:
        found = form(shared) if isinstance(shared, Tensor) else shared
        allowed = f"a tensor {tuple(tokens.shape)} of {tokens.dtype} on {tokens.device}"
        raise ConfigError.of("output of shared_expert", found, allowed)


def _check_share(weight: Any, num_experts: int, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError unless `weight` holds this rank's experts of `num_experts`, divided over
    the group in the order of its ranks."""
    world, rank, local = dist.get_world_size(group), dist.get_rank(group), _local(weight).shape[0]
    places = [rank]
    if hasattr(weight, "device_mesh"):
        mesh, coordinate = weight.device_mesh, weight.device_mesh.get_coordinate() or ()
        dims = zip(coordinate, mesh.shape, weight.placements, strict=False)
        places = [place for place, size, kind in dims if size > 1 and not kind.is_replicate()]
    if local * world == num_experts and (world == 1 or places == [rank]):
        return
    found = f"{local} of {num_experts} experts at {places} on rank {rank} of a group of {world}"
    allowed = "num_experts / ranks of them, in the order of ranks: pass the layer's own group, and"
    raise ConfigError.of("experts", found, f"{allowed} a layer that FSDP2 does not shard")


def _check(weight1: Tensor, weight2: Tensor, activation: object) -> None:
    """Raise ConfigError where the weights do not fit each other or the activation."""
    shape1, shape2 = tuple(_local(weight1).shape), tuple(_local(weight2).shape)
    if len(shape1) != 3 or len(shape2) != 3 or shape1[0] != shape2[0]:
        raise ConfigError.of("weight1, weight2", (shape1, shape2), "[El, F1, H] and [El, H, F]")
    known = isinstance(activation, str)
    if known and activation not in _ACTIVATIONS:
        allowed = f"{', '.join(_ACTIVATIONS)}, or a callable"
        raise ConfigError.of("activation", activation, allowed)
    types, on_gpu = (weight1.dtype, weight2.dtype), weight1.device.type == "cuda"
    allowed_types = (torch.bfloat16,) if on_gpu else (torch.bfloat16, torch.float16)
    if types[0] not in allowed_types or types[0] != types[1]:
        raise ConfigError.of("type of the weights", types, ", ".join(map(str, allowed_types)))
    if shape2[1] != shape1[2]:
        raise ConfigError.of("weight2", shape2, f"[El, H, F] with H = {shape1[2]}")
    if isinstance(activation, str):  # the width that a callable needs is not known
        needed = shape2[2] * (2 if activation.endswith("glu") else 1)
        if shape1[1] != needed:
            allowed = f"[El, F1, H] with F1 = {needed} for {activation}"
            raise ConfigError.of("weight1", shape1, allowed)
