"""Pretrain a GPT mixture-of-experts with Megatron-Core, its communication overlapped by
megatron_fluid.

    torchrun --nproc_per_node 2 examples/pretrain_gpt_moe.py                       # CPU cores or
    GPUs, real text, no download torchrun --nproc_per_node 8 examples/pretrain_gpt_moe.py
    --text-path my/texts --hidden-size 1024 --num-layers 12 ...

Everything that is special to megatron_fluid is the import below: it patches Megatron as Megatron is
imported (MEGATRON_FLUID=off leaves it alone). The rest is an ordinary Megatron training script on
the megatron-core wheel; every flag of Megatron works, and `--help` lists them with the `--fluid-*`
flags and those of the data.
"""

# ruff: noqa: E402 (warnings are sorted out before Megatron is imported)

from __future__ import annotations

# First: its patches take effect while Megatron is being imported.
import megatron_fluid  # noqa: F401  # isort: skip

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if os.environ.get("RANK", "0") != "0":
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
# Megatron says at a dozen places what it lacks; main() says it once.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine and Apex).* not installed.*")
warnings.filterwarnings("ignore", message="Only transformer-engine>=.* supports MoE experts")

import torch

if not torch.cuda.is_available():  # in which case megatron_fluid says that it trains on the CPU
    os.environ.setdefault("MEGATRON_FLUID_CPU", "1")

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from pretrain_defaults import RUN_FOLDER, Machine, set_parser_defaults, uses_text
from run_record import RunRecord
from run_report import run_report
from text_dataset import (
    ByteTokenizer,
    MegatronTextTokenizer,
    TextDataset,
    TextTokenizer,
    build_text_dataset,
    find_text_files,
    parse_split,
    standard_library_files,
)

__all__ = ["main"]

