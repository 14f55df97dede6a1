"""The least that a program around `megatron.training.pretrain` needs, with one line more: `import
megatron_fluid`.

Mock data, a GPT-MoE, everything else from Megatron's command line. As Megatron-LM's
pretrain_gpt.py, which the wheel of megatron-core leaves out.
"""

import functools
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

import megatron_fluid  # noqa: F401 (the one line)


def data_sets(sizes: Any, vp_stage: int | None = None) -> Any:
    """Training, validation and test sets of `sizes` samples."""
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
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()


data_sets.is_distributed = True  # type: ignore[attr-defined]


def loss(
    mask: torch.Tensor, per_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over tokens, their number, and both for the log."""
    total = (per_token.view(-1).float() * mask.view(-1).float()).sum()
    count = mask.sum().clone().detach().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """One microbatch forward."""
    names = ("tokens", "labels", "loss_mask", "position_ids")
    sample = next(iterator)
    batch = get_batch_on_this_cp_rank(
        {name: sample[name].cuda() for name in names},
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
    )
    step = model.build_schedule_plan if return_schedule_plan else model
    out = step(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return out, functools.partial(loss, batch["loss_mask"])


if __name__ == "__main__":
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, data_sets, ModelType.encoder_or_decoder, forward_step)
