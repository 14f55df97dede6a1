"""A program around `megatron.training.pretrain` with one line more, `import megatron_fluid`: mock
data and a GPT-MoE, everything else from Megatron's command line."""

import megatron_fluid  # noqa: F401, I001 (the one line)
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from benchmarks.cases.pretrain_rank import _data_sets, _forward_step

_data_sets.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    args = parse_and_validate_args()
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, _data_sets, ModelType.encoder_or_decoder, _forward_step)
