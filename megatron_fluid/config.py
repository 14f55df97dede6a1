"""The settings of megatron_fluid: one frozen, validated object.

They come from the environment (`MEGATRON_FLUID_MOE_BACKEND=rounds`), from Megatron's command line
(`--fluid-moe-backend rounds`, see patches/arguments.py), or from `set_config(FluidConfig(...))`;
whoever speaks last wins.
"""

import dataclasses
import difflib
import functools
import inspect
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from megatron_fluid.errors import ConfigError

__all__ = [
    "CHOICES",
    "ENVIRONMENT_PREFIX",
    "FieldsConfig",
    "FluidConfig",
    "check_setting",
    "current_config",
    "environment_settings",
    "moe_recompute",
    "names_exchange",
    "profile_range",
    "set_config",
    "shows_fields_of",
]

ENVIRONMENT_PREFIX = "MEGATRON_FLUID_"
# Read elsewhere: patches/engine/switches.py, topology.py, tools, tests.
_OTHER_VARIABLES = (
    "ALLOW_UNSUPPORTED",
    "AUTOLOAD",
    "CPU",
    "DISABLE_PATCH",
    "FUSED_OPTIMIZER",
    "MEGATRON_MAIN",
    "NVLINK_DOMAIN",
    "PATCHES",
    "STRICT",
    "TEST_DRAWS",
    "TEST_ITERATIONS",
    "TEST_RANKS",
    "TEST_RESULTS",
    "VERBOSE",
)

