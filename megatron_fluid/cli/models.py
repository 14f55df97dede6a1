"""The models of the command line: by name, or by the flags of a Megatron training."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_fluid.cli.terminal import BriefParser, positive
from megatron_fluid.errors import ConfigError

__all__ = ["MODELS", "Model", "add_models", "model_of_flags", "wanted_models"]


@dataclass(frozen=True)
class Model:
    """Sizes of a layer, and the ranks it is spread over.

    Attributes:
        value_dim: width of a head of values, where it is not head_dim.
        ffn: of a dense layer. expert_ffn, experts, top_k: of an MoE layer. 0: there is none.
        gated: whether the activation of a dense layer has a gate, which doubles its first linear.
        q_rank, kv_rank: widths of the compressed rows of latent attention; 0: none.
        sequence, batch: positions of a sequence, sequences of a microbatch.
        context, tensor, expert: ranks of each kind of parallelism.
        layers: of the published model; 0: not known.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int = 0
    expert_ffn: int = 0
    experts: int = 0
    top_k: int = 0
    value_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    sequence: int = 4096
    batch: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    layers: int = 0
    gated: bool = True

    @property
    def rows(self) -> int:
        """Tokens of a context-parallel rank."""
        return self.sequence * self.batch // self.context


MODELS: Mapping[str, Model] = {
    "deepseek-v3": Model(
        7168, 128, 128, 192, 18432, 2048, 256, 8, value_dim=128, q_rank=1536, kv_rank=512, layers=61
    ),
    "gpt-oss-20b": Model(2880, 64, 8, 64, expert_ffn=2880, experts=32, top_k=4, layers=24),
    "llama-3-70b": Model(8192, 64, 8, 128, 28672, layers=80),
    "mixtral-8x7b": Model(4096, 32, 8, 128, expert_ffn=14336, experts=8, top_k=2, layers=32),
    "olmoe": Model(2048, 16, 16, 128, expert_ffn=1024, experts=64, top_k=8, layers=16),
    "qwen3-235b-a22b": Model(4096, 64, 4, 128, expert_ffn=1536, experts=128, top_k=8, layers=94),
    "qwen3-30b-a3b": Model(2048, 32, 4, 128, expert_ffn=768, experts=128, top_k=8, layers=48),
}
"""The models of `plan`, `warm`, the recipes and the benchmarks."""
_ALIASES = {"olmoe-1b-7b": "olmoe"}  # as its recipe and its publisher call it


def add_models(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name models, for `wanted_models`."""
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    add("--expert-parallel", dest="expert", type=positive, metavar="RANKS", help="(1)")
    flags = "the flags of a Megatron training in place of MODEL; given last"
    add("--from-args", nargs=argparse.REMAINDER, metavar="FLAGS", help=flags)
    parser.set_defaults(own=parser._option_string_actions)


def wanted_models(args: argparse.Namespace) -> dict[str, Model]:
    """Return the models that a command line names. Its other arguments that are fields of Model
    replace theirs.

    Raises:
        ConfigError: an unknown name, no model, names beside flags, or experts that the ranks do
            not divide.
    """
    if args.from_args == [] and args.models and args.models[0].startswith("-"):
        args.from_args, args.models = args.models, []  # behind `--`, as `compare` takes its command
    if bool(args.models) == bool(args.from_args):
        raise ConfigError("give MODEL, or --from-args with Megatron's flags, not both")
    models: dict[str, Model] = {}
    own = set(args.own) - {f"--{flag}" for flag, _ in _FLAGS.values()}
    if late := own.intersection(word.partition("=")[0] for word in args.from_args or ()):
        raise ConfigError(f"{', '.join(sorted(late))}: found after --from-args, allowed: before it")
    if args.from_args:
        models["the model of these flags"] = model_of_flags(args.from_args)
    for name in args.models:
        name = name.lower().replace("_", "-")
        name = _ALIASES.get(name, name)
        if name not in MODELS:
            raise ConfigError.of("MODEL", name, ", ".join(MODELS))
        models[name] = MODELS[name]
    fields = {field.name for field in dataclasses.fields(Model)}
    changes = {k: v for k, v in vars(args).items() if k in fields and v is not None}
    models = {name: dataclasses.replace(model, **changes) for name, model in models.items()}
    for name, model in models.items():
        if model.experts % model.expert:
            allowed = f"a multiple of {model.expert}"
            raise ConfigError.of(f"{name}: experts", model.experts, allowed)
    return models


# Megatron's flag of each field, and its default; None: there is none, or another flag gives it.
_FLAGS: Mapping[str, tuple[str, int | None]] = {
    "hidden": ("hidden-size", None), "heads": ("num-attention-heads", None),
    "kv_heads": ("num-query-groups", 1), "head_dim": ("kv-channels", None),
    "ffn": ("ffn-hidden-size", None), "expert_ffn": ("moe-ffn-hidden-size", None),
    "experts": ("num-experts", 0), "top_k": ("moe-router-topk", 2),
    "sequence": ("seq-length", None), "batch": ("micro-batch-size", 1),
    "context": ("context-parallel-size", 1), "tensor": ("tensor-model-parallel-size", 1),
    "expert": ("expert-model-parallel-size", 1), "layers": ("num-layers", 0),
    "value_dim": ("v-head-dim", 128), "q_rank": ("q-lora-rank", 0), "kv_rank": ("kv-lora-rank", 32),
}  # fmt: skip


def model_of_flags(flags: Sequence[str]) -> Model:
    """Return the model of a Megatron command line.

    Raises:
        ConfigError: a flag that the model needs is not there.
    """
    parser = BriefParser(prog="--from-args", add_help=False, allow_abbrev=False)
    for field, (flag, default) in _FLAGS.items():
        parser.add_argument(f"--{flag}", dest=field, type=positive, default=default)
    parser.add_argument("--qk-head-dim", type=positive, default=128)
    parser.add_argument("--qk-pos-emb-head-dim", type=positive, default=64)
    for switch in ("group-query-attention", "multi-latent-attention", "swiglu", "quick-geglu"):
        parser.add_argument(f"--{switch}", action="store_true")
    parsed = parser.parse_known_args(flags)[0]
    for field in ("hidden", "heads", "sequence"):
        if getattr(parsed, field) is None:
            flag = f"--from-args: --{_FLAGS[field][0]}"
            raise ConfigError.of(flag, "no such flag", "an integer, as the training has it")
    sizes = {field: getattr(parsed, field) for field in _FLAGS}
    sizes["gated"] = parsed.swiglu or parsed.quick_geglu
    usual = 8 * parsed.hidden // 192 * 64 if parsed.swiglu else 4 * parsed.hidden  # as Megatron's
    ffn = parsed.ffn or usual
    if parsed.experts:
        sizes |= {"ffn": 0, "expert_ffn": parsed.expert_ffn or ffn}
    else:
        sizes |= {"ffn": ffn, "expert_ffn": 0, "top_k": 0}
    if parsed.multi_latent_attention:
        head_dim = parsed.qk_head_dim + parsed.qk_pos_emb_head_dim
        sizes |= {"kv_heads": parsed.heads, "head_dim": head_dim}
    else:
        sizes |= {"value_dim": 0, "q_rank": 0, "kv_rank": 0}
        sizes["head_dim"] = parsed.head_dim or parsed.hidden // parsed.heads
        sizes["kv_heads"] = parsed.kv_heads if parsed.group_query_attention else parsed.heads
    return Model(**sizes)
