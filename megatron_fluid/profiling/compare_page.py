"""The page of `megatron-fluid compare`: three runs of one training, laid over each other."""

from __future__ import annotations

import html
import io
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fluid import __version__

__all__ = ["Comparison", "Step", "write_page"]

_SAME = 1e-7  # the least relative difference that curves show: Megatron logs seven digits
_DIFFERENCE = "relative difference of losses"
# Of a run's curve: colour, style and width, so that the curve below is seen beside the one above.
_STYLES = {
    "off": ("#9db8d9", "-", 4.0), "off again": ("#8a94a0", "--", 1.5), "on": ("#c8321e", "-", 1.5)
}  # fmt: skip

type _Curves = dict[str, list[tuple[int, float]]]  # (iteration, value) of each run


class Step(NamedTuple):
    """One iteration as Megatron logs it: milliseconds, loss (NaN: it was none), gradient norm
    (None: not logged)."""

    iteration: int
    ms: float
    loss: float
    grad_norm: float | None


@dataclass(frozen=True)
class Comparison:
    """Three runs: without the package, with it, and without it again.

    Attributes:
        off, on, again: their steps, of which those of the same iteration are compared.
        warm_up: first steps whose times do not count.
        tolerance: mean relative difference of losses that is allowed.
        memory_mib: the most that rank 0 allocated without the package and with it.
        started: the lines that the package printed at start-up.
        command: what ran with the package.
        caution: what the times do not say, "" for nothing.
    """

    off: Sequence[Step]
    on: Sequence[Step]
    again: Sequence[Step]
    warm_up: int
    tolerance: float
    memory_mib: tuple[float | None, float | None]
    started: Sequence[str]
    command: Sequence[str]
    caution: str = ""

    @property
    def iterations(self) -> list[int]:
        """Those that any run has."""
        return sorted({step.iteration for run in (self.off, self.on, self.again) for step in run})

    @property
    def lost(self) -> str:
        """The first iteration that has no finite loss in all runs, and which run it is; "" for
        none."""
        losses = {
            "without the package": _losses(self.off),
            "with the package": _losses(self.on),
            "without the package again": _losses(self.again),
        }
        for iteration in self.iterations:
            for run, of_run in losses.items():
                if not math.isfinite(of_run.get(iteration, math.nan)):
                    return f"{run} iteration {iteration} has no finite loss"
        return ""

    def difference(self, one: Sequence[Step], other: Sequence[Step]) -> dict[int, float]:
        """Relative difference of the losses of two runs at each iteration that both have."""
        mine, others = _losses(one), _losses(other)
        return {
            at: abs(loss - others[at]) / max(abs(others[at]), 1e-12)
            for at, loss in mine.items()
            if at in others
        }

    @property
    def made(self) -> float:
        """Mean relative difference of the losses with and without the package."""
        return statistics.fmean(self.difference(self.on, self.off).values())

    @property
    def noise(self) -> float:
        """The same of the two runs without it."""
        return statistics.fmean(self.difference(self.again, self.off).values())

    @property
    def agrees(self) -> bool:
        """Whether losses agree; one that is missing or not a finite number never does."""
        return not self.lost and self.made <= max(self.tolerance, 3 * self.noise)

    def ms(self, *runs: Sequence[Step]) -> float:
        """Median milliseconds of an iteration behind the warm-up."""
        return statistics.median(step.ms for run in runs for step in run[self.warm_up :])

    def _spread(self, *runs: Sequence[Step]) -> str:
        times = (step.ms for run in runs for step in run[self.warm_up :])
        low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
        return f"{low:.1f} to {high:.1f} ms"

    @property
    def speed_up(self) -> float:
        """How many times as fast an iteration is with the package."""
        return self.ms(self.off, self.again) / self.ms(self.on)

    def lines(self) -> list[str]:
        """What the terminal shows: the verdict first."""
        word = "agree" if self.agrees else "DIFFER"
        why = self.lost or (
            f"with and without the package they differ by {_share(self.made)}, two runs without it "
            f"by {_share(self.noise)} (allowed: {_share(self.tolerance)}, or three times the "
            "latter)"
        )
        off, on = self.ms(self.off, self.again), self.ms(self.on)
        lines = [
            f"{self.speed_up:.2f} times as fast: {off:.1f} ms an iteration -> {on:.1f} ms "
            f"(median of {len(self.on)} steps but the first {self.warm_up})",
            "tenth to ninetieth percentile of an iteration: "
            f"{self._spread(self.off, self.again)} -> {self._spread(self.on)}",
            f"losses {word}: {why}",
        ]
        if all(self.memory_mib):
            before, after = self.memory_mib
            lines.append(f"memory of rank 0: {before:,.0f} MiB -> {after:,.0f} MiB")
        return lines + ([self.caution] if self.caution else [])