CHOICES = {
    "moe_backend": ("auto", "nvlink", "hierarchical", "rounds", "local", "experts", "megatron"),
    "moe_recompute": ("none", "rows", "hidden", "both"),
    "moe_fp8": ("megatron", "ours"),
    "moe_fp8_weight_grads": ("fp8", "bf16"),
    "tp_overlap": ("auto", "on", "off"),
    "cp_backend": ("auto", "nvlink", "rounds", "collective", "megatron"),
}
_MACHINES = ("auto", "reference", "h100", "h200", "cpu")  # else a file: plan/machine.py
_YEAR_S = 31_536_000

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class FieldsConfig:
    """For configuration dataclasses: made from a config, a dictionary or the fields themselves."""

    @classmethod
    def of(cls, *shape: Any, **fields: Any) -> Self:
        """Return the one config in ``shape`` as it is, or make one.

        Args:
            shape: a config, a dictionary of fields, or the first fields in their order.
            fields: more fields by name. They take precedence over a dictionary's; with a config
                there are none.

        Raises:
            ConfigError: unknown, missing or repeated fields, or a field's value.
        """
        if len(shape) == 1 and isinstance(shape[0], cls) and not fields:
            return shape[0]
        known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if len(shape) == 1 and isinstance(shape[0], Mapping):
            values = {**shape[0], **fields}
        else:
            named = dict(zip(known, shape, strict=False))
            if len(shape) > len(known) or named.keys() & fields.keys():
                raise ConfigError.of("config", (*shape, *fields), f"once each of {list(known)}")
            values = {**named, **fields}
        if unknown := sorted(values.keys() - known.keys()):
            allowed = ", ".join(known) + _closest(unknown, known)
            raise ConfigError.of("config", ", ".join(unknown), allowed)
        required = [n for n, field in known.items() if field.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            names = ", ".join(values) or "nothing"
            raise ConfigError(f"config: {', '.join(missing)} not found, needed besides {names}")
        return cls(**values)

    def check_fields(self) -> None:
        """Refuse a field declared as a number, a bool, a text, or None besides, that is something
        else.

        Raises:
            ConfigError: such a field, or a number that is not finite.
        """
        kinds = {"int": int, "float": int | float, "bool": bool, "str": str, "None": type(None)}
        words = dict.fromkeys(kinds, "None") | {"int": "an integer", "float": "a finite number"}
        words |= {"bool": "True or False", "str": "a text"}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            declared = field.type.__name__ if isinstance(field.type, type) else str(field.type)
            value, names = getattr(self, field.name), declared.split(" | ")
            if not kinds.keys() >= set(names):
                continue
            fits = any(isinstance(value, kinds[name]) for name in names)
            if isinstance(value, bool):
                fits = "bool" in names
            if not fits or (isinstance(value, float) and not abs(value) < float("inf")):
                allowed = ", or ".join(words[name] for name in names)
                raise ConfigError.of(field.name, value, allowed)


def _closest(unknown: Iterable[str], known: Iterable[str]) -> str:
    """The names that may have been meant, to follow a list of all; "" if none is near."""
    near = [name for word in unknown for name in difflib.get_close_matches(word, known, 1)]
    return f"; did you mean {', '.join(near)}?" if near else ""


def shows_fields_of[F: Callable[..., Any]](
    config: Callable[..., Any], leave_out: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """Let help() and editors show the fields of ``config`` in the place of a function's ``*shape``
    and ``**fields``. Calls are not touched.

    Args:
        config: a configuration dataclass, or any callable whose parameters are passed on.
        leave_out: parameters of ``config`` that the function gives itself.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        shown = [p for n, p in inspect.signature(config).parameters.items() if n not in leave_out]
        own = [p for p in signature.parameters.values() if p.kind not in variable]
        by_kind = sorted([*own, *shown], key=lambda parameter: parameter.kind)
        function.__signature__ = signature.replace(parameters=by_kind)  # type: ignore[attr-defined]
        return function

    return decorate


@dataclass(frozen=True)
class FluidConfig:
    """Settings of the overlapped layers. Every field is validated when the object is made. Under
    Megatron each is a flag, whose help is the text below (patches/arguments.py).

    Attributes:
        moe_backend: who moves the tokens of MoE layers: nvlink (symmetric memory inside one NVLink
            domain), hierarchical (experts over several hosts: a token crosses once for each host),
            rounds (round-robin P2P over NCCL or gloo), local (one expert-parallel rank: no
            exchange), experts (Megatron, with megatron_fluid's experts behind its dispatcher),
            megatron (Megatron's own path), auto (the fastest that fits).
        dx_chunks: with rounds: pieces in which dX is computed and sent back in backward, at
            least 1.
        defer_weight_grads: queue weight gradients across layers and overlap them with later
            exchanges.
        timeout_s: bound in seconds on every wait for a peer. None: the timeout of the process group
            that waits, so that no rank gives up before the group's own collectives would.
        deterministic: linears that tp_overlap overlaps never let NCCL sum, at some cost. Every
            other sum of megatron_fluid has a fixed order anyway.
        tp_overlap: hide the collectives of Megatron's own linear layers under tensor and sequence
            parallelism behind their GEMMs: auto (where that is faster), on (everywhere), off.
        cp_backend: who exchanges heads and sequence in attention under --cp-comm-type a2a: nvlink
            (symmetric memory inside one NVLink domain), rounds (round-robin P2P over NCCL or gloo;
            both overlapped with the projections), collective (one all-to-all each way between
            them), megatron (Megatron's own path), auto (nvlink where it is available; else on GPUs
            megatron with Transformer Engine and collective without, and on CPUs rounds).
        moe_recompute: what the backward of MoE layers computes again in place of keeping it: rows
            (the dispatched tokens, by another dispatch), hidden (the output of fc1, by another
            GEMM), both, none.
        profile_steps: trace these steps on rank 0, counted from 1 as in Megatron's log, both
            included, and write a page and a picture of them.
        profile_dir: folder for that page. None: profile in the folder of --save, else of
            --tensorboard-dir.
        end_on_timeout: end the process with status 75 where its main thread waits for longer than
            the timeout, also in Megatron's own collectives, and a rank is missing or all ranks
            wait. Otherwise the missing rank is only named.
        moe_fp8: who computes experts under --fp8-format e4m3 --fp8-recipe blockwise: ours
            (megatron_fluid), megatron (Transformer Engine, behind megatron_fluid's exchange).
        machine: figures of the machine by which auto chooses overlaps of MoE layers: auto
            (reference figures of this GPU), reference, h100, h200, cpu, or a file that
            `megatron-fluid plan --write` has written.
        moe_fp8_weight_grads: the precision of weight gradients of megatron_fluid's fp8 experts: fp8
            (a scale for 128 rows of each feature), bf16.
        graph: one CUDA graph for forward and backward of all microbatches, under any routing: turns
            on --cuda-graph-impl full_iteration and what that needs. An iteration that sends a rank
            more expert rows than the graph has room for runs again without it.
        batch_invariant: the forward of an MoE layer gives a token the same bits whatever other
            tokens are in the batch, whatever the number of expert-parallel ranks and the transport;
            hierarchical cannot. Megatron's --batch-invariant-mode turns it on for MoE layers, too.

    Raises:
        ConfigError: a value out of range; the message names the setting, what was found and what is
            allowed.
    """

    moe_backend: str = "auto"
    dx_chunks: int = 1
    defer_weight_grads: bool = False
    timeout_s: float | None = None
    deterministic: bool = False
    tp_overlap: str = "auto"
    cp_backend: str = "auto"
    moe_recompute: str = "none"
    profile_steps: str | None = None
    profile_dir: str | None = None
    end_on_timeout: bool = False
    moe_fp8: str = "ours"
    machine: str = "auto"
    moe_fp8_weight_grads: str = "fp8"
    graph: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        for name in _fields():
            check_setting(name, getattr(self, name))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> "FluidConfig":
        """The settings that `MEGATRON_FLUID_<FIELD>` variables give; fields without a variable keep
        their default.

        Args:
            environ: where to look, `os.environ` by default.

        Raises:
            ConfigError: a variable that cannot be read as its field's type, or is out of range; the
                message names the variable.
        """
        settings = environment_settings(environ)
        for value in settings.values():
            if isinstance(value, ConfigError):
                raise value
        return cls(**settings)

    def shared(self) -> dict[str, Any]:
        """Return what must be the same on all ranks: the package's version and the settings.
        Timeouts and folders may differ, and so may the file of `machine`: that of a group's first
        rank counts."""
        settings = {name: getattr(self, name) for name in _fields()}
        del settings["timeout_s"], settings["profile_dir"]
        if self.machine not in _MACHINES:
            settings["machine"] = "a file"
        return settings | {"version": sys.modules["megatron_fluid"].__version__}


def moe_recompute(config: FluidConfig) -> tuple[str, ...]:
    """config.moe_recompute as moe/autograd.py takes it: some of "rows" and "hidden"."""
    parts = config.moe_recompute
    return ("rows", "hidden") if parts == "both" else () if parts == "none" else (parts,)


def names_exchange(config: FluidConfig) -> bool:
    """Whether config.moe_backend asks for an exchange of ours by name."""
    return config.moe_backend not in ("auto", "experts", "megatron")


def profile_range(steps: str) -> tuple[int, int]:
    """The first and the last step of "FIRST:LAST", a value that `check_setting` lets pass."""
    first, last = steps.split(":")
    return int(first), int(last)


@functools.cache
def _fields() -> dict[str, Any]:
    """The type of every setting."""
    return {field.name: field.type for field in dataclasses.fields(FluidConfig)}


def check_setting(name: str, value: object, where: str | None = None) -> None:
    """Refuse a value that a setting cannot have.

    Args:
        name: a field of FluidConfig.
        value: what it is to be.
        where: who said so (a flag, an environment variable), for the message; the field's name by
            default.

    Raises:
        ConfigError: the value is out of range.
    """
    if name in CHOICES:
        fits, allowed = value in CHOICES[name], ", ".join(CHOICES[name])
    elif name == "dx_chunks":
        # Each piece is a message, an empty one as well.
        fits = isinstance(value, int) and 1 <= value <= 1024 and value is not True
        allowed = "an integer from 1 to 1024"
    elif name == "timeout_s":
        # Above a year, clocks of torch and of kernels overflow.
        fits = value is None or (
            isinstance(value, int | float) and value is not True and 0 < value <= _YEAR_S
        )
        allowed = f"a number of seconds above 0, at most {_YEAR_S} (a year)"
    elif name == "profile_steps":
        text = isinstance(value, str) and re.fullmatch(r"[1-9]\d*:[1-9]\d*", value)
        fits = value is None or (bool(text) and operator.le(*profile_range(str(value))))
        allowed = "FIRST:LAST, two steps counted from 1, such as 10:12"
    elif name == "machine":
        # A path that is not there may be on the rank that reads it.
        fits = isinstance(value, str) and (value in _MACHINES or "/" in value or "." in value)
        fits = fits or (isinstance(value, str) and os.path.isfile(value))
        allowed = f"{', '.join(_MACHINES)} or a file"
    elif name == "profile_dir":
        fits, allowed = value is None or (isinstance(value, str) and bool(value)), "a folder"
    else:
        fits, allowed = isinstance(value, bool), "True or False"
    if not fits:
        raise ConfigError.of(where or name, value, allowed)


def environment_settings(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The settings that variables give, by field; in the place of one that cannot be had the
    ConfigError that says so, by the variable's name, since a flag may yet beat it.
    """
    environ = os.environ if environ is None else environ
    _warn_of_unknown(tuple(sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX))))
    values: dict[str, Any] = {}
    for name, kind in _fields().items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environ:
            try:
                values[name] = _read(variable, environ[variable], kind)
                check_setting(name, values[name], variable)
            except ConfigError as error:
                values[name] = error
    return values


@functools.cache
def _warn_of_unknown(variables: tuple[str, ...]) -> None:
    """Tell once of variables that nothing reads: a misspelt setting would hold its default without
    a word."""
    known = [
        ENVIRONMENT_PREFIX + name
        for name in (*(field.upper() for field in _fields()), *_OTHER_VARIABLES)
    ]
    if unknown := [name for name in variables if name not in known]:
        text = f"nothing reads {', '.join(unknown)}; the variables are {', '.join(known)}"
        text += _closest(unknown, known)
        warnings.warn(f"megatron_fluid: {text}", stacklevel=3)


def _read(variable: str, text: str, kind: object) -> object:
    if kind is bool:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ConfigError.of(variable, text, ", ".join(_TRUE + _FALSE))
    if kind is int or kind == float | None:
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            allowed = "an integer" if kind is int else "a number"
            raise ConfigError.of(variable, text, allowed) from None
    return text


_current: FluidConfig | None = None


def current_config() -> FluidConfig:
    """The configuration in force: what `set_config` was last given, else what the environment
    says."""
    global _current
    if _current is None:
        _current = FluidConfig.from_environment()
    return _current


def set_config(config: FluidConfig | None) -> None:
    """Put `config` in force for layers that are built from now on; None returns to the
    environment's settings."""
    global _current
    if config is not None and not isinstance(config, FluidConfig):
        raise ConfigError.of("config", config, "a FluidConfig or None")
    _current = config
