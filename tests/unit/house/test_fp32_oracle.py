"""How the tests on GPUs compare a layer with Megatron's: what is one error, and what is worse."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.fp32_oracle import Errors, errors_of, worse_of


@pytest.mark.parametrize(
    "name", ["experts.linear_fc1.weight{}", "experts.local_experts.{}.linear_fc1.weight"]
)
def test_the_parameters_of_all_experts_are_one_error(name: str) -> None:
    right = {name.format(e): torch.full((2, 3), float(e)) for e in range(3)}
    theirs = {key: value + 1.0 for key, value in right.items()}
    ours = dict(right)
    ours[name.format(0)] = right[name.format(0)] + 1.0  # an expert without rows, say
    size = math.sqrt(6 * (0 + 1 + 4))
    found = errors_of(right, theirs, ours)["experts.linear_fc1.weight"]
    assert found == (pytest.approx(math.sqrt(18) / size), pytest.approx(math.sqrt(6) / size), 18)


def test_other_tensors_stay_apart() -> None:
    names = ["output", "router.weight", "router.bias", "shared_experts.linear_fc1.weight"]
    names += ["experts.linear_fc1.weight0", "experts.linear_fc1.bias0", "experts.linear_fc2.bias1"]
    values = {name: torch.ones(4) for name in names}
    found = errors_of(values, values, values)
    assert list(found) == [name.rstrip("01") for name in names]
    assert {error.elements for error in found.values()} == {4}


@pytest.mark.parametrize(
    ("elements", "ours", "most", "is_worse"),
    [
        (10_000, 0.0109, 0.02, False),
        (10_000, 0.0112, 0.02, True),
        (16, 0.0149, 0.02, False),
        (16, 0.0151, 0.02, True),
        (16, 0.0149, 0.014, True),
    ],
)
def test_few_elements_may_be_further_off(
    elements: int, ours: float, most: float, is_worse: bool
) -> None:
    errors = {"dw": Errors(0.01, ours, elements)}
    assert worse_of(errors, False, most) == (errors if is_worse else {})
