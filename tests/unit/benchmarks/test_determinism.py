"""The suite that measures fixed orders of sums: its forms agree, and bits that differ are seen."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.suites.determinism import _alike, _check


def test_results_that_differ_are_seen() -> None:
    count = itertools.count()
    assert _alike(lambda: (torch.ones(3), torch.zeros(2)))
    assert not _alike(lambda: (torch.ones(3), torch.full((2,), float(next(count) > 3))))


def test_a_form_that_computes_something_else_is_refused() -> None:
    forms = {"fluid": lambda: (torch.ones(3),), "wrong": lambda: (torch.full((3,), 1.1),)}
    with pytest.raises(AssertionError, match=r"combine wrong is off by 1\.0e-01"):
        _check("combine", forms)