# What one microbatch may hold; a pipeline stage gets only what it uses, the rest is None.
BATCH = (
    "tokens", "labels", "loss_mask", "position_ids", "attention_mask",
    "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags of this script beside Megatron's, and its defaults in place of Megatron's."""
    group = parser.add_argument_group(
        "text", "Text files as training data, tokenised once and kept."
    )
    group.add_argument(
        "--text-path",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="Text files or folders. Without this and without Megatron's own data flags: the "
        "sources of Python's "
        "standard library. The tokens are bytes unless --tokenizer-model names a HuggingFace "
        "tokenizer folder "
        "(or --tokenizer-type another tokenizer of Megatron).",
    )
    group.add_argument(
        "--text-cache", default=f"{RUN_FOLDER}/data", metavar="FOLDER",
        help="Where tokenised text is kept. Default: %(default)s.",
    )  # fmt: skip
    group.add_argument(
        "--text-wait-minutes", type=float, default=60.0, metavar="MINUTES",
        help="How long a rank waits for another one to tokenise. Default: %(default)s.",
    )  # fmt: skip
    group.add_argument(
        "--no-defaults",
        nargs="*",
        metavar="FLAG",
        help="Take Megatron's own defaults for these flags (all, if none is named) instead of "
        "this script's.",
    )
    chosen = set_parser_defaults(parser, Machine.detect(), sys.argv[1:])
    parser.set_defaults(example_defaults=chosen)
    return parser


# --------------------------------------------------------------------------------------------------
# data


def prepare_text(args: argparse.Namespace) -> TextDataset | None:
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
    tokenizer: TextTokenizer
    if args.tokenizer_type == "NullTokenizer":
        if args.vocab_size is None or args.vocab_size < ByteTokenizer.vocab_size:
            raise ValueError(
                f"--vocab-size: found {args.vocab_size}, bytes need at least "
                f"{ByteTokenizer.vocab_size} "
                "(256 values and the end of a document)"
            )
        tokenizer = ByteTokenizer()
    else:
        tokenizer = MegatronTextTokenizer(get_tokenizer(), args.tokenizer_model)
    text = build_text_dataset(
        files,
        tokenizer,
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
    print_rank_0(
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


# --------------------------------------------------------------------------------------------------
# steps


def masked_loss(
    record: RunRecord, training: bool, loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses ``losses`` [B, S] where ``loss_mask`` is one, their number, and what
    Megatron logs.

    A NaN or an infinite loss ends the run by name, as Megatron's
    ``--check-for-nan-in-loss-and-grad`` asks.
    """
    args = get_args()
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    check = get_rerun_state_machine().validate_result
    if args.check_for_nan_in_loss_and_grad:
        for test, message in (
            (torch.isnan, "found NaN in the loss"),
            (torch.isinf, "found an infinite loss"),
        ):
            check(result=loss, rejection_func=test, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        spiky = partial(
            get_rerun_state_machine().is_unexpectedly_large, threshold=10, context="loss"
        )
        check(
            result=loss,
            rejection_func=spiky,
            message="loss ten times the largest",
            tolerance=0.0,
            fatal=False,
        )
    if training:
        record.train(args.curr_iteration, loss, tokens)
    else:
        record.evaluate(loss, tokens)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(
    record: RunRecord, data_iterator: Any, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """One microbatch through this rank's stage: its output (or its schedule, for overlapped 1F1B),
    and the loss function."""
    args = get_args()
    if model.training:
        record.begin(args.curr_iteration)
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    loss = partial(masked_loss, record, model.training, batch["loss_mask"])
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    targets = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    if return_schedule_plan:
        return model.build_schedule_plan(*inputs, **targets), loss
    return model(*inputs, **targets, packed_seq_params=packed_sequences(batch)), loss


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold word embeddings: the first, the last if it shares them,
    those of MTP layers."""
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if len(pipeline_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline_ranks[-1])
        ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


# --------------------------------------------------------------------------------------------------
# run


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Name the data modes of Megatron's own script that this one does not have.

    Raises:
        ValueError: one of them is asked for.
    """
    for name in ("fim_data", "sft", "perform_rl_step", "logits_load_dir"):
        if getattr(args, name, None):
            raise ValueError(
                f"--{name.replace('_', '-')} is not a form of pretraining that this script knows; "
                "Megatron-LM's "
                "pretrain_gpt.py has it, and needs one added line to run with megatron_fluid: "
                "import megatron_fluid"
            )


def meet_megatrons_demand(arguments: Sequence[str]) -> None:
    """Give CUDA the one queue that Megatron insists on under tensor or context parallelism before
    Blackwell, where the environment does not say otherwise; it counts from CUDA's start on.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--tensor-model-parallel-size", "--context-parallel-size"):
        parser.add_argument(name, type=int, default=1)
    sizes = vars(parser.parse_known_args(arguments)[0])
    if max(sizes.values()) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def main() -> None:
    """Parse, tokenise, train, evaluate, save, and say what was done."""
    meet_megatrons_demand(sys.argv[1:])
    args = parse_and_validate_args(extra_args_provider=add_arguments)
    refuse_unsupported(args)
    if args.transformer_impl == "local":
        missing = (
            ""
            if Machine.detect().transformer_engine
            else " (Transformer Engine is not installed or there is no GPU)"
        )
        print_rank_0(f"> layers: Megatron's local ones{missing}")
    if args.example_defaults:
        shown = " ".join(
            flag if value is None else f"{flag} {value}"
            for flag, value in args.example_defaults.items()
        )
        print_rank_0(
            "> set by this script where the command line is silent (--no-defaults FLAG drops "
            f"one): {shown}"
        )
    text = prepare_text(args)
    record = RunRecord()
    # Megatron's way to say: call it on every rank.
    setattr(datasets_provider, "is_distributed", True)  # noqa: B010
    finished: SystemExit | None = None
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
            datasets_provider,
            ModelType.encoder_or_decoder,
            partial(forward_step, record),
            get_embedding_ranks=embedding_ranks,
            non_loss_data_func=lambda model: record.end_evaluation(args.iteration),
        )
    except (
        SystemExit
    ) as stop:  # --exit-interval and its like: Megatron has saved and wants to leave
        finished = stop
    result = record.result()
    if torch.distributed.get_rank() == 0:
        print(
            run_report(args, text, result, tested=bool(args.do_test) and finished is None),
            flush=True,
        )
    torch.distributed.destroy_process_group()
    if finished is not None:
        raise finished


if __name__ == "__main__":
    main()
