"""examples/recipes: Megatron's parser knows every flag, its own checks pass, and docs/recipes.md
says what is ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh_program import run_code
from tests.support.recipe_flags import RECIPES, ROOT, printed

pytest.importorskip("megatron.training")

RUNS = [f"{recipe} on {nodes}" for recipe, counts in RECIPES.items() for nodes in counts]


# Parameters of the published weights, those of DeepSeek-V3 without its MTP layer.
PUBLISHED = {
    "mixtral_8x7b on 1": 46_702_792_704,
    "qwen3_30b_a3b on 1": 30_532_122_624,
    "deepseek_v3 on 128": 671_026_404_352,
    "gpt_oss_20b on 1": 20_914_757_184,
    "olmoe_1b_7b on 1": 6_919_161_856,
}


def told(recipe: str) -> str:
    """What the table of docs/recipes.md says about a recipe's experts."""
    row = re.search(rf"^\|.*`{recipe}\.sh`.*$", (ROOT / "docs/recipes.md").read_text(), re.M)
    assert row is not None, f"docs/recipes.md has no row of {recipe}.sh"
    return [cell.strip() for cell in row[0].strip("|").split("|")][2]


@pytest.fixture(scope="module")
def checked() -> dict[str, dict[str, Any]]:
    """What Megatron makes of each recipe, outside of CPU mode."""
    kept = {name: value for name, value in os.environ.items() if "MEGATRON_FLUID" not in name}
    done = run_code(
        "from tests.support.recipe_flags import main; main()",
        environment=kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_recipe_is_checked() -> None:
    scripts = {path.stem for path in (ROOT / "examples/recipes").glob("*.sh")}
    assert scripts == {*RECIPES, "launch"}


@pytest.mark.parametrize("run", RUNS)
def test_megatron_takes_every_flag(run: str, checked: dict[str, dict[str, Any]]) -> None:
    assert "error" not in checked[run], checked[run]["error"]
    arguments = checked[run]["arguments"]
    assert arguments["moe_token_dispatcher_type"] == "alltoall"
    assert arguments["bf16"] == "True"
    assert arguments["fluid_moe_backend"] == "auto"
    stages, biased = arguments["pipeline_model_parallel_size"], arguments["add_bias_linear"]
    assert (arguments["fluid_graph"] == "True") is (stages == "1" and biased == "False")


@pytest.mark.parametrize("run", RUNS)
def test_the_table_says_which_setting_keeps_experts_on_megatrons_path(
    run: str, checked: dict[str, dict[str, Any]]
) -> None:
    reason = checked[run]["unsupported"]
    said = told(run.split()[0])
    if reason is None:
        assert said == "ours"
    else:
        assert said == f"Megatron's: `{reason.partition('=')[0]}`"


def number_of_parameters(arguments: dict[str, str]) -> int:
    """Of embeddings, layers and the output layer, without MTP layers."""
    values = {name: text for name, text in arguments.items() if text != "None"}

    def number(name: str, default: str = "0") -> int:
        return int(values.get(name, default))

    hidden, heads, experts = (
        number(name) for name in ("hidden_size", "num_attention_heads", "num_experts")
    )
    biased = values["add_bias_linear"] == "True"
    gated = values["swiglu"] == "True" or values["quick_geglu"] == "True"

    def mlp(width: int) -> int:
        fc1 = width * (2 if gated else 1)
        return hidden * (fc1 + width) + biased * (fc1 + hidden)

    if values["multi_latent_attention"] == "True":
        query, latent = number("q_lora_rank"), number("kv_lora_rank")
        plain, rotated = number("qk_head_dim"), number("qk_pos_emb_head_dim")
        value = number("v_head_dim")
        attention = hidden * (query + latent + rotated) + query + latent
        attention += query * heads * (plain + rotated) + latent * heads * (plain + value)
        attention += heads * value * hidden
    else:
        grouped = values["group_query_attention"] == "True"
        groups = number("num_query_groups") if grouped else heads
        channels = number("kv_channels", str(hidden // heads))
        attention = hidden * channels * (2 * heads + 2 * groups)
        attention += biased * (channels * (heads + 2 * groups) + hidden)
        attention += 2 * channels * (values["qk_layernorm"] == "True")
        attention += heads * (values["softmax_type"] == "learnable")
    moe = experts * (hidden + mlp(number("moe_ffn_hidden_size")) + biased)
    moe += experts * (values["moe_router_enable_expert_bias"] == "True")
    if shared := number("moe_shared_expert_intermediate_size"):
        moe += mlp(shared)
    layers = number("num_layers")
    pattern = json.loads(values["moe_layer_freq"])
    pattern = pattern if isinstance(pattern, list) else [1] * layers
    assert len(pattern) == layers
    feed_forward = sum(moe if kind else mlp(number("ffn_hidden_size")) for kind in pattern)
    assert values["untie_embeddings_and_output_weights"] == "True"
    ends = 2 * number("vocab_size") * hidden + hidden
    return ends + layers * (attention + 2 * hidden) + feed_forward


@pytest.mark.parametrize("run", PUBLISHED)
def test_the_widths_give_the_published_number_of_parameters(
    run: str, checked: dict[str, dict[str, Any]]
) -> None:
    # OLMoE's norms of queries and keys are wider than Megatron's.
    found = number_of_parameters(checked[run]["arguments"])
    assert found == pytest.approx(PUBLISHED[run], rel=1e-5)


def test_data_of_ones_own_takes_the_place_of_made_up_tokens() -> None:
    assert "--mock-data" in printed("olmoe_1b_7b", 1)
    mine = printed("olmoe_1b_7b", 1, "--data-path", "corpus", "--lr", "1e-3")
    assert "--mock-data" not in mine
    assert "--vocab-size" not in mine
    assert mine[-4:] == ["--data-path", "corpus", "--lr", "1e-3"]


def test_without_a_checkout_of_megatron_a_recipe_says_what_it_needs(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM"}
    done = subprocess.run(
        ["bash", str(ROOT / "examples/recipes/olmoe_1b_7b.sh")],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "MEGATRON_LM: names no checkout of Megatron-LM" in done.stderr
