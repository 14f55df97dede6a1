"""Compare a function's signature with the one a patch was written for: names, kinds and which
parameters have a default.

Annotations and the values of defaults are left out: they change without changing who can call what.

    >>> describe(parse("(self, hidden: 'Tensor', *, group=None)"))
    '(self, hidden, *, group=...)'
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any

from megatron_fluid.errors import PatchError

__all__ = ["Parameters", "describe", "of", "of_arguments", "parse"]

# One entry a parameter: (name, kind, has a default).
Parameters = tuple[tuple[str, inspect._ParameterKind, bool], ...]

_ONLY, _ANY = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_STAR, _KEY, _STARS = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter.VAR_KEYWORD,
)


def parse(text: str) -> Parameters:
    """Read a signature as one writes it after `def name`.

    Raises:
        PatchError: the text is no signature.
    """
    try:
        return of_arguments(ast.parse(f"def _{text}: ...").body[0].args)  # type: ignore[attr-defined]
    except SyntaxError as error:
        raise PatchError(f"not a signature: {text!r} ({error})") from None


def of_arguments(arguments: ast.arguments) -> Parameters:
    """The parameters of a function definition in a syntax tree."""
    positional = [(a.arg, _ONLY) for a in arguments.posonlyargs] + [
        (a.arg, _ANY) for a in arguments.args
    ]
    first_default = len(positional) - len(arguments.defaults)
    found: list[tuple[str, inspect._ParameterKind, bool]] = [
        (name, kind, i >= first_default) for i, (name, kind) in enumerate(positional)
    ]
    if arguments.vararg:
        found.append((arguments.vararg.arg, _STAR, False))
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(a.arg, _KEY, default is not None) for a, default in defaults]
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, _STARS, False))
    return tuple(found)


def of(function: Callable[..., Any]) -> Parameters | None:
    """The parameters of a callable; None where Python does not know them (some builtins)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return tuple((p.name, p.kind, p.default is not p.empty) for p in parameters)


def describe(parameters: Parameters | None) -> str:
    """The text of a signature, for messages."""
    if parameters is None:
        return "(unknown)"
    words: list[str] = []
    kinds = [kind for _, kind, _ in parameters]
    for i, (name, kind, default) in enumerate(parameters):
        if kind is _KEY and _KEY not in kinds[:i] and _STAR not in kinds:
            words.append("*")
        words.append(
            ("*" if kind is _STAR else "**" if kind is _STARS else "")
            + name
            + ("=..." if default else "")
        )
        if kind is _ONLY and _ONLY not in kinds[i + 1 :]:
            words.append("/")
    return f"({', '.join(words)})"
