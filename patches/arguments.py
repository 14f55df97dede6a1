"""The `--fluid-*` flags in Megatron's own parser.

A flag beats its environment variable, which beats what `set_config` was given before, which beats
the default. Parsing puts the result in force (`set_config`).
"""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_fluid import patches
from megatron_fluid.config import (
    CHOICES,
    ENVIRONMENT_PREFIX,
    FluidConfig,
    check_setting,
    current_config,
    environment_settings,
    set_config,
)
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu.mode import hint_at_cpu_mode
from megatron_fluid.patches.engine.switches import (
    SWITCHES,
    add_switches,
    asked,
    disabled,
    switched_off,
)
from megatron_fluid.patches.iteration_graph import turn_on_graph
from megatron_fluid.patches.profile_steps import check_profile

__all__ = [
    "add_fluid_arguments",
    "check_flags",
    "config_from_args",
    "configure",
    "microbatch_room",
    "parse_args",
    "without_flags",
]

_parsed: FluidConfig | None = None  # what the last parsing put in force
_in_code = FluidConfig()  # what set_config was given before
_FIRST_RANK_S = 8.0  # how long a rank waits for rank 0 to show an error that both may have met


def _flag(field: str) -> str:
    """The flag of a field of FluidConfig."""
    return "--fluid-" + field.removesuffix("_s").replace("_", "-")


def _destination(field: str) -> str:
    """Its name among parsed arguments."""
    return _flag(field)[2:].replace("-", "_")


def _help() -> dict[str, str]:
    """What each field of FluidConfig is, from its docstring."""
    attributes = (inspect.getdoc(FluidConfig) or "").partition("Attributes:\n")[2]
    _, *parts = re.split(r"^    (\w+): ", attributes.partition("\n\n")[0], flags=re.MULTILINE)
    texts = (" ".join(text.split()) for text in parts[1::2])
    return {name: text[0].upper() + text[1:] for name, text in zip(parts[::2], texts, strict=True)}


# How argparse reads fields that are no switches and have no named choices.
_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_READS: dict[str, dict[str, Any]] = {
    "dx_chunks": {"type": int, "metavar": "N"},
    "timeout_s": {"type": float, "metavar": "SECONDS"},
    "machine": {"metavar": "FIGURES"},
    "profile_steps": {"metavar": "FIRST:LAST"},
    "profile_dir": {"metavar": "FOLDER"},
}


