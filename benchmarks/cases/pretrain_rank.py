"""One rank of one process of the end-to-end benchmark: Megatron's own training loop, each iteration
timed.

Started by `benchmarks.suites.pretrain` under torchrun with Megatron's flags. PRETRAIN_RESULT names
the file that rank 0 writes; PRETRAIN_PLAIN=1 leaves megatron_fluid out of the process;
PRETRAIN_KERNELS=1 traces the last iteration on a GPU, which then is not among the timed ones.
"""

# ruff: noqa: E402 (megatron_fluid is imported first, or not at all)

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PLAIN = os.environ.get("PRETRAIN_PLAIN") == "1"
if not PLAIN:
    importlib.import_module("megatron_fluid")  # before Megatron, as a user's one line

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from benchmarks.harness.kernel_times import kernel_times

__all__ = ["main"]


class Watch:
    """Seconds and loss of every training step of this rank, and with `traced` where the time of
    that one went, which is not among the seconds."""

    def __init__(self, traced: int | None = None) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.kernels: dict[str, Any] | None = None
        self._traced = traced
        self._hosts: Any = None

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's train_step, timed from a device that is done to a device that is done. All
        ranks begin together: the last rank logs each iteration, and the others would wait for it
        in their first exchange."""

        @functools.wraps(step)
        def timed(*args: Any, **kwargs: Any) -> Any:
            _synchronize()
            if len(self.seconds) == self._traced:
                done, self.kernels = kernel_times(lambda: step(*args, **kwargs), self._together)
            else:
                self._together()
                begun = time.perf_counter()
                done = step(*args, **kwargs)
                _synchronize()
                self.seconds.append(time.perf_counter() - begun)
            self.losses += [float(value) for name, value in done[0].items() if name == "lm loss"]
            return done

        return timed

    def _together(self) -> None:
        """Wait for the other ranks' hosts, by no kernel of a GPU."""
        if torch.distributed.get_world_size() == 1:
            return
        if self._hosts is None:
            self._hosts = torch.distributed.new_group(backend="gloo")
        torch.distributed.barrier(self._hosts)


def _on_gpu() -> bool:
    return torch.distributed.get_backend() == "nccl"


def _synchronize() -> None:
    if _on_gpu():
        torch.cuda.synchronize()


def _data_sets(sizes: Any, vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=None,
        split="1,1,1",
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


def _loss(mask: torch.Tensor, per_token: torch.Tensor) -> tuple[Any, ...]:
    total = (per_token.view(-1).float() * mask.view(-1).float()).sum()
    count = mask.sum().clone().detach().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def _forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    sample = next(iterator)
    names = ("tokens", "labels", "loss_mask", "position_ids")
    batch = get_batch_on_this_cp_rank(
        {name: sample[name].cuda(non_blocking=True) for name in names},
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
    )
    out = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return out, functools.partial(_loss, batch["loss_mask"])


def _report(args: Any, watch: Watch) -> dict[str, Any] | None:
    """Figures over all ranks, on rank 0; the seconds are the slowest rank's. Collective."""
    mine = {"seconds": watch.seconds, "losses": watch.losses, "peak": 0, "reserved": 0}
    if _on_gpu():
        mine["peak"] = torch.cuda.max_memory_allocated()
        mine["reserved"] = torch.cuda.max_memory_reserved()
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    if torch.distributed.get_rank():
        return None
    flops = training.num_floating_point_operations(args, args.global_batch_size)
    return {
        "seconds": [max(times) for times in zip(*(one["seconds"] for one in every), strict=True)],
        "losses": next((one["losses"] for one in every if one["losses"]), []),
        "peak_bytes": max(one["peak"] for one in every),
        "reserved_bytes": max(one["reserved"] for one in every),
        "flops": float(flops),
        "tokens": args.global_batch_size * args.seq_length,
        "overlap": [] if PLAIN else _overlap(),
        "kernels": watch.kernels,
    }


def _overlap() -> list[str]:
    """What megatron_fluid says of its layers, on rank 0."""
    features = importlib.import_module("megatron_fluid.patches.startup_report").features()
    return [f"{name}: {n} {'on' if on else 'off'} ({reason})" for name, on, reason, n in features]


def main() -> None:
    """Train as the command line says, and write what was measured."""
    if PLAIN:  # the wheel has its helpers compiled, and no Makefile to compile them by
        dataset_utils.compile_helpers = lambda: None
    args = parse_and_validate_args()
    tracing = os.environ.get("PRETRAIN_KERNELS") == "1" and torch.cuda.is_available()
    watch = Watch(traced=args.train_iters - 1 if tracing else None)
    training.train_step = watch.wrap(training.train_step)
    setattr(_data_sets, "is_distributed", True)  # noqa: B010 (Megatron's way: on every rank)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        _data_sets,
        ModelType.encoder_or_decoder,
        _forward_step,
    )
    report = _report(args, watch)
    if report is not None:
        Path(os.environ["PRETRAIN_RESULT"]).write_text(json.dumps(report), encoding="utf-8")
    torch.distributed.barrier()
    _synchronize()
    FullCudaGraphWrapper.reset_cuda_graph(None)  # NCCL would wait for a graph of its kernels
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
