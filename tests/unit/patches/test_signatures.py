"""Signatures as text against signatures as Python sees them."""

import argparse
import inspect
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from megatron_fluid.errors import PatchError
from megatron_fluid.patches.engine import signatures

FUNCTIONS = [
    function
    for module in (argparse, inspect, subprocess)
    for function in vars(module).values()
    if inspect.isfunction(function)
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_reading_what_was_described_gives_the_same_parameters(function: Callable[..., Any]) -> None:
    found = signatures.of(function)
    assert signatures.parse(signatures.describe(found)) == found


def test_annotations_and_values_of_defaults_do_not_count() -> None:
    def function(self, x: int, /, y: str = "a", *args: int, group=None, **rest: object) -> None: ...  # type: ignore[no-untyped-def]

    assert signatures.of(function) == signatures.parse(
        "(self, x, /, y: bytes = b'', *args, group=0, **rest) -> int"
    )
    assert (
        signatures.describe(signatures.of(function))
        == "(self, x, /, y=..., *args, group=..., **rest)"
    )


@pytest.mark.parametrize(
    "changed",
    [
        "(a, c, *, d=1)",
        "(a, b=1, *, d=1)",
        "(a, b, *, d)",
        "(a, b, d=1)",
        "(b, a, *, d=1)",
        "(a, b, *, d=1, **k)",
    ],
)
def test_names_order_kinds_and_presence_of_defaults_count(changed: str) -> None:
    assert signatures.parse(changed) != signatures.parse("(a, b, *, d=1)")


def test_what_python_does_not_know_is_unknown() -> None:
    assert signatures.of(dict.pop) is None or signatures.describe(None) == "(unknown)"


def test_a_text_that_is_no_signature_is_refused() -> None:
    with pytest.raises(PatchError, match="not a signature"):
        signatures.parse("(self, ")
