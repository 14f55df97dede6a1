"""Switches that must be known before Megatron parses its arguments, because patches are applied
when Megatron's modules are imported.

Each is an environment variable. Six are flags of Megatron's command line too: these are looked up
in `sys.argv` here, and arguments.py declares them to Megatron's own parser.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from megatron_fluid.errors import ConfigError

__all__ = ["SWITCHES", "add_switches", "asked", "disabled", "disabled_by", "switched_off"]

_Environ = Mapping[str, str] | None  # None: this process's own
_Argv = Sequence[str] | None

_OFF = ("off", "0", "false", "no")
_ON = ("on", "1", "true", "yes", "")
_DISABLE = "MEGATRON_FLUID_DISABLE_PATCH"


# Text of --help by name, in its order. The flag of a switch is --fluid-NAME, its variable
# MEGATRON_FLUID_NAME.
SWITCHES = {
    "allow_unsupported": "Try a megatron-core version outside the supported range; signatures are "
    "checked all the same.",
    "strict": "End with an error where megatron-core is of an unsupported version or a patch does "
    "not fit it; without this they are left out with a warning.",
    "cpu": "Train on the CPU where no GPU is found: Megatron's CUDA devices become CPU cores, NCCL "
    "becomes gloo. No effect where there is a GPU.",
    "fused_optimizer": "Clip gradients, step Transformer Engine's Adam and copy into the model in "
    "one launch, under the distributed optimizer.",
    "verbose": "Print Megatron's patches and every layer's reasons at start-up, in place of three "
    "lines.",
}


def _variable(name: str) -> str:
    return f"MEGATRON_FLUID_{name.upper()}"


def add_switches(parser: argparse._ActionsContainer) -> None:
    """Declare the flags among the switches."""
    for name, text in SWITCHES.items():
        flag = f"--fluid-{name.replace('_', '-')}"
        if name == "allow_unsupported":
            flag += "-megatron"
        text = f"{text} Also {_variable(name)}=1."
        parser.add_argument(flag, dest=f"fluid_{name}", action="store_true", help=text)
    parser.add_argument(
        "--fluid-disable-patch",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="Leave these patches out (`megatron-fluid patches` lists them). Also "
        f"{_DISABLE}=NAME,NAME.",
    )


def switched_off(environ: _Environ = None) -> str | None:
    """Why nothing is patched at all, or None.

    Raises:
        ConfigError: MEGATRON_FLUID is neither on nor off.
    """
    return None if _is_on("MEGATRON_FLUID", environ, default=True) else "MEGATRON_FLUID=off"


def asked(name: str, environ: _Environ = None, argv: _Argv = None) -> bool:
    """Whether the user gave a switch: allow_unsupported, strict, cpu, fused_optimizer or verbose.

    Raises:
        ConfigError: its variable is neither on nor off.
    """
    return _is_on(_variable(name), environ) or bool(getattr(_early_flags(argv), f"fluid_{name}"))


def disabled(environ: _Environ = None, argv: _Argv = None) -> list[str]:
    """Names of the patches that the user turned off.

    Raises:
        ConfigError: a flag turns off the patch that declares the flags; Megatron's parser would not
            know that flag.
    """
    listed, flags = _listed(environ), list(_early_flags(argv).fluid_disable_patch)
    if "arguments" in flags and "arguments" not in listed:
        raise ConfigError.of(
            "--fluid-disable-patch",
            "arguments",
            "all others: this patch declares the --fluid-* flags; "
            f"{_DISABLE}=arguments leaves it out",
        )
    return listed + flags


def disabled_by(name: str) -> str:
    """The variable or the flag by which the user turned a patch off; "patch" if neither names
    it."""
    if name in _listed(None):
        return _DISABLE
    return "--fluid-disable-patch" if name in _early_flags(None).fluid_disable_patch else "patch"


def _listed(environ: _Environ) -> list[str]:
    listed = (os.environ if environ is None else environ).get(_DISABLE, "")
    return [name.strip() for name in listed.split(",") if name.strip()]


def _is_on(variable: str, environ: _Environ, default: bool = False) -> bool:
    text = (os.environ if environ is None else environ).get(variable, "").strip().lower()
    if not text:
        return default
    if text not in _OFF + _ON:
        raise ConfigError.of(variable, text, "on or off")
    return text in _ON


def _early_flags(argv: _Argv) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_switches(parser)
    try:
        return parser.parse_known_args(sys.argv[1:] if argv is None else argv)[0]
    except argparse.ArgumentError:  # the program's own parser will say what is wrong
        return parser.parse_args([])
