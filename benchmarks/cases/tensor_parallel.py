"""The tensor-parallel GEMMs that are measured: goals, the sweep of the seed, and the linear layers
of real models.

A case is (operation, M, N, K) of the whole problem, "ag" for AllGather-GEMM and "rs" for
GEMM-ReduceScatter; each of W ranks runs M x N/W x K in the first and M x N x K/W in the second.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence

__all__ = [
    "LAYERS",
    "ROWS",
    "SWEEPS",
    "Case",
    "divided",
    "divisible",
    "layer_of",
    "select",
    "undivided",
]

Case = tuple[str, int, int, int]

ROWS = (1024, 2048, 4096, 8192, 16384)

# Model -> layer -> (N, K) of the whole linear. qkv and up are column-parallel (ag), out and down
# row-parallel (rs); up holds gate and up. The experts of mixtures are not here: they are parallel
# by expert.
LAYERS = {
    "llama-3-8b": {
        "qkv": (6144, 4096),
        "up": (28672, 4096),
        "out": (4096, 4096),
        "down": (4096, 14336),
    },
    "llama-3-70b": {
        "qkv": (10240, 8192),
        "up": (57344, 8192),
        "out": (8192, 8192),
        "down": (8192, 28672),
    },
    "mixtral-8x7b": {"qkv": (6144, 4096), "out": (4096, 4096)},
    "qwen3-30b-a3b": {"qkv": (5120, 2048), "out": (2048, 4096)},
    "gpt-175b": {
        "qkv": (36864, 12288),
        "up": (49152, 12288),
        "out": (12288, 12288),
        "down": (12288, 49152),
    },
}


def _operation(layer: str) -> str:
    return "rs" if layer in ("out", "down") else "ag"


def _of_model(model: str) -> list[Case]:
    return [(_operation(layer), m, n, k) for layer, (n, k) in LAYERS[model].items() for m in ROWS]


def _unique(cases: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(cases))


SWEEPS: dict[str, list[Case]] = {
    "tiny": [("ag", 64, 96, 32), ("rs", 64, 32, 96)],  # for a look at the program, on a CPU too
    "goals": [
        ("ag", 8192, 28672, 8192),
        ("rs", 8192, 8192, 28672),
    ],  # with 4 ranks: N 7168 and K 7168 a rank
    "seeds": [("ag", m, 12288, 49152) for m in ROWS[:4]]
    + [("rs", m, 49152, 12288) for m in ROWS[:4]],
    **{model: _of_model(model) for model in LAYERS},
}
SWEEPS["layers"] = _unique(case for model in LAYERS for case in SWEEPS[model])
SWEEPS["all"] = _unique(SWEEPS["goals"] + SWEEPS["seeds"] + SWEEPS["layers"])


def select(
    sweeps: Sequence[str], rows: Sequence[int] = (), operation: str | None = None
) -> list[Case]:
    """The cases of some sweeps, once each; with `rows` only those with such an M, with `operation`
    only "ag" or "rs".

    Raises:
        ValueError: one of `rows` is no case's M.
    """
    cases = _unique(case for name in sweeps for case in SWEEPS[name])
    known = sorted({case[1] for case in cases})
    for m in rows:
        if m not in known:
            raise ValueError(
                f"argument --rows: found {m}, allowed with --sweep {' '.join(sweeps)}: some of "
                f"{', '.join(map(str, known))}"
            )
    return [c for c in cases if (not rows or c[1] in rows) and operation in (None, c[0])]


def divisible(case: Case, ranks: int) -> Case:
    """A case that is for a look at the program, with sizes that the ranks divide; measured ones are
    taken as they are."""
    if case not in SWEEPS["tiny"]:
        return case
    operation, *sizes = case
    m, n, k = (math.ceil(size / ranks) * ranks for size in sizes)
    return operation, m, n, k


def undivided(case: Case, ranks: int) -> dict[str, int]:
    """The sizes of a case that the ranks share but do not divide, by their letters."""
    operation, m, n, k = case
    shared = {"M": m, "N": n} if operation == "ag" else {"M": m, "K": k}
    return {name: size for name, size in shared.items() if size % ranks}


def divided(cases: Sequence[Case], ranks: int) -> list[Case]:
    """The cases whose sizes the ranks divide; rank 0 names the others, and where none is left the
    program ends."""
    kept = [case for case in cases if not undivided(case, ranks)]
    others = ", ".join("-".join(map(str, case)) for case in cases if case not in kept)
    speaks = os.environ.get("RANK", "0") == "0"
    if others and speaks:
        allowed = f"M and N (ag), M and K (rs) that are multiples of the {ranks} ranks"
        print(f"cases left out: found {others}, allowed: {allowed}", file=sys.stderr, flush=True)
    if not kept:
        sys.exit(
            2 if speaks else 0
        )  # torchrun ends the other ranks once one fails: rank 0 is to have spoken
    return kept


def layer_of(case: Case) -> str:
    """Which layers of which models have this case, for people; empty where none has."""
    operation, _, n, k = case
    return ", ".join(
        f"{model} {layer}"
        for model, layers in LAYERS.items()
        for layer, shape in layers.items()
        if shape == (n, k) and _operation(layer) == operation
    )
