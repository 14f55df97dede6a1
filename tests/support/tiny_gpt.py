"""A GPT-MoE small enough to train in a test, through Megatron-Core's own model, data parallelism
and optimizer. All is stock Megatron; a test trains it with and without the plug-in, and compares.
"""

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_fluid import patches
from megatron_fluid.backward.weight_grads import get_backward_scheduler
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches.moe import expert_modules
from megatron_fluid.patches.moe import layer as seam
from tests.support import grouped_tensor

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2
MOE_PATCHES = (
    *("moe-layer-init", "moe-layer", "moe-experts", "moe-delayed-gradients"),
    "moe-router-topk",
)


@contextlib.contextmanager
def plug_in(on: bool, *, kept: bool = False, **fields: Any) -> Iterator[list[int]]:
    """Inside, Megatron's MoELayer is patched or its own, and takes GroupedLinear for one of
    Transformer Engine's; yields a list that grows with each overlapped call. kept: the caller has
    applied or reverted the patches, which stay so."""
    calls: list[int] = []
    real, linears = seam.start_experts, expert_modules._te_linear_types

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    def known() -> tuple[type, ...]:
        return (*linears(), GroupedLinear)

    if not kept:
        patches.revert(*MOE_PATCHES)
    set_config(FluidConfig(**{"moe_backend": "rounds" if on else "auto", **fields}))
    try:
        with (
            mock.patch.object(seam, "start_experts", counted),
            mock.patch.object(expert_modules, "_te_linear_types", known),
            patches.patched(*MOE_PATCHES) if on and not kept else contextlib.nullcontext(),
        ):
            yield calls
    finally:
        set_config(None)
        get_backward_scheduler().disable()


def parallel(**sizes: int | None) -> None:
    """(Re)build Megatron's process groups: expert_model_parallel_size=2, ... Experts are not split
    over tensor-parallel ranks unless it says so."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{"expert_tensor_parallel_size": 1, **sizes})


def expert_order(layer: MoELayer) -> list[int] | None:
    """The order in which an overlapped layer computes its local experts, None before its first
    overlapped forward."""
    decision = seam.DECISIONS.get(layer)
    path = None if decision is None else decision.path
    return list(path.weights.order) if isinstance(path, seam.OverlappedLayer) else None


def descending(model: torch.nn.Module) -> bool:
    """Whether the overlapped MoE layers read their experts in descending order."""
    orders = [expert_order(layer) for layer in model.modules() if isinstance(layer, MoELayer)]
    return any(order is not None and len(order) > 1 and order[0] > order[-1] for order in orders)


def config_of(**overrides: Any) -> TransformerConfig:
    """Two layers, hidden 32, four experts of 48, top-2, SwiGLU, fp32; the parallel sizes are those
    in force."""
    tensor_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 64,
        "num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
        "gated_linear_unit": True, "activation_func": F.silu, "transformer_impl": "local",
        "tensor_model_parallel_size": tensor_parallel_size,
        "sequence_parallel": tensor_parallel_size > 1,
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": 1, "use_cpu_initialization": not torch.cuda.is_available(),
        "params_dtype": torch.float32, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "bias_activation_fusion": False, "masked_softmax_fusion": False,
        "bias_dropout_fusion": False, "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
    }  # fmt: skip
    latent = overrides.get("multi_latent_attention", False)
    kind = MLATransformerConfig if latent else TransformerConfig
    return kind(**{**settings, **overrides})


def gpt(config: TransformerConfig, spec: Any = None, seed: int = 1234) -> GPTModel:
    """The model, from the same random numbers every time."""
    tensor_parallel.random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    if spec is None:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=config.transformer_impl != "local"
        )
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, config.transformer_impl != "local")
    model = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, position_embedding_type="rope", mtp_block_spec=mtp,
    )  # fmt: skip
    model = model.to(device())
    return model.bfloat16() if config.bf16 else model  # as Megatron's Float16Module does


def device() -> torch.device:
    """Where models and batches live."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


@dataclasses.dataclass
class Training:
    """What a training run leaves: the loss of every iteration (this rank's), gradient norms, and
    the trained model."""

    losses: list[float]
    gradient_norms: list[float]
    model: GPTModel


