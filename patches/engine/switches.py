"""The switches that must be known before Megatron parses its arguments: patches apply when its
modules are imported.

Each is an environment variable. Four of them are flags of Megatron's command line as well: those
are looked up in `sys.argv` here, and declared to Megatron's own parser in arguments.py.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from megatron_fluid.errors import ConfigError

__all__ = [
    "add_switches",
    "allow_unsupported",
    "cpu_mode_asked",
    "disabled",
    "disabled_by",
    "fused_optimizer_asked",
    "switched_off",
]

_OFF = ("off", "0", "false", "no")
_ON = ("on", "1", "true", "yes", "")


def add_switches(parser: argparse._ActionsContainer) -> None:
    """Declare the flags among the switches."""
    parser.add_argument(
        "--fluid-allow-unsupported-megatron",
        action="store_true",
        help="Try a megatron-core version outside the supported range; signatures are checked all "
        "the same. Also MEGATRON_FLUID_ALLOW_UNSUPPORTED=1.",
    )
    parser.add_argument(
        "--fluid-disable-patch",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="Leave these patches out (`megatron-fluid patches` lists them). Also "
        "MEGATRON_FLUID_DISABLE_PATCH=NAME,NAME.",
    )
    parser.add_argument(
        "--fluid-cpu",
        action="store_true",
        help="Train on the CPU where no GPU is found: Megatron's CUDA devices become CPU cores, "
        "NCCL becomes gloo. No effect where there is a GPU. Also MEGATRON_FLUID_CPU=1.",
    )
    parser.add_argument(
        "--fluid-fused-optimizer",
        action="store_true",
        help="Clip gradients, step Transformer Engine's Adam and copy into the model in one "
        "launch, under the distributed optimizer. Also MEGATRON_FLUID_FUSED_OPTIMIZER=1.",
    )


def switched_off(environ: Mapping[str, str] | None = None) -> str | None:
    """Why nothing is patched at all, or None.

    Raises:
        ConfigError: MEGATRON_FLUID is neither on nor off.
    """
    return "MEGATRON_FLUID=off" if not _flag("MEGATRON_FLUID", environ, default=True) else None


def allow_unsupported(
    environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> bool:
    """Whether the user overrides the supported range of megatron-core versions."""
    return (
        _flag("MEGATRON_FLUID_ALLOW_UNSUPPORTED", environ, default=False)
        or _early_flags(argv).fluid_allow_unsupported_megatron
    )


def cpu_mode_asked(
    environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> bool:
    """Whether the user wants Megatron on the CPU where no GPU is found.

    Raises:
        ConfigError: MEGATRON_FLUID_CPU is neither on nor off.
    """
    return _flag("MEGATRON_FLUID_CPU", environ, default=False) or _early_flags(argv).fluid_cpu


def fused_optimizer_asked(
    environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> bool:
    """Whether the user wants clipping, Adam and the copy into the model in one launch.

    Raises:
        ConfigError: MEGATRON_FLUID_FUSED_OPTIMIZER is neither on nor off.
    """
    return (
        _flag("MEGATRON_FLUID_FUSED_OPTIMIZER", environ, default=False)
        or _early_flags(argv).fluid_fused_optimizer
    )


def disabled(
    environ: Mapping[str, str] | None = None, argv: Sequence[str] | None = None
) -> list[str]:
    """Names of the patches that the user turned off.

    Raises:
        ConfigError: the patch that declares the flags, by a flag: nothing would know that flag.
    """
    listed, flags = _listed(environ), list(_early_flags(argv).fluid_disable_patch)
    if "arguments" in flags and "arguments" not in listed:
        raise ConfigError.of(
            "--fluid-disable-patch",
            "arguments",
            "all others: this patch declares the --fluid-* flags; "
            "MEGATRON_FLUID_DISABLE_PATCH=arguments leaves it out",
        )
    return listed + flags


def disabled_by(name: str) -> str:
    """The variable or the flag by which the user named a patch to be left out; "patch" where it was
    neither."""
    if name in _listed(None):
        return "MEGATRON_FLUID_DISABLE_PATCH"
    return "--fluid-disable-patch" if name in _early_flags(None).fluid_disable_patch else "patch"


def _listed(environ: Mapping[str, str] | None) -> list[str]:
    listed = (os.environ if environ is None else environ).get("MEGATRON_FLUID_DISABLE_PATCH", "")
    return [name.strip() for name in listed.split(",") if name.strip()]


def _flag(variable: str, environ: Mapping[str, str] | None, default: bool) -> bool:
    text = (os.environ if environ is None else environ).get(variable, "").strip().lower()
    if not text:
        return default
    if text not in _OFF + _ON:
        raise ConfigError.of(variable, text, "on or off")
    return text in _ON


def _early_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_switches(parser)
    try:
        return parser.parse_known_args(sys.argv[1:] if argv is None else argv)[0]
    except argparse.ArgumentError:  # the program's own parser will say what is wrong
        return parser.parse_args([])
