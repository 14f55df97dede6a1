"""Megatron's interleaved pipeline (PP2, VPP2, EP2) with overlapped MoE layers beside its own
path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.launch import run_ranks

pytest.importorskip("megatron.core")

from tests.support import tiny_gpt

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="CPU mode is for machines without a GPU"
)

MICROBATCHES, STEPS = 4, 2


def _interleaved(rank: int, world_size: int) -> dict[str, tuple[list[float], int]]:
    """Losses and gradient norms of every step, training and validation, and the calls of the
    overlapped forward: on Megatron's path, and overlapped in two ways."""
    from megatron_fluid.patches import apply_all

    apply_all()
    tiny_gpt.parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        expert_model_parallel_size=2,
    )
    found = {}
    deferred = {"defer_weight_grads": True, "dx_chunks": 2}
    for name, on, fields in (
        ("megatron", False, {}),
        ("overlapped", True, {}),
        ("deferred", True, deferred),
    ):
        with tiny_gpt.plug_in(on, **fields) as calls:
            numbers = _train_interleaved()
            found[name] = numbers, len(calls)
    return found


def _train_interleaved() -> list[float]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    config = tiny_gpt.config_of(
        num_layers=4,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        moe_shared_expert_intermediate_size=40,
        overlap_p2p_comm=False,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
    )
    chunks = []
    for stage in range(2):
        model_parallel_cuda_manual_seed(7 + stage, force_reset_rng=True)
        torch.manual_seed(7 + stage)
        ends = {"ignore_virtual": False, "vp_stage": stage}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=tiny_gpt.VOCABULARY,
            max_sequence_length=tiny_gpt.SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),
            post_process=parallel_state.is_pipeline_last_stage(**ends),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
            vp_stage=stage,
        )
        distributed = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=2000
        )
        chunks.append(DistributedDataParallel(config, distributed, model))
    settings = OptimizerConfig(
        optimizer="adam", adam_eps=1e-4, lr=5e-3, use_distributed_optimizer=True, clip_grad=1.0,
        params_dtype=torch.float32,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, chunks)
    config.no_sync_func = [chunk.no_sync for chunk in chunks]
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    numbers = []
    for step, forward_only in itertools.product(range(STEPS), (False, True)):
        for chunk in chunks:
            chunk.train(not forward_only)
            if not forward_only:
                chunk.zero_grad_buffer()
        optimizer.zero_grad()
        rank = parallel_state.get_data_parallel_rank()
        batches = [tiny_gpt.batch(rank, step, m) for m in range(MICROBATCHES)]
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(batches), iter(batches)],
            model=chunks,
            num_microbatches=MICROBATCHES,
            seq_length=tiny_gpt.SEQUENCE,
            micro_batch_size=2,
            forward_only=forward_only,
        )
        numbers += [float(report["loss"]) for report in reports]
        if not forward_only:
            numbers.append(float(optimizer.step()[1]))
    return numbers


def _forward_step(iterator: Iterator[Any], model: Any) -> Any:

    tokens, labels, positions = next(iterator)
    shape = (1, 1, tiny_gpt.SEQUENCE, tiny_gpt.SEQUENCE)
    mask = torch.triu(torch.ones(*shape, dtype=torch.bool), 1)
    out = model(tokens, positions, mask, labels=labels)
    return out, lambda y: (y.float().mean(), {"loss": y.detach().float().mean()})


def test_an_interleaved_pipeline_trains_as_on_megatrons_path() -> None:
    for rank, found in enumerate(run_ranks(_interleaved, 4, timeout_s=240)):
        reference, calls = found["megatron"]
        assert calls == 0
        assert len(reference) == STEPS * (1 + 2 * MICROBATCHES * (rank >= 2))  # the last stage's
        for name in ("overlapped", "deferred"):
            numbers, calls = found[name]
            assert calls == 2 * STEPS * 2 * MICROBATCHES  # two layers a rank, training, validation
            assert numbers == pytest.approx(reference, rel=1e-5)
