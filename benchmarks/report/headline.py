"""The figures of the README's first screen, from the result files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.results import RESULTS
from benchmarks.report.descriptions import SUITES
from benchmarks.report.tables import age, best_of, by_case, documents, markdown, others_of
from megatron_fluid.cli.models import MODELS

__all__ = ["Compared", "between_hosts", "compared", "headline", "wire_shares"]

_GPUS = (1, 2)  # of the iterations that are shown
LARGER = (2, 4, 8)
"""Sequences a microbatch, of gains beside those with one."""
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A row of Megatron's and one of ours."""


class Compared(NamedTuple):
    """The rows of Megatron's and of our fastest variant, of one case of a file; held: how much of
    the model was trained; larger: the pairs with more than one sequence a microbatch."""

    case: str
    held: str
    megatron: Mapping[str, Any]
    fluid: Mapping[str, Any]
    document: Mapping[str, Any]
    larger: Mapping[int, Pair]

    @property
    def gain(self) -> str:
        """How many times faster."""
        return _gain(self.megatron, self.fluid)

    @property
    def date(self) -> str:
        """When it was measured: of rows that were added to a file later, their own."""
        return str(self.fluid["config"].get("measured", self.document["date"][:10]))

    def pairs(self) -> list[Pair]:
        """All that a line shows."""
        return [(self.megatron, self.fluid), *self.larger.values()]

    def cublas(self, pair: Pair) -> str:
        """The version of a pair, or both if its rows differ; "" where older files do not tell."""
        known = self.document.get("cublas")
        found = [str(row["config"].get("cublas") or known or "") for row in pair]
        return " and ".join(dict.fromkeys(found))

    @property
    def where(self) -> str:
        """How many GPUs of which kind."""
        return f"{self.document['gpus']} {self.document['gpu'].removeprefix('NVIDIA ')}"


def _gain(megatron: Mapping[str, Any], fluid: Mapping[str, Any]) -> str:
    ratio = megatron["median_ms"] / fluid["median_ms"]
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def compared(folder: Path) -> Iterator[Compared]:
    """Training iterations, bf16 beside bf16: of today's code, or else of the newest commit."""
    found = list(_of_all_versions(folder))
    newest = max((line.document for line in found), key=lambda d: d["date"], default=None)
    current = [line for line in found if not age(line.document)]
    yield from current or (line for line in found if line.document["commit"] == newest["commit"])


def _of_all_versions(folder: Path) -> Iterator[Compared]:
    for gpus in _GPUS:
        found = best_of(folder, "pretrain", gpus)
        if found is None or not found[1]["cuda"]:
            continue
        document = found[1]
        bf16 = [r for r in document["rows"] if not r["variant"].endswith("fp8")]
        best = {case: _best(bf16, case) for case, mode in by_case(bf16) if mode == "train"}

        for case, pair in best.items():
            if pair is None or pair[1]["config"].get("micro_batch_size", 1) > 1:
                continue
            found_of = {n: best.get(f"{case}-mbs{n}") for n in LARGER}
            larger = {n: more for n, more in found_of.items() if more is not None}
            yield Compared(case, _layers(pair[1], case), *pair, document, larger)


def _best(rows: Sequence[Mapping[str, Any]], case: str) -> Pair | None:
    """The rows of the fastest of Megatron's variants and of ours, where a case has both."""
    of_case = [row for row in rows if (row["case"], row["mode"]) == (case, "train")]
    others = [row for row in of_case if row["variant"] in SUITES["pretrain"].others]
    ours = [row for row in of_case if row["variant"].startswith("fluid")]
    if not others or not ours:
        return None
    megatron, fluid = (min(some, key=lambda row: row["median_ms"]) for some in (others, ours))
    return megatron, fluid


def _layers(row: Mapping[str, Any], case: str) -> str:
    """How many of a model's layers, and of its experts if not all, were trained."""
    config = row["config"]
    model = MODELS.get(case.removesuffix("-forced"))
    if "layers" not in config or model is None:
        return ""
    held = config.get("experts", model.experts)
    fewer = f", {held} of {model.experts} experts" if held < model.experts else ""
    return f"{config['layers']} of {model.layers} layers{fewer}"


def _span(row: Mapping[str, Any]) -> str:
    return "{median_ms:.0f} ms ({p10_ms:.0f} to {p90_ms:.0f})".format_map(row)


