"""Compare a function's signature with the one a patch was written for: names, kinds and which
parameters have a default. Annotations and values of defaults are ignored, since calls do not depend
on them.

    >>> describe(parse("(self, hidden: 'Tensor', *, group=None)"))
    '(self, hidden, *, group=...)'
"""

import inspect
from collections.abc import Callable
from typing import Any

from megatron_fluid.errors import PatchError

__all__ = ["Parameters", "describe", "fits", "of", "parse"]

Parameters = inspect.Signature  # without annotations, every default the same


class _Default:
    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


def parse(text: str) -> Parameters:
    """Read a signature as one writes it after `def name`.

    Raises:
        PatchError: the text is no signature.
    """
    names: dict[str, Any] = {}
    try:
        exec(f"from __future__ import annotations\ndef function{text}: ...", names)
    except SyntaxError as error:
        raise PatchError(f"not a signature: {text!r} ({error})") from None
    return of(names["function"])  # type: ignore[return-value]


def of(function: Callable[..., Any]) -> Parameters | None:
    """The parameters of a callable; None if Python does not know them (some builtins)."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return inspect.Signature(
        [
            inspect.Parameter(p.name, p.kind, default=p.empty if p.default is p.empty else _DEFAULT)
            for p in found
        ]
    )


def fits(expected: Parameters, found: Parameters | None) -> bool:
    """Whether a replacement written for `expected` can stand for `found`: the same parameters in
    the same order, of which optional ones may be missing, as in an older version.

        >>> fits(parse("(self, x, mask=None, *, name=None)"), parse("(self, x, *, name=None)"))
        True
    """
    if found is None:
        return False
    kept = [
        parameter
        for name, parameter in expected.parameters.items()
        if parameter.default is not _DEFAULT or name in found.parameters
    ]
    return kept == list(found.parameters.values())


def describe(parameters: Parameters | None) -> str:
    """The text of a signature, for messages."""
    return "(unknown)" if parameters is None else str(parameters)