def add_fluid_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group `megatron_fluid` to a parser."""
    default, texts, variables = _defaults(), _help(), environment_settings()
    group = parser.add_argument_group("megatron_fluid", "Communication hidden behind computation.")
    for name in default:
        reads = {"choices": CHOICES[name]} if name in CHOICES else _READS.get(name, _SWITCH)
        text = texts.get(name, "")
        text += f" Default: %(default)s. Also {ENVIRONMENT_PREFIX}{name.upper()}=VALUE."
        value = default[name]
        if name not in variables:
            value = parser._defaults.get(_destination(name), value)  # of the script
        group.add_argument(_flag(name), default=value, help=text, **reads)
    add_switches(group)
    return parser


def _defaults() -> dict[str, Any]:
    """What holds without flags, by field; for a variable that cannot be had its ConfigError, raised
    where no flag beats it."""
    global _in_code
    with contextlib.suppress(ConfigError):  # of a variable, which is found below
        if (in_force := current_config()) is not _parsed:
            _in_code = in_force
    return dataclasses.asdict(_in_code) | environment_settings()


def config_from_args(args: Any) -> FluidConfig:
    """The configuration that parsed arguments ask for; what they do not hold (a YAML file) comes
    from the environment.

    Raises:
        ConfigError: a value out of range; the message names the flag or the variable, what was
            found and what is allowed.
    """
    for name in SWITCHES:  # a variable that cannot be read would end the job later
        asked(name)
    values: dict[str, Any] = {}
    for name, default in _defaults().items():
        value = values[name] = getattr(args, _destination(name), default)
        if isinstance(value, ConfigError):
            raise value
        check_setting(name, value, _flag(name))
    return FluidConfig(**values)


def configure(args: Any) -> None:
    """Put the settings of parsed arguments in force in this process, as `parse_args` does in the
    one that parses. For workers that are handed a driver's arguments: slime calls it by
    `--custom-megatron-init-path megatron_fluid.configure`.

    Raises:
        ConfigError: as for config_from_args; no namespace, or an attribute fluid_... that is no
            setting; a switch that has to be a variable of this process, since Megatron is patched
            as it is imported.
    """
    _check_names(args)
    _put_in_force(args)
    patches.disable(*getattr(args, "fluid_disable_patch", ()))


def _check_names(args: Any) -> None:
    """Raise the errors of `configure` for arguments that no parser of ours has read."""
    given = [name for name in getattr(args, "__dict__", {}) if name.startswith("fluid_")]
    known = [*map(_destination, _defaults()), *(f"fluid_{name}" for name in SWITCHES)]
    known.append("fluid_disable_patch")
    if isinstance(args, dict) or not (hasattr(args, "__dict__") and set(given) <= set(known)):
        found = sorted(set(given) - set(known)) or type(args).__name__
        raise ConfigError.of("args", found, f"a namespace with {', '.join(known)}")
    if not isinstance(named := getattr(args, "fluid_disable_patch", ()), list | tuple):
        raise ConfigError.of("fluid_disable_patch", named, "a list of patches")
    for name in SWITCHES:
        if name != "verbose" and getattr(args, f"fluid_{name}", False) and not asked(name):
            variable = f"{ENVIRONMENT_PREFIX}{name.upper()}=1 in the environment of this process"
            raise ConfigError(f"fluid_{name}: found on in args, allowed: {variable}")


def _put_in_force(args: Any) -> None:
    global _parsed
    _parsed = config_from_args(args)
    set_config(_parsed)


def microbatch_room() -> int:
    """How many training microbatches hold the tokens of any that a forward may bring: evaluation
    may have larger ones (--eval-micro-batch-size). 1 outside Megatron's own training.
    """
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    training, evaluation = (
        getattr(args, name, None) for name in ("micro_batch_size", "eval_micro_batch_size")
    )
    return max(1, -(-evaluation // training)) if training and evaluation else 1


def _escape_bare_percent_signs(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron 0.19 has a help text with "10%)", on which argparse fails, so that `--help` ends in
    a traceback."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
    return parser


def check_flags(words: Sequence[str], program: str) -> None:
    """Check the --fluid-* flags of a command line before its ranks start or its script is imported.
    All other words are left to the script.

    Args:
        words: the script's flags.
        program: the name that an error begins with.

    Raises:
        SystemExit: an unknown flag or a value out of range; rank 0 has printed one line.
    """
    if switched_off() is not None:
        return
    parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
    _end_in_one_line(parser)
    args, others = add_fluid_arguments(parser).parse_known_args(words)
    if unknown := [word for word in others if word.startswith(("--fluid-", "--no-fluid-"))]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        config_from_args(args)
        patches.check_names(*args.fluid_disable_patch)
    except ConfigError as error:
        parser.error(str(error))


def without_flags(words: Sequence[str]) -> list[str]:
    """Return a command line less this package's flags and their values: what Megatron knows where
    nothing of it is patched. One whose flags cannot be read is left as it is."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    try:
        return add_fluid_arguments(parser).parse_known_args(words)[1]
    except argparse.ArgumentError:
        return list(words)


def _end_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Let an error of the parser be one line of rank 0. Megatron's usage text has 700, on each
    rank. Other ranks wait, because a launcher ends them when rank 0 leaves, and then speak
    themselves: a variable may be wrong on their host alone."""

    def error(message: str) -> NoReturn:
        if message.startswith("unrecognized arguments"):
            message += _nearest(message, list(parser._option_string_actions))
        if (rank := os.environ.get("RANK", "0")) != "0":
            time.sleep(_FIRST_RANK_S)
            message += f" (rank {rank})"
        print(f"{parser.prog}: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(2)

    parser.error = error  # type: ignore[method-assign]


def _nearest(message: str, known: Sequence[str]) -> str:
    """The flag that the first one in a message resembles, in words."""
    flag = re.search(r"--[\w-]+", message)
    near = difflib.get_close_matches(flag[0], known, 1, 0.85) if flag else []
    return f"; did you mean {near[0]}?" if near else ""


def parse_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `megatron.training.arguments.parse_args`: the --fluid-* flags join the caller's
    own, and their values are put in force. An error ends the job with one line and status 2.

    Megatron parses again, unknown words ignored, where it wants a flag before its arguments are
    known: without the script's own flags and defaults, and after it may have called `set_config`.
    What was parsed in full stays in force."""
    in_full = False

    @functools.wraps(original)
    def fluid_parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        nonlocal in_full
        parsers: list[argparse.ArgumentParser] = []

        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            _end_in_one_line(parser)
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            parsers.append(parser)
            return add_fluid_arguments(_escape_bare_percent_signs(parser))

        args = original(provider, ignore_unknown_args)
        if ignore_unknown_args and in_full:
            return args
        hint_at_cpu_mode()
        try:
            if (off := switched_off()) is not None:
                when = "before megatron_fluid is imported, as in the job's environment"
                raise ConfigError(f"{off}: found after Megatron was patched, allowed: {when}")
            if not isinstance(args, argparse.Namespace):  # of --yaml-cfg
                _check_names(args)
            _put_in_force(args)
            if not ignore_unknown_args:
                check_profile(args)
            turn_on_graph(args)
            patches.disable(*getattr(args, "fluid_disable_patch", ()), *disabled())
        except ConfigError as error:
            parsers[0].error(str(error))
        in_full = in_full or not ignore_unknown_args
        return args

    return fluid_parse_args
