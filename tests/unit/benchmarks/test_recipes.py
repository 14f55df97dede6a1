"""The suite of the recipes: what it starts, and what it makes of a comparison's logs."""

from pathlib import Path

import pytest

from benchmarks.suites import pretrain
from benchmarks.suites.recipes import FEWER, ROOT, SEARCHED, best_command, command_of, main, rows_of

LINE = (
    " [2026-11-27] iteration {n}/ 1000 | consumed samples: 1 | elapsed time per iteration (ms): "
    "{ms} | learning rate: 1E-4 | lm loss: {loss} | grad norm: 1.0 |\n"
)


def test_every_recipe_has_fewer_layers_and_its_own_flags() -> None:
    recipes = {path.stem for path in (ROOT / "examples" / "recipes").glob("*.sh")} - {"launch"}
    assert set(FEWER) == set(SEARCHED) == recipes
    for recipe in recipes:
        words = command_of(recipe, 2, Path("pretrain_gpt.py"))
        script = words.index("pretrain_gpt.py")
        assert int(words[len(words) - words[::-1].index("--num-layers")]) <= 12
        assert words[script - 2 : script] == ["--nproc-per-node", "2"]
        assert "--moe-router-dtype" in words[script:]


def test_rows_hold_times_behind_the_warm_up_and_how_far_losses_are_apart(tmp_path: Path) -> None:
    for name, ms, loss in (("off", 40.0, 2.0), ("on", 10.0, 2.02), ("off_again", 20.0, 2.0)):
        steps = (LINE.format(n=n, ms=ms if n > 1 else 9e3, loss=loss) for n in (1, 2, 3))
        (tmp_path / f"{name}.log").write_text("".join(steps) + "[Rank 0] max allocated: 2048.0\n")
    plain, fluid = rows_of("olmoe_1b_7b", tmp_path, 1, 2, "0.19.1")
    assert (plain.variant, plain.median_ms, plain.iters) == ("megatron", 30.0, 4)
    assert (fluid.variant, fluid.median_ms, fluid.iters) == ("fluid", 10.0, 2)
    assert fluid.config["difference"] == pytest.approx(0.01)
    assert fluid.config["noise"] == 0.0
    assert fluid.config["peak_gib"] == 2.0
    (tmp_path / "best.log").write_text("".join(LINE.format(n=n, ms=7, loss=2) for n in (1, 2)))
    (tmp_path / "off_again.log").write_text("it did not start")
    fluid, best = rows_of("olmoe_1b_7b", tmp_path, 1, 2, "0.19.1")
    assert "difference" not in fluid.config
    assert (best.variant, best.median_ms) == ("megatron_best", 7.0)
    assert best.config["searched"] == "olmoe"
    assert best.config["megatron_lm"] == "0.19.1"


def test_megatrons_best_flags_stand_behind_the_recipes_and_without_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    words, variant = best_command("mixtral_8x7b", 1, script, 9)
    assert not [word for word in words if word.startswith("--fluid-")]
    assert "--overlap-grad-reduce" not in words, "its search kept late_reductions"
    assert words[-4:] == ["--exit-interval", "9", "--log-interval", "1"]
    assert variant.environment["NVTE_USE_CUTLASS_GROUPED_GEMM"] == "1"
    assert "fused_weight_gradient_mlp_cuda" in variant.needs
    monkeypatch.setattr(pretrain, "_cublas", lambda: "13.10.0")
    assert "--moe-single-grouped-weight" in best_command("mixtral_8x7b", 1, script, 9)[0]


def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "olmoe_1b_7b"])
    assert "no GPU is visible" in capsys.readouterr().err
