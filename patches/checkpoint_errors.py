"""Megatron's errors about a checkpoint that does not fit, in words of the flags that cause them."""

import argparse
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from megatron_fluid.errors import ConfigError, FluidError

__all__ = ["full_disk_named", "load_checkpoint", "settings_that_differ"]

_PROBE_BYTES = 64 << 20


# What Megatron says where experts were saved with expert parallelism, and without it.
_TEXTS = ("Could not find parameter group", "entries in state dict, but got")

# Settings that shape the parameters of a model, by destination in Megatron's parser.
_SHAPES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("group_query_attention", "kv_channels", "multi_latent_attention", "q_lora_rank"),
    *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_experts"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq"),
    *("moe_router_enable_expert_bias", "mtp_num_layers", "swiglu", "normalization"),
    *("qk_layernorm", "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights"),
    *("position_embedding_type", "padded_vocab_size"),
)
# Those that a checkpoint of Megatron's older format (--ckpt-format torch) keeps apart by rank.
_RANKS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
# Where the flag is not the destination's name.
_FLAGS = {
    "add_bias_linear": "add_bias_linear (--disable-bias-linear)",
    "padded_vocab_size": "the padded vocabulary of --tokenizer-model or --vocab-size",
}


def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `megatron.training.checkpointing.load_checkpoint`: where a checkpoint cannot be loaded
    into this model, a ConfigError names the settings that are not the checkpoint's.

    An optimizer whose parameter groups are not the checkpoint's is a ConfigError about expert
    parallelism, which divides them. Other errors stay as they are.
    """

    @functools.wraps(original)
    def fluid_load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except _caught() as error:
            from megatron.training import get_args

            settings = get_args()
            name = kwargs.get("load_arg", args[3] if len(args) > 3 else "load")
            folder = getattr(settings, name, None)
            if differ := settings_that_differ(settings, _saved_settings(settings, folder)):
                raise ConfigError(
                    f"--{name} {folder}: the checkpoint does not fit this model: "
                    f"{'; '.join(differ)}; allowed: the checkpoint's own settings "
                    "(--use-checkpoint-args takes them), or another folder"
                ) from error
            if not any(text in str(error) for text in _TEXTS) or not settings.num_experts:
                raise
            raise ConfigError.of(
                "--expert-model-parallel-size",
                settings.expert_model_parallel_size,
                "1 only if the checkpoint was saved with 1, and any other size only if it was "
                "saved with another than 1 (Megatron's optimizer keeps experts in a group of their "
                "own under expert parallelism alone); or --no-load-optim, which starts the "
                "optimizer anew",
            ) from error

    return fluid_load_checkpoint


@contextlib.contextmanager
def full_disk_named() -> Iterator[None]:
    """Inside, where Megatron writes a checkpoint and fails: look whether the folder takes files at
    all. Megatron's error names neither the folder nor the reason, and none on the other ranks.

    Raises:
        FluidError: it takes none on this rank: the folder, and why.
    """
    try:
        yield
    except _caught() as error:
        from megatron.training import get_args

        folder = getattr(get_args(), "save", None)
        if folder is None or (reason := _takes_no_files(folder)) is None:
            raise
        raise FluidError(
            f"--save {folder}: this rank's part of the checkpoint could not be written: {reason}; "
            "checkpoints before it are untouched"
        ) from error


def _takes_no_files(folder: str) -> str | None:
    """Why a file of _PROBE_BYTES cannot be written to `folder`, or None."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(folder).free >> 20} MiB free)"
        return f"{error.strerror}{free}"
    return None


def _caught() -> tuple[type[BaseException], ...]:
    """Every error; what torch.distributed.checkpoint raises for one of any rank is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    return Exception, CheckpointException


def settings_that_differ(
    settings: argparse.Namespace, saved: argparse.Namespace | None
) -> list[str]:
    """Each setting that shapes a model and is not the checkpoint's: found and saved.

    Args:
        settings: Megatron's arguments of this run.
        saved: those that the checkpoint holds, or None.
    """
    if saved is None:
        return []
    by_rank = getattr(settings, "ckpt_format", None) == "torch"
    grouped = any(getattr(each, "group_query_attention", True) for each in (settings, saved))
    texts = []
    for name in (*_SHAPES, *(_RANKS if by_rank else ())):
        if name == "num_query_groups" and not grouped:
            continue  # Megatron sets it to the number of heads while it builds the model
        if hasattr(settings, name) and hasattr(saved, name):
            mine, theirs = getattr(settings, name), getattr(saved, name)
            if mine != theirs:
                flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
                texts.append(f"{flag}: found {mine}, in the checkpoint {theirs}")
    return texts


def _saved_settings(settings: argparse.Namespace, folder: str | None) -> Any:
    """The arguments that a checkpoint holds; None where they cannot be read."""
    if folder is None:
        return None
    from megatron.training import checkpointing

    try:
        state, *_ = checkpointing._load_base_checkpoint(folder, settings, rank0=True)
    except Exception:  # a damaged checkpoint has an error of its own
        return None
    return state.get("args") if state else None
