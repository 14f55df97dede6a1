"""Result files as Markdown: the tables of docs/results.md, and a page of each suite under
docs/results/ with everything.

`make readme` writes both, so that no figure in them is typed by hand. What a file holds is read
from the file, not from its name: of a suite there may be several, measured on different numbers of
GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measured_code import fingerprint
from benchmarks.harness.results import NO_SUITES, RESULTS, read_results
from benchmarks.report.descriptions import FLOORS, SUITES, Suite

__all__ = [
    "FRONT",
    "age",
    "best_of",
    "by_case",
    "documents",
    "hidden_shares",
    "launched",
    "markdown",
    "others_of",
    "suite_page",
    "summary",
    "summary_table",
    "time_of",
]

FRONT = ("pretrain", "moe_layer", "dispatch_combine", "all_to_all", "tp_overlap", "slow_wire")
"""Suites of which docs/results.md has a table."""
_PICTURES = {
    "pretrain": ("pretrain.png", "Training iterations with Megatron and with megatron_fluid"),
    "tp_overlap": ("tp_overlap.png", "Communication of tensor parallelism that is not hidden"),
}
NOTHING = (
    "Nothing yet: the code has changed since the last measurement, and its figures are not those "
    "of this version. They are kept in `benchmarks/results/archive/`."
)
# How earlier files say what launch.sh does; a suite started so does not find its package.
_TORCHRUN = re.compile(r"torchrun --nproc_per_node (\d+) benchmarks/(\w+)\.py")
_PACED = 0.9  # of a call
_ROUTINGS = {"real": "balanced by an auxiliary loss", "forced": "forced to balance"}
_WORDS = {
    "fluid": "megatron_fluid",
    **dict.fromkeys(FLOORS, "the floor"),
    "floor_fluid": "megatron_fluid's grouped GEMMs alone, on the rows as routed",
    "floor_sdpa": "the floor with torch's attention",
    "floor_te": "the floor with Transformer Engine's attention",
}

Document = Mapping[str, Any]


def time_of(milliseconds: float | None) -> str:
    """Text of a time; empty for None."""
    if milliseconds is None:
        return ""
    return f"{milliseconds:.2f} ms" if milliseconds >= 1 else f"{1e3 * milliseconds:.1f} us"


def _host_ms(config: Mapping[str, Any]) -> float | None:
    """The host's time of a call; tp_overlap tells it in microseconds."""
    found, us = config.get("host_ms"), config.get("host_us")
    return found if us is None else us / 1e3


def _kept(config: Mapping[str, Any]) -> str:
    count = config.get("kept_bytes")
    return "" if count is None else f"{count / 2**20:.0f} MiB"


# Of rows that tell: heading, text of what their config tells.
_MORE: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("host", lambda config: time_of(_host_ms(config))),
    ("kept for the backward", _kept),
    ("cuBLAS", lambda config: config.get("cublas", "")),
    ("CPUs of the host", lambda config: str(config.get("host_cpus", ""))),
)


