"""The tensor-parallel GEMMs that are measured: goals, the sweep of the seed, and the linear layers of real models.

A case is (operation, M, N, K) of the whole problem, "ag" for AllGather-GEMM and "rs" for GEMM-ReduceScatter; each of W ranks runs
M x N/W x K in the first and M x N x K/W in the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["LAYERS", "ROWS", "SWEEPS", "Case", "divisible", "layer_of", "select"]

Case = tuple[str, int, int, int]

ROWS = (1024, 2048, 4096, 8192, 16384)

# Model -> layer -> (N, K) of the whole linear. qkv and up are column-parallel (ag), out and down row-parallel (rs); up holds gate and up.
# The experts of mixtures are not here: they are parallel by expert.
LAYERS = {
    "llama-3-8b": {"qkv": (6144, 4096), "up": (28672, 4096), "out": (4096, 4096), "down": (4096, 14336)},
    "llama-3-70b": {"qkv": (10240, 8192), "up": (57344, 8192), "out": (8192, 8192), "down": (8192, 28672)},
    "mixtral-8x7b": {"qkv": (6144, 4096), "out": (4096, 4096)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "out": (2048, 4096)},
    "gpt-175b": {"qkv": (36864, 12288), "up": (49152, 12288), "out": (12288, 12288), "down": (12288, 49152)},
}


def _operation(layer: str) -> str:
    return "rs" if layer in ("out", "down") else "ag"


def _of_model(model: str) -> list[Case]:
    return [(_operation(layer), m, n, k) for layer, (n, k) in LAYERS[model].items() for m in ROWS]


def _unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))


SWEEPS: dict[str, list[Case]] = {
    "tiny": [("ag", 64, 96, 32), ("rs", 64, 32, 96)],  # for a look at the program, on a CPU too
    "goals": [("ag", 8192, 28672, 8192), ("rs", 8192, 8192, 28672)],  # with 4 ranks: N 7168 and K 7168 a rank
    "seeds": [("ag", m, 12288, 49152) for m in ROWS[:4]] + [("rs", m, 49152, 12288) for m in ROWS[:4]],
    **{model: _of_model(model) for model in LAYERS},
}
SWEEPS["layers"] = _unique(case for model in LAYERS for case in SWEEPS[model])
SWEEPS["all"] = _unique(SWEEPS["goals"] + SWEEPS["seeds"] + SWEEPS["layers"])


def select(sweeps: Sequence[str], rows: Sequence[int] = (), operation: str | None = None) -> list[Case]:
    """The cases of some sweeps, once each; with `rows` only those with such an M, with `operation` only "ag" or "rs".

    Raises:
        ValueError: nothing is left.
    """
    cases = _unique(case for name in sweeps for case in SWEEPS[name])
    kept = [c for c in cases if (not rows or c[1] in rows) and operation in (None, c[0])]
    if not kept:
        raise ValueError(
            f"none of the {len(cases)} cases of {', '.join(sweeps)} has M in {list(rows)} and operation {operation}"
        )
    return kept


def divisible(case: Case, ranks: int) -> Case:
    """A case that is for a look at the program, with sizes that the ranks divide; measured ones are taken as they are."""
    if case not in SWEEPS["tiny"]:
        return case
    operation, *sizes = case
    m, n, k = (math.ceil(size / ranks) * ranks for size in sizes)
    return operation, m, n, k


def layer_of(case: Case) -> str:
    """Which layers of which models have this case, for people; empty where none has."""
    operation, _, n, k = case
    return ", ".join(
        f"{model} {layer}"
        for model, layers in LAYERS.items()
        for layer, shape in layers.items()
        if shape == (n, k) and _operation(layer) == operation
    )
