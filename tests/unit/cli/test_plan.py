"""`megatron-fluid plan`: predictions of a model by name or by Megatron's flags."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report.iterations import iterations
from megatron_fluid.cli import main, plan
from megatron_fluid.cli.models import MODELS, model_of_flags
from megatron_fluid.errors import ConfigError
from megatron_fluid.plan.machine import REFERENCE, Machine, machine_named
from tests.support.machine import GPUS
from tests.support.recipe_flags import RECIPES, printed

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 16384 --num-experts 8 --moe-ffn-hidden-size 14336 "
    "--moe-router-topk 2 --context-parallel-size 4 --expert-model-parallel-size 4 --bf16 --swiglu"
)


def test_every_part_that_moves_data_has_a_choice(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan mixtral-8x7b qwen3-30b-a3b --machine h200 --seq-length 16384 --context-parallel 4"
    assert main([*words.split(), "--tensor-parallel", "2", "--expert-parallel", "4"]) == 0
    text = capsys.readouterr().out
    assert "machine: NVIDIA H200" in text and "(reference)" in text
    for name in ("mixtral-8x7b", "qwen3-30b-a3b"):
        assert f"{name}: 16384 positions" in text
    for part in ("attention", "linear_qkv", "linear_proj", "experts"):
        assert sum(line.startswith(part) for line in text.splitlines()) == 2
    assert text.count("under sequence parallelism") == 2
    assert max(map(len, text.splitlines())) <= 100


def test_flags_give_the_same_as_the_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    by_flags = model_of_flags(FLAGS.split())
    by_name = dataclasses.replace(MODELS["mixtral-8x7b"], sequence=16384, context=4, expert=4)
    assert by_flags == by_name
    assert main(["plan", "--machine", "h200", "--from-args", *FLAGS.split()]) == 0
    assert "the model of these flags: 16384 positions" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_models_are_those_of_the_recipes(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", recipe, "--expert-parallel", "8"]) == 0
    said = capsys.readouterr().out
    name = next(name for name in MODELS if f"\n{name}: 4096 positions" in said)
    flags = model_of_flags(printed(recipe, 1))
    for field in "hidden heads kv_heads head_dim expert_ffn experts top_k".split():
        assert getattr(flags, field) == getattr(MODELS[name], field), field


def test_measured_iterations_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    case = {"model": "qwen3-30b-a3b", "sequences": 1}.items()
    found = [one for one in json.loads(iterations()) if case <= one.items()]
    assert len(found) >= 2
    assert main(["plan", "qwen3-30b-a3b", "--expert-parallel", "4"]) == 0
    said = capsys.readouterr().out
    last = " ".join(said[said.index("expected iteration") :].split())
    for one in found:
        before, after = one["megatron_ms"], one["fluid_ms"]
        assert f"{before:.1f} -> {after:.1f} ms, {before / after:.2f} times as fast" in last
        assert f"({one['layers']} of 48 layers on {one['gpus']} " in last
    assert f"1 sequence a microbatch, cuBLAS {found[0]['cublas']}, routing" in last
    assert main(["plan", "qwen3-30b-a3b", "--gpus", "3"]) == 0
    said = capsys.readouterr().out
    assert "on 3 GPUs; the nearest number is 2" in said and said.count("layers on 2 ") == 1
    assert main(["plan", "qwen3-30b-a3b", "--gpus", "1", "--micro-batch-size", "9"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert " 8 sequences a microbatch," in said and said.count("expected iteration: ") == 1
    assert main(["plan", "llama-3-70b", "--tensor-parallel", "8"]) == 0
    assert "were not measured" in capsys.readouterr().out.splitlines()[-1]


def test_flags_of_latent_attention_and_a_gate_are_read() -> None:
    latent = "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --multi-latent-attention"
    model = model_of_flags(latent.split())
    gated = model_of_flags([*latent.split(), "--swiglu"])
    assert (gated.ffn, gated.gated, model.gated) == (128, True, False), "of Megatron's defaults"
    assert (model.head_dim, model.value_dim, model.kv_heads) == (192, 128, 4)
    assert (model.ffn, model.experts) == (256, 0)
    assert (model.q_rank, model.kv_rank) == (0, 32), "Megatron's defaults"
    with pytest.raises(ConfigError, match="--from-args: --seq-length: found 'no such flag'"):
        model_of_flags(["--hidden-size", "64", "--num-attention-heads", "4"])


def test_without_a_gpu_figures_are_an_h200s_and_without_ranks_nothing_is_chosen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ("llama-3-70b --expert-parallel 4", "deepseek-v3 --tensor-parallel 8"):
        assert main(["plan", *words.split()]) == 0
        text = capsys.readouterr().out
        assert "nothing to choose for these ranks: give --context-parallel, --expert-p" in text
    assert GPUS or "machine: NVIDIA H200" in text


def test_figures_are_written_and_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    words = ["plan", "mixtral-8x7b", "--context-parallel", "2"]
    assert main([*words, "--machine", "h200", "--write", str(path)]) == 0
    first = capsys.readouterr().out.replace("(reference)", "")
    assert Machine.read(str(path)).flops_per_s == REFERENCE["h200"].flops_per_s
    assert main([*words, "--machine", str(path)]) == 0
    assert capsys.readouterr().out.split()[-10:] == first.split()[-10:]


def test_of_latent_attention_compressed_rows_are_gathered_where_they_are_few() -> None:
    model = dataclasses.replace(MODELS["deepseek-v3"], context=4, sequence=16384)
    machine = REFERENCE["h200"]

    def taken(**changes: int) -> tuple[str, str]:
        (part,) = plan.parts_of(dataclasses.replace(model, **changes), machine)
        assert part.name.startswith("latent")
        return part.taken, part.why

    assert taken() == ("compressed rows are gathered", "")
    assert taken(heads=16, context=8)[0] == "heads are exchanged"
    exchanged, why = taken(tensor=2)
    assert exchanged == "heads are exchanged" and "tensor parallelism" in why


def test_attention_is_overlapped_unless_linears_hide_their_own_gathers() -> None:
    model = dataclasses.replace(MODELS["llama-3-70b"], context=2, sequence=16384)
    parts = list(plan.parts_of(model, REFERENCE["h200"]))
    assert [(part.name, part.taken) for part in parts] == [("attention", "overlapped")]
    parts = list(plan.parts_of(dataclasses.replace(model, tensor=2), REFERENCE["h200"]))
    assert parts[0].taken.startswith("exchanged") and "sequence parallelism" in parts[0].why
    assert len(parts) == 5


# ---- figures of a machine: their names, and what a file of them may hold


def test_names_give_reference_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, machine in REFERENCE.items():
        assert machine_named(name) is machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu, name in (("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("A", "h200")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
        assert machine_named("auto") is machine_named("reference") is REFERENCE[name]


@pytest.mark.parametrize("change", [
    {"flops_per_s": 0}, {"flops_per_s": "fast"}, {"bytes_per_s": float("nan")},
    {"wire_bytes_per_s": None}, {"bytes_per_s": True}, {"device": 3}, {"another": 1},
    "not JSON", "[]",
])  # fmt: skip
def test_a_file_with_a_figure_out_of_range_or_none_is_refused_by_name(
    tmp_path: Path, change: Any
) -> None:
    path, figures = tmp_path / "machine.json", dataclasses.asdict(REFERENCE["cpu"])
    path.write_text(change if isinstance(change, str) else json.dumps(figures | change))
    with pytest.raises(ConfigError, match=f"machine: {path}: found .*, allowed: a file that"):
        Machine.read(str(path))
    with pytest.raises(ConfigError, match="machine: found .*absent.* allowed: auto, reference"):
        Machine.read(str(tmp_path / "absent"))