def by_case(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """(case, mode) -> variant -> median in milliseconds."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["mode"]), {})[row["variant"]] = row["median_ms"]
    return cases


def summary_table(document: Document) -> str:
    """Return a table with a line for each case and mode that the page shows.

    Its columns are the best of the others, megatron_fluid inside Megatron and on plain torch, how
    many times faster these are, and the ratio to the floor. Empty columns are left out.
    """
    suite, cases = SUITES[document["suite"]], by_case(document["rows"])
    pattern = suite.shown(document["gpus"])
    # On several GPUs kernels of NCCL run while they wait for another rank.
    hidden, busy = hidden_shares(document), _busy_ms(document) if document["gpus"] == 1 else {}
    variant, words = suite.also or ("", "")
    chosen = [
        line
        for line in _by_precision(cases)
        if {"fluid", "fluid_megatron", variant} & line[-1].keys()
        and re.fullmatch(pattern, f"{line[0]} {line[1]}")
    ]
    both = any("fluid_megatron" in times for *_, times in chosen)
    absent = _left_out(document) or _left_out_of_cases(document)
    rival = f"{suite.best}, of those run" if absent else suite.best
    plain_words = "megatron_fluid " if suite.unoverlapped.startswith("fluid") else ""
    lines: list[list[tuple[str, str]]] = []  # of (heading, cell)
    for case, mode, label, times in chosen:
        beside = cases.get((case, suite.beside.get(mode, "")), {})
        others = others_of(suite, times) | others_of(suite, beside)
        best = min(others, key=lambda name: others[name], default="")
        best_ms = others.get(best)
        floor = next((times[name] for name in FLOORS if name in times), None)
        ours, inside = times.get("fluid"), times.get("fluid_megatron")
        also = times.get(variant)
        fastest = busy.get((case, variant if also else "fluid")) if label == mode else None
        share = hidden.get((case, mode)) if label == mode else None
        lines.append(
            [
                ("case", case),
                ("mode", label),
                (rival, f"{time_of(best_ms)}{_named(suite, best)}" if best else ""),
                ("megatron_fluid inside Megatron", time_of(inside)),
                ("times faster", _ratio(best_ms, inside)),
                (f"{plain_words}without overlap", time_of(times.get(suite.unoverlapped))),
                ("megatron_fluid on plain torch" if both else "megatron_fluid", time_of(ours)),
                ("times faster", _ratio(best_ms, ours)),
                (words, time_of(also)),
                ("times faster", _ratio(best_ms, also)),
                ("over the floor", _ratio(ours, floor)),
                ("of the wire's time hidden", "" if share is None else f"{share:.0%}"),
                ("times less time in which a kernel runs", _ratio(busy.get((case, best)), fastest)),
            ]
        )
    if not lines:
        return ""
    filled = [i for i in range(len(lines[0])) if any(line[i][1] for line in lines)]
    head = [lines[0][i][0] for i in filled]
    return markdown(head, [[line[i][1] for i in filled] for line in lines])


def _ratio(slow: float | None, fast: float | None) -> str:
    return f"{slow / fast:.2f}" if slow and fast else ""


def _by_precision(
    cases: Mapping[tuple[str, str], Mapping[str, float]],
) -> Iterator[tuple[str, str, str, dict[str, float]]]:
    """(case, mode, how the line is called, times): bf16 and fp8 apart, of fp8 with the names that
    megatron_fluid's variants have in bf16."""
    for (case, mode), times in cases.items():
        fp8 = {variant: ms for variant, ms in times.items() if variant.endswith("_fp8")}
        yield case, mode, mode, {v: ms for v, ms in times.items() if v not in fp8}
        ours = {v.removesuffix("_fp8"): ms for v, ms in fp8.items() if v.startswith("fluid")}
        if ours:
            others = {v: ms for v, ms in fp8.items() if not v.startswith("fluid")}
            yield case, mode, f"{mode}, fp8", {**others, **ours}


def hidden_shares(document: Document) -> dict[tuple[str, str], float]:
    """Return by case and mode which share of the wire's time is hidden: of the time that the limit
    adds to a plain exchange."""
    return {
        (row["case"], row["mode"]): row["config"]["hidden_share"]
        for row in document["rows"]
        if row["variant"] == "fluid" and row["config"].get("hidden_share") is not None
    }


def _busy_ms(document: Document) -> dict[tuple[str, str], float]:
    """By case and variant how long the GPU was busy in a traced iteration, of rows that tell."""
    kernels = {
        (row["case"], row["variant"]): row["config"].get("kernels") for row in document["rows"]
    }
    return {key: float(found["busy_ms"]) for key, found in kernels.items() if found}


def kernel_table(document: Document) -> str:
    """Where the GPU's time of one traced iteration goes, in ms, of rows that tell; empty without
    any. The host is slower while it traces."""
    traced = [row for row in document["rows"] if row["config"].get("kernels")]
    sums: dict[str, float] = {}
    for row in traced:
        for kind, ms in row["config"]["kernels"]["kinds"].items():
            sums[kind] = sums.get(kind, 0.0) + ms
    kinds = sorted(sums, key=lambda kind: -sums[kind])
    lines = []
    for row in traced:
        found = row["config"]["kernels"]
        times = [found["kinds"].get(kind) for kind in kinds]
        shown = ["" if ms is None else f"{ms:.1f}" for ms in times]
        busy = [f"{row['median_ms']:.1f}", f"{found['span_ms']:.1f}", f"{found['busy_ms']:.1f}"]
        lines.append([row["case"], row["variant"], *busy, *shown])
    head = ["ms of an iteration", "variant", "not traced", "traced", "a kernel runs", *kinds]
    return markdown(head, lines) if lines else ""


def others_of(suite: Suite, times: Mapping[str, float]) -> dict[str, float]:
    """Those of the variants that are not megatron_fluid, nor a floor."""
    return {name: ms for name, ms in times.items() if name in suite.others}


def _named(suite: Suite, variant: str) -> str:
    """Which of several others this is; nothing where a suite has one alone."""
    return f", {suite.others[variant]}" if len(suite.others) > 1 else ""


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _title(document: Document) -> str:
    """The suite and what it ran on, in words."""
    count, device = document["gpus"], document["gpu"].removeprefix("NVIDIA ")
    return (
        f"{document['suite']}, {count} {device}"
        if document["cuda"]
        else f"{document['suite']}, {count} CPU processes"
    )


def launched(command: str) -> str:
    """Return a recorded command as it is typed in the project's folder today."""
    return _TORCHRUN.sub(r"NPROC=\1 benchmarks/launch.sh \2", command)


def _commands(document: Document) -> str:
    """The commands of a file; those that differ by a case alone are one, with a list of cases."""
    commands = launched(document["command"]).split(" && ")
    found: dict[str, list[str]] = {}
    for command in commands:
        found.setdefault(re.sub(r"(?<=--cases )\S+", "CASE", command), []).append(command)
    cases = [re.findall(r"--cases (\S+)", command) for command in commands]
    if len(found) > 1 or len(commands) == 1 or any(len(case) != 1 for case in cases):
        return f"`{' && '.join(commands)}`"
    return f"`{next(iter(found))}`, CASE being {', '.join(case for [case] in cases)} in turn,"


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _explanation(document: Document) -> str:
    """What was measured, and by what."""
    suite = SUITES[document["suite"]]
    what = f"{_sentence(suite.what)} "
    if suite.floor and any(row["variant"] in FLOORS for row in document["rows"]):
        what += f"The floor is {suite.floor}. "
    for name, usual in suite.told.items():
        values = dict.fromkeys(str(row["config"].get(name, usual)) for row in document["rows"])
        if shown := ", ".join(_ROUTINGS.get(value, value) for value in filter(None, values)):
            what += f"{name.replace('_', ' ').capitalize()}: {shown}. "
    packages = {
        "torch": "torch",
        "cuBLAS": "cublas",
        "Megatron-Core": "megatron_core",
        "Transformer Engine": "transformer_engine",
    }
    checkouts = dict.fromkeys(row["config"].get("megatron_lm") for row in document["rows"])
    used = {**document, "megatron_core": next(iter(checkouts), None) or document["megatron_core"]}
    if any("cublas" in row["config"] for row in document["rows"]):
        used["cublas"] = None  # each row tells its own
    versions = [f"{name} {used[key]}" for name, key in packages.items() if used.get(key)]
    origin = [
        f"{_commands(document)} on {document['gpu']}",
        document["date"][:10],
        f"commit {document['commit']}{_other_commits(document)}",
    ]
    measured = f"{what}Measured by {', '.join([*origin, *versions])}."
    return f"{measured} {_absent(document)}{_paced(document)}{age(document)}".strip()


def _other_commits(document: Document) -> str:
    """Of rows that were measured at another commit with the same measured code."""
    found = {
        (row["case"], row["config"]["measured"], row["config"]["commit"]): None
        for row in document["rows"]
        if "commit" in row["config"]
    }
    return "".join(f" (of {case} {date}, {commit})" for case, date, commit in found)


def _paced(document: Document) -> str:
    """Where the host needs nearly as long for a call as the call takes: another host gives another
    ratio."""
    host = {
        (row["case"], row["mode"], row["variant"]): _host_ms(row["config"]) or 0.0
        for row in document["rows"]
    }
    found: dict[str, list[str]] = {}
    for case, mode, label, times in _by_precision(by_case(document["rows"])):
        others = others_of(SUITES[document["suite"]], times)
        looked = {min(others, key=lambda name: others[name], default=""): "the fastest other"}
        looked |= {"fluid": "megatron_fluid", "fluid_megatron": "megatron_fluid inside Megatron"}
        for variant, words in looked.items():
            ours_in_fp8 = label.endswith("fp8") and variant.startswith("fluid")
            name = f"{variant}_fp8" if ours_in_fp8 else variant
            if host.get((case, mode, name), 0.0) >= _PACED * times.get(variant, math.inf):
                found.setdefault(words, []).append(f"{case} {label}".replace(",", " in"))
    where = "; ".join(f"for {words} in {', '.join(cases)}" for words, cases in found.items())
    return f"The host's own time of a call is 90% of it or more {where}. " if found else ""


def _left_out(document: Document) -> list[str]:
    """What the suite can measure of others, and the file does not hold."""
    there = {row["variant"] for row in document["rows"]}
    return [words for name, words in SUITES[document["suite"]].others.items() if name not in there]


def _absent(document: Document) -> str:
    """The rivals that the suite names and the file does not hold, also of some cases alone."""
    absent = [*_left_out(document), *SUITES[document["suite"]].rivals.values()]
    words = f"Not run: {'; '.join(absent)}. " if absent else ""
    for others, cases in _left_out_of_cases(document).items():
        of = ", ".join(cases) if len(cases) <= 4 else f"{len(cases)} cases"
        words += f"Not run of {of}: {'; '.join(others)}. "
    return words


def _left_out_of_cases(document: Document) -> dict[tuple[str, ...], list[str]]:
    """Others that ran of some cases alone -> the cases of which they did not."""
    others, cases = SUITES[document["suite"]].others, by_case(document["rows"])
    found: dict[tuple[str, ...], list[str]] = {}
    for (case, mode), times in cases.items():
        there = {name for (_, other), names in cases.items() if other == mode for name in names}
        absent = tuple(words for name, words in others.items() if name in there - times.keys())
        if absent and case not in found.setdefault(absent, []):
            found[absent].append(case)
    return found


def age(document: Document) -> str:
    """A mark where the code that the suite measures is not what was measured."""
    if document.get("code") == fingerprint(document["suite"], document["rows"]) is not None:
        return ""
    return "**Of an earlier version: the measured code has changed since.**"


def _legend(document: Document) -> str:
    """What the variants of a file are, where words are known for them."""
    suite = SUITES[document["suite"]]
    known = {**_WORDS, **suite.ours, **suite.others}
    found = dict.fromkeys(row["variant"] for row in document["rows"])
    return "; ".join(f"`{name}`: {known[name]}" for name in found if name in known)


def documents(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """All result files with their titles, in the order of SUITES, a suite's by the number of GPUs.
    Of two that would have one title, that without Transformer Engine, or of other tokens than
    usual, says so.
    """
    order = list(SUITES)

    def place(document: Document) -> tuple[int, int]:
        return order.index(document["suite"]), document["gpus"]

    files = (path for path in sorted(folder.glob("*.json")) if path.name not in NO_SUITES)
    documents = sorted(map(read_results, files), key=place)
    titles = [_title(document) for document in documents]
    for i, document in enumerate(documents):
        usual = SUITES[document["suite"]].told.get("tokens")
        tokens = str(document["rows"][0]["config"].get("tokens", usual))
        if titles.count(titles[i]) > 1 and tokens != usual:
            titles[i] += f", {tokens} tokens"
    for i, document in enumerate(documents):
        if titles.count(titles[i]) > 1 and not document["transformer_engine"]:
            titles[i] += ", without Transformer Engine"
    return list(zip(titles, documents, strict=True))


def best_of(folder: Path, suite: str, gpus: int | None = None) -> tuple[str, dict[str, Any]] | None:
    """(title, document) of a suite's result file that pages show first: one with Megatron's own
    times, of today's code before an older one, then of the most cases, then of the most GPUs. None
    where there is none.

    Args:
        folder: of the result files.
        suite: its name.
        gpus: take files of this number of GPUs alone.
    """

    def rank(found: tuple[str, Document]) -> tuple[bool, bool, int, int]:
        document = found[1]
        variants = {row["variant"] for row in document["rows"]}
        compared = any(variant.startswith("megatron") for variant in variants)
        cases = len({row["case"] for row in document["rows"]})
        return compared, not age(document), cases, int(document["gpus"])

    of_suite = [
        (title, document)
        for title, document in documents(folder)
        if document["suite"] == suite and gpus in (None, int(document["gpus"]))
    ]
    return max(of_suite, key=rank, default=None)


def summary(folder: Path = RESULTS, suites: Sequence[str] = FRONT) -> str:
    """For one result file of each of some suites what it is and where it comes from, and its
    summary, and its picture if docs/ has one."""
    parts = []
    for title, document in filter(None, (best_of(folder, name) for name in suites)):
        if table := summary_table(document):
            parts.append(f"**{title}.** {_explanation(document)}\n\n{table}")
            picture, words = _PICTURES.get(document["suite"], ("", ""))
            if picture and (folder.parents[1] / "docs" / picture).is_file():
                parts.append(f"![{words}]({picture})")
    return "\n\n".join(parts) or NOTHING


def suite_page(name: str, folder: Path = RESULTS) -> str:
    """Every row of every result file of a suite, as a page, each with its summary before it."""
    parts = [f"# {name}\n\n{_sentence(SUITES[name].what)}"]
    for title, document in documents(folder):
        if document["suite"] != name:
            continue
        more = [words for words in _MORE if any(words[1](r["config"]) for r in document["rows"])]
        lines = []
        for row in document["rows"]:
            spread = f"{time_of(row['p10_ms'])} to {time_of(row['p90_ms'])}"
            line = [row["case"], row["mode"], row["variant"], time_of(row["median_ms"]), spread]
            line.append(str(row["iters"]))
            lines.append([*line, *(text(row["config"]) for _, text in more)])
        head = ["case", "mode", "variant", "median", "p10 to p90", "samples"]
        words = [f"## {title}", _explanation(document), summary_table(document)]
        if times := kernel_table(document):
            words += ["Where the GPU's time of one more, traced iteration goes:", times]
        if legend := _legend(document):
            words.append(f"Variants: {legend}.")
        words.append(markdown([*head, *(heading for heading, *_ in more)], lines))
        parts.append("\n\n".join(word for word in words if word))
    if len(parts) == 1:
        parts.append(NOTHING)
    return "\n\n".join(parts) + "\n"
