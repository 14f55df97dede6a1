"""A tiny GPT-MoE trained by stock Megatron-Core's own pipeline schedules, under any split of it
over gloo ranks, in CPU mode. All start from one checkpoint and see the same global batch, so their
losses and gradient norms must agree.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.patches.attention import latent, self_attention
from tests.support import tiny_gpt

VOCABULARY, SEQUENCE, SEQUENCES, STEPS = 64, 16, 4, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One split of one model. Sequence parallelism with tp > 1. Runs with the same `model` share a
    checkpoint. `fused`: overlapped attentions add their projections' gradients to main_grad, as
    with gradient accumulation fusion.
    """

    name: str  # for messages
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1  # interleaved model chunks of each pipeline stage
    model: tuple[tuple[str, Any], ...] = ()  # TransformerConfig: what changes the mathematics
    how: tuple[tuple[str, Any], ...] = ()  # TransformerConfig: what does not
    distributed: tuple[str, ...] = ()  # settings of data parallelism and of the optimizer
    backend: str = "megatron"  # who computes MoE layers, or "rounds"
    fused: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """What a rank saw of every step; losses are NaN where the last stage is not. `attention` says
    how each self-attention of the rank is overlapped: "rounds" (latent: "collective") or None."""

    losses: list[float]  # per token
    gradient_norms: list[float]
    attention: list[str | None]
    attention_calls: int  # overlapped forwards


def run_cases(rank: int, world_size: int, cases: Sequence[Case], folder: str) -> dict[str, Run]:
    """Train every case in turn. One rank saves its initial parameters first; several load them."""
    torch.set_num_threads(1)
    runs = {}
    for case in cases:
        set_config(FluidConfig(moe_backend=case.backend))
        try:
            runs[case.name] = _train(case, Path(folder))
        except BaseException as error:
            error.add_note(f"in the case {case.name!r}, rank {rank} of {world_size}")
            raise
    return runs


def _config(case: Case) -> Any:
    settings: dict[str, Any] = {
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        # its loss is taken over a rank's own tokens: each split has its own
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "normalization": "RMSNorm",
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "context_parallel_size": case.cp,
        "cp_comm_type": "a2a",
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": False,
        "calculate_per_token_loss": True,
    }
    settings.update(case.model)
    if settings.get("bf16"):
        settings.update(params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    settings.update(case.how)
    return tiny_gpt.config_of(**settings)


def _model(case: Case, config: Any, stage: int | None) -> Any:
    """The chunk `stage` of this rank's, None where it has one."""
    ends: dict[str, Any] = {"ignore_virtual": stage is None, "vp_stage": stage}
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).cuda()
    return Float16Module(config, model) if config.bf16 else model


def _initialise(case: Case, models: Sequence[Any], folder: Path) -> None:
    """Save the parameters on one rank, load them on several: Megatron's checkpoints are free of how
    they were split."""
    inner = [getattr(model, "module", model) for model in models]
    shards = {str(n): model.sharded_state_dict() for n, model in enumerate(inner)}
    path = folder / "-".join(["initial", *(f"{name}={value}" for name, value in case.model)])
    if torch.distributed.get_world_size() == 1:
        path.mkdir()
        dist_checkpointing.save(shards, str(path))
    else:
        loaded = dist_checkpointing.load(shards, str(path))
        for n, model in enumerate(inner):
            model.load_state_dict(loaded[str(n)])


def _batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's microbatches of one sequence: its data-parallel share, context-parallel part."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, SEQUENCE), generator=generator)
    labels = (tokens * 5 + 1) % VOCABULARY  # something to learn
    share = SEQUENCES // parallel_state.get_data_parallel_world_size()
    first = share * parallel_state.get_data_parallel_rank()
    for i in range(first, first + share):
        batch = {"tokens": tokens[i : i + 1], "labels": labels[i : i + 1]}
        batch["position_ids"] = torch.arange(SEQUENCE).unsqueeze(0)
        batch = {name: tensor.cuda() for name, tensor in batch.items()}
        yield get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
        )


def _loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = per_token.float().sum()
    count = torch.tensor(per_token.numel(), dtype=torch.int, device="cuda")
    return total, count, {"loss": torch.stack([total.detach(), count.float()])}


def _forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = next(iterator)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), _loss


def _train(case: Case, folder: Path) -> Run:
    calls: list[int] = []

    def counted(path: Any) -> Any:
        real = path.forward
        return mock.patch.object(path, "forward", lambda *args: (calls.append(1), real(*args))[1])

    with counted(self_attention.OverlappedAttention), counted(latent.OverlappedLatentAttention):
        run = _trained(case, folder)
    return dataclasses.replace(run, attention_calls=len(calls))


def _trained(case: Case, folder: Path) -> Run:
    tiny_gpt.parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
    )
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    config = _config(case)
    models = [_model(case, config, n if case.vpp > 1 else None) for n in range(case.vpp)]
    _initialise(case, models, folder)
    kinds = SelfAttention, MLASelfAttention
    attentions: list[Any] = [m for model in models for m in model.modules() if isinstance(m, kinds)]
    for attention in attentions if case.fused else ():
        if isinstance(attention, MLASelfAttention):
            for linear in (attention.linear_q_up_proj, attention.linear_kv_up_proj):
                linear.gradient_accumulation_fusion = True
            continue
        attention.linear_qkv.gradient_accumulation_fusion = (
            attention.linear_proj.gradient_accumulation_fusion
        ) = True
        self_attention.DECISIONS.announce(attention)

    sharded = "distributed_optimizer" in case.distributed
    overlap = "overlap" in case.distributed
    chunks, optimizer = tiny_gpt.wrapped(
        models,
        config,
        distributed=sharded,
        reduce=overlap,
        gather=sharded and overlap,
        lr=1e-2,
        adam_eps=1e-4,  # where a gradient is all rounding, the step must not be
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if overlap:
        functions = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = functions if case.vpp > 1 else functions[0]

    losses, norms = [], []
    for step in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[_batches(step) for _ in chunks] if case.vpp > 1 else _batches(step),
            model=chunks,
            num_microbatches=SEQUENCES // parallel_state.get_data_parallel_world_size(),
            seq_length=SEQUENCE,
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = optimizer.step()
        assert updated
        norms.append(float(norm))
        if reports:
            total = torch.stack([report["loss"] for report in reports]).sum(dim=0)
            torch.distributed.all_reduce(
                total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )
            losses.append(float(total[0] / total[1]))
        else:
            losses.append(float("nan"))
    decisions = [
        self_attention.DECISIONS.get(found) or latent.DECISIONS.get(found) for found in attentions
    ]
    return Run(losses, norms, [found and found.backend for found in decisions], 0)
