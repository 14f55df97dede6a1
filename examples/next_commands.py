"""What to run next: commands that fit the machine, each with a rough estimate of its time."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from pretrain_defaults import Machine, default_settings
from run_folder import saved_iteration

__all__ = ["about", "next_commands", "training_flops"]

# Flags that are not repeated in a command that trains on: it sets them itself, or they were meant
# for this run alone.
_NOT_AGAIN = {
    "--override-opt-param-scheduler",
    "--resume",
    "--skip-train",
    "--profile",
    "--use-pytorch-profiler",
    "--fluid-profile-steps",
}
_NOT_AGAIN |= {"--profile-step-start", "--profile-step-end", "--profile-ranks"}
_NOT_AGAIN |= {"--finetune", "--pretrained-checkpoint", "--ckpt-step"}
# Added where a checkpoint lacks it.
_LOAD_WITHOUT = {"no_save_optim": "--no-load-optim", "no_save_rng": "--no-load-rng"}
_NOT_AGAIN |= {*_LOAD_WITHOUT.values()}

# Proposed is the first of these (hidden size, layers) that is larger than the run and trains in
# less time than this, else the last one.
_PATIENCE_S = 30 * 60.0
_LARGER = ((1024, 16), (512, 8), (256, 4), (192, 3))


def next_commands(
    args: argparse.Namespace, step_s: float | None, stopped: bool = False
) -> list[str]:
    """Commands that go on from here: resume, own text, a larger model on as many ranks as the
    machine has.

    Args:
        args: Megatron's arguments of the run that ends.
        step_s: seconds of one of its iterations, None where that is not known.
        stopped: whether a signal ended it. A run whose last checkpoint is before --train-iters
            (--exit-interval) is taken to have stopped, too.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    more = max(ranks, min(2 * ranks, devices))

    launcher = ["megatron-fluid", "run"]
    if not shutil.which("megatron-fluid"):  # a source tree by PYTHONPATH
        launcher = [os.path.relpath(sys.executable), "-m", "megatron_fluid.cli", "run"]

    def command(ranks: int, *words: str) -> str:
        return "  " + shlex.join(
            [*launcher, "--nproc_per_node", str(ranks), os.path.relpath(sys.argv[0]), *words]
        )

    def estimate(ranks_then: int, **given: Any) -> float | None:
        """Seconds of a run of this script with these flags, as its arithmetic compares with that
        of the run that ends. None where that one was much smaller, as a recipe's --smoke is: most
        of its time is no arithmetic."""
        if step_s is None:
            return None
        machine = dataclasses.replace(Machine.detect(), ranks=ranks_then)
        usual = default_settings({}, dataclasses.replace(machine, ranks=ranks))
        if 2 * training_flops(vars(args)) < training_flops(usual):
            return None
        then = {**given, **default_settings(given, machine)}
        ratio = training_flops(then) / training_flops(vars(args)) * ranks / ranks_then
        return step_s * ratio * then["train_iters"]

    lines = []
    saved = saved_iteration(args.save)
    without = [flag for name, flag in _LOAD_WITHOUT.items() if getattr(args, name, None)]
    done = int(saved) if saved is not None and saved.isdigit() else args.train_iters or 0
    if saved is not None and (stopped or done < (args.train_iters or 0)):
        words = [*_without(sys.argv[1:], {"--load", *_NOT_AGAIN}), *without]
        left = None
        if step_s is not None and args.train_iters:
            left = step_s * max(0, args.train_iters - done)
        lines += [f"go on where it stopped{about(left)}:", command(ranks, *words, "--resume")]
    elif args.train_iters and saved is not None:
        # A checkpoint may be of more than what was asked for: then nothing was trained.
        length = (
            ("--train-samples", max(args.train_samples, args.consumed_train_samples))
            if args.train_samples
            else ("--train-iters", max(args.train_iters, done))
        )
        resume = {"--load": args.save, length[0]: str(2 * length[1])}
        words = _without(sys.argv[1:], {*resume, *_NOT_AGAIN})
        words += [word for pair in resume.items() for word in pair] + without
        again = None if step_s is None else step_s * args.train_iters
        lines += [
            f"train on from the checkpoint{about(again)}:",
            command(ranks, *words, "--override-opt-param-scheduler"),
        ]
    lines += [
        f"your own text{about(estimate(ranks))}:",
        command(ranks, "--text-path", "FILE_OR_FOLDER", "--save", "runs/own_text"),
    ]
    text = "a larger model" if more == ranks else f"a larger model on {more} ranks"
    larger = [
        (hidden, layers, estimate(more, hidden_size=hidden, num_layers=layers))
        for hidden, layers in _LARGER
        if hidden > args.hidden_size
    ]
    for hidden, layers, seconds in larger:
        if hidden == larger[-1][0] or (seconds is not None and seconds <= _PATIENCE_S):
            size = ("--hidden-size", str(hidden), "--num-layers", str(layers))
            lines += [f"{text}{about(seconds)}:", command(more, *size, "--save", "runs/larger")]
            break
    return lines


def training_flops(settings: Mapping[str, Any]) -> float:
    """Operations of one iteration of a GPT-MoE, to compare two models: six a parameter that a token
    meets, and those of attention.

    Args:
        settings: Megatron's arguments by destination; the width of an expert may be left out.
    """

    def value(name: str, otherwise: float) -> float:
        found = settings.get(name)
        return otherwise if found is None else float(found)

    hidden, length = value("hidden_size", 1), value("seq_length", 128)
    width = value("ffn_hidden_size", 8 / 3 * hidden if settings.get("swiglu") else 4 * hidden)
    chosen = 1.0
    if settings.get("num_experts"):
        width, chosen = value("moe_ffn_hidden_size", width), value("moe_router_topk", 1)
    matrices = 3 if settings.get("swiglu") else 2
    layer = 4 * hidden**2 + chosen * matrices * hidden * width + 2 * length * hidden
    words = value("padded_vocab_size", value("vocab_size", 257))
    a_token = 6 * (value("num_layers", 1) * layer + hidden * words)
    return a_token * length * value("global_batch_size", value("micro_batch_size", 1))


def about(seconds: float | None) -> str:
    """Return " (about 3 min)", or nothing where the time is not known."""
    if seconds is None:
        return ""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f" (about {seconds / length:.0f} {unit})"
    return f" (about {max(1, round(seconds))} s)"


def _without(words: Sequence[str], flags: Collection[str]) -> list[str]:
    """A command line without ``flags`` and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.split("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept
