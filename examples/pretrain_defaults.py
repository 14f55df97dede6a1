"""What ``pretrain_gpt_moe.py`` sets where the command line is silent: a small byte-level GPT-MoE
that trains anywhere.

Every entry is a default of Megatron's own parser under Megatron's own name: the flag overrides it,
``--no-defaults NAME`` drops it (back to Megatron's default, the only way for switches), and rank 0
prints what was set.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "RUN_FOLDER",
    "TEXT_CACHE",
    "UNSAVED",
    "Machine",
    "default_settings",
    "given_arguments",
    "run_folder_of",
    "set_parser_defaults",
    "uses_text",
]

RUN_FOLDER = "runs/pretrain_gpt_moe"
# logs of runs that save no checkpoint; the next such run adds to them
UNSAVED = "runs/unsaved"
# shared by all runs: the same text is tokenised once
TEXT_CACHE = "runs/text"
# the default global batch, or the nearest below it that the ranks divide: losses can be compared
_SEQUENCES = 16


@dataclass(frozen=True)
class Machine:
    """What the defaults depend on besides the command line."""

    ranks: int
    cuda: bool
    transformer_engine: bool
    wgrad_kernel: bool
    softmax_kernel: bool

    @classmethod
    def detect(cls) -> Machine:
        """This process: ranks from the launcher, devices and kernels from here."""
        from megatron.core.tensor_parallel import layers

        def importable(name: str) -> bool:
            return importlib.util.find_spec(name) is not None

        cuda = torch.cuda.is_available()
        return cls(
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
            cuda=cuda,
            transformer_engine=cuda and importable("transformer_engine"),
            # Apex's, or megatron_fluid's in its place.
            wgrad_kernel=cuda and bool(layers._grad_accum_fusion_available),
            softmax_kernel=importable("scaled_masked_softmax_cuda"),
        )


class _GivenArguments(argparse.Namespace):
    """A namespace in which every argument seems to be set already, so that argparse stores only
    what was given."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


def given_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The arguments that ``argv`` really names, by destination; arguments unknown to ``parser`` are
    left out."""
    if {"-h", "--help", "--help-fluid"} & set(argv):
        return {}
    namespace, _ = parser.parse_known_args(list(argv), _GivenArguments())
    return dict(vars(namespace))


def run_folder_of(save: str | None, otherwise: str) -> str:
    """The folder of the run that keeps its checkpoints in ``save``: a folder named "checkpoints"
    belongs to the run above it."""
    if save is None:
        return otherwise
    return str(Path(save).parent) if Path(save).name == "checkpoints" else save


def uses_text(arguments: Mapping[str, Any]) -> bool:
    """Whether the data is text to tokenise; False where Megatron's own data flags name something
    else."""
    own = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path")
    return not any(arguments.get(name) for name in (*own, "per_split_data_args_path", "mock_data"))


def default_settings(given: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Values, by destination in Megatron's parser, for arguments that ``given`` does not name.

    Raises:
        ValueError: a tokenizer for text files, whose tokens are bytes.
    """
    chosen: dict[str, Any] = {}

    def default(**values: Any) -> None:
        chosen.update({name: value for name, value in values.items() if name not in given})

    def value(name: str, otherwise: Any) -> Any:
        return given.get(name, chosen.get(name, otherwise))

    # Data: bytes, and 256 for the end of a document, but for data of one's own.
    named = given.get("tokenizer_type", given.get("tokenizer_model"))
    if uses_text(given) and named not in (None, "NullTokenizer"):
        raise ValueError(
            f"--tokenizer-type or --tokenizer-model: found {named}, allowed: none for text files, "
            "whose tokens are bytes; for others name what Megatron-LM's tools/preprocess_data.py "
            "made of them as --data-path"
        )
    if named is None and (uses_text(given) or given.get("mock_data")):
        default(tokenizer_type="NullTokenizer", vocab_size=257)
    if uses_text(given):
        default(split="95,5,0")

    # Model: from a checkpoint or a YAML file where one of them gives it.
    if not any(given.get(name) for name in ("use_checkpoint_args", "yaml_cfg")):
        if "hidden_size" in given:
            default(num_attention_heads=max(1, given["hidden_size"] // 64))
        else:
            default(hidden_size=128, num_attention_heads=4, ffn_hidden_size=256)
        default(num_layers=2, seq_length=128, num_experts=8)
        if value("num_experts", None) and value("ffn_hidden_size", None):
            default(moe_ffn_hidden_size=value("ffn_hidden_size", None))
        default(moe_router_topk=min(2, value("num_experts", None) or 2))
        default(max_position_embeddings=value("seq_length", None), position_embedding_type="rope")
        default(
            normalization="RMSNorm", add_bias_linear=False, untie_embeddings_and_output_weights=True
        )
        default(attention_dropout=0.0, hidden_dropout=0.0)
        if not any(given.get(name) for name in ("squared_relu", "quick_geglu", "openai_gelu")):
            default(swiglu=True)
        default(
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="aux_loss",
            moe_aux_loss_coeff=1e-2,
        )

    # Parallelism: experts over as many ranks as divide both them and the ranks.
    tensor = int(given.get("tensor_model_parallel_size", 1))
    pipeline = int(given.get("pipeline_model_parallel_size", 1))
    context = int(given.get("context_parallel_size", 1))
    if experts := value("num_experts", None):
        expert_tensor = int(given.get("expert_tensor_parallel_size", tensor))
        default(
            expert_model_parallel_size=math.gcd(
                experts, max(1, machine.ranks // (expert_tensor * pipeline))
            )
        )

    # Optimisation.
    replicas = max(1, machine.ranks // (tensor * pipeline * context))
    sequences = value("global_batch_size", _SEQUENCES)
    # The largest that leaves a microbatch for each stage, and divides a replica's share of the
    # global batch if that was given.
    share, most = sequences // replicas, max(1, sequences // (replicas * pipeline))
    default(
        micro_batch_size=next(
            size
            for size in range(most, 0, -1)
            if share % size == 0 or "global_batch_size" not in given
        )
    )
    if not {"rampup_batch_size", "step_batch_size_schedule", "micro_batch_size"} & set(given):
        default(global_batch_size=chosen.get("micro_batch_size", 1) * replicas * pipeline)
    if "train_samples" not in given:
        default(train_iters=200)
    if not {"lr_warmup_iters", "lr_warmup_samples"} & set(given):
        default(lr_warmup_fraction=0.05)
    rate = 3e-3 if value("hidden_size", 0) <= 256 else 3e-4
    default(lr=rate, min_lr=value("lr", rate) / 10, lr_decay_style="cosine")
    default(weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0)

    # Logs, evaluation, checkpoints.
    default(log_interval=10, eval_iters=10, eval_interval=1000, save_interval=1000)
    default(exit_signal_handler=True)
    ends_early = value("exit_interval", None)  # on purpose: it keeps nothing
    default(save=None if ends_early else value("load", None) or f"{RUN_FOLDER}/checkpoints")
    default(tensorboard_dir=f"{run_folder_of(value('save', None), UNSAVED)}/tensorboard")

    # Machine: only kernels that are there, NCCL alone on GPUs.
    default(create_attention_mask_in_dataloader=False)
    if not machine.transformer_engine:
        default(transformer_impl="local", apply_rope_fusion=False)
    if value("transformer_impl", None) == "local":
        default(no_persist_layer_norm=True)
    elif value("num_experts", None):
        default(moe_grouped_gemm=True)
    if not machine.wgrad_kernel or value("use_torch_fsdp2", False):
        default(gradient_accumulation_fusion=False)
    if not machine.softmax_kernel:
        default(masked_softmax_fusion=False)
    if machine.cuda:
        default(use_gloo_process_groups=False)
        if "fp16" not in given:
            default(bf16=True)
    return chosen


def set_parser_defaults(
    parser: argparse.ArgumentParser, machine: Machine, argv: Sequence[str]
) -> dict[str, Any]:
    """Put :func:`default_settings` into a parser that holds all of Megatron's arguments.

    Returns what was set, as flags: ``{"--num-layers": 2, "--swiglu": None, ...}``, None for a
    switch.

    Raises:
        ValueError: ``--no-defaults`` names something that is no default here.
    """
    given = given_arguments(parser, argv)
    chosen = default_settings(given, machine)
    flags = {
        action.dest: max(action.option_strings, key=len)
        for action in parser._actions
        if action.option_strings
    }
    if (dropped := given.get("no_defaults")) is not None:
        names = {name.lstrip("-") for name in dropped}
        known = {flags[name].lstrip("-"): name for name in {*chosen, *given} & set(flags)}
        if unknown := names - set(known):
            raise ValueError(
                f"--no-defaults: found {', '.join(sorted(unknown))}; "
                f"allowed are {', '.join(sorted(flags[name].lstrip('-') for name in chosen))}"
            )
        gone = {known[name] for name in names} if names else set(chosen)
        chosen = {name: value for name, value in chosen.items() if name not in gone}
    parser.set_defaults(**chosen)
    return {
        flags[name]: None if isinstance(value, bool) else value for name, value in chosen.items()
    }
