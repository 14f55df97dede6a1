"""The MoE layers that suites compare: MoELayer, Megatron's, and the grouped GEMMs alone.

Every layer routes alike: `routed_tokens` holds the wanted logits in its first columns, and
the routers' weights read them out. No router is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.moe import MoECase, torch_grouped_matmul, torch_grouped_weight_grad
from megatron_fluid import MoEBaseline, MoELayer
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.kernels.grouped_gemm.launch import grouped_weight_grad, sends_rows
from megatron_fluid.moe.expert_weights import ExpertWeights, grouped_product
from megatron_fluid.moe.experts import PlainExperts
from megatron_fluid.moe.local.transport import LocalPlan, plan_local
from megatron_fluid.moe.nvlink import shared
from megatron_fluid.moe.nvlink.schedule import Schedule, choose_schedule
from megatron_fluid.moe.sharding import local_part

__all__ = [
    "CAPACITY_FACTOR",
    "MegatronMoE",
    "chosen_schedule",
    "floor_call",
    "fluid_layer",
    "graph_call",
    "own_gemms_call",
    "routed_tokens",
    "schedule_of",
    "set_routing_weight",
    "share_parameters",
]

CAPACITY_FACTOR = 2.0  # of the rows that each rank gets where routing is balanced


def routed_tokens(logits: Tensor, hidden: int) -> Tensor:
    """Return bf16 tokens [T, H] from which the routers compute `logits` [T, E], fp32.

    Column e holds the logit rounded to bf16, column E + e the rest of it.
    """
    count, experts = logits.shape
    x = torch.randn(count, hidden, device=logits.device, dtype=torch.bfloat16)
    x[:, :experts] = logits.bfloat16()
    x[:, experts : 2 * experts] = (logits - x[:, :experts].float()).bfloat16()
    return x


@torch.no_grad()
def set_routing_weight(weight: Tensor) -> None:
    """Make a router of `weight` [E, H] compute the logits that routed_tokens holds."""
    experts = weight.shape[0]
    weight.zero_()
    weight[:, :experts].fill_diagonal_(1.0)
    weight[:, experts : 2 * experts].fill_diagonal_(1.0)


def fluid_layer(
    case: MoECase,
    device: torch.device,
    like: MoELayer | None = None,
    group: dist.ProcessGroup | None = None,
    of: type[MoELayer | MoEBaseline] = MoELayer,
    **settings: Any,
) -> Any:
    """Return a layer `of` megatron_fluid over all ranks, with the weights of `like` or its own."""
    config = {
        "hidden_size": case.hidden,
        "ffn_hidden_size": case.ffn,
        "num_experts": case.experts,
        "top_k": case.top_k,
        "backend": "auto",  # MegatronMoE changes the configuration's
        **settings,
    }
    layer = of(config, group or dist.group.WORLD, device, torch.bfloat16)
    if like is None:
        set_routing_weight(layer.router.weight)
    else:
        layer.weight1, layer.weight2 = like.weight1, like.weight2
        layer.router.weight = like.router.weight
    return layer


@contextlib.contextmanager
def chosen_schedule(schedule: Schedule | None) -> Iterator[None]:
    """Let layers whose first forward runs inside take `schedule`, where it is given; each on a
    process group of its own, as a group keeps what it chose."""
    if schedule is None:
        yield
        return
    with mock.patch.object(shared, "choose_schedule", return_value=schedule):
        yield


def schedule_of(case: MoECase, tokens: int, device: torch.device) -> Schedule:
    """Return the schedule that a layer of this shape takes by itself."""
    shape = (tokens, case.hidden, case.ffn, case.top_k, case.experts)
    sends = device.type == "cuda" and sends_rows(device, torch.bfloat16)
    return choose_schedule(*shape, dist.get_world_size(), sends)


def graph_call(layer: MoELayer, x: Tensor) -> Callable[[], None]:
    """Return the replay of a forward of `layer`, which has a capacity factor, as a CUDA graph."""
    side = torch.cuda.Stream()
    with torch.no_grad():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may query their events meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            layer(x)
    return graph.replay


class MegatronMoE(nn.Module):
    """Megatron's MoE layer.

    Args:
        dispatcher: Megatron's token dispatcher.
        overlap: overlap_dispatch_backward_with_experts_wgrad.
        backend: "megatron" leaves Megatron its own way of moving tokens, "auto" is ours by patch,
            "experts" our experts behind Megatron's dispatcher.
        keep_experts: with our exchange, leave the layer Megatron's experts.
        like: a layer of the same case whose parameters it shares, so that a GPU holds them and
            their gradients once for all variants; None draws its own.
        settings: more of Megatron's TransformerConfig.
    """

    def __init__(
        self, case: MoECase, device: torch.device, dispatcher: str, overlap: bool, backend: str,
        keep_experts: bool = False, like: nn.Module | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.config = FluidConfig(moe_backend=backend)
        set_config(self.config)
        self.layer = _megatron_layer(case, device, dispatcher, overlap, **settings)
        set_routing_weight(self.layer.router.weight)  # type: ignore[union-attr, arg-type]
        if keep_experts:  # a hook, which our experts would never call
            self.layer.experts.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
        set_config(None)
        if like is not None:
            share_parameters(self, like)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        from megatron.core.fp8_utils import get_fp8_context

        set_config(self.config)  # a layer chooses its way at its first call
        with get_fp8_context(self.layer.config):  # type: ignore[arg-type]
            y: Tensor = self.layer(x.unsqueeze(1))[0]
        return y.squeeze(1)


def share_parameters(module: nn.Module, like: nn.Module) -> None:
    """Give `module` the parameters of `like`, which has the same names and shapes."""
    for name, parameter in like.named_parameters():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        assert getattr(holder, leaf).shape == parameter.shape, name
        setattr(holder, leaf, parameter)


def _megatron_layer(
    case: MoECase, device: torch.device, dispatcher: str, overlap: bool, **settings: Any
) -> nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=16,
        ffn_hidden_size=case.ffn,
        moe_ffn_hidden_size=case.ffn,
        num_moe_experts=case.experts,
        moe_router_topk=case.top_k,
        moe_token_dispatcher_type=dispatcher,
        moe_grouped_gemm=True,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        expert_model_parallel_size=dist.get_world_size(),
        moe_router_load_balancing_type="none",
        moe_permute_fusion=True,
        bias_activation_fusion=True,
        gradient_accumulation_fusion=False,
        moe_router_dtype="fp32",
        **({"overlap_dispatch_backward_with_experts_wgrad": True} if overlap else {}),
        **settings,
    )
    build = get_moe_module_spec(use_te=True, num_experts=case.experts, moe_grouped_gemm=True)
    layer = build(config).to(device).bfloat16()
    if hasattr(layer, "set_layer_number"):
        layer.set_layer_number(1)
    return layer


def floor_call(
    case: MoECase, tokens: int, ranks: int, device: torch.device, train: bool
) -> Callable[[], object]:
    """Return the grouped GEMMs of a layer, on rows spread evenly over the experts of a rank."""
    rows, local, bf16 = tokens * case.top_k, case.experts // ranks, torch.bfloat16
    x = torch.randn(rows, case.hidden, device=device, dtype=bf16)
    h = torch.randn(rows, 2 * case.ffn, device=device, dtype=bf16)
    a = torch.randn(rows, case.ffn, device=device, dtype=bf16)
    w1 = torch.randn(local, 2 * case.ffn, case.hidden, device=device, dtype=bf16) * 0.02
    w2 = torch.randn(local, case.hidden, case.ffn, device=device, dtype=bf16) * 0.02
    ends = [(e + 1) * (rows // local) for e in range(local)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)

    def run() -> None:
        torch_grouped_matmul(x, w1.transpose(1, 2), offsets, ends)
        torch_grouped_matmul(a, w2.transpose(1, 2), offsets, ends)
        if train:
            torch_grouped_matmul(x, w2, offsets, ends)
            torch_grouped_matmul(h, w1, offsets, ends)
            torch_grouped_weight_grad(x, a, offsets, ends)
            torch_grouped_weight_grad(h, x, offsets, ends)

    return run


@torch.no_grad()
def own_gemms_call(layer: MoELayer, x: Tensor, train: bool) -> Callable[[], object]:
    """Return the grouped GEMMs of a layer of one rank by the kernels that it runs itself, on its
    rows as they are routed, which lie in the experts' order already. The first one activates, as in
    the layer."""
    x = x.detach()
    routing, experts = layer.router(x), layer.num_local_experts
    plan = plan_local(x, routing.ids, routing.probs.float(), experts, activation=layer.activation)
    assert not isinstance(plan, LocalPlan)
    rows, groups, act = plan.permute(x), plan.groups, layer.activation
    w1, w2 = (ExpertWeights(local_part(w), experts) for w in (layer.weight1, layer.weight2))
    own = PlainExperts(w1, w2, act)
    h, a = own.activated(rows, groups, plan.row_prob, keep=True)
    assert h is not None

    def run() -> None:
        with torch.no_grad():
            own.activated(rows, groups, plan.row_prob, keep=train)
            grouped_product(a, w2.forward_matrices, groups)
            if train:
                grouped_product(rows, w2.backward_matrices, groups)
                grouped_product(h, w1.backward_matrices, groups)
                grouped_weight_grad(rows, a, groups.offsets)
                grouped_weight_grad(h, rows, groups.offsets)

    return run
