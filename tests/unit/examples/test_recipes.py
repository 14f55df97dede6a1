"""examples/recipes: Megatron's parser knows every flag, its own checks pass, and docs/recipes.md
says what is ours."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.fresh_program import run_code
from tests.support.recipe_flags import RECIPES, ROOT, printed

pytest.importorskip("megatron.training")

RUNS = [f"{recipe} on {nodes}" for recipe, counts in RECIPES.items() for nodes in counts]


@pytest.fixture(scope="module")
def checked() -> dict[str, dict[str, Any]]:
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
    wanted = {"moe_token_dispatcher_type": "alltoall", "bf16": "True", "fluid_moe_backend": "auto"}
    assert wanted.items() <= arguments.items()
    stages, biased = arguments["pipeline_model_parallel_size"], arguments["add_bias_linear"]
    assert (arguments["fluid_graph"] == "True") is (stages == "1" and biased == "False")
    # On GPUs Transformer Engine's experts with biases refuse this fusion, Megatron's default.
    assert "False" in (biased, arguments["bias_dropout_fusion"])


def test_experts_are_this_packages_as_the_page_says(checked: dict[str, dict[str, Any]]) -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    assert all(f"`{recipe}.sh`" in page for recipe in RECIPES)
    assert "experts and combine are this package's in all five" in page and len(RECIPES) == 5
    assert [run for run in RUNS if checked[run]["unsupported"] is not None] == []


def test_data_of_ones_own_takes_the_place_of_made_up_tokens() -> None:
    assert "--mock-data" in printed("olmoe_1b_7b", 1)
    mine = printed("olmoe_1b_7b", 1, "--data-path", "corpus", "--lr", "1e-3")
    assert not {"--mock-data", "--vocab-size"} & set(mine)
    assert mine[-4:] == ["--data-path", "corpus", "--lr", "1e-3"]


@pytest.mark.parametrize("variable", [{}, {"MEGATRON_LM": "/"}, {"NNODES": "abc"}])
def test_a_recipe_names_a_wrong_variable(variable: dict[str, str], tmp_path: Path) -> None:
    said = (
        f"MEGATRON_LM: found '{variable.get('MEGATRON_LM', '')}', which is no checkout of Megatron"
    )
    if "NNODES" in variable:
        said = "NNODES: found 'abc', allowed: a whole number, 1 or more"
    kept = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM"} | variable
    command = ["bash", str(ROOT / "examples/recipes/deepseek_v3.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(said) and done.stderr.count("\n") == 1
