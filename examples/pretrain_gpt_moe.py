"""Pretrain a GPT mixture-of-experts with Megatron-Core, its communication overlapped by
megatron_fluid.

    megatron-fluid run --nproc-per-node 2 examples/pretrain_gpt_moe.py
    torchrun --nproc-per-node 8 examples/pretrain_gpt_moe.py --text-path my/texts --num-layers 12

The first trains on CPU cores or GPUs, on text that every machine has. `megatron-fluid run` is
torchrun with short endings.

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
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from run_output import RunOutput, short_parser

if __name__ == "__main__":
    OUTPUT = RunOutput(sys.argv[1:])
    OUTPUT.start()  # before Megatron's imports, which print and log

if os.environ.get("RANK", "0") != "0":
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
# Megatron says at a dozen places what it lacks; main() says it once.
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine and Apex).* not installed.*")
warnings.filterwarnings("ignore", message="Only transformer-engine>=.* supports MoE experts")
# That there is no GPU, which was said: also in processes that save, which import this file again.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

import torch

if not torch.cuda.is_available():  # in which case megatron_fluid says that it trains on the CPU
    os.environ.setdefault("MEGATRON_FLUID_CPU", "1")

import megatron.core

if (found := megatron.core.__version__).startswith(("0.16.", "0.17.", "0.18.")):
    sys.exit(f"pretrain_gpt_moe.py: error: found Megatron-Core {found}, allowed: 0.19 or 0.20")

from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.dist_signal_handler import all_gather_item
from pretrain_data import datasets_provider, get_batch, packed_sequences, prepare_text
from pretrain_defaults import TEXT_CACHE, UNSAVED, Machine, run_folder_of, set_parser_defaults
from run_folder import RunFolder
from run_record import RunRecord
from run_report import features, run_report
from run_signals import StopRequest
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fluid.errors import ConfigError

__all__ = ["main"]


def add_arguments(output: RunOutput, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags that this script adds to Megatron's, and its defaults in place of Megatron's.

    The folder of the run is settled here, because Megatron writes to it while it parses.
    """
    group = parser.add_argument_group(
        "text", "Text files as training data, tokenised once and kept."
    )
    group.add_argument(
        "--text-path",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="Text files or folders. Without this and without Megatron's own data flags: the "
        "sources of Python's standard library. Their tokens are bytes.",
    )
    group.add_argument(
        "--text-cache", default=TEXT_CACHE, metavar="FOLDER",
        help="Where tokenised text is kept. Default: %(default)s.",
    )  # fmt: skip
    group.add_argument(
        "--text-wait-minutes", type=float, default=60.0, metavar="MINUTES",
        help="How long a rank waits for another one to tokenise. Default: %(default)s.",
    )  # fmt: skip
    group = parser.add_argument_group("run", "The folder of the run, and what is shown of it.")
    group.add_argument(
        "--resume",
        action="store_true",
        help="Train on from the last checkpoint in the run's folder, if there is one. Without this "
        "a folder that holds a run is refused.",
    )
    group.add_argument(
        "--no-defaults",
        nargs="*",
        metavar="FLAG",
        help="Take Megatron's own defaults for these flags (all, if none is named) instead of "
        "this script's.",
    )
    short_parser(parser, output)
    argv = sys.argv[1:]
    chosen = set_parser_defaults(parser, Machine.detect(), argv)
    if {"-h", "--help", "--help-fluid"} & set(argv):
        return parser
    parse = parser.parse_args

    def parse_and_settle(*args: Any) -> argparse.Namespace:
        parsed: argparse.Namespace = parse(*args)
        save = parsed.save
        folder = RunFolder.choose(vars(parsed), run_folder_of(save, UNSAVED), save, parsed.resume)
        output.open(folder.path)
        if "--tensorboard-dir" in chosen:
            parsed.tensorboard_dir = str(folder.path / "tensorboard")
        if folder.resumed is not None:
            parsed.load = save
        if parsed.load is not None and not parsed.use_checkpoint_opt_param_scheduler:
            # The learning rate's schedule follows this command: it may ask for more iterations.
            parsed.override_opt_param_scheduler = True
        # Megatron writes its arguments into checkpoints: plain values only.
        parsed.run_path, parsed.run_resumed_from = str(folder.path), folder.resumed
        return parsed

    # The first moment after the flags are known: Megatron writes to the folder soon after.
    parser.parse_args = parse_and_settle  # type: ignore[method-assign, assignment]
    parser.set_defaults(example_defaults=chosen)
    return parser


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
    record: RunRecord,
    stop: StopRequest,
    data_iterator: Any,
    model: Any,
    return_schedule_plan: bool = False,
) -> tuple[Any, Callable[..., Any]]:
    """One microbatch through this rank's stage: its output (or its schedule, for overlapped 1F1B),
    and the loss function."""
    args = get_args()
    if model.training:
        stop.begin_training()
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
    """Name the data modes of Megatron's own script that this one does not have, what starts it
    where nothing has given it a rank, and a length that trains nothing.

    Raises:
        ValueError: one of them is asked for, or no launcher has started the script.
    """
    if "MASTER_ADDR" not in os.environ:
        raise ValueError(
            "MASTER_ADDR: found no launcher's; start the script by "
            "`megatron-fluid run --nproc-per-node 2 examples/pretrain_gpt_moe.py`, or by torchrun"
        )
    flag, found, least = "--train-iters", args.train_iters, 1
    if args.train_samples is not None:
        flag, found, least = "--train-samples", args.train_samples, args.global_batch_size
    if not args.skip_train and (found or 0) < least:
        raise ValueError(
            f"{flag}: found {found}, allowed: {least} or more; --skip-train evaluates alone"
        )
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


