"""Parse and check the flags of every recipe as a rank of an H100 node would, and print JSON.

A program of its own, as the tests' CPU mode would adapt the flags. It answers for the device.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# How many nodes each recipe is checked on.
RECIPES = {
    "mixtral_8x7b": (1, 2), "qwen3_30b_a3b": (1, 4), "deepseek_v3": (1, 128), "gpt_oss_20b": (1, 2),
    "olmoe_1b_7b": (1, 2),
}  # fmt: skip


def printed(recipe: str, nodes: int, *flags: str) -> list[str]:
    """What a recipe hands to pretrain_gpt.py."""
    command = ["bash", str(ROOT / f"examples/recipes/{recipe}.sh"), "--print", *flags]
    environment = os.environ | {"NNODES": str(nodes)}
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def check(recipe: str, nodes: int) -> dict[str, Any]:
    """The values of Megatron's arguments as text, by name; or what Megatron or we say against
    them, as `error`."""
    from megatron.training import arguments
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_fluid.config import current_config
    from megatron_fluid.patches.moe.decision import part_reasons

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(8 * nodes))
    sys.argv = ["pretrain_gpt.py", *printed(recipe, nodes)]
    try:
        args = arguments.parse_args()
        given = {name: str(value) for name, value in vars(args).items()}
        arguments.validate_args(args)
        args.apply_rope_fusion = args.moe_permute_fusion = False
        config = gpt_config_from_args(args)
    except (SystemExit, AssertionError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    config = getattr(config, "transformer", config)
    return {
        "arguments": given,
        "replicas": args.data_parallel_size,
        "unsupported": part_reasons(config, current_config()).fused,
    }


def main() -> None:
    """Print `{"recipe on N": ...}`."""
    import torch

    hopper = types.SimpleNamespace(major=9, minor=0, name="NVIDIA H100")
    torch.cuda.get_device_properties = lambda *_: hopper  # type: ignore[assignment]
    import megatron_fluid  # noqa: F401

    answer = sys.stdout
    sys.stdout = sys.stderr
    found = {
        f"{recipe} on {count}": check(recipe, count)
        for recipe, nodes in RECIPES.items()
        for count in nodes
    }
    json.dump(found, answer)


if __name__ == "__main__":
    main()
