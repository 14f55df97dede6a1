"""The summary that ends a run of ``pretrain_gpt_moe.py``: what was patched, how it went, where
things lie, what next."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import shlex
from pathlib import Path

import torch
from next_commands import next_commands
from run_folder import saved_iteration
from run_record import RunResult
from text_dataset import TextDataset

from megatron_fluid import patches
from megatron_fluid.patches.engine.switches import switched_off

__all__ = ["features", "run_report"]

_WIDTH = 100


def run_report(
    args: argparse.Namespace,
    text: TextDataset | None,
    result: RunResult,
    tested: bool,
    picture: Path | None = None,
    stopped: bool = False,
) -> str:
    """The summary as text.

    Args:
        args: Megatron's arguments after the run.
        text: the tokenised text, None where Megatron's own data flags were used.
        result: what was measured.
        tested: whether the last evaluation ran on the test split.
        picture: the losses drawn, None where nothing was.
        stopped: whether a signal ended the run.
    """
    rows = [
        ("patches", _patches()),
        ("ranks", _ranks(args)),
        ("model", _model(args)),
        ("data", _data(args, text)),
    ]
    if result.train_losses:
        rows += [("speed", _speed(args, result)), ("training loss", _training(args, result))]
    elif not args.skip_train:
        rows.append(("training", _untrained(args)))
    evaluations = list(result.evaluations)
    test = evaluations.pop() if tested and evaluations else None
    if evaluations:
        rows.append(
            (
                "held-out loss",
                _evaluated(evaluations[-1].loss, evaluations[-1].iteration, text, "valid"),
            )
        )
    if test is not None:
        rows.append(("test loss", _evaluated(test.loss, test.iteration, text, "test")))
    rows += [
        ("checkpoint", _checkpoint(args) or "none (--save FOLDER writes one)"),
        ("logs", _logs(args)),
    ]
    if picture is not None:
        rows.append(("picture", os.path.relpath(picture)))
    rows.append(("next", "\n".join(next_commands(args, result.step_s, stopped))))
    return _table(f"megatron_fluid: run {'stopped by a signal' if stopped else 'complete'}", rows)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    lines = ["", f"== {title} ".ljust(_WIDTH, "=")]
    for name, value in rows:
        first, *others = value.split("\n")
        lines += [f"{name.ljust(width)} : {first}", *(" " * (width + 3) + line for line in others)]
    return "\n".join([*lines, "=" * _WIDTH])


def features() -> list[tuple[str, bool, str, int]]:
    """What overlaps: a feature's name, on or off, the reason, for how many layers."""
    if switched_off():
        return []
    found: list[tuple[str, bool, str, int]] = importlib.import_module(
        "megatron_fluid.patches.startup_report"
    ).features()
    return found


def _patches() -> str:
    """Which patches are in force, by group, and what they do to how many layers."""
    if switched_off():
        return "none (MEGATRON_FLUID=off): Megatron's own code ran"
    groups: dict[str, list[str]] = {}
    for row in patches.report():
        if row.state == "applied":
            groups.setdefault(row.group, []).append(row.patch)
    lines = [
        f"{group}: {', '.join(names) if len(names) <= 8 else f'{len(names)} patches'}"
        for group, names in groups.items()
    ]
    lines += [
        f"{name}: {count} {'on' if on else 'off'} ({reason})"
        for name, on, reason, count in features()
    ]
    return "\n".join([*lines, "(megatron-fluid patches lists them all, with reasons)"])


def _ranks(args: argparse.Namespace) -> str:
    backend = torch.distributed.get_backend()
    device = torch.cuda.get_device_name() if backend == "nccl" else "CPU"
    sizes = {
        "tensor": args.tensor_model_parallel_size,
        "pipeline": args.pipeline_model_parallel_size,
        "context": args.context_parallel_size,
        "expert": args.expert_model_parallel_size,
        "data": args.data_parallel_size,
    }
    parallel = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "none"
    return f"{args.world_size} x {device}, {backend}; parallel: {parallel}"


def _model(args: argparse.Namespace) -> str:
    experts = (
        f"{args.num_experts} experts, top-{args.moe_router_topk}, " if args.num_experts else ""
    )
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    return (
        f"{args.num_layers} layers, hidden {args.hidden_size}, {experts}sequence "
        f"{args.seq_length}, "
        f"{precision}, {args.transformer_impl} layers"
    )


def _data(args: argparse.Namespace, text: TextDataset | None) -> str:
    if text is None:
        return (
            "synthetic (--mock-data)"
            if args.mock_data
            else "Megatron data sets (--data-path and its like)"
        )
    source = (
        ", ".join(args.text_path) if args.text_path else "the sources of Python's standard library"
    )
    return (
        f"{source}: {text.files} files, bytes\n{text.tokens['train']:,} to train on, "
        f"{text.tokens['valid']:,} held out, "
        f"kept in {os.path.relpath(text.folder)}"
    )


def _speed(args: argparse.Namespace, result: RunResult) -> str:
    if result.step_s is None:
        return "too few iterations to say"
    return (
        f"{args.global_batch_size * args.seq_length / result.step_s:,.0f} tokens/s "
        f"({1000 * result.step_s:.1f} ms an iteration, median)"
    )


def _training(args: argparse.Namespace, result: RunResult) -> str:
    first, last = min(result.train_losses), max(result.train_losses)
    interval = args.log_interval
    means = f"; the lines above are means of {interval}" if interval > 1 else ""
    return (
        f"{result.train_losses[first]:.4f} -> {result.train_losses[last]:.4f} nats a token "
        f"(iterations {first + 1} and {last + 1}{means})"
    )


def _untrained(args: argparse.Namespace) -> str:
    unit = "samples" if args.train_samples else "iters"
    asked = getattr(args, f"train_{unit}")
    return (
        f"none: the checkpoint is of iteration {args.iteration}, --train-{unit} is {asked}; more "
        "trains on from it"
    )


def _evaluated(loss: float, iteration: int, text: TextDataset | None, split: str) -> str:
    perplexity = math.exp(min(loss, 20.0))
    value = f"{loss:.4f} nats a token after iteration {iteration}, perplexity {perplexity:.2f}"
    if text is not None and text.bytes[split]:
        value += f", {loss / math.log(2) * text.tokens[split] / text.bytes[split]:.3f} bits a byte"
    return value


def _checkpoint(args: argparse.Namespace) -> str | None:
    iteration = saved_iteration(args.save)
    return None if iteration is None else f"{args.save} (iteration {iteration})"


def _logs(args: argparse.Namespace) -> str:
    return (
        f"tensorboard --logdir {shlex.quote(args.tensorboard_dir)}"
        if args.tensorboard_dir
        else "none (--tensorboard-dir FOLDER)"
    )
