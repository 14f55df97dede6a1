"""The overlapped MoE against the oracle over random routings, and on eight ranks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.support.launch import run_ranks
from tests.support.moe_cases import ROUTINGS, Case, run_cases

routings = st.builds(
    Case,
    routing=st.sampled_from(list(ROUTINGS)),
    tokens=st.integers(0, 12),
    top_k=st.integers(1, 8),
    experts_per_rank=st.integers(1, 5),
    layers=st.integers(1, 3),
    microbatches=st.integers(1, 2),
    dx_chunks=st.integers(1, 5),
    deferred=st.booleans(),
    activation=st.sampled_from(["swiglu", "geglu", "gelu", "relu2"]),
    weights=st.sampled_from(["stacked", "tuple", "in_out"]),
    train_tokens=st.booleans(),
    seed=st.integers(0, 10_000),
    hidden=st.integers(1, 9),
    ffn=st.integers(1, 9),
)


# Without shrinking: an example starts processes, and the cases it was given say enough.
@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(world=st.integers(1, 3), cases=st.lists(routings, min_size=3, max_size=5))
def test_random_routings(world: int, cases: list[Case]) -> None:
    run_ranks(run_cases, world, cases, timeout_s=200)


@pytest.mark.slow
def test_eight_ranks() -> None:
    cases = [
        Case(deferred=True, layers=2, dx_chunks=2, top_k=3),
        Case(routing="uneven", tokens=20),
        Case(routing="masked"),
    ]
    run_ranks(run_cases, 8, cases, timeout_s=200)