def batch(
    rank: int, iteration: int, microbatch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions of one microbatch, each [BATCH, SEQUENCE]."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + 1009 * iteration + microbatch)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = (tokens * 5 + 1) % VOCABULARY  # something to learn
    positions = torch.arange(SEQUENCE).unsqueeze(0).expand(BATCH, -1)
    return tokens.to(device()), labels.to(device()), positions.to(device())


def wrapped(
    models: Sequence[torch.nn.Module], config: TransformerConfig, *, distributed: bool = False,
    reduce: bool = False, gather: bool = False, bucket_size: int = 2000, **adam: Any,
) -> tuple[list[DistributedDataParallel], Any]:  # fmt: skip
    """Megatron's data parallelism around each model, and one Adam optimizer of all, with the
    settings `adam`. `distributed`: its state is sharded. `reduce`, `gather`: gradients are reduced,
    parameters gathered, beside the computation."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, overlap_grad_reduce=reduce,
        overlap_param_gather=gather, grad_reduce_in_fp32=config.bf16, bucket_size=bucket_size,
    )  # fmt: skip
    chunks = [DistributedDataParallel(config, settings, model) for model in models]
    given = {"lr": 5e-3, "clip_grad": 1.0, "bf16": config.bf16, "params_dtype": config.params_dtype}
    optimizer = OptimizerConfig(
        optimizer="adam",
        use_distributed_optimizer=distributed,
        overlap_param_gather=gather,
        **(given | adam),
    )
    for chunk in chunks:
        chunk.train()
    return chunks, get_megatron_optimizer(optimizer, chunks, use_gloo_process_groups=False)


def train(
    model: GPTModel, iterations: int = 20, microbatches: int = 1,
    distributed_optimizer: bool = False, overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False, learning_rate: float = 5e-3,
) -> Training:  # fmt: skip
    """Train as Megatron's loop does: microbatches, the last one with sync, finalize, clip, step."""
    data_rank = parallel_state.get_data_parallel_rank()
    [ddp], optimizer = wrapped(
        [model], model.config, distributed=distributed_optimizer, reduce=overlap_grad_reduce,
        gather=overlap_param_gather, lr=learning_rate,
    )  # fmt: skip
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device()), 1)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0 / microbatches, device=device()))
    result = Training([], [], model)
    for iteration in range(iterations):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        total = 0.0
        for microbatch in range(microbatches):
            tokens, labels, positions = batch(data_rank, iteration, microbatch)
            last = microbatch == microbatches - 1
            if microbatch == 0:  # as the schedules do
                model.set_is_first_microbatch()
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(tokens, positions, mask, labels=labels).float().mean() / microbatches
                loss.backward()
            total += loss.item()
        finalize_model_grads([ddp])
        _, norm, _ = optimizer.step()
        result.losses.append(total)
        result.gradient_norms.append(float(norm))
    if overlap_param_gather:
        ddp.disable_forward_pre_hook()
    return result


class GroupedLinear(torch.nn.Module):
    """Stands in for Transformer Engine's, which needs a GPU: the same parameters and calls, in a
    loop. With single grouped parameters it is Megatron's fused operation that computes."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, /, *, config: Any, bias: bool,
        skip_bias_add: bool, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias, self.skip_bias_add = num_gemms, bias, skip_bias_add
        for i in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype)
            )
            config.init_method(weight)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                zeros = torch.zeros(output_size, dtype=config.params_dtype)
                self.register_parameter(f"bias{i}", torch.nn.Parameter(zeros))
        self.single_grouped_weight = config.moe_single_grouped_weight
        self.single_grouped_bias = config.moe_single_grouped_bias
        for kind in ("weight", "bias"):
            if getattr(self, f"single_grouped_{kind}"):
                grouped_tensor.pack(self, kind)

    def forward(
        self, x: torch.Tensor, m_splits: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        assert not self.single_grouped_weight, "Transformer Engine refuses it, too"
        weights, biases = (grouped_tensor.members(self, kind) for kind in ("weight", "bias"))
        rows = [part @ w.t() for part, w in zip(x.split(m_splits), weights, strict=True)]
        if not self.use_bias:
            return torch.cat(rows), None
        if self.skip_bias_add:
            return torch.cat(rows), biases
        return torch.cat([row + bias for row, bias in zip(rows, biases, strict=True)]), None


def _grouped(mlp: Any) -> Any:
    """An MoE layer's spec with TEGroupedMLP in place of SequentialMLP."""
    linears = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    experts = functools.partial(TEGroupedMLP, submodules=linears)
    submodules = dataclasses.replace(mlp.keywords["submodules"], experts=experts)
    return functools.partial(MoELayer, submodules=submodules)


def grouped_spec(config: TransformerConfig) -> Any:
    """The spec of a model whose MoE layers have TEGroupedMLP, for gpt()."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.mlp = _grouped(layer.submodules.mlp)
    return spec


def moe_layer(config: TransformerConfig, seed: int = 4321, grouped: bool = False) -> MoELayer:
    """One MoE layer of that configuration, alone; router weights large enough for a decided
    routing. `grouped`: with TEGroupedMLP (and GroupedLinear above), not SequentialMLP."""
    tensor_parallel.random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    torch.manual_seed(seed)
    spec = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=config.transformer_impl != "local"
    )[0]
    mlp = spec.submodules.mlp
    if grouped:
        mlp = _grouped(mlp)
    layer = mlp(config=config)
    layer.set_layer_number(1)
    with torch.no_grad():
        layer.router.weight *= 20
        for parameter in layer.experts.parameters():
            parameter *= 5
    return layer.to(device())


def layer_step(
    layer: MoELayer, x: torch.Tensor, forward: Callable[[torch.Tensor], Any] | None = None
) -> dict[str, torch.Tensor]:
    """The output "y" of one pass, and the gradients of its squares' sum: "dx" and by parameter.
    `forward` takes the place of the layer's own; it returns the output alone."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)[0] if forward is None else forward(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}


def guarded(body: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """One case's results, or its traceback: the cases after it still run. (What fails, fails on
    every rank alike.)"""
    try:
        return body()
    except Exception:  # noqa: BLE001 (reported by the test)
        return {"error": traceback.format_exc()}