def _losses(run: Sequence[Step]) -> dict[int, float]:
    return {step.iteration: step.loss for step in run}


def _share(value: float) -> str:
    return f"{value:.2g}" if value else "nothing that the log shows"


def write_page(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.html and compare.png; returns the paths written.

    Without matplotlib the page has the table of steps and no curves, there is no PNG, and a message
    says so.
    """
    charts: list[str] = []
    paths = [folder / "compare.html"]
    try:
        panels = _panels(comparison)
        charts = [_svg(*panel) for panel in panels.items()]
        paths.append(folder / "compare.png")
        _figure(panels, 2, comparison.lines()[0]).savefig(paths[-1], dpi=110)
    except ImportError as error:
        paths = paths[:1]
        print(f"no curves: install matplotlib ({error})", flush=True)
    verdict, *facts = map(html.escape, comparison.lines())
    started = html.escape("\n".join(comparison.started) or "(nothing was printed at start-up)")
    runs = (comparison.off, comparison.on, comparison.again)
    steps = [{step.iteration: step for step in run} for run in runs]
    rows = "".join(
        _row(iteration, [run.get(iteration) for run in steps])
        for iteration in comparison.iterations
    )
    paths[0].write_text(
        _PAGE.format(
            verdict=verdict,
            facts="".join(f"<p>{fact}</p>" for fact in facts),
            charts="".join(f"<figure>{chart}</figure>" for chart in charts),
            started=started,
            command=html.escape(shlex.join(comparison.command)),
            rows=rows,
            version=__version__,
        )
    )
    return paths


def _row(iteration: int, steps: Sequence[Step | None]) -> str:
    cells = [f"{step.loss:.6g}" if step else "-" for step in steps]
    cells += [f"{step.ms:.1f}" if step else "-" for step in steps]
    return f"<tr><td>{iteration}{''.join(f'<td>{cell}' for cell in cells)}</tr>"


def _panels(comparison: Comparison) -> dict[str, _Curves]:
    """The curves of each plot, by its title."""
    off, on, again = comparison.off, comparison.on, comparison.again

    def curves(name: str, first: int = 0) -> _Curves:
        return {
            run: [
                (s.iteration, getattr(s, name))
                for s in steps[first:]
                if getattr(s, name) is not None
            ]
            for run, steps in (("off", off), ("off again", again), ("on", on))
        }

    def differences(run: Sequence[Step]) -> list[tuple[int, float]]:
        return [(at, max(value, _SAME)) for at, value in comparison.difference(run, off).items()]

    return {
        "loss": curves("loss"),
        _DIFFERENCE: {"on and off": differences(on), "off again and off": differences(again)},
        "gradient norm": curves("grad_norm"),
        "milliseconds an iteration": curves("ms", comparison.warm_up),
    }


def _figure(panels: dict[str, _Curves], columns: int, title: str = "") -> Any:
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        for run, points in curves.items():
            colour, style, width = _STYLES[run.split(" and ")[0]]
            at, values = [at for at, _ in points], [value for _, value in points]
            axis.plot(at, values, style, color=colour, label=run, linewidth=width)
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_xlabel("iteration", fontsize=10)
        axis.grid(color="#dddddd", linewidth=0.5)
        axis.legend(fontsize=9, frameon=False)
        if name == _DIFFERENCE:  # curves of differences have a logarithmic axis
            axis.set_yscale("log")
            axis.set_ylim(_SAME / 2, max(1e-2, 2 * axis.get_ylim()[1]))
    figure.suptitle(title, fontsize=12)
    return figure


def _svg(title: str, curves: _Curves) -> str:
    text = io.StringIO()
    _figure({title: curves}, 1).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>megatron_fluid: a comparison</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1b2733; margin: 24px auto;
  max-width: 1240px; padding: 0 16px; background: #fff; }}
h1 {{ font-size: 22px; margin: 0 0 6px; }} h2 {{ font-size: 17px; }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 14px; }}
figure {{ margin: 0; border: 1px solid #dde2e8; border-radius: 8px; padding: 8px; }}
svg {{ width: 100%; height: auto; display: block; }}
pre {{ background: #f5f7f9; padding: 10px; overflow-x: auto; font-size: 12.5px; }}
.steps {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 13px; }}
td, th {{ padding: 2px 12px 2px 0; text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>{verdict}</h1>
{facts}
<main>{charts}</main>
<h2>What was on, and what stayed Megatron's</h2>
<pre>{started}</pre>
<h2>The command, with megatron_fluid {version}</h2>
<pre>{command}</pre>
<h2>Every step</h2>
<div class="steps"><table><tr><th>iteration<th>loss off<th>on<th>off again<th>ms off<th>on
<th>off again</tr>{rows}</table></div>
</body></html>
"""