def announce(args: argparse.Namespace, output: RunOutput) -> None:
    """Say what runs and where its full log is; in the full log, what this script chose."""
    if args.transformer_impl == "local":
        missing = (
            ""
            if Machine.detect().transformer_engine
            else " (Transformer Engine is not installed or there is no GPU)"
        )
        output.say(f"> layers: Megatron's local ones{missing}")
    if output.rank == 0 and args.example_defaults:
        shown = " ".join(
            flag if value is None else f"{flag} {value}"
            for flag, value in args.example_defaults.items()
        )
        print(
            "> set by this script where the command line is silent (--no-defaults FLAG drops "
            f"one): {shown}"
        )
    output.say(f"> full log: {output.path} (--fluid-verbose shows it here)")
    if args.run_resumed_from is not None:
        output.say(f"> resumes {args.run_path} from iteration {args.run_resumed_from}")


def announce_overlap(output: RunOutput) -> None:
    """Say which layers overlap, and which stay on Megatron's path and why."""
    for name, on, reason, count in features():
        output.say(f"> {name}: {count} {'on' if on else 'OFF: on the path of Megatron'} ({reason})")


def train(output: RunOutput) -> None:
    """Parse, tokenise, train, evaluate, save, and say what was done."""
    try:
        meet_megatrons_demand(sys.argv[1:])
        args = parse_and_validate_args(extra_args_provider=partial(add_arguments, output))
        refuse_unsupported(args)
        announce(args, output)
        text = prepare_text(args, output.say)
        folder = RunFolder(Path(args.run_path), args.save, args.run_resumed_from)
        if output.rank == 0:
            folder.begin(args, text)
    except (ValueError, AssertionError, NotImplementedError, OSError) as error:
        output.fail(error, by_user=True)
    output.sequence_length = args.seq_length
    record, stop = RunRecord(), StopRequest(args.exit_signal)
    record.at_first(partial(announce_overlap, output))
    if args.exit_signal_handler:
        stop.install()
    # Tells Megatron to call it on every rank, not only on tensor-parallel rank 0.
    setattr(datasets_provider, "is_distributed", True)  # noqa: B010
    finished: SystemExit | None = None
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
            datasets_provider,
            ModelType.encoder_or_decoder,
            partial(forward_step, record, stop),
            get_embedding_ranks=embedding_ranks,
            non_loss_data_func=lambda model: record.end_evaluation(args.iteration),
        )
    except SystemExit as leave:  # --exit-interval, a signal: Megatron has saved and wants to leave
        finished = leave
    except ConfigError as error:
        output.fail(error, by_user=True)
    finally:
        stop.end_training()
    if finished is not None and not record.begun:
        output.close()
        if output.rank == 0:
            print(f"Megatron ended before training; its last lines:\n{output.last_lines()}")
        # Of a checkpoint that it cannot read Megatron only says so.
        raise finished if args.ckpt_convert_format else SystemExit(finished.code or 1)
    result = record.result()
    # A run that was complete when the signal came is complete.
    asked = max(all_gather_item(stop.asked, torch.int32)) if finished is not None else 0
    if output.rank == 0:
        picture = folder.end(result)
        tested = bool(getattr(args, "do_test", False)) and finished is None
        output.say(run_report(args, text, result, tested, picture, stopped=bool(asked)))
    if asked:
        torch.distributed.barrier()  # a launcher ends all ranks when one leaves with this status
    torch.cuda.synchronize()
    FullCudaGraphWrapper.reset_cuda_graph(None)  # NCCL would wait for a graph of its kernels
    torch.distributed.destroy_process_group()
    if finished is not None:
        raise SystemExit(finished.code or (asked and 128 + asked))


def main(output: RunOutput) -> None:
    """Run, and show an error once and briefly."""
    try:
        train(output)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        output.fail(error, by_user=False)
    except KeyboardInterrupt:  # before training, which ends with a checkpoint
        if output.rank == 0:
            print("error: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        output.close()


if __name__ == "__main__":
    main(OUTPUT)
