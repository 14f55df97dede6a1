"""The data of ``pretrain_gpt_moe.py``: text to tokenise, Megatron's data sets, one microbatch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_tokenizer
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from pretrain_defaults import uses_text
from text_dataset import (
    ByteTokenizer,
    TextDataset,
    build_text_dataset,
    find_text_files,
    parse_split,
    standard_library_files,
)

__all__ = ["datasets_provider", "get_batch", "packed_sequences", "prepare_text"]

# What one microbatch may hold; a pipeline stage gets only what it uses, the rest is None.
BATCH = (
    "tokens", "labels", "loss_mask", "position_ids", "attention_mask",
    "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group",
)  # fmt: skip


def prepare_text(args: argparse.Namespace, say: Callable[[str], None]) -> TextDataset | None:
    """Tokenise the text that ``args`` name and point Megatron's data arguments to it; None where
    other data is asked for.

    Every rank comes here before any process group exists, and every rank meets the same errors.

    Raises:
        ValueError: text that does not exist, is empty, unreadable or too short.
        TimeoutError: another rank does not finish within ``--text-wait-minutes``.
    """
    if not uses_text(vars(args)):
        if args.text_path:
            raise ValueError(
                "--text-path cannot be combined with --data-path, --mock-data and their like: give "
                "one of them"
            )
        return None
    files = find_text_files(args.text_path) if args.text_path else standard_library_files()
    if args.vocab_size is None or args.vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size: found {args.vocab_size}, bytes need at least "
            f"{ByteTokenizer.vocab_size} (256 values and the end of a document)"
        )
    text = build_text_dataset(
        files,
        ByteTokenizer(),
        parse_split(args.split),
        args.text_cache,
        wait_s=60 * args.text_wait_minutes,
    )
    text.require_length(args.seq_length)
    args.train_data_path, args.valid_data_path, args.test_data_path = (
        None if text.prefixes[name] is None else [text.prefixes[name]]
        for name in ("train", "valid", "test")
    )
    args.split = None  # done: each split has its own data set
    if args.data_cache_path is None and not os.access(text.folder, os.W_OK):
        # Megatron's indices of samples, which it keeps with the tokens by default
        args.data_cache_path = str(Path(args.run_path, "index_cache"))
    say(
        f"> text: {text.files} files in {text.folder}; tokens: "
        + ", ".join(f"{name} {count:,}" for name, count in text.tokens.items())
        + (f"; {len(text.skipped)} binary files left out" if text.skipped else "")
    )
    return text


def holds_mtp(vp_stage: int | None) -> bool:
    """Whether this stage computes multi-token prediction, which needs tokens and labels anywhere in
    the pipeline."""
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def builds_dataset(vp_stage: int | None) -> bool:
    """Whether this rank reads samples: the first tensor-parallel rank of the stages that use
    them."""
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    return is_first_or_last_pipeline_stage(vp_stage) or needs_boundaries() or holds_mtp(vp_stage)


def needs_boundaries() -> bool:
    """Whether every stage needs the boundaries of the documents in a sample."""
    return bool(get_args().dataloader_inter_document_masking)


def datasets_provider(samples: Sequence[int | None], vp_stage: int | None = None) -> list[Any]:
    """Train, valid and test data sets for Megatron, with at least ``samples`` samples each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    counts = None
    if args.per_dataset_sequences_path is not None:
        counts = json.loads(Path(args.per_dataset_sequences_path).read_text(encoding="utf-8"))
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=counts,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        hybrid_context_parallel=args.hybrid_context_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        kind, samples, partial(builds_dataset, vp_stage), config
    ).build()


def get_batch(data_iterator: Any, vp_stage: int | None) -> dict[str, Any]:
    """This rank's part of the next microbatch: what its pipeline stage uses, its context-parallel
    slice of the sequence.

    ``tokens``, ``labels``, ``loss_mask``, ``position_ids``: [B, S / context-parallel size]; None
    where unused.
    """
    args = get_args()
    mtp = holds_mtp(vp_stage)
    outer_stage = is_first_or_last_pipeline_stage(vp_stage) or mtp
    if not outer_stage and not needs_boundaries():
        return dict.fromkeys(BATCH)
    batch: dict[str, Any] = {}
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    if tensor_rank == 0:
        sample = next(data_iterator)
        for name in BATCH:
            found = sample.get(name)
            batch[name] = None if found is None else found.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=needs_boundaries(),
        is_hybrid_cp=args.hybrid_context_parallel,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if outer_stage:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=args.hybrid_context_parallel,
            cp_group=mpu.get_context_parallel_group(),
            hybrid_cp_group_func=mpu.get_hybrid_data_context_parallel_groups,
            use_per_sequence_balancing=needs_boundaries(),
        )
    return {name: batch.get(name) for name in BATCH}


def packed_sequences(batch: dict[str, Any]) -> PackedSeqParams | None:
    """The boundaries of the documents in a microbatch, for attention that must not cross them."""
    if batch["cu_seqlens"] is None:
        return None
    true_ends = batch["cu_seqlens"].squeeze(0)
    padded_ends = (
        None if batch["cu_seqlens_padded"] is None else batch["cu_seqlens_padded"].squeeze(0)
    )
    update_seqlen_stats_from_cu_seqlens(true_ends)
    ends = true_ends if padded_ends is None else padded_ends
    longest = int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded_ends,
        cu_seqlens_kv_padded=padded_ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        local_cp_size=None
        if batch["local_cp_size"] is None
        else int(batch["local_cp_size"].item()),
        cp_group=batch["hybrid_cp_group"],
        tokens_per_sample=get_args().seq_length,
    )