def headline(folder: Path = RESULTS) -> str:
    """A few rows for the README's first screen, a training step each."""
    lines = list(compared(folder))
    dates = sorted(line.date for line in lines)
    measured = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    versions = {line.cublas(pair) for line in lines for pair in line.pairs()}
    cublas = " and ".join(sorted(version or "not recorded" for version in versions))
    columns: dict[str, list[str]] = {
        "training iteration, one sequence a microbatch": [
            ", ".join(filter(None, (line.case, line.held, line.where))) for line in lines
        ],
        "Megatron + Transformer Engine": [_span(line.megatron) for line in lines],
        "megatron_fluid": [_span(line.fluid) for line in lines],
        "times faster": [f"**{line.gain}**" for line in lines],
    }
    for n in LARGER:
        pairs = [line.larger.get(n) for line in lines]
        columns[f"{n} sequences"] = [_gain(*pair) if pair else "" for pair in pairs]
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    table = markdown(list(columns), list(map(list, zip(*columns.values(), strict=True))))
    forced = any(line.fluid["config"].get("routing", "forced") == "forced" for line in lines)
    routing = "force" if forced else "an auxiliary loss"
    source = "[commits, commands and every row](docs/results/pretrain.md)"
    stale = " Not measured again since the code changed."
    stale = stale if any(age(line.document) for line in lines) else ""
    shown = [row for line in lines for pair in line.pairs() for row in pair]
    counts = sorted({row["iters"] for row in shown})
    samples = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    said = (
        f"Medians of {samples} iterations (tenth to ninetieth percentile), {measured}, bf16, "
        f"experts balanced by {routing}, cuBLAS {cublas}: {source}."
    )
    return f"{table}\n\n{said}{stale}"


def between_hosts(folder: Path = RESULTS) -> str:
    """What is gained over a wire that takes as long as the computation."""
    of_suite = (d for _, d in documents(folder) if d["suite"] == "slow_wire")
    document = next((d for d in of_suite if not d["commit"].endswith("-dirty")), None)
    if document is None:
        return "Between hosts nothing was measured at this version: `make bench-hosts` does it."
    cases = by_case(document["rows"])

    def cells(case: str) -> list[str]:
        times = cases[case, "train"]
        ours, theirs = times["fluid"], min(others_of(SUITES["slow_wire"], times).values())
        ratios = (f"{ms / ours:.2f}" for ms in (theirs, times["fluid_no_overlap"]))
        return [f"{theirs:.0f} ms", f"{ours:.0f} ms", *ratios]

    what = {
        "main-2x1-wire-1": "Megatron's own loop, two hosts",
        "moe-2x1-wire-1": "an MoE layer, two experts a token, two hosts",
        "moe-4x1-top8-wire-1": "an MoE layer, eight experts a token, four hosts",
        "layer-2x1-wire-1": "a transformer layer, two hosts",
    }
    measured = [[words, *cells(case)] for case, words in what.items() if (case, "train") in cases]
    head = ["training step between hosts", "the fastest of the others", "megatron_fluid"]
    return (
        f"{markdown([*head, 'times faster', 'by overlap alone'], measured)}\n\n"
        "Hosts are played by one machine on CPU cores; their link takes as long as the computation "
        f"(`make bench-hosts`, {document['date'][:10]}, [several nodes](docs/several_nodes.md))."
    )


def wire_shares(folder: Path = RESULTS) -> str:
    """Of an MoE layer's gain between two hosts, what a cheaper exchange brings and what overlap."""
    lines = []
    for _, document in documents(folder):
        for (case, mode), times in by_case(document["rows"]).items():
            ours, plain = times.get("fluid"), times.get("fluid_no_overlap")
            others = [ms for variant, ms in times.items() if variant.startswith("megatron")]
            if document["suite"] != "slow_wire" or not case.startswith("moe-2x1-wire-"):
                continue
            if mode == "train" and ours and plain and others:
                shown = min(others), min(others) - plain, plain - ours, ours
                lines.append([case.rpartition("-")[2], *(f"{ms:.0f} ms" for ms in shown)])
    head = ["wire / computation", "Megatron, its faster dispatcher", "less by a cheaper exchange"]
    return (
        markdown([*head, "less by overlap", "megatron_fluid"], lines) if lines else "Not measured."
    )
