"""The --fluid-* flags and the switches that are needed before Megatron parses them."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fluid import FluidConfig, current_config, patches, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches import arguments, iteration_graph
from megatron_fluid.patches.engine import switches


def parse(*argv: str) -> argparse.Namespace:
    return arguments.add_fluid_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(
        argv
    )


def test_flags_become_the_configuration() -> None:
    assert arguments.config_from_args(parse()) == FluidConfig()
    flags = "--fluid-moe-backend rounds --fluid-dx-chunks 4 --fluid-defer-weight-grads"
    args = parse(*flags.split(), "--fluid-timeout", "2.5", "--fluid-deterministic")
    assert arguments.config_from_args(args) == FluidConfig("rounds", 4, True, 2.5, True)


def _parsed(**settings: Any) -> Any:
    given = {
        "cuda_graph_impl": "none", "cuda_graph_modules": None, "te_rng_tracker": False,
        "check_for_nan_in_loss_and_grad": True, "pipeline_model_parallel_size": 1,
        "fp16": False, "loss_scale": None,
    }  # fmt: skip
    return SimpleNamespace(**given | settings)


@pytest.mark.parametrize(("settings", "reason"), [
    ({}, None),
    ({"cuda_graph_impl": "full_iteration"}, None),
    ({"fp16": True, "loss_scale": 1024.0}, None),
    ({"pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size is above 1"),
    ({"cpu": True}, "CPU mode has no CUDA graphs"),
    ({"fp16": True}, "--fp16 without --loss-scale: the host changes the scale of the loss"),
    ({"save_wgrads_interval": 5}, "--save-wgrads-interval: a replay runs no hooks that save"),
    ({"qk_clip": True}, "--qk-clip: a replay leaves nothing of it on the host"),
], ids=str)  # fmt: skip
def test_fluid_graph_turns_on_what_a_graph_of_an_iteration_needs_or_says_why_not(
    settings: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(iteration_graph, "cpu_mode_active", lambda: "cpu" in settings)
    monkeypatch.setattr(iteration_graph, "current_config", lambda: FluidConfig(graph=True))
    args = _parsed(**settings)
    iteration_graph.turn_on_graph(args)
    on = (args.cuda_graph_impl, args.te_rng_tracker, args.check_for_nan_in_loss_and_grad)
    assert on == (("none", False, True) if reason else ("full_iteration", True, False))
    assert [record.getMessage() for record in caplog.records] == (
        [f"--fluid-graph has no effect: {reason}"] if reason else []
    )


def test_fluid_graph_refuses_graphs_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration_graph, "current_config", lambda: FluidConfig(graph=True))
    words = "^--cuda-graph-impl: found 'local', allowed: none or full_iteration with --fluid-graph$"
    with pytest.raises(ConfigError, match=words):
        iteration_graph.turn_on_graph(_parsed(cuda_graph_impl="local"))


def test_a_flag_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUID_DX_CHUNKS", "3")
    monkeypatch.setenv("MEGATRON_FLUID_DETERMINISTIC", "on")
    assert arguments.config_from_args(parse("--no-fluid-deterministic")) == FluidConfig(dx_chunks=3)
    assert arguments.config_from_args(parse("--fluid-dx-chunks", "5")).dx_chunks == 5
    from_a_file = SimpleNamespace(num_layers=2, fluid_moe_backend="rounds")  # lacks the others
    assert arguments.config_from_args(from_a_file) == FluidConfig("rounds", 3, deterministic=True)
    set_config(FluidConfig("nvlink", timeout_s=7.0))  # in code, before Megatron parses
    arguments.configure(parse("--fluid-moe-backend", "local"))
    assert current_config() == FluidConfig("local", 3, timeout_s=7.0, deterministic=True)
    arguments.configure(parse())  # parsed again
    assert current_config() == FluidConfig("nvlink", 3, timeout_s=7.0, deterministic=True)
    for on, names in (("off", ""), ("on", "nonsense")):  # by a script, after Megatron was patched
        monkeypatch.setenv("MEGATRON_FLUID", on)
        monkeypatch.setenv("MEGATRON_FLUID_DISABLE_PATCH", names)
        with pytest.raises(SystemExit):
            arguments.parse_args(megatron_like([]))()


def megatron_like(argv: list[str]) -> Callable[..., Any]:
    """A parse_args as Megatron's."""

    def parse_args(provider: Any = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--num-layers", type=int)
        parser = provider(parser)
        return parser.parse_known_args(argv)[0] if ignore_unknown_args else parser.parse_args(argv)

    return parse_args


@pytest.mark.parametrize("name", ["fluid_moe_backnd", "fluid_strict", "fluid_disable_patch"])
def test_nothing_in_a_drivers_arguments_or_a_yaml_file_is_lost(name: str) -> None:
    given = SimpleNamespace(**{name: ["nonsense"]})
    with pytest.raises(ConfigError, match="found .*(moe_backnd'|_STRICT=1 in the env|'nonsense')"):
        arguments.configure(given)
    read = arguments.parse_args(lambda provide, _: provide(argparse.ArgumentParser()) and given)
    with pytest.raises(SystemExit):
        read()
    with pytest.raises(ConfigError, match="disable_patch: found 'engine', allowed: a list of pat"):
        arguments.configure(SimpleNamespace(fluid_disable_patch="engine"))
    with pytest.raises(ConfigError, match="args: found 'NoneType', allowed: a namespace with flui"):
        arguments.configure(None)


@pytest.mark.parametrize("full_first", [True, False])
def test_megatrons_look_ahead_changes_no_setting(
    full_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FLUID_TIMEOUT_S", "5")
    parse = arguments.parse_args(megatron_like(["--fluid-profile-steps", "1:2"]))

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.set_defaults(fluid_dx_chunks=6, fluid_timeout=9.0, save=str(tmp_path))  # of pages
        return parser

    for full in (full_first, not full_first):
        parse(provider if full else None, ignore_unknown_args=not full)
    assert current_config() == FluidConfig(dx_chunks=6, timeout_s=5, profile_steps="1:2")
    set_config(FluidConfig("rounds"))
    parse(None, ignore_unknown_args=True)
    assert current_config() == FluidConfig("rounds")


def test_the_scripts_own_arguments_are_kept() -> None:
    wrapped = arguments.parse_args(megatron_like(["--mine", "1", "--num-layers", "2", "--unknown"]))
    args = wrapped(lambda parser: parser.add_argument("--mine", type=int) and parser, True)
    assert (args.mine, args.num_layers, args.fluid_moe_backend) == (1, 2, "auto")


BAD_FLAGS = {
    "--fluid-moe-bakcend=rounds": "unrecognized arguments: --fluid-moe-bakcend=rounds; "
    "did you mean --fluid-moe-backend?",
    "--fluid-moe-backend foo": "argument --fluid-moe-backend: invalid choice: 'foo'",
    "--fluid-dx-chunks two": "argument --fluid-dx-chunks: invalid int value: 'two'",
    "--fluid-dx-chunks 0": "--fluid-dx-chunks: found 0",
    "--fluid-timeout -1": "--fluid-timeout: found -1.0, allowed: a number of seconds above 0",
    "--fluid-disable-patch nonsense": "patch: found 'nonsense', allowed: arguments",
}
BAD_TO_MEGATRON = {
    "--num-layrs 2": "unrecognized arguments: --num-layrs 2; did you mean --num-layers?"
}


def one_line(error: pytest.ExceptionInfo[SystemExit], capsys: pytest.CaptureFixture[str]) -> str:
    """The only line that was printed before a process ended with status 2."""
    assert error.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("flags", [*BAD_FLAGS, *BAD_TO_MEGATRON])
def test_a_wrong_flag_ends_the_job_with_one_line(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.parse_args(megatron_like(flags.split()))()
    message = (BAD_FLAGS | BAD_TO_MEGATRON)[flags]
    assert f": error: {message}" in one_line(ended, capsys)


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_a_launcher_refuses_wrong_flags_and_leaves_others_to_the_script(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        arguments.check_flags(["--lr", "1", *flags.split(), "-x"], "megatron-fluid run")
    assert one_line(ended, capsys).startswith(f"megatron-fluid run: error: {BAD_FLAGS[flags]}")
    arguments.check_flags("--fluid 1 file --lr -1 --fluid-dx-chunks 2 -- -h".split(), "run")


def test_ranks_meet_a_wrong_flag_and_rank_0_alone_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")

    def ended_by_the_launcher(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(arguments.time, "sleep", ended_by_the_launcher)
    with pytest.raises(KeyboardInterrupt):
        arguments.check_flags(["--fluid-nonsense"], "run")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(arguments.time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as ended:  # rank 0 has gone on: its host's variables are right
        arguments.check_flags(["--fluid-nonsense"], "run")
    said = one_line(ended, capsys)
    assert said == "run: error: unrecognized arguments: --fluid-nonsense (rank 1)"


def test_a_flag_beats_a_variable_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_FLUID_MOE_BACKEND", "foo")
    monkeypatch.setenv("MEGATRON_FLUID_DX_CHUNKS", "two")
    backend, chunks = ("--fluid-moe-backend", "rounds"), ("--fluid-dx-chunks", "2")
    assert arguments.config_from_args(parse(*backend, *chunks)) == FluidConfig("rounds", 2)
    for flag, told in ((chunks, "MOE_BACKEND: found 'foo'"), (backend, "DX_CHUNKS: found 'two'")):
        with pytest.raises(ConfigError, match=f"^MEGATRON_FLUID_{told}, allowed: a"):
            arguments.config_from_args(parse(*flag))
    with pytest.raises(SystemExit):
        parse("--help")
    assert "MEGATRON_FLUID_DX_CHUNKS: found 'two'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "off"), [("off", True), ("OFF", True), ("0", True), ("on", False), ("", False)]
)
def test_megatron_fluid_on_and_off(text: str, off: bool) -> None:
    said = switches.switched_off({"MEGATRON_FLUID": text})
    assert said == ("MEGATRON_FLUID=off" if off else None)
    assert switches.switched_off({}) is None
    with pytest.raises(ConfigError, match="MEGATRON_FLUID: found 'offf', allowed: on or off"):
        switches.switched_off({"MEGATRON_FLUID": "offf"})


def test_switches_are_found_among_other_flags() -> None:
    argv = "--num-layers 2 --fluid-disable-patch a b --lr 1 --fluid-disable-patch c".split()
    assert switches.disabled({}, argv) == ["a", "b", "c"]
    variable = {"MEGATRON_FLUID_DISABLE_PATCH": "x, y"}
    assert switches.disabled(variable, argv[-2:]) == ["x", "y", "c"]
    assert switches.disabled({}, argv[2:3]) == [], "left to the program's own parser"
    assert not switches.asked("allow_unsupported", {}, argv)
    assert switches.asked("allow_unsupported", {}, ["--fluid-allow-unsupported-megatron"])
    assert switches.asked("allow_unsupported", {"MEGATRON_FLUID_ALLOW_UNSUPPORTED": "1"}, [])


def test_the_patch_that_declares_the_flags_is_not_left_out_by_one() -> None:
    argv = ["--fluid-disable-patch", "arguments"]
    with pytest.raises(ConfigError, match="MEGATRON_FLUID_DISABLE_PATCH=arguments leaves it out"):
        switches.disabled({}, argv)
    assert switches.disabled({"MEGATRON_FLUID_DISABLE_PATCH": "arguments"}, []) == ["arguments"]


OF = {"flagged": "--fluid-disable-patch", "listed": "MEGATRON_FLUID_DISABLE_PATCH", "y": "patch"}


@pytest.mark.parametrize(("name", "where"), OF.items())
def test_an_unknown_patch_is_refused_by_the_flag_or_the_variable_that_named_it(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--fluid-disable-patch", "flagged"])
    monkeypatch.setenv("MEGATRON_FLUID_DISABLE_PATCH", "x, listed")
    with pytest.raises(ConfigError, match=f"^{where}: found '{name}', allowed: arguments"):
        patches.disable(name)


@pytest.mark.parametrize(
    ("training", "evaluation", "room"), [(2, 2, 1), (2, 5, 3), (4, 1, 1), (None, None, 1)]
)
def test_room_is_made_for_larger_microbatches_of_evaluation(
    monkeypatch: pytest.MonkeyPatch, training: int | None, evaluation: int | None, room: int
) -> None:
    args = SimpleNamespace(micro_batch_size=training, eval_micro_batch_size=evaluation)
    module = SimpleNamespace(_GLOBAL_ARGS=args if training else None)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    assert arguments.microbatch_room() == room


def test_the_page_of_settings_has_each_flag_with_its_values_default_first() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/configuration.md").read_text()
    rows = re.findall(r"^\| `(--fluid-[a-z0-9-]+)` \(`(\w+)`\) \| ([^|]+) \|", page, re.M)
    own = arguments.add_fluid_arguments(argparse.ArgumentParser())._actions[1:]  # without --help
    flags = {action.option_strings[0]: action for action in own}
    assert {flag for flag, *_ in rows} == flags.keys()
    for flag, variable, values in rows:
        action, told = flags[flag], re.findall(r"\b(off|on)\b|`([^`]+)`", values)
        listed = [switch or value for switch, value in told]
        assert f"Also {variable}=" in str(action.help)
        if action.choices is not None:
            assert listed[0] == action.default and set(listed) == set(action.choices)
        elif isinstance(action.default, bool):
            assert listed == (["on", "off"] if action.default else ["off", "on"])
        elif isinstance(action.default, int | float | str):
            assert listed[0] == str(action.default)
