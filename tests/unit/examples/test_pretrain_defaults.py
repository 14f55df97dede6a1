"""examples/pretrain_defaults.py: command lines are obeyed, and get values where they are silent."""

import argparse
from dataclasses import replace
from typing import Any

import pretrain_defaults as pd
import pytest

CPU = pd.Machine(2, False, transformer_engine=False, wgrad_kernel=False, softmax_kernel=False)
GPU = replace(CPU, cuda=True, ranks=4)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    for name, value in pd.default_settings({}, GPU).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            made.add_argument(flag, action="store_true", dest=name)
        else:
            made.add_argument(flag, type=type(value), dest=name)
    made.add_argument("--no-defaults", nargs="*")
    made.add_argument("--text-path", nargs="+", action="extend")
    return made


def test_what_was_given_is_told_from_what_was_not() -> None:
    words = "--num-layers=7 --swiglu --unknown x --text-path a b".split()
    given = {"num_layers": 7, "swiglu": True, "text_path": ["a", "b"]}
    assert pd.given_arguments(parser(), words) == given
    assert pd.given_arguments(parser(), ["--help"]) == {}


def test_given_flags_win_and_the_rest_is_reported() -> None:
    made = parser()
    shown = pd.set_parser_defaults(made, CPU, ["--num-layers", "7"])
    args = made.parse_args(["--num-layers", "7"])
    assert args.num_layers == 7 and "--num-layers" not in shown
    assert args.hidden_size == shown["--hidden-size"] == 128
    assert args.swiglu and shown["--swiglu"] is None


def test_defaults_can_be_dropped_one_by_one_and_all_at_once() -> None:
    made = parser()
    argv = ["--no-defaults", "swiglu", "num-experts"]
    assert not {"--swiglu", "--num-experts"} & set(pd.set_parser_defaults(made, CPU, argv))
    assert made.parse_args(argv).swiglu is False
    assert pd.set_parser_defaults(parser(), CPU, ["--no-defaults"]) == {}
    with pytest.raises(ValueError, match=r"--no-defaults: found swigloo; allowed are .*swiglu"):
        pd.set_parser_defaults(parser(), CPU, ["--no-defaults", "swigloo"])


SPREADS: list[tuple[int, dict[str, Any], int]] = [
    (1, {}, 1), (2, {}, 2), (3, {}, 1), (4, {}, 4), (8, {}, 8), (16, {}, 8),
    (4, {"tensor_model_parallel_size": 2}, 2), (8, {"pipeline_model_parallel_size": 2}, 4),
    (4, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 4),
    (6, {"num_experts": 12}, 6),
]  # fmt: skip


def test_experts_spread_over_ranks_that_divide_them() -> None:
    for ranks, given, experts_over in SPREADS:
        chosen = pd.default_settings(given, replace(CPU, ranks=ranks))
        assert chosen["expert_model_parallel_size"] == experts_over, (ranks, given)


def test_the_global_batch_does_not_depend_on_the_ranks() -> None:
    for ranks, stages in ((1, 1), (2, 1), (4, 1), (16, 1), (2, 2), (4, 2), (16, 2), (8, 4)):
        given, machine = {"pipeline_model_parallel_size": stages}, replace(CPU, ranks=ranks)
        chosen = pd.default_settings(given, machine)
        at_once = chosen["micro_batch_size"] * ranks // stages
        assert chosen["global_batch_size"] == 16 and 16 % at_once == 0
        assert 16 // at_once % stages == 0, "interleaved pipelines need it"


def test_a_batch_that_was_described_is_not_described_again() -> None:
    for name in ("micro_batch_size", "rampup_batch_size", "step_batch_size_schedule"):
        assert "global_batch_size" not in pd.default_settings({name: 3}, CPU)


def test_data_flags_choose_the_tokenizer() -> None:
    assert pd.default_settings({}, CPU)["tokenizer_type"] == "NullTokenizer"
    assert pd.default_settings({"mock_data": True}, CPU)["vocab_size"] == 257
    own = pd.default_settings({"data_path": ["x"]}, CPU)
    assert not {"tokenizer_type", "vocab_size", "split"} & set(own)
    spoken = {"tokenizer_type": "SentencePieceTokenizer"}
    assert "vocab_size" not in pd.default_settings({**spoken, "data_path": ["x"]}, CPU)
    for given in (spoken, {"tokenizer_model": "a_folder"}):
        with pytest.raises(ValueError, match=r"found (Sent|a_f).*whose tokens are bytes"):
            pd.default_settings(given, CPU)


def test_machines_differ_only_where_they_must() -> None:
    gpu = pd.default_settings({}, GPU)
    assert gpu["use_gloo_process_groups"] is False and gpu["transformer_impl"] == "local"
    assert gpu["bf16"] is True and "bf16" not in pd.default_settings({}, CPU)
    assert "bf16" not in pd.default_settings({"fp16": True}, GPU)
    # Megatron's own default is to fuse, which torch's FSDP does not go with.
    fused, name = replace(GPU, wgrad_kernel=True), "gradient_accumulation_fusion"
    assert gpu[name] is False and name not in pd.default_settings({}, fused)
    assert pd.default_settings({"use_torch_fsdp2": True}, fused)[name] is False
    with_te = pd.default_settings({}, replace(GPU, transformer_engine=True))
    assert not {"transformer_impl", "no_persist_layer_norm"} & set(with_te)
    assert with_te["moe_grouped_gemm"] is True


def test_a_model_from_a_checkpoint_is_left_to_it() -> None:
    chosen = pd.default_settings({"use_checkpoint_args": True, "load": "there"}, CPU)
    left = "num_layers hidden_size num_experts swiglu expert_model_parallel_size".split()
    assert not set(left) & set(chosen)
    assert chosen["save"] == "there"


def test_microbatches_divide_a_given_global_batch() -> None:
    for batch, stages, ranks in ((5, 2, 2), (9, 1, 3), (12, 2, 4), (16, 4, 4), (7, 1, 1)):
        given = {"global_batch_size": batch, "pipeline_model_parallel_size": stages}
        size = pd.default_settings(given, replace(CPU, ranks=ranks))["micro_batch_size"]
        at_once = size * ranks // stages
        assert batch % at_once == 0 and batch // at_once >= stages


def test_a_dense_model_has_no_width_of_experts() -> None:
    for given in ({"num_experts": 0}, {"num_experts": 0, "ffn_hidden_size": 64}):
        assert "moe_ffn_hidden_size" not in pd.default_settings(given, CPU)
