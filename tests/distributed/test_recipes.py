"""examples/recipes/*.sh --smoke: each trains, has the structure of the real run, and says at
start-up what docs/recipes.md says of all."""

import argparse
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.forked_program import run_program
from tests.support.recipe_flags import RECIPES, ROOT, printed

pytest.importorskip("megatron.training")
pytest.importorskip("tqdm")

pytestmark = [pytest.mark.slow]

LAUNCHER = ["-m", "megatron_fluid.cli", "run", "--nproc-per-node", "2"]
# Arguments that make the small model another size than the real one, none that makes it another
# model.
SIZES = {
    "num_layers", "moe_layer_freq", "hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "num_experts", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "v_head_dim", "window_size", "seq_length",
}  # fmt: skip
CPU = {"MEGATRON_FLUID_CPU": "1", "OMP_NUM_THREADS": "1"}
VERBOSE = {"MEGATRON_FLUID_VERBOSE": "1"}  # the whole table
# Of Megatron's defaults, those that the example's script has others for.
DEFAULTS = {"add_bias_linear", "swiglu", "moe_router_pre_softmax", "qk_layernorm", "softmax_type"}


def smoke(recipe: str, folder: Path) -> str:
    (folder / "text.txt").write_bytes(Path(os.__file__).with_name("argparse.py").read_bytes())
    script, *flags = launched(recipe, folder)
    code, output = run_program(Path(script), 2, flags, folder, CPU | VERBOSE, 200)
    assert code == 0, output[-4000:]
    return output


def launched(recipe: str, folder: Path) -> list[str]:
    """The program that the recipe's script starts on two ranks, and its flags."""
    shown = folder / "python"
    shown.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    shown.chmod(0o755)
    command = ["bash", str(ROOT / f"examples/recipes/{recipe}.sh"), "--smoke"]
    command += ["--train-iters", "3", "--text-path", "text.txt"]
    kept = {name: value for name, value in os.environ.items() if "MEGATRON_FLUID" not in name}
    environment = kept | {"PYTHON": str(shown)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    words = done.stdout.splitlines()
    assert done.returncode == 0 and words[:5] == LAUNCHER, done.stdout + done.stderr
    return words[5:]


def model_arguments(recipe: str) -> dict[str, str]:
    """The arguments that describe the real model (the flags up to the dispatcher's type, which ends
    them), and those that Megatron sets by default where it has no flag: name and value."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = printed(recipe, 1)
    flags = flags[: flags.index("--moe-token-dispatcher-type") + 2]
    values = vars(parser.parse_args(flags))
    actions = parser._option_string_actions
    named = {actions[flag].dest for flag in flags if flag.startswith("--")}
    found = {name: values[name] for name in named | DEFAULTS}
    for name, value in found.items():  # Megatron makes a list of one entry that entry
        if isinstance(value, list) and len(value) == 1:
            found[name] = value[0]
    return {name: str(value) for name, value in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_smoke_run_trains_the_same_structure_and_reports_what_the_page_says(
    recipe: str, tmp_path: Path
) -> None:
    log = smoke(recipe, tmp_path)
    losses = [float(text) for text in re.findall(r"iteration +\d+/.*?lm loss: ([0-9.E+-]+)", log)]
    assert losses[-1] < losses[0]

    layers = r"^overlapped MoE layer +(on|off) +\d+ +(\S.*)$"
    ((state, reason),) = re.findall(layers, log, re.MULTILINE)
    exchange, _, why = reason.partition("; Megatron's experts: ")
    assert (state, exchange) == ("on", "rounds, 2 expert-parallel ranks")
    # A run on CPUs has no grouped GEMM: its SequentialMLP is no part of the recipe.
    assert not why or why.startswith("SequentialMLP's")

    ran = dict(re.findall(r"^ +(\w+) \.{3,} (.*)$", log, re.MULTILINE))
    wanted = {name: text for name, text in model_arguments(recipe).items() if name not in SIZES}
    assert {name: ran[name] for name in wanted} == wanted
